"""What is shown of stored results: one JSON file for each bench, tables, and pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import flexcache_plot, parallel_plot, parallel_tables, tables
from .errors import BenchError
from .files import write_json, write_whole
from .results import kind_of, summary

NAMES = {"flexcache": "flexcache", "parallel": "parallel_bench"}
"""Bench -> what its files begin with."""
SECTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "flexcache": tables.section,
    "parallel": parallel_tables.section,
}


def publish(sources: Sequence[Path], folder: Path, *, ratio: float = 2.0) -> list[Path]:
    """Put the results of `sources` together, each bench by itself, and write them to `folder`; the paths.

    Args:
        sources: results folders, or files that this wrote before.
        ratio: how much less compute the cases of the contact sheet take.

    Raises:
        BenchError: see `results.summary` and `files.write_whole`.
    """
    by_kind: dict[str, list[Path]] = {}
    for source in sources:
        by_kind.setdefault(kind_of(source), []).append(source)
    if not by_kind:
        raise BenchError("there are no results to put together")
    made = []
    for kind, places in by_kind.items():
        found, name = summary(places), NAMES[kind]
        data, page = folder / f"{name}.json", folder / f"{name}.md"
        write_json(data, found)
        text = SECTIONS[kind](found) + "\n"
        write_whole(page, lambda half, text=text: half.write_text(text, encoding="utf-8"))  # type: ignore[misc]
        made += [data, page]
        if kind == "parallel":
            made += parallel_plot.plot(found, folder, name)
        else:
            made += flexcache_plot.plot(found, folder, name)
            folders = [place for place in places if place.is_dir()]
            sheet = flexcache_plot.contact_sheet(found, folders, folder / f"{name}_sheet.png", ratio=ratio)
            made += [sheet] if sheet is not None else []
    return made
