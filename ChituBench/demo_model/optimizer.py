"""Optimizers for the transformer: Muon for the blocks' matrices, AdamW for all else; an averaged copy of the weights."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn


def orthogonalise(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Push all singular values of a stack of matrices (n, rows, columns) towards 1 by a Newton-Schulz iteration.

    The quintic's coefficients are those published with Muon (Jordan et al., 2024): they trade exactness for speed, so
    the singular values land between about 0.7 and 1.2, which is all that an update direction needs.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    wide = x.shape[-2] > x.shape[-1]
    x = x.mT if wide else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if wide else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum whose update is orthogonalised. Matrices of one shape are handled as one batch, so that a small
    model is not bound by kernel launches."""

    def __init__(self, params, lr: float, momentum: float = 0.95):
        super().__init__(list(params), {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    by_shape[param.shape].append(param)
            for (rows, columns), params in by_shape.items():
                grads = [param.grad for param in params]
                buffers = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in params]
                torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
                ahead = torch._foreach_lerp(grads, buffers, group["momentum"])
                update = orthogonalise(torch.stack(ahead))
                scale = group["lr"] * max(1.0, rows / columns) ** 0.5
                torch._foreach_add_(params, list(update.unbind()), alpha=-scale)


def transformer_matrices(transformer: nn.Module) -> list[nn.Parameter]:
    """The blocks' attention and feed-forward matrices. Modulation layers stay with AdamW: they start at zero and read
    one vector per picture, so an update of equal strength in all directions would be mostly noise."""
    return [
        param
        for name, param in transformer.named_parameters()
        if param.ndim == 2 and "transformer_blocks." in name and ".linear." not in name
    ]


class Average:
    """Exponential moving average of parameters; the horizon grows with the run, so early steps are soon forgotten."""

    def __init__(self, modules: list[nn.Module], decay: float):
        self.params = [param for module in modules for param in module.parameters()]
        self.mean = [param.detach().clone() for param in self.params]
        self.decay, self.steps = decay, 0

    @torch.no_grad()
    def update(self) -> None:
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self.mean, self.params, 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the live weights and the averaged ones; call again to undo."""
        for param, mean in zip(self.params, self.mean):
            kept = param.clone()
            param.copy_(mean)
            mean.copy_(kept)
