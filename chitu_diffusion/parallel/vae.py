"""Tiles of the VAE on different ranks, where the user has switched tiling on: diffusers' own tiles and its own blending.

``vae.tiled_decode`` runs twice: first with a decoder that only notes the tiles, then, when each rank has decoded its share
and they have exchanged, with one that hands out what was decoded. So the result is that of the stock tiled decode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from chitu_hooks import Feature, Generation, Order
from chitu_hooks.clock import instance_wrapper

from .mesh import Mesh


class _InSequence(Exception):
    """The decoder keeps something from one tile to the next."""


class VaeTiles(Feature):
    """Tiles over all ranks of `mesh.replica`."""

    name = "vae tiles"
    order = Order.CLOCK

    def __init__(self, mesh: Mesh) -> None:
        self.axis = mesh.replica
        self.decoded = self.all = 0

    def begin(self, generation: Generation) -> None:
        self.decoded = self.all = 0
        vae = getattr(generation.pipe, "vae", None)
        hooks = generation.memory(self).hooks = contextlib.ExitStack()
        if vae is None or not hasattr(vae, "tiled_decode") or not hasattr(vae, "decoder"):
            return

        def tiled_decode(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
            scale = scale_of(vae)
            if not generation.running_here or scale is None:
                return wrapped(*args, **kwargs)
            try:
                return self._divided(vae, scale, lambda: wrapped(*args, **kwargs))
            except _InSequence:
                generation.note(
                    f"{self.name}: {type(vae).__name__} decodes its tiles in sequence, so every rank decodes all"
                )
                return wrapped(*args, **kwargs)

        hooks.enter_context(instance_wrapper(vae, "tiled_decode", tiled_decode))

    def _divided(self, vae: Any, scale: int, decode: Callable[[], Any]) -> Any:
        tiles: list[Tensor] = []
        channels = vae.config.out_channels

        def note(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Tensor:
            if len(args) != 1 or kwargs or args[0].dim() != 4:
                raise _InSequence
            tiles.append(args[0])
            B, _, H, W = args[0].shape
            return args[0].new_zeros(B, channels, H * scale, W * scale)

        with instance_wrapper(vae.decoder, "forward", note):
            decode()
        decoded = [self._decode(vae, tile, number, scale, channels) for number, tile in enumerate(tiles)]
        for number, tile in enumerate(decoded):
            dist.broadcast(tile, src=self.axis.ranks[number % self.axis.size], group=self.axis.group)
        self.all += len(tiles)
        ready = iter(decoded)
        with instance_wrapper(vae.decoder, "forward", lambda wrapped, instance, args, kwargs: next(ready)):
            return decode()

    def _decode(self, vae: Any, tile: Tensor, number: int, scale: int, channels: int) -> Tensor:
        """This tile, or room for it if it is another rank's."""
        if number % self.axis.size == self.axis.index:
            self.decoded += 1
            return vae.decoder(tile).contiguous()
        B, _, H, W = tile.shape
        return torch.empty(B, channels, H * scale, W * scale, dtype=tile.dtype, device=tile.device)

    def end(self, generation: Generation) -> None:
        hooks = getattr(generation.memory(self), "hooks", None)
        if hooks is not None:
            hooks.close()

    def report(self) -> dict[str, Any]:
        return {"tiles decoded here": self.decoded, "of": self.all}


def scale_of(vae: Any) -> int | None:
    """Pixels of a latent, along one side; None if the VAE does not say it in the usual way."""
    sample, latent = getattr(vae, "tile_sample_min_size", None), getattr(vae, "tile_latent_min_size", None)
    if isinstance(sample, int) and isinstance(latent, int) and latent and sample % latent == 0:
        return sample // latent
    return None
