"""What the subcommands print: tables for people."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from .group import say

if TYPE_CHECKING:
    from rich.console import Console

    from chitu_diffusion.runtime import Metrics, Result


def table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """An empty table; the columns in `numbers` are flush right."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in numbers else "left", no_wrap=not made.columns)
    return made


@contextlib.contextmanager
def showing_notes() -> Iterator[None]:
    """Warnings of Chitu's own as one line on stderr each; all others as always."""
    from chitu_hooks import ChituWarning

    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Any, category: Any, *rest: Any, **more: Any) -> None:
            if issubclass(category, ChituWarning):
                say(f"note: {message}")
            else:
                others(message, category, *rest, **more)

        warnings.showwarning = show
        warnings.simplefilter("always", ChituWarning)
        yield


def show_result(console: Console, folder: Path, names: list[str], result: Result) -> None:
    """Stage timings, what the hooks did, and where the files are."""
    console.print(timings(result.metrics))
    console.print()
    for report in result.reports:
        console.print(_hits(report), highlight=False, markup=False, soft_wrap=True)
    for name in names:
        console.print(str(folder / name), highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{folder}/ has request.json, report.json and metrics.json too", highlight=False, markup=False, soft_wrap=True
    )


def timings(metrics: Metrics) -> Table:
    """Seconds per stage."""
    made = table("stage", "seconds", "", numbers=("seconds",))
    for stage, seconds in metrics.seconds.items():
        each = (
            f"{metrics.steps} steps, {1000 * seconds / metrics.steps:.0f} ms each"
            if stage == "denoise" and metrics.steps
            else ""
        )
        made.add_row(stage, f"{seconds:.2f}", each)
    made.add_row(
        "all",
        f"{sum(metrics.seconds.values()):.2f}",
        f"peak {metrics.peak_memory / 2**20:.0f} MiB ({metrics.peak_memory_of})",
    )
    return made


def _hits(report: dict[str, Any]) -> str:
    """The report of one call in a few lines."""
    lines = [f"{report['pipeline']}: hook map {report['hook_map']}"]
    for feature in report["features"]:
        lines.append(f"  {feature['name']} ({feature['exactness']})")
    for branch, calls in report["branches"].items():
        counts = ", ".join(f"{count} {kind}" for kind, count in calls.items() if count)
        lines.append(f"  {branch}: {counts}")
    saved = next(
        (f["flops"] for f in report["features"] if isinstance(f.get("flops"), dict) and "saved" in f["flops"]), None
    )
    if saved and saved["full"]:
        lines.append(f"  FLOPs saved: {100 * saved['saved'] / saved['full']:.1f} %")
    lines += [f"  note: {note}" for note in report["notes"]]
    return "\n".join(lines)
