"""Attention of a draft's training-time-test passes: a causal trunk shared by all rows, plus each row's own branch keys."""

from specdraft_kernels.branch_attention.naive import branch_attention

__all__ = ["branch_attention"]
