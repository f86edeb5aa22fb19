"""`patch` for users: words become features, and the engine hooks the pipeline with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

import chitu_hooks
from chitu_hooks import Feature, HookMap, PatchError, RefusedError
from chitu_hooks.find import find_hook_map
from chitu_hooks.patch import check_pipe, patch_with

from .adapters import registry
from .attention import make_attention
from .attention.choice import AutoAttention, NamedAttention
from .attention.parts import TorchInParts
from .flexcache import Params, Strategy, calibrate, make_strategy
from .parallel import Parallel, make_parallel
from .parallel.agree import Agreement
from .parallel.context import ContextParallel
from .parallel.guidance import GuidanceParallel


class Handle(chitu_hooks.Handle):
    """What `patch` returns. A context manager; leaving it undoes the patch."""

    def undo(self) -> None:
        super().undo()
        _decide_together(self.features, ())  # they may be the caller's, who can use them again

    def calibrate(
        self,
        prompts: Sequence[str | Mapping[str, Any]],
        path: str | Path | None = None,
        planned: str | Path | None = None,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Measure on this model what strategies need that have no published constants for it.

        Runs the pipeline once for each prompt, computing every step, with the number of steps and the guidance of
        `arguments`; the measured constants serve any number of steps.

        Args:
            prompts: texts, or mappings of arguments of the pipeline's call. One tells most; a few tell a little more.
            path: YAML file to write, for ``MagCache(constants=path)``; None writes none.
            planned: safetensors file to write, for ``Planned(profile=planned, budget=0.4)``: a profile of runs with exactly
                these steps, size and guidance. It takes 8 to 16 prompts, at least 4, and runs some of them again to try it.
            arguments: further arguments of every call, such as ``num_inference_steps``.

        Returns:
            What the file holds: the model, how it was measured, and the constants by strategy.

        Raises:
            PatchError: no prompts, a cache is on, several ranks make one picture, or the runs have fewer than 2 steps.
        """
        spread = next((feature for feature in self.features if isinstance(feature, Agreement)), None)
        if spread is not None:
            raise PatchError(
                f"calibrate measures whole calls on one rank, and parallel spreads them over {spread.axis.size}; patch without "
                "parallel for it"
            )
        return calibrate(self, prompts, path, planned, **arguments)


def patch(
    pipe: Any,
    *,
    attention: str | None = None,
    cache: str | Params | None = None,
    parallel: Parallel | str | None = None,
    hook_map: HookMap | str | Path | None = None,
    features: tuple[Feature, ...] = (),
) -> Handle:
    """Hook a loaded diffusers pipeline in place.

    Args:
        pipe: the pipeline; its weights, modules and processors stay the objects they are.
        attention: name of a kernel, see ``chitu env``; None leaves every kernel as it is.
        cache: name of a strategy, or its parameters such as ``Static(steps=(0, 1, 2, 4, 8))``; None computes every step.
        parallel: how many ranks make one picture, such as ``Parallel(cfg=2, ulysses=2)``; ``"auto"`` chooses
            from the ranks that there are, None is one.
        hook_map: a map or the path of one, in place of the registry's or an inferred one.
        features: further features of your own.

    Returns:
        The handle: a context manager with ``undo()`` and ``report()``.

    Raises:
        PatchError: not a pipeline, patched already, or an unknown name; the message lists the nearest.
        HookMapError: no hook map fits the pipeline.
        RefusedError: a feature cannot do exactly what it is for here. Nothing was changed.
    """
    check_pipe(pipe)
    found = find_hook_map(pipe, hook_map, registry())
    chosen = [*features]
    if attention is not None:
        chosen.append(make_attention(attention))
    if cache is not None:
        chosen.append(make_strategy(cache))
    if parallel is not None:
        chosen += make_parallel(parallel, pipe, found)
    if any(isinstance(feature, ContextParallel) and feature.rings for feature in chosen):
        chosen.append(TorchInParts())
    try:
        _decide_together(chosen, chosen)
        return patch_with(Handle, pipe, chosen, found)
    except BaseException:
        _decide_together(chosen, ())
        raise


def _decide_together(features: Sequence[Feature], parallel: Sequence[Feature]) -> None:
    """Ranks of one picture choose the same kernels; and a cache that measures a share of the tokens or of the batch decides by
    the sums over all tokens, and by the worst sample of all. With no features for it in `parallel` each decides alone again."""
    agreement = next((feature for feature in parallel if isinstance(feature, Agreement)), None)
    context = next((feature for feature in parallel if isinstance(feature, ContextParallel)), None)
    guidance = next((feature for feature in parallel if isinstance(feature, GuidanceParallel)), None)
    for feature in features:
        if isinstance(feature, Strategy) and feature.cuts_tokens:
            _refuse_ranks(feature, context, guidance)
        if isinstance(feature, AutoAttention):
            feature.told = _to_itself if agreement is None else agreement.told
        if isinstance(feature, NamedAttention):
            feature.in_parts = context is not None and context.parallel.ring > 1
        if isinstance(feature, Strategy):
            feature.reduce = _reduction(context, guidance)


def _refuse_ranks(cache: Strategy, context: ContextParallel | None, guidance: GuidanceParallel | None) -> None:
    if context is not None:
        raise RefusedError(
            f"{cache.name}: context parallelism spreads the tokens over ranks, and {cache.name} leaves some out; use another cache"
        )
    if guidance is not None:
        raise RefusedError(
            f"{cache.name}: under cfg parallelism each rank would leave out tokens by its own part of the batch; use another cache"
        )


def _to_itself(mine: Any) -> list[Any]:
    return [mine]


def _reduction(context: ContextParallel | None, guidance: GuidanceParallel | None) -> Callable[[Tensor], Tensor]:
    def reduce(sums: Tensor) -> Tensor:
        sums = sums if context is None else context.summed(sums)
        return sums if guidance is None else guidance.gathered(sums)

    return reduce
