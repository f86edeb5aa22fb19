"""An interrupt that is never lost: Python drops one that arrives while a destructor or a weak reference's callback runs."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from typing import Any

LATER = 0.05  # seconds; the callback that swallowed it has ended by then


def keep_interrupts() -> None:
    """Raise Ctrl-C and an asked-for end once more where Python could only say that it ignored them."""
    with contextlib.suppress(ValueError, AttributeError):  # not the main thread, or no such signal here
        signal.signal(signal.SIGTERM, _terminated)
    sys.unraisablehook = _again


def _terminated(number: int, frame: Any) -> None:
    """Leave through every ``finally``, so that nothing half written stays behind."""
    sys.exit(128 + number)


def _again(ignored: Any) -> None:
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        number = signal.SIGINT
    elif issubclass(ignored.exc_type, SystemExit):
        number = signal.SIGTERM
    else:
        return sys.__unraisablehook__(ignored)
    main = threading.main_thread().ident  # the signal itself, so that a sleep or a wait of that thread ends
    timer = threading.Timer(LATER, signal.pthread_kill, (main, number))
    timer.daemon = True
    timer.start()
