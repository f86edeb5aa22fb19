"""Attention kernels: one file a kernel, one row each in the table of `kernels`."""

from .choice import AttentionFeature, make_attention
from .kernel import AttentionCall, Kernel
from .table import find_kernel, kernels

__all__ = ["AttentionCall", "AttentionFeature", "Kernel", "find_kernel", "kernels", "make_attention"]
