"""The clock seam: where a generation begins and ends, and the scheduler's steps inside it.

The pipeline's `__class__` becomes a shared subclass of the same name whose `__call__` opens and closes the generation.
The scheduler's `set_timesteps` and `step` are wrapped when a generation begins, on the scheduler that the pipeline has
then, and unwrapped when it ends. The step is read from the scheduler's own index: some pipelines call `step` only to
look ahead, and rewind.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import wrapt

from .call import StepCall
from .copies import unhooked_reduce
from .state import ACTIVE, Generation

if TYPE_CHECKING:
    from .engine import Engine

CALLBACKS = ("callback_on_step_end", "callback")
"""Arguments of pipelines that run the user's code in the middle of a generation."""

MARK = "_chitu_engine"
"""Attribute of a hooked pipeline: its engine."""

_HOOKED: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()
"""Pipeline class -> its hooked subclass, for as long as some pipeline is of it."""


def hook_pipeline(pipe: Any, engine: Engine) -> None:
    """Make ``pipe(...)`` a generation of `engine`."""
    vars(pipe)[MARK] = engine
    pipe.__class__ = _hooked_class(type(pipe))


def is_hooked(pipe: Any, engine: Engine) -> bool:
    """Whether ``pipe(...)`` is a generation of `engine` already."""
    return vars(pipe).get(MARK) is engine


def unhook_pipeline(pipe: Any) -> bool:
    """Take back what `hook_pipeline` did.

    Returns:
        False if the class was changed by somebody else meanwhile, so that it was left as it is.
    """
    vars(pipe).pop(MARK, None)
    for base, hooked in list(_HOOKED.items()):
        if type(pipe) is hooked:
            pipe.__class__ = base
            return True
    return False


def _hooked_class(cls: type) -> type:
    hooked = _HOOKED.get(cls)
    if hooked is None:

        @functools.wraps(cls.__call__)
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            engine = vars(self).get(MARK)
            if engine is None:
                return cls.__call__(self, *args, **kwargs)
            with engine.generate(self, args, kwargs) as generation:
                for name in CALLBACKS:
                    if callable(kwargs.get(name)):
                        kwargs[name] = _pausing(generation, kwargs[name])
                return cls.__call__(self, *args, **kwargs)

        body = {
            # `type(pipe).from_pipe(...)` and the like make stock pipelines.
            "__new__": lambda kind, *args, **kwargs: cls(*args, **kwargs),
            "__call__": __call__,
            "__reduce_ex__": lambda self, protocol: unhooked_reduce(self, protocol, cls),
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
        }
        hooked = _HOOKED[cls] = type(cls.__name__, (cls,), body)
    return hooked


def _pausing(generation: Generation, callback: Callable[..., Any]) -> Callable[..., Any]:
    """`callback`, outside the generation while it runs; a proxy, since pipelines look at the class of some callbacks."""

    def paused(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        generation.paused = True
        try:
            return wrapped(*args, **kwargs)
        finally:
            generation.paused = False

    return wrapt.FunctionWrapper(callback, paused)


_ABSENT = object()
"""The instance had no attribute of that name."""


class _Method(wrapt.FunctionWrapper):
    """A wrapped method of the scheduler, the denoiser or the VAE that a copy of its owner does not inherit."""

    _self_before: Any
    """What the instance's attribute was before: another wrapper, say, or `_ABSENT`."""

    def __deepcopy__(self, memo: Any) -> Any:
        # The bound method, copied, is bound to the copy: `memo` knows it already.
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__wrapped__.__reduce_ex__(protocol)


@contextlib.contextmanager
def scheduler_watched(generation: Generation, step_in: tuple[Any, ...], step_out: tuple[Any, ...]) -> Iterator[None]:
    """Wrap `set_timesteps` and `step` of the generation's scheduler; features see every step."""
    scheduler = generation.scheduler
    if scheduler is None:
        yield
        return

    def set_timesteps(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        if generation.running_here:
            generation.new_schedule(getattr(scheduler, "timesteps", None))
        return result

    def step(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        if not generation.running_here:
            return wrapped(*args, **kwargs)
        call = StepCall(generation, generation.current_step(), args, kwargs)
        for feature in step_in:
            feature.step_in(call)
        call.result = wrapped(*call.args, **call.kwargs)
        generation.steps_done += 1
        generation.learn_first_index()
        for feature in reversed(step_out):
            feature.step_out(call)
        return call.result

    with instance_wrapper(scheduler, "set_timesteps", set_timesteps), instance_wrapper(scheduler, "step", step):
        yield


@contextlib.contextmanager
def cache_context_watched(denoiser: Any) -> Iterator[None]:
    """Note which `cache_context` the pipeline enters on `denoiser`, in this thread, for the time of one generation."""
    denoiser = getattr(denoiser, "_orig_mod", denoiser)
    if not hasattr(denoiser, "cache_context"):
        yield
        return

    @contextlib.contextmanager
    def cache_context(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Iterator[Any]:
        outer = ACTIVE.cache_context
        ACTIVE.cache_context = args[0] if args else kwargs.get("name")
        try:
            with wrapped(*args, **kwargs) as value:
                yield value
        finally:
            ACTIVE.cache_context = outer

    with instance_wrapper(denoiser, "cache_context", cache_context):
        yield


@contextlib.contextmanager
def instance_wrapper(owner: Any, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Stand in front of `owner.name` on the instance only, and leave the instance's attributes as they were."""
    attributes = vars(owner)
    alive = True
    ours = _Method(getattr(owner, name), wrapper, enabled=lambda: alive)
    ours._self_before = attributes.get(name, _ABSENT)
    attributes[name] = ours
    try:
        yield
    finally:
        alive = False  # a stranger may have wrapped ours and keep it: then it passes through
        _take_out(attributes, name, ours)


def _take_out(attributes: dict[str, Any], name: str, ours: _Method) -> None:
    """Remove `ours` from the chain at `name`: two generations that share a module end in any order."""
    above = attributes.get(name)
    if above is ours:
        if ours._self_before is _ABSENT:
            del attributes[name]
        else:
            attributes[name] = ours._self_before
        return
    while isinstance(above, _Method):
        if above._self_before is ours:
            above._self_before, above.__wrapped__ = ours._self_before, ours.__wrapped__
            return
        above = above._self_before
