"""The wheel: what is in it, and that it works from an environment and a folder that know nothing of this repository.

Nothing is downloaded: the build backend is the installed one, and the new environment sees the dependencies of this
one through a .pth file. The .pth files in a folder that was added that way are not read, so that an editable
installation of the repository stays out of sight.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str | Path, cwd: Path, timeout: int = 300) -> str:
    """Run `command` without any path or setting of the repository; its output, or a failure that shows it."""
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST_", "VIRTUAL"))
    }
    environment |= {"PYTHONNOUSERSITE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "NO_COLOR": "1"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment that holds the wheel and nothing else of ours."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    binaries = folder / "bin"
    pip = (sys.executable, "-m", "pip", "--python", binaries / "python", "install", "--no-deps", "--no-index")
    run(*pip, wheel, cwd=folder)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    dependencies = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    (site_packages / "dependencies.pth").write_text("\n".join(dependencies) + "\n")
    return binaries


def sources(folder: str) -> list[Path]:
    """Files of the repository below `folder`, relative to it, without what Python and editors leave there."""
    found = [path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [path for path in found if not any(part == "__pycache__" or part.startswith(".") for part in path.parts)]


def test_holds_packages_maps_and_model(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert Path("model_index.json") in sources("chitu_diffusion/demo/model")
    homes = {
        "chitu_hooks": "chitu_hooks",
        "chitu_diffusion": "chitu_diffusion",
        "adapters": "chitu_diffusion/_adapters",
        "ChituBench/cases": "chitu_diffusion/_bench/cases",
        "ChituBench/prompts": "chitu_diffusion/_bench/prompts",
    }
    for folder, home in homes.items():
        expected = {f"{home}/{path.as_posix()}" for path in sources(folder)}
        assert expected and expected - names == set()
    assert {"chitu_hooks/py.typed", "chitu_diffusion/py.typed"} <= names


def test_holds_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"chitu_diffusion", "chitu_hooks"}
    assert [name for name in names if "__pycache__" in name or "/tests/" in name] == []


def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
        assert name.replace("METADATA", "licenses/LICENSE") in archive.namelist()
    assert metadata["Name"] == "chitu-diffusion"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) == {
        "flash",
        "xformers",
        "sage",
        "eval",
        "bench",
        "video",
        "test",
    }
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert [line for line in required if "==" in line] == [], "the package pins nothing"


def test_imports_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = "import chitu_diffusion, chitu_hooks; print(chitu_diffusion.__file__); print(chitu_hooks.__file__)"
    for line in run(installed / "python", "-c", code, cwd=tmp_path).splitlines():
        assert Path(line).is_relative_to(installed.parent), "the repository shadows the wheel"


def test_finds_every_hook_map(installed: Path, tmp_path: Path) -> None:
    code = "from chitu_diffusion.adapters import registry; print(*sorted(hook_map.name for hook_map in registry()))"
    found = run(installed / "python", "-c", code, cwd=tmp_path).split()
    assert len(found) == len(set(found)) == len(list(ROOT.glob("adapters/[!_]*.py")))


def test_command_line(installed: Path, tmp_path: Path) -> None:
    text = run(installed / "chitu", "--help", cwd=tmp_path)
    for command in ("run", "verify", "env"):
        assert command in text


@pytest.mark.slow
def test_draws_a_picture(installed: Path, tmp_path: Path) -> None:
    arguments = ("--prompt", "a red apple on a blue background", "--steps", "2", "--output", tmp_path / "out")
    run(installed / "chitu", "run", *arguments, cwd=tmp_path)
    assert list((tmp_path / "out").rglob("*.png"))
