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
