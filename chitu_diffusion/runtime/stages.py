"""`Stages`: one pipeline call, taken a stage at a time, without rewriting any pipeline.

``pipe(...)`` runs in a thread of its own, which stops at the clock seam: before the first denoiser call, after every
``scheduler.step``, after the VAE's decoding. So each stage is the pipeline's own code, and all of them in a row are
``pipe(...)``.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from chitu_hooks import Call, Feature, Generation, Handle, Order, PatchError, StepCall
from chitu_hooks.clock import instance_wrapper

from .metrics import is_last
from .relay import Relay

PREPARED, STEPPED, DENOISED, DECODING, DECODED, ENDED = (
    "prepared",
    "stepped",
    "denoised",
    "decoding",
    "decoded",
    "ended",
)
"""Where a call can stand. *stepped*: after a step that is not the last; *denoised*: after the last one; *decoding*:
before the VAE, where the last step could not be told from the schedule."""


class Stages:
    """One call of a hooked pipeline, stage by stage.

    Each stage first runs those before it that have not run yet. Leaving the ``with`` block, or `close`, ends a call
    that is half way; the pipeline can be used again at once. ::

        with Stages(handle, prompt="a red apple", num_inference_steps=28) as stages:
            stages.prepare()
            while stages.denoise() is not None:
                look_at(stages.latents)
            stages.decode()
            image = stages.output().images[0]

    Args:
        handle: what `patch` returned, or a callable that loads and patches and returns that: the *load* stage.
        arguments: of the pipeline's call.
    """

    def __init__(self, handle: Handle | Callable[[], Handle], **arguments: Any) -> None:
        self._handle = handle
        self._arguments = arguments
        self._gate: _Gate | None = None
        self._complete = False
        self._end = contextlib.ExitStack()
        self._finalizer = weakref.finalize(self, self._end.close)

    # -- the stages ------------------------------------------------------------------------------------------------

    def load(self) -> Handle:
        """Load the components and hook the pipeline, if that is still to be done."""
        if not isinstance(self._handle, Handle):
            self._handle = self._handle()
        return self._handle

    def prepare(self) -> None:
        """Check the arguments, encode the prompt, set the schedule, make the latents: up to the first denoiser call."""
        self._run_until(lambda where: where != "start")

    def denoise(self) -> Any:
        """Run one scheduler step: its denoiser calls, guidance and ``scheduler.step``.

        Returns:
            The latents after it, in the pipeline's own form, or None if no step was left to run.
        """
        self.prepare()
        if self.where not in (PREPARED, STEPPED):
            return None
        self._resume()
        return self.latents if self.where in (STEPPED, DENOISED) else None

    def steps(self) -> Iterator[Any]:
        """The latents after each of the steps that are left."""
        while (latents := self.denoise()) is not None:
            yield latents

    def decode(self) -> None:
        """Run what steps are left, and the VAE. With ``output_type="latent"`` there is nothing to decode.

        A pipeline that calls its VAE several times, piece by piece, does the rest of them in `output`.
        """
        self._run_until(lambda where: where in (DECODED, ENDED))

    def output(self) -> Any:
        """Run what is left of the call.

        Returns:
            What ``pipe(...)`` returns.
        """
        self._run_until(lambda where: where == ENDED)
        return self._gate.relay.result if self._gate is not None else None

    # -- where it stands -------------------------------------------------------------------------------------------

    @property
    def where(self) -> str:
        """The place at which the call stands: `start`, or one of this module's constants."""
        return self._gate.relay.where if self._gate is not None else "start"

    @property
    def latents(self) -> Any:
        """What the last scheduler step returned; None before the first."""
        return self._gate.latents if self._gate is not None else None

    def _run_until(self, reached: Callable[[str], bool]) -> None:
        self._check_open()
        while not reached(self.where):
            self._resume()

    def _resume(self) -> None:
        gate = self._gate or self._start()
        try:
            gate.relay.resume()
        except BaseException:
            self.close()
            raise
        if gate.relay.where == ENDED:
            self._complete = True
            self.close()

    def _check_open(self) -> None:
        if not self._finalizer.alive and not self._complete:
            raise PatchError("this call was ended half way; make new Stages for another one")

    def _start(self) -> _Gate:
        handle, arguments = self.load(), self._arguments
        relay = Relay(lambda: handle.pipe(**arguments))
        gate = _Gate(relay)
        self._end.enter_context(handle.also(gate))
        self._end.callback(relay.close)
        self._gate = gate
        return gate

    def close(self) -> None:
        """End the call where it stands. A second call does nothing."""
        self._finalizer()

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Gate(Feature):
    """Stops the pipeline's thread between its stages."""

    name = "stages"
    exactness = "exact"
    order = Order.CLOCK

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.latents: Any = None
        self._places = contextlib.ExitStack()
        self._entered = False
        self._decoded = False

    def begin(self, generation: Generation) -> None:
        vae = getattr(generation.pipe, "vae", None)
        if callable(getattr(vae, "decode", None)):
            self._places.enter_context(instance_wrapper(vae, "decode", self._decode))

    def denoiser_in(self, call: Call) -> None:
        if self._entered:
            self.relay.check()
            return
        self._entered = True
        self.relay.pause(PREPARED)

    def step_out(self, step: StepCall) -> None:
        self.latents = step.next_sample
        self.relay.pause(DENOISED if is_last(step) else STEPPED)

    def _decode(self, wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        ours = threading.get_ident() == self.relay.thread
        if not ours or self.latents is None or self._decoded:
            return wrapped(*args, **kwargs)
        if self.relay.where == STEPPED:
            self.relay.pause(DECODING)
        result = wrapped(*args, **kwargs)
        self._decoded = True
        self.relay.pause(DECODED)
        return result

    def end(self, generation: Generation) -> None:
        self._places.close()
