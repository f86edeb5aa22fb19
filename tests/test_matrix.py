"""The parity matrix: every row is made again and compared with the page, and a broken seam shows in it."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import test_house
from matrix import modes, report
from matrix.table import ENTRIES, NOT_BUILT, Bare, Model, Whole, models, transformer_classes, variations

from chitu_hooks import attention

DOCS = test_house.ROOT / "docs"


@cache
def published() -> dict[str, Any]:
    return json.loads((DOCS / "models.json").read_text(encoding="utf-8"))


def ids(model: Model) -> str:
    return getattr(model, "key", None) or " ".join(list(model.named().values())[:1])


@pytest.mark.parametrize("model", [*models(), *variations()], ids=ids)
def test_row_is_what_is_published(model: Model) -> None:
    """The whole page takes under a minute of one free core, so all of it is made again."""
    table = "variants" if "variant" in model.named() else "models"
    place = (variations() if table == "variants" else models()).index(model)
    assert report.row(model) == published()[table][place]


def test_nothing_is_missing_and_nothing_fails() -> None:
    found = published()
    assert report.failures(found) == []
    assert len(found["models"]) == len(models())
    assert len(found["variants"]) == len(variations())
    assert {line["transformer"] for line in found["models"]} | set(NOT_BUILT) == set(transformer_classes())
    assert set(ENTRIES) <= set(transformer_classes())
    states = {cell["state"] for line in found["models"] for cell in line["modes"].values()}
    assert states <= {"works", "refused", "scoped out"}


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
