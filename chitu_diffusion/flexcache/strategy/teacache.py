"""`teacache`: a polynomial of the change of the trunk's input tells the change of its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from chitu_hooks import Call, HookMap, Refusal, Sites, Streams

from ..constants import find, missing, read
from ..distance import alike, copied, main_stream, relative_l1
from ..params import TeaCache
from .base import Strategy


class TeaCacheStrategy(Strategy):
    """Accumulates the predicted change of each branch and computes when it reaches the threshold."""

    params: TeaCache
    decides = "trunk_in"
    adaptive = True
    start: ClassVar[dict[str, Any]] = {"signal": None, "before": None, "sum": None}

    def bind(self, sites: Sites, hook_map: HookMap) -> Refusal | None:
        file = self.params.constants
        if self.params.coefficients is not None:
            found: Mapping[str, Any] | None = {"coefficients": self.params.coefficients}
        else:
            found = find(sites, hook_map, self.name) if file is None else read(file, self.name, sites)
        if found is None:
            return missing(self.name, sites)
        self._coefficients: Sequence[float] = found["coefficients"]
        self._signal: Mapping[str, Any] = found.get("signal", {})
        self._domain: Sequence[float] = found.get("domain", (0.0, float("inf")))
        if found.get("warmup", 0) > self.params.warmup:  # the polynomial was published for runs that compute these
            self.params = replace(self.params, warmup=found["warmup"])
        return super().bind(sites, hook_map)

    def trunk_in(self, call: Call, streams: Streams) -> Streams | None:
        if self.learning(call):
            return None
        memory = self.memory(call.branch)
        memory.before, memory.signal = memory.signal, self.signal(call, streams)
        if self.decide(call):
            call.skip_trunk(self.forecast(call))
        return None

    def signal(self, call: Call, streams: Streams) -> torch.Tensor:
        """What is compared from step to step: an argument of the first block, its modulated input, or its input."""
        entry, described = call.entry, self._signal
        if entry is None or not described:
            return copied(main_stream(streams))
        if "argument" in described:
            return entry.get(described["argument"])
        module = getattr(entry.block.module, described["module"])
        named = {name: entry.get(argument) for name, argument in described["arguments"].items()}
        result = module(entry.get(described["input"]), **named)
        return result[0] if isinstance(result, tuple) else result

    def wants(self, call: Call) -> bool:
        memory = self.memory(call.branch)
        if not self.params.threshold or not call.can_skip or not alike(memory.signal, memory.before):
            return False
        changes = self.ratios(call, relative_l1(memory.signal, memory.before))
        memory.sum = [a + self.predicted(b) for a, b in zip(memory.sum or [0.0] * len(changes), changes)]
        return max(memory.sum) < self.params.threshold

    def predicted(self, change: float) -> float:
        """Change of the trunk's output for a change of the signal, by Horner's rule, highest power first."""
        if change == float("inf"):
            return change
        value, x = 0.0, min(max(change, self._domain[0]), self._domain[1])
        for coefficient in self._coefficients:
            value = value * x + coefficient
        return value

    def learn(self, call: Call) -> None:
        self.memory(call.branch).sum = None

    @property
    def full_budget(self) -> bool:
        return self.params.threshold == 0
