"""The parity matrix: every row is made again and compared with the page, and a broken seam shows in it."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import test_house
from matrix import modes, report, strategies
from matrix.table import ENTRIES, NOT_BUILT, Bare, Model, Whole, models, transformer_classes, variations

from chitu_hooks import Call, attention

DOCS = test_house.ROOT / "docs"


@cache
def published() -> dict[str, Any]:
    return json.loads((DOCS / "models.json").read_text(encoding="utf-8"))


def ids(model: Model) -> str:
    return getattr(model, "key", None) or " ".join(list(model.named().values())[:1])


@pytest.mark.parametrize("model", [*models(), *variations()], ids=ids)
def test_row_is_what_is_published(model: Model) -> None:
    """The whole page takes under a minute of one free core, so all of it is made again."""
    skip_without_its_package(model)
    assert report.row(model) == {key: value for key, value in line_of(model).items() if key != "strategies"}


def skip_without_its_package(model: Model) -> None:
    if lacks := getattr(model, "lacks", None):
        pytest.skip(f"{lacks} is not installed")


def line_of(model: Model) -> dict[str, Any]:
    table = "variants" if "variant" in model.named() else "models"
    return published()[table][(variations() if table == "variants" else models()).index(model)]


DIFFICULT = (
    "Cosmos3OmniTransformer",
    "Flux3Transformer2DModel",
    "Kandinsky5Transformer3DModel",
    "LatteTransformer3DModel",
    "WanAnimateTransformer3DModel",
    "WanVACETransformer3DModel",
    "flux 3, modular",
)
"""Rows where some strategy once did nothing, or still refuses."""
SOME = [
    model
    for place, model in enumerate([*models(), *variations()])
    if place % 10 == 0 or next(iter(model.named().values())) in DIFFICULT
]


@pytest.mark.parametrize("model", SOME, ids=ids)
def test_caches_are_what_is_published(model: Model) -> None:
    """Every strategy on every row takes some minutes, so some rows are made again."""
    skip_without_its_package(model)
    assert report.caches(model) == line_of(model)["strategies"]


def test_nothing_is_missing_and_nothing_fails() -> None:
    found = published()
    assert report.failures(found) == []
    assert len(found["models"]) == len(models())
    assert len(found["variants"]) == len(variations())
    assert {line["transformer"] for line in found["models"]} | set(NOT_BUILT) == set(transformer_classes())
    assert set(ENTRIES) <= set(transformer_classes())
    for line in [*found["models"], *found["variants"]]:
        cells = [*line["modes"].values(), *line["strategies"].values()]
        assert len(cells) == len(modes.MODES) + len(strategies.STRATEGIES)
        assert {cell["state"] for cell in cells} <= {"works", "refused", "scoped out"}
        assert all(cell["note"] for cell in cells if cell["state"] != "works")


def test_the_page_is_made_from_the_data() -> None:
    assert (DOCS / "models.md").read_text(encoding="utf-8") == report.as_page(published())
    assert (DOCS / "models.json").read_text(encoding="utf-8") == report.as_json(published())


@pytest.mark.parametrize("model", [Bare("AllegroTransformer3DModel"), Whole("", "", "flux")], ids=ids)
def test_a_broken_seam_shows(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = modes.Trial(model)
    assert modes.outcome("attention", trial) == modes.WORKS
    monkeypatch.setattr(attention.AttentionContext, "next", lambda self, q, k, v: self.original(q, k, v, self))
    assert modes.outcome("attention", trial).state == "fails"
    monkeypatch.setattr(attention.AttentionContext, "next", lambda self, q, k, v: q * 0.5)
    assert modes.outcome("hooked and undone", trial).state == "fails"


def test_a_cache_that_never_skips_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = modes.Trial(Bare("AllegroTransformer3DModel"))
    assert modes.outcome("static cache", trial) == modes.WORKS
    monkeypatch.setattr(modes, "HALF", range(64))
    assert modes.outcome("static cache", trial).state == "fails"


def test_a_strategy_that_only_says_that_it_skips_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = modes.Trial(Bare("AllegroTransformer3DModel"), strategies.STEPS)
    kept = {name: strategies.STRATEGIES[name] for name in ("static", "fbcache", "taylorseer")}
    assert {strategies.outcome(trial, name, params) for name, params in kept.items()} == {modes.WORKS}
    monkeypatch.setattr(Call, "skip_trunk", lambda self, residuals=None: None)
    assert {strategies.outcome(trial, name, params).state for name, params in kept.items()} == {"fails"}
