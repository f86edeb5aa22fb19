"""Runs a function in a thread of its own that stops at named places and goes on when the caller says so."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any

import torch


class Closed(BaseException):
    """Raised inside the paused thread to end it. A `BaseException`, so that no ``except Exception`` swallows it."""


class Relay:
    """Two threads of which exactly one runs: the caller's, or the one in which `function` runs.

    The thread inherits what torch keeps per thread from whoever makes the relay: gradient and inference mode, autocast,
    default device, CUDA device and stream; and the caller's context variables.

    Attributes:
        where: the name of the place at which the function stands; `ended` once it has returned or raised.
        result: what the function returned.
        thread: the number of the function's thread, once it runs.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self.where = "start"
        self.result: Any = None
        self.thread: int | None = None
        self.closing = False
        self._error: BaseException | None = None
        self._turn = threading.Semaphore(0)
        self._news = threading.Semaphore(0)
        context, modes = contextvars.copy_context(), _torch_modes()
        self._worker = threading.Thread(
            target=context.run, args=(self._run, function, modes), name="chitu-stages", daemon=True
        )

    def _run(self, function: Callable[[], Any], modes: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self.thread = threading.get_ident()
        try:
            with modes():
                self.result = function()
        except BaseException as error:
            self._error = error
        finally:
            self.where = "ended"
            self._news.release()

    def pause(self, where: str) -> None:
        """Called by the function: hand control back, and wait.

        Raises:
            Closed: the caller has closed the relay.
        """
        self.check()
        self.where = where
        self._news.release()
        self._turn.acquire()
        self.check()

    def check(self) -> None:
        """Called by the function: end here if the caller has closed the relay.

        Raises:
            Closed: it has.
        """
        if self.closing:
            raise Closed

    def resume(self) -> str:
        """Called by the caller: let the function run to its next pause, or its end.

        Returns:
            Where it stands now.

        Raises:
            BaseException: whatever the function raised.
        """
        if self.where == "ended":
            return self.where
        if self._worker.ident is None:
            self._worker.start()
        else:
            self._turn.release()
        self._news.acquire()
        error, self._error = self._error, None
        if error is not None:
            self._worker.join()
            raise error
        if self.where == "ended":
            self._worker.join()
        return self.where

    def close(self) -> None:
        """End the function where it stands, or at the next place where it looks; does nothing once it has ended."""
        self.closing = True
        if self._worker.ident is not None:
            self._turn.release()
            if self.thread != threading.get_ident():
                self._worker.join()
        self.where = "ended"
        self._error = None


def _torch_modes() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """What torch keeps per thread, as it is here, to be entered over there."""
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    device = torch.get_default_device()
    casts = {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    stream = torch.cuda.current_stream() if cuda else None

    @contextlib.contextmanager
    def modes() -> Any:
        with contextlib.ExitStack() as stack:
            if stream is not None:
                stack.enter_context(torch.cuda.device(stream.device))
                stack.enter_context(torch.cuda.stream(stream))
            if device != torch.get_default_device():
                stack.enter_context(torch.device(device))
            for kind, dtype in casts.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            stack.enter_context(torch.inference_mode(inference))
            if not inference:
                stack.enter_context(torch.set_grad_enabled(grad))
            yield

    return modes
