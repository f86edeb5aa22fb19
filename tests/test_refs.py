"""The pages of reference facts: each citation has its source, each source is cited, and the files of diffusers are there."""

from __future__ import annotations

import re
from pathlib import Path

import diffusers
import pytest
from test_house import ROOT

PAGES = sorted((ROOT / "refs").glob("*/README.md"))
SECTIONS = ["Upstream", "Checkpoints", "Defaults", "Shape", "Gap report", "Sources"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_every_citation_has_its_source(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS
    body, sources = text.split("## Sources")
    listed = re.findall(r"^(\d+)\. <https://", sources, re.MULTILINE)
    assert listed == [str(number + 1) for number in range(len(listed))]
    assert set(re.findall(r"\[(\d+)\]", body)) == set(listed)
    for name in re.findall(r"\[[TP]\] (?:is )?`([^`]+)`", body):
        assert (Path(diffusers.__file__).parent / name).is_file(), name


LINK = re.compile(r"https://|\]\(http")
TOLD = re.compile(r"\[\d+\]|\[[TP]\]|signature|docstring")
"""A citation of a numbered source, of a file of diffusers, or of what Python shows of it."""
OPEN = ("not checked", "see the model card", "below")
"""What stands in place of a fact that nobody has read."""


def rows(page: str, section: str) -> list[list[str]]:
    """The cells of the tables of `section`, without the heads."""
    text = page.split(f"## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rules = [place for place, line in enumerate(lines) if set(line) <= set("|- ")]
    heads = {place - 1 for place in rules} | set(rules)
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for place, line in enumerate(lines) if place not in heads
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_every_field_is_there_with_its_link(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    upstream = rows(text, "Upstream")
    assert any("weights" in what or "models" in what for what, *_ in upstream)
    for what, where, licence in upstream:
        assert LINK.search(where) or where in OPEN or where.startswith("in the same repositor"), what
        assert TOLD.search(licence) or any(word in licence for word in OPEN), what
    demo = re.search(r"^Demo of upstream.*$", text, re.MULTILINE)
    assert demo and (TOLD.search(demo[0]) or "not checked" in demo[0])
    for checkpoint, *_ in rows(text, "Checkpoints"):
        assert LINK.search(checkpoint), checkpoint
    said = text.split("## Defaults\n")[1].split("\n## ")[0]
    assert "diffusers" in said and "upstream" in said
    for what, *cells in rows(text, "Defaults"):
        assert TOLD.search(" ".join(cells)) or cells[0] == "not checked", what
