"""Attention of a block drafter: each block sees the trunk before its anchor, and itself in both directions."""

from specdraft_kernels.block_attention.api import block_attention, block_spans, of_used_slots

__all__ = ["block_attention", "block_spans", "of_used_slots"]
