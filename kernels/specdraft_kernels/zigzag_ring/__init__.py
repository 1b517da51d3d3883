"""Packed sequences split zigzag over context-parallel ranks: the layout, shifts across its boundaries, attention over it."""

from specdraft_kernels.zigzag_ring.cost import choose_form, held_bytes, sent_bytes
from specdraft_kernels.zigzag_ring.exchange import Exchange
from specdraft_kernels.zigzag_ring.layout import ZigzagLayout
from specdraft_kernels.zigzag_ring.shift import lookahead, shift
from specdraft_kernels.zigzag_ring.trunk import Trunk

__all__ = ["Exchange", "Trunk", "ZigzagLayout", "choose_form", "held_bytes", "lookahead", "sent_bytes", "shift"]
