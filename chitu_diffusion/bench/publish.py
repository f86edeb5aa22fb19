"""What is shown of stored results: one JSON file, tables, and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .files import write_json, write_whole
from .flexcache_plot import contact_sheet, plot
from .results import summary
from .tables import section


def publish(sources: Sequence[Path], folder: Path, *, ratio: float = 2.0) -> list[Path]:
    """Put the results of `sources` together and write them to `folder`; the paths.

    Args:
        sources: results folders, or files that this wrote before.
        ratio: how much less compute the cases of the contact sheet take.

    Raises:
        BenchError: see `results.summary` and `files.write_whole`.
    """
    found = summary(sources)
    made = [folder / "flexcache.json", folder / "flexcache.md"]
    write_json(made[0], found)
    write_whole(made[1], lambda half: half.write_text(section(found) + "\n", encoding="utf-8"))
    made += plot(found, folder)
    sheet = contact_sheet(found, [s for s in sources if s.is_dir()], folder / "flexcache_sheet.png", ratio=ratio)
    return made + ([sheet] if sheet is not None else [])
