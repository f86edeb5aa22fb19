"""How far a bench is: over cases, pictures and steps, with the time that is left."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from chitu_diffusion.bench import meter as module
from chitu_diffusion.bench.meter import Meter


def told(meter: Meter) -> str:
    return meter.bar.tasks[0].description


def test_where_it_is_and_how_long_it_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    screen = io.StringIO()
    meter = Meter(Console(file=screen, width=200), 400)
    assert meter.left() == "time left not known yet"
    meter.begin("drawing", 2)
    meter.next("fbcache", 10)
    for first in (0, 4, 8):
        for _ in range(10):
            meter.drew(first, 4 if first < 8 else 2)
    assert told(meter) == "drawing, case 1 of 2: fbcache · picture 9–10 of 10 · step 10"
    now[0] += 50
    assert (meter.done, meter.left()) == (100, "about 2 min left")
    meter.next("static", 1)
    meter.drew(0, 1)
    assert told(meter) == "drawing, case 2 of 2: static · picture 1 of 1 · step 1"
    meter.tell("drew it")
    assert "drew it · about 2 min left" in screen.getvalue()


def test_what_others_have_finished_counts() -> None:
    meter = Meter(Console(file=io.StringIO()), 100)
    meter.begin("drawing", 4)
    for steps, case in ((15, False), (20, True), (20, True), (20, True)):  # a part of a baseline, and three cases
        meter.finished(steps, case=case)
    assert meter.done == 75 and told(meter) == "drawing, 3 of 4 cases"
