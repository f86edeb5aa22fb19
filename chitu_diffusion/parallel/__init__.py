"""Several ranks, one picture: guidance and context parallelism, and the launcher. See `Parallel`."""

from .feature import make_parallel
from .params import Parallel

__all__ = ["Parallel", "make_parallel"]
