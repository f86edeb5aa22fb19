"""The table that `attention="auto"` reads: the fastest kernel by device, dtype and shape, as measured.

Only ``chitu bench attention --write`` changes the file. It is never timed at run time: two runs, or two ranks, that
chose differently would give different pictures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from .kernel import AttentionCall, word

FILE = Path(__file__).with_name("fastest.yaml")


@dataclass(frozen=True)
class Row:
    """One measurement: from `tokens` query and key tokens on, up to the next row, and for head dims up to `head_dim`.

    Attributes:
        capability: CUDA compute capability, such as "9.0".
        dtype: such as "bfloat16".
        kernels: names from the fastest; those that cannot do a call are passed over.
    """

    capability: str
    dtype: str
    head_dim: int
    tokens: int
    kernels: tuple[str, ...]
    above: int = 0
    """Largest head dim that another row is for."""

    def fits(self, call: AttentionCall, tokens: int) -> bool:
        """Whether it speaks for `call`, of at least `tokens` tokens."""
        return word(call.dtype) == self.dtype and self.above < call.head_dim <= self.head_dim and tokens >= self.tokens


def read_rows() -> list[Row]:
    """Every row of the file."""
    rows: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())["rows"] or []
    return [Row(**{**row, "kernels": tuple(row["kernels"])}) for row in rows]


def fastest() -> tuple[Row, ...]:
    """The rows for this machine's CUDA device, longest first; empty without one, or without measurements for it."""
    if not torch.cuda.is_available():
        return ()
    major, minor = torch.cuda.get_device_capability()
    return rows_for(f"{major}.{minor}")


def rows_for(capability: str) -> tuple[Row, ...]:
    """The rows for a compute capability, longest first, each knowing which head dims are another row's."""
    rows = [row for row in read_rows() if row.capability == capability]
    dims = {row.dtype: sorted({r.head_dim for r in rows if r.dtype == row.dtype}) for row in rows}
    bounded = [
        Row(
            row.capability,
            row.dtype,
            row.head_dim,
            row.tokens,
            row.kernels,
            above=max((dim for dim in dims[row.dtype] if dim < row.head_dim), default=0),
        )
        for row in rows
    ]
    return tuple(sorted(bounded, key=lambda row: -row.tokens))


def write_rows(capability: str, rows: Iterable[Row]) -> None:
    """Put `rows` in place of those for `capability`; the header and the rows of other devices stay."""
    text = FILE.read_text()
    header = text[: text.index("rows:")]
    kept = [row for row in read_rows() if row.capability != capability]
    lines = [
        f"  - {{capability: '{row.capability}', dtype: {row.dtype}, head_dim: {row.head_dim}, tokens: {row.tokens}, "
        f"kernels: [{', '.join(row.kernels)}]}}"
        for row in sorted((*kept, *rows), key=lambda row: (row.capability, row.dtype, row.head_dim, row.tokens))
    ]
    FILE.write_text(header + ("rows:\n" + "\n".join(lines) if lines else "rows: []") + "\n")
