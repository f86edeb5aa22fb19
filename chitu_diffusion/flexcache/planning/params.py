"""The parameters of the planned cache."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from chitu_hooks import PatchError

from ..limits import Params

AIMS = ("budget", "speedup", "psnr")


@dataclass(frozen=True, kw_only=True)
class Planned(Params):
    """Compute the steps of a plan that was made for this model, and forecast the guided prediction at the others.

    `chitu calibrate --planned` measures how the predictions of a model hang together; from that the steps to compute and the
    weights of the forecasts are worked out for any budget. Nothing runs at a skipped step. The planner is ours; planning by
    dynamic programming is DPCache's, https://arxiv.org/abs/2602.22654, and keeping to a number of steps BudCache's,
    https://arxiv.org/abs/2606.13496.
    """

    strategy: ClassVar[str] = "planned"

    profile: str | None = None
    """File that `chitu calibrate --planned` or ``handle.calibrate(prompts, planned=...)`` wrote."""
    budget: float | None = None
    """Part of the steps that is computed, above 0 to 1, rounded down to whole steps; 1 computes all."""
    speedup: float | None = None
    """In place of `budget`: how many times less to compute, at least 1."""
    psnr: float | None = None
    """In place of `budget`: as few steps as can be expected to give pictures of this PSNR to the full run, in dB, in the mean
    over prompts."""
    guard: int = 0
    """Steps that a run may compute more or fewer than planned, where its predictions change more or less than those of the
    calibration; at least 0, which keeps to the plan and waits for nothing."""
    stretch: bool = False
    """Take a profile of another number of steps, size or guidance, by sigma, where it would be refused."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.profile, os.PathLike):
            object.__setattr__(self, "profile", os.fspath(self.profile))
        if self.profile is not None and not (isinstance(self.profile, str) and self.profile):
            raise PatchError(f"planned: profile is the path of a file, not {self.profile!r}")
        given = [name for name in AIMS if getattr(self, name) is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise PatchError(f"planned: give exactly one of {', '.join(AIMS[:-1])} and {AIMS[-1]}, not {got}")
        self._number(
            given[0],
            least={"budget": 0.0, "speedup": 1.0, "psnr": 0.0}[given[0]],
            most=1.0 if self.budget is not None else float("inf"),
        )
        if self.budget == 0:
            raise PatchError("planned: budget is a number above 0, not 0: some step has to be computed")
        self._file("profile")
        self._whole("guard", least=0)
        self._choice("stretch")

    def computed(self, steps: int) -> int:
        """Steps to compute of a run of `steps`, by `budget` or `speedup`: at most so many, and at least one."""
        part = self.budget if self.budget is not None else 1 / (self.speedup or 1)
        return max(1, int(steps * part + 1e-9))
