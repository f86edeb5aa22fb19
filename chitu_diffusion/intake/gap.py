"""The gap report: every piece of a pipeline, and whether the seams and stages reach it.

Each rule reads evidence: the module tree, the processors, and the source of the pipeline. There is no list of models. How each
class is decided stands in ``docs/adapting-a-model.md``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

COVERED = "covered"
STAGE = "needs a stage wrapper"
ATTENTION = "needs attention or parallel logic"
SHAPE = "needs scheduler or latent-shape handling"
GLUE = "benchmark glue"
CLASSES = (COVERED, STAGE, ATTENTION, SHAPE, GLUE)
NOT_COVERED = (STAGE, ATTENTION, SHAPE)
"""The classes for which something is to be written before every feature can act; glue is none of them."""

PARTS = ("pipeline", "prompt encoding", "transformer", "attention", "scheduler", "vae", "other modules")


@dataclass(frozen=True)
class Piece:
    """A function, a class, or a statement of the denoising loop."""

    part: str
    """One of `PARTS`."""
    name: str
    kind: str
    """One of `CLASSES`."""
    lines: int
    """Lines of code: no comments, blank lines or docstrings."""
    why: str
    """The evidence for `kind`."""
    where: str = ""
    """``file.py:line``."""


@dataclass(frozen=True)
class Gap:
    """All pieces of one pipeline, each line of source in one of them."""

    pipeline: str
    diffusers: str
    """Version that was read."""
    pieces: tuple[Piece, ...]

    @property
    def lines(self) -> dict[str, int]:
        """Class -> lines of code."""
        return {kind: sum(piece.lines for piece in self.pieces if piece.kind == kind) for kind in CLASSES}

    @property
    def not_covered(self) -> int:
        """Lines of code of the three classes that need something."""
        return sum(self.lines[kind] for kind in NOT_COVERED)

    def of(self, *kinds: str) -> list[Piece]:
        return [piece for piece in self.pieces if piece.kind in kinds]

    def to_dict(self) -> dict[str, Any]:
        return {
            "pipeline": self.pipeline,
            "diffusers": self.diffusers,
            "lines": self.lines,
            "not_covered": self.not_covered,
            "pieces": [asdict(piece) for piece in self.pieces],
        }

    def to_markdown(self) -> str:
        """The report as a page: totals, then what is not covered, then the rest."""
        total = sum(self.lines.values())
        rows = [f"| {kind} | {len(self.of(kind))} | {self.lines[kind]} |" for kind in CLASSES]
        parts = [
            f"# Gap report of {self.pipeline}",
            f"Written by `chitu inspect --write`, from the sources of diffusers {self.diffusers}. How each class is decided is in\n"
            "`docs/adapting-a-model.md`.",
            "\n".join(
                [
                    "| class | pieces | lines of code |",
                    "|---|---|---|",
                    *rows,
                    f"| all | {len(self.pieces)} | {total} |",
                ]
            ),
            f"**Not covered: {self.not_covered} of {total} lines.**",
        ]
        open_pieces = self.of(*NOT_COVERED)
        if open_pieces:
            parts += ["## Not covered", _table(open_pieces)]
        parts += ["## Covered, and glue", _table(self.of(COVERED, GLUE))]
        return "\n\n".join(parts) + "\n"


def _table(pieces: Iterable[Piece]) -> str:
    rows = [
        f"| {p.part} | `{p.name}` | {p.lines} | {p.kind} | {p.why.replace('|', '/')} | {f'`{p.where}`' if p.where else ''} |"
        for p in pieces
    ]
    return "\n".join(["| part | piece | lines | class | evidence | source |", "|---|---|---|---|---|---|", *rows])


def gap_report(pipe: Any, classes: dict[str, type], sites: Any) -> Gap:
    """The gap report of `pipe`.

    Args:
        pipe: a pipeline, with or without weights.
        classes: component -> class, also of components that are not loaded.
        sites: what the hook map in use finds in it; stacks whose streams are known are covered.
    """
    import diffusers

    from .gap_modules import denoiser_pieces, scheduler_pieces, side_pieces
    from .gap_pipeline import pipeline_pieces
    from .source import PipelineSource

    source = PipelineSource(type(pipe), tuple(denoiser.name for denoiser in sites.denoisers))
    modules = module_names(pipe, classes)
    pieces = [
        *pipeline_pieces(source, modules),
        *(piece for denoiser in sites.denoisers for piece in denoiser_pieces(denoiser)),
        *scheduler_pieces(source, classes),
        *side_pieces(pipe, source, classes, modules),
    ]
    once = {(piece.part, piece.name, piece.where): piece for piece in reversed(pieces)}
    ordered = sorted(reversed(once.values()), key=lambda piece: PARTS.index(piece.part))
    return Gap(type(pipe).__name__, diffusers.__version__, tuple(ordered))


def module_names(pipe: Any, classes: dict[str, type]) -> set[str]:
    """Components of `pipe` that are modules, whether they are loaded or not."""
    import torch

    loaded = {name for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    return loaded | {name for name, cls in classes.items() if issubclass(cls, torch.nn.Module)}
