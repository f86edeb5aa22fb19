"""The engine: one pipeline's sites, the features on them, and the generation that is running."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from . import branches, clock
from .block import BlockSeam
from .call import Call, with_first
from .errors import ChituWarning, GenerationError, RefusedError
from .feature import Feature, needs_seam, overrides
from .hook_map import HookMap
from .processors import hook_processor, is_hooked, reaches_attention, unhook_processor
from .seam import Shim
from .sites import AttentionSite, DenoiserSite, Sites
from .state import ACTIVE, Generation


class Engine:
    """Installs the hooks that the features need, and runs the features at them.

    Args:
        sites: where the seams of the pipeline are.
        hook_map: the map that the sites were found by.
        features: in any order; they run in the order of `Feature.order`.
    """

    def __init__(self, sites: Sites, hook_map: HookMap, features: list[Feature]) -> None:
        self.sites = sites
        self.hook_map = hook_map
        self.features: list[Feature] = []
        self.generation: Generation | None = None
        self.last: Generation | None = None
        """The last generation, its tensors dropped, for the report."""
        self.left_behind: list[str] = []
        """What `remove` could not take back because somebody else had wrapped on top."""
        self._lock = threading.Lock()
        self._shims: list[Shim] = []
        self._processors: dict[int, tuple[Any, AttentionSite]] = {}
        self.blocks = BlockSeam(self)
        self._plan(features)

    def _plan(self, features: Iterable[Feature]) -> None:
        """Take `features` and work out, once, which of them run where."""
        self.features = sorted(features, key=lambda feature: feature.order)
        self._hooks_denoiser = self._any("denoiser") or self._any("block") or self._any("attention")
        self._hooks_attention = self._any("attention")
        self._denoiser_in = self.having("denoiser_in")
        self._denoiser_out = self.having("denoiser_out")
        self._attention = tuple(feature for feature in self.features if needs_seam(feature, "attention")) or None
        self._layers: tuple[Any, tuple[Feature, ...]] = (None, ())
        """Features of the attention seam, as the last call had them, and those of them that have an `attention_layer`."""
        self._skips = any(feature.skips_trunk for feature in self.features)
        self.blocks.plan()

    def __deepcopy__(self, memo: Any) -> None:
        return None  # a copied pipeline is not hooked

    def having(self, method: str) -> tuple[Feature, ...]:
        """The features that override `method`, outermost first."""
        return tuple(feature for feature in self.features if overrides(feature, method))

    def _any(self, seam: str) -> bool:
        return any(needs_seam(feature, seam) for feature in self.features)

    @property
    def hooks_blocks(self) -> bool:
        return self._any("block")

    # -- putting hooks in and taking them out ----------------------------------------------------------------------

    def install(self, undo: contextlib.ExitStack) -> None:
        """Put every hook in place, pushing onto `undo` how to take it out again.

        The clock comes first: without it no generation begins and nothing else acts.
        """
        if not self.features:
            return
        if not clock.is_hooked(self.sites.pipe, self):
            undo.callback(self._remove_pipeline)
            clock.hook_pipeline(self.sites.pipe, self)
        stood = {id(shim.site) for shim in self._shims}
        for denoiser in self.sites.denoisers if self._hooks_denoiser else ():
            if id(denoiser) not in stood:
                self._stand_before(denoiser.module, denoiser, self._enter_denoiser, undo)
        for block in self.sites.blocks if self.hooks_blocks else ():
            if id(block) not in stood:
                self._stand_before(block.module, block, self.blocks.enter, undo)
        for exit in self.sites.exits if self.having("trunk_out") else ():
            if id(exit) not in stood:
                self._stand_before(exit.module, exit, self.blocks.leave_trunk, undo)
        if not self._processors:
            undo.callback(self._remove_processors)
            self._hook_processors()

    @contextlib.contextmanager
    def joined(self, features: Iterable[Feature]) -> Iterator[None]:
        """Run `features` too, for a while. Hooks that are in place stay as they are; only missing ones are added."""
        before = list(self.features)
        try:
            self._plan([*before, *features])
            with contextlib.ExitStack() as undo:
                self.install(undo)
                yield
        finally:
            self._plan(before)

    def _stand_before(
        self, module: nn.Module, site: Any, enter: Callable[..., Any], undo: contextlib.ExitStack
    ) -> None:
        shim = Shim(module, site, enter)
        undo.callback(self._remove_shim, shim)
        shim.install()
        self._shims.append(shim)

    def _hook_processors(self) -> None:
        if not self._hooks_attention:
            return
        for site in self.sites.attention:
            processor = getattr(site.module, "processor", None)
            if processor is None or is_hooked(processor, site, id(self)):
                continue
            if site.reachable and not reaches_attention(type(processor)):
                raise RefusedError(
                    f"{site.path}: {type(processor).__name__} was put there after patching and calls no attention that can be "
                    "intercepted; put another processor there, or undo the handle"
                )
            hook_processor(processor, site, id(self))
            self._processors[id(processor)] = (processor, site)

    def _remove_pipeline(self) -> None:
        if not clock.unhook_pipeline(self.sites.pipe):
            self.left_behind.append(
                f"class of {type(self.sites.pipe).__name__} was changed after patching and is left so"
            )

    def _remove_shim(self, shim: Shim) -> None:
        shim = next((renewed for renewed in self._shims if renewed.site is shim.site), shim)
        if shim in self._shims:
            self._shims.remove(shim)
        if not shim.remove():
            self.left_behind.append(
                f"{type(shim.module).__name__}: wrapped by somebody else after patching; ours passes through"
            )

    def _remove_processors(self) -> None:
        for processor, site in self._processors.values():
            if not unhook_processor(processor, id(self)):
                self.left_behind.append(f"{site.path}: processor class was changed after patching and is left so")
        self._processors.clear()

    # -- one generation --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def generate(self, pipe: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Iterator[Generation]:
        """The time of one ``pipe(...)`` call.

        Raises:
            GenerationError: one is running already, in this thread or another.
        """
        generation = Generation(pipe, args, kwargs)
        with self._lock:
            if self.generation is not None:
                here = "this thread" if self.generation.thread == generation.thread else "another thread"
                raise GenerationError(
                    f"this {type(pipe).__name__} is generating already, in {here}; a pipeline holds the state of one generation "
                    f"at a time: use one pipeline per thread ({type(pipe).__name__}.from_pipe shares the weights)"
                )
            self.generation = generation
        begun: list[Feature] = []
        try:
            self._refresh()
            with contextlib.ExitStack() as stack:
                stack.enter_context(
                    clock.scheduler_watched(generation, self.having("step_in"), self.having("step_out"))
                )
                for denoiser in self.sites.denoisers if self._hooks_denoiser else ():
                    stack.enter_context(clock.cache_context_watched(denoiser.module))
                for feature in self.features:
                    begun.append(feature)
                    feature.begin(generation)
                yield generation
        finally:
            self._end(generation, begun)

    def _end(self, generation: Generation, begun: list[Feature]) -> None:
        try:
            with contextlib.ExitStack() as ends:  # an `end` that raises does not keep the others from theirs
                for feature in begun:
                    ends.callback(feature.end, generation)
                generation.close_schedule()
        finally:
            generation.memory = type(generation.memory)()
            generation.timesteps = generation.scheduler = generation.pipe = None
            generation.args, generation.kwargs = (), {}
            generation.ordinals.clear()
            self.last = generation
            self.generation = None

    def _refresh(self) -> None:
        """Come back to the front where something was put there after patching: compiled calls, new processors.

        Raises:
            GenerationError: the pipeline has got another denoiser.
            RefusedError: the denoiser was compiled whole after patching, and a feature needs its blocks.
        """
        for denoiser in self.sites.denoisers:
            self._follow(denoiser)
        self._shims = [shim.renewed() for shim in self._shims]
        self._hook_processors()
        refuse_whole_compile(self)

    def _follow(self, denoiser: DenoiserSite) -> None:
        """Move out to the wrapper that ``pipe.transformer = torch.compile(pipe.transformer)`` put there, or back in."""
        module = getattr(self.sites.pipe, denoiser.name, None)
        if module is denoiser.module or not isinstance(module, nn.Module):
            return
        if getattr(module, "_orig_mod", module) is not denoiser.inner:
            raise GenerationError(
                f"{denoiser.name} was replaced by another {type(module).__name__} after patching; undo the handle and patch "
                "the pipeline again"
            )
        denoiser.module = module
        for place, shim in enumerate(self._shims):
            if shim.site is denoiser:
                shim.remove()
                self._shims[place] = Shim(module, denoiser, shim.enter)
                self._shims[place].install()

    # -- one denoiser call -----------------------------------------------------------------------------------------

    def _enter_denoiser(self, denoiser: DenoiserSite, rest: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        generation = self.generation
        if generation is None or not generation.running_here:
            return rest(*args, **kwargs)
        if not generation.entered:
            generation.entered = True
            self._hook_processors()  # perturbed attention guidance puts its own in after the pipeline's call began
        call = Call(self, generation, denoiser, args, kwargs)
        call.step = generation.current_step()
        call.branch = branches.identify(generation, call, self.hook_map.conditioning)
        if self._skips:
            call.signature = branches.signature(call)
            call.spans = self.blocks.spans_of(call)
        outer = ACTIVE.call, ACTIVE.attention, ACTIVE.layers, ACTIVE.layout
        ACTIVE.call, ACTIVE.layout = call, None
        call.attention = self._attention
        try:
            replacement = None
            for feature in self._denoiser_in:
                replacement = feature.denoiser_in(call)
                if replacement is not None:
                    break
            ACTIVE.attention, ACTIVE.layers = call.attention, self._with_layers(call.attention)
            if replacement is None:
                call.output = rest(*call.args, **call.kwargs)
            else:
                call.replaced = True
                call.output = with_first(self._output_like(call), replacement)
        finally:
            ACTIVE.call, ACTIVE.attention, ACTIVE.layers, ACTIVE.layout = outer
        self.blocks.leave(call)
        for feature in reversed(self._denoiser_out):
            feature.denoiser_out(call)
        return call.output

    def _with_layers(self, features: tuple[Feature, ...] | None) -> tuple[Feature, ...]:
        """Those of `features`, which differ from call to call at most, that have to be asked at every layer."""
        if self._layers[0] is not features:
            found = tuple(feature for feature in features or () if overrides(feature, "attention_layer"))
            self._layers = features, found
        return self._layers[1]

    def _output_like(self, call: Call) -> Any:
        """An output of the form that this call asks for, to put a predicted sample into.

        Raises:
            GenerationError: the denoiser returns more than its sample, which a prediction cannot stand for.
        """
        if call.argument("return_dict") is False:
            return (None,)
        raise GenerationError(
            f"{call.denoiser.name} was called for an output object; a predicted sample can stand only for a tuple "
            "(return_dict=False)"
        )


def refuse_whole_compile(engine: Engine) -> None:
    """Raise if a feature needs blocks that are inside one compiled region."""
    if not engine.hooks_blocks:
        return
    for denoiser in engine.sites.denoisers:
        if denoiser.compiled_whole:
            names = ", ".join(feature.name for feature in engine.features if needs_seam(feature, "block"))
            raise RefusedError(
                f"{names}: {denoiser.name} is compiled as a whole, so its blocks cannot be skipped or observed; use "
                f"{denoiser.name}.compile_repeated_blocks(fullgraph=True) instead, before or after patching"
            )


def warn_left_behind(engine: Engine) -> None:
    """Tell what `undo` could not take back."""
    for text in engine.left_behind:
        warnings.warn(text, ChituWarning, stacklevel=3)
