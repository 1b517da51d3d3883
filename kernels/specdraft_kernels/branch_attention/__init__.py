"""Attention of a draft's training-time-test passes: a causal trunk shared by all rows, plus each row's own branch keys."""

from specdraft_kernels.branch_attention.api import branch_attention, branch_spans, within_window

__all__ = ["branch_attention", "branch_spans", "within_window"]
