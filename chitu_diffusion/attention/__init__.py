"""Attention kernels: one file a kernel, one row each in the table of `kernels`."""

from .choice import AttentionChoice, make_attention
from .kernel import AttentionCall, Kernel
from .table import kernels

__all__ = ["AttentionCall", "AttentionChoice", "Kernel", "kernels", "make_attention"]
