"""Where the time of a step goes; it is part of the bench of the package now."""

from chitu_diffusion.bench.kernel_kinds import by_kind, kind_of, sum_of_union

__all__ = ["by_kind", "kind_of", "sum_of_union"]
