"""Timing: several candidates in turns in one process, so that a drift of the device's clock hits them all alike."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

HEAD_START = 4_000_000
"""Cycles, about 2 ms, that the device idles before a sample: the host is then ahead, and launches cost nothing."""


class Stopwatch:
    """Marks in the stream of a device, and the milliseconds between them; on the CPU, in the process's own time."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def laps(self) -> list[float]:
        """Milliseconds between successive marks; waits for the device."""
        pairs = list(zip(self.marks, self.marks[1:]))
        if not self.cuda:
            return [1000 * (end - start) for start, end in pairs]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]


def in_turns(
    work: Mapping[str, Callable[[], Any]], device: torch.device, *, rounds: int = 10, calls: int = 1, warmup: int = 2
) -> dict[str, list[float]]:
    """Name -> milliseconds of one call, one sample for each round; every candidate runs once a round.

    Args:
        calls: calls between two marks; their mean is one sample.
        warmup: calls of each before the first round.
    """
    for run in work.values():
        for _ in range(warmup):
            run()
    samples: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, run in work.items():
            watch = Stopwatch(device)
            if watch.cuda:
                torch.cuda._sleep(HEAD_START)
            watch.mark()
            for _ in range(calls):
                run()
            watch.mark()
            samples[name].append(watch.laps()[0] / calls)
    return samples


def summary(samples: list[float]) -> dict[str, Any]:
    """Median and spread of samples in milliseconds; the spread is between the quartiles."""
    ordered = sorted(samples)
    low, _, high = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else (ordered[0],) * 3
    return {"median_ms": statistics.median(ordered), "quartiles_ms": [low, high], "samples": len(ordered)}


@dataclass
class Budget:
    """Seconds that a run may take; what no longer fits is left out, and said."""

    seconds: float
    start: float = field(default_factory=time.monotonic)
    skipped: list[str] = field(default_factory=list)

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.start)

    def allows(self, what: str, seconds: float) -> bool:
        """Whether `what`, which takes about `seconds`, still fits."""
        if self.left >= seconds:
            return True
        self.skipped.append(f"{what}: takes about {seconds:.0f} s, and {max(self.left, 0):.0f} s are left")
        print(f"skipped {self.skipped[-1]}", flush=True)
        return False


PACKAGES = (
    "torch", "diffusers", "transformers", "triton", "fa3-fwd", "flash-attn", "xformers", "sageattention", "cache-dit",
)  # fmt: skip


def circumstances(device: torch.device) -> dict[str, Any]:
    """What is stored with every number: machine, versions, commit and command."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            pass
    machine: dict[str, Any] = {"cpu": platform.processor() or platform.machine()}
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        machine = {"gpu": found.name, "capability": f"{found.major}.{found.minor}", "memory_bytes": found.total_memory}
        versions["cuda"] = str(torch.version.cuda)
        versions["cudnn"] = str(torch.backends.cudnn.version())
    return {
        "machine": machine,
        "versions": versions,
        "commit": _commit(),
        "command": command(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def command() -> str:
    """What was typed; a rank of ours, and ``python -m``, have the module's path in place of the script's name."""
    path = Path(sys.argv[0])
    name = "chitu" if path.parts[-2:] == ("cli", "main.py") else path.name
    return " ".join([name, *sys.argv[1:]])


def _commit() -> str | None:
    """The commit of the checkout that this file is in, or None where it is none."""
    folder = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True
        )
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def store(path: Path, data: Any) -> None:
    """Write `data` as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".part")
    half.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    half.replace(path)
