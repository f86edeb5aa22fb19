"""Parameters: every field explained, checked and readable from the command line, where every strategy works."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_text
import yaml
from typer.testing import CliRunner, Result

import chitu_diffusion
from chitu_diffusion import PAB, BlockDance, Cubic, EasyCache, FBCache, MagCache, MeanCache, Planned, Static, TaylorSeer
from chitu_diffusion.cli.main import app
from chitu_diffusion.flexcache import Params, make_params, params
from chitu_diffusion.flexcache.constants import NEED_NONE
from chitu_diffusion.flexcache.strategy import STRATEGIES
from chitu_hooks import PatchError


def test_every_strategy_has_params_that_are_exported() -> None:
    assert set(params.PARAMS) == set(STRATEGIES) >= set(NEED_NONE)
    for name, cls in params.PARAMS.items():
        assert cls.strategy == name and getattr(chitu_diffusion, cls.__name__) is cls
        assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
        assert "http" in (cls.__doc__ or "") or name in ("static",), "cites its source"


@pytest.mark.parametrize("cls", params.PARAMS.values(), ids=lambda cls: cls.strategy)
def test_every_field_is_explained(cls: type[Params]) -> None:
    """A literal below each field of the class, which is what documentation tools read."""
    explained = set()
    for owner in (base for base in cls.__mro__ if base is not object):
        body = ast.parse(inspect.getsource(owner)).body[0].body  # type: ignore[attr-defined]
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                explained.add(ast.unparse(field.target))
    assert {field.name for field in dataclasses.fields(cls)} <= explained


def test_paths_are_kept_as_text() -> None:
    """A report holds the parameters, and is plain data."""
    found = [Planned(speedup=2, profile=Path("a/b")).profile, MagCache(constants=Path("a/b")).constants]  # type: ignore[arg-type]
    assert found == [str(Path("a/b"))] * 2


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (FBCache, {"warmup": 0}, "fbcache: warmup is a whole number from 1, not 0"),
        (FBCache, {"warmup": True}, "fbcache: warmup is a whole number from 1, not True"),
        (FBCache, {"cooldown": -1}, "fbcache: cooldown is a whole number from 0, not -1"),
        (FBCache, {"max_consecutive": 0}, "fbcache: max_consecutive is a whole number from 1 or none, not 0"),
        (FBCache, {"threshold": -0.1}, "fbcache: threshold is a number from 0, not -0.1"),
        (FBCache, {"threshold": float("nan")}, "fbcache: threshold is a number from 0, not nan"),
        (FBCache, {"threshold": "much"}, "fbcache: threshold is a number from 0, not 'much'"),
        (FBCache, {"front": 0}, "fbcache: front is a whole number from 1, not 0"),
        (FBCache, {"back": 1.5}, "fbcache: back is a whole number from 0, not 1.5"),
        (FBCache, {"order": 5}, "fbcache: order is a whole number from 0 to 4, not 5"),
        (MagCache, {"retention": 1.2}, "magcache: retention is a number from 0 to 1, not 1.2"),
        (MagCache, {"ratios": (1.0, 0.0)}, "magcache: ratios are numbers above 0"),
        (EasyCache, {"threshold": None}, "easycache: threshold is a number from 0, not None"),
        (TaylorSeer, {"interval": 0}, "taylorseer: interval is a whole number from 1, not 0"),
        (TaylorSeer, {"ramp": 1}, "taylorseer: ramp is true or false, not 1"),
        (TaylorSeer, {"damping": 1.5}, "taylorseer: damping is a number from 0 to 1, not 1.5"),
        (TaylorSeer, {"of": "featur"}, "taylorseer: of is residual or feature, not 'featur'; nearest: feature"),
        (
            Static,
            {"steps": (0,), "forecast": "line"},
            "static: forecast is hold or linear or damped, not 'line'; nearest: linear",
        ),
        (BlockDance, {"boundary": 1.5}, "blockdance: boundary is a number from 0 to 1, not 1.5"),
        (PAB, {"kinds": "selff"}, "pab: kinds is self or cross or all, not 'selff'; nearest: self"),
        (Cubic, {"static": 1.5}, "cubic: static is a number from 0 to 1, not 1.5"),
        (Cubic, {"region": 1}, "cubic: region is a whole number from 2, not 1"),
        (Cubic, {"static_interval": 0}, "cubic: static_interval is a whole number from 1, not 0"),
        (BlockDance, {"group": 0}, "blockdance: group is a whole number from 1, not 0"),
        (MeanCache, {"steps": (0, 1), "window": 0}, "meancache: window is a whole number from 1, not 0"),
        (MeanCache, {"steps": "growing"}, "meancache: budget, the number of steps to compute, belongs to"),
        (
            Static,
            {"steps": "uniform"},
            "static: budget, the number of steps to compute, belongs to uniform and growing",
        ),
        (Static, {"steps": (0, 1), "budget": 2}, "static: budget belongs to uniform and growing, not to a list"),
        (Static, {"steps": "growing", "budget": 0}, "static: budget is a whole number from 1 or none, not 0"),
        (Planned, {}, "planned: give exactly one of budget, speedup and psnr, not none"),
        (
            Planned,
            {"budget": 0.5, "psnr": 40},
            "planned: give exactly one of budget, speedup and psnr, not budget and psnr",
        ),
        (Planned, {"budget": 0}, "planned: budget is a number above 0, not 0"),
        (Planned, {"budget": 12}, "planned: budget is a number from 0 to 1, not 12"),
        (Planned, {"speedup": 0.5}, "planned: speedup is a number from 1, not 0.5"),
        (Planned, {"speedup": 2, "guard": -1}, "planned: guard is a whole number from 0, not -1"),
        (Planned, {"speedup": 2, "stretch": "yes"}, "planned: stretch is true or false, not 'yes'"),
        (Planned, {"speedup": 2, "profile": 5}, "planned: profile is the path of a file, not 5"),
        (MagCache, {"constants": ["a.yaml"]}, "magcache: constants is the path of a file, not ['a.yaml']"),
        (Static, {"steps": "lemica-flux-27"}, "no schedule 'lemica-flux-27'; nearest: lemica-flux-26"),
    ],
)
def test_values_out_of_range(cls: type[Params], values: dict[str, Any], message: str) -> None:
    with pytest.raises(PatchError) as error:
        cls(**values)
    assert message in str(error.value)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "flux"
    tiny_text.save("flux", folder)
    return folder


def chitu(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


WORDS: dict[str, list[str]] = {
    "static": ["steps=growing", "budget=5", "forecast=linear"],
    "fbcache": ["threshold=50", "front=2", "back=1", "max_consecutive=2"],
    "magcache": ["ratios=1,1,1,1,1,1,1,1,1", "retention=0.1"],
    "easycache": ["threshold=50", "warmup=2"],
    "teacache": ["coefficients=1.0,0.0", "threshold=50"],
    "meancache": ["steps=growing", "budget=5", "window=2"],
    "blockdance": ["boundary=0.5", "group=3"],
    "pab": ["interval=3", "kinds=self"],
    "cubic": ["warmup=2", "static=0.4", "medium=0.7", "static_interval=5", "active_interval=1", "region=2"],
    "taylorseer": ["interval=3", "order=2", "of=feature"],
    "planned": ["budget=0.5", "guard=1"],
}


@pytest.fixture(scope="module")
def profile(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    (folder / "prompts.txt").write_text("a cat\na dog\na house\na tree\n")
    done = chitu(
        "calibrate", "--model", model, *tiny_text.SIZES["flux"], "--prompts", folder / "prompts.txt", "--steps", 10,
        "--planned", folder / "flux.safetensors",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "5 of 10" in done.output and "dB" in done.output
    return folder / "flux.safetensors"


@pytest.mark.parametrize("name", WORDS)
def test_every_strategy_runs_from_the_command_line(
    name: str, model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    assert set(WORDS) == set(STRATEGIES)
    words = [part for word in WORDS[name] for part in ("--cache-arg", word)]
    if name == "planned":
        words += ["--cache-arg", f"profile={request.getfixturevalue('profile')}"]
    done = chitu(
        "run", "--model", model, *tiny_text.SIZES["flux"], "--prompt", "a cat", "--steps", 10, "--cache", name, *words,
        "--output", tmp_path / "out",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    (feature,) = (f for f in report["generations"][0]["features"] if f["name"] == name)
    assert feature["hits"] > 0 and feature["bytes_held"] > 0
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["flops"]["spent"] == feature["flops"]["spent"] < metrics["flops"]["full"]
    assert make_params(name, dict(word.split("=") for word in WORDS[name])).strategy == name


def test_calibrate_and_use_what_it_wrote(model: Path, tmp_path: Path) -> None:
    file, size = tmp_path / "flux.yaml", tiny_text.SIZES["flux"]
    done = chitu(
        "run", "--model", model, *size, "--prompt", "a cat", "--cache", "magcache", "--output", tmp_path / "no"
    )
    assert done.exit_code == 2 and "chitu calibrate" in done.stderr
    done = chitu("calibrate", "--model", model, *size, "--prompt", "a cat", "--steps", 10, "--output", file)
    assert done.exit_code == 0, done.output
    assert yaml.safe_load(file.read_text())["magcache"]["steps"] == 10
    done = chitu(
        "run", "--model", model, *size, "--prompt", "a cat", "--steps", 10, "--cache", "magcache", "--cache-arg",
        f"constants={file}", "--cache-arg", "threshold=9", "--output", tmp_path / "out",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    again = chitu("calibrate", "--model", model, "--prompt", "a cat", "--output", file)
    assert again.exit_code == 2 and "is there already" in again.stderr


def test_a_profile_is_shown_and_mistakes_about_it_are_told(model: Path, profile: Path, tmp_path: Path) -> None:
    shown = json.loads(chitu("inspect", profile, "--json").output)
    assert shown["steps"] == 10 and {row["steps"] for row in shown["plans"]} == {2, 3, 5, 6}
    assert all(len(row["computes"]) == row["steps"] for row in shown["plans"])
    assert "5 of 10" in chitu("inspect", profile).output
    few = chitu(
        "calibrate", "--model", model, "--prompt", "a cat", "--planned", tmp_path / "few.safetensors", "--steps", 3
    )
    assert few.exit_code == 2 and "1 prompts are too few" in few.stderr and not (tmp_path / "few.safetensors").exists()
    nothing = chitu("calibrate", "--model", model, "--prompt", "a cat")
    assert nothing.exit_code == 2 and "name a file with --output, --planned or both" in nothing.stderr
    words = ("--cache-arg", f"profile={profile}", "--cache-arg", "budget=0.5")
    other = chitu(
        "run", "--model", model, *tiny_text.SIZES["flux"], "--prompt", "a cat", "--steps", 12, "--cache", "planned", *words,
        "--output", tmp_path / "out",
    )  # fmt: skip
    assert other.exit_code == 2 and "the profile is of 10 steps and the run has 12" in other.stderr


def test_a_strategy_is_a_small_file() -> None:
    folder = Path(inspect.getfile(chitu_diffusion)).parent / "flexcache" / "strategy"
    shared = {"__init__.py", "base.py", "checks.py", "guided.py", "tokens.py"}
    lengths = {p.name: len(p.read_text().splitlines()) for p in folder.glob("*.py") if p.name not in shared}
    assert len(lengths) >= 5
    assert {name: lines for name, lines in lengths.items() if lines > 115} == {}
