"""How much a piece of training holds, from how long pieces took."""

from __future__ import annotations


class AnchorBudget:
    """How many anchors a microbatch may hold so that its slowest piece stays inside the slice.

    Starts small and grows: a first guess that is too large would make a request wait.
    """

    def __init__(self, slice_ms: float, *, start: int = 32, low: int = 8, high: int = 512) -> None:
        self._slice_ms, self._low, self._high = slice_ms, low, high
        self.anchors = start

    def measured(self, slowest_ms: float, anchors: int) -> None:
        """Record the slowest piece of a microbatch of `anchors` anchors, in ms."""
        wanted_ms = 0.7 * self._slice_ms
        # The trunk costs the same for few anchors: a small last microbatch that fits says nothing about a full one.
        if slowest_ms <= wanted_ms and anchors < 0.7 * self.anchors:
            return
        fitting = anchors * wanted_ms / max(slowest_ms, 1e-3)
        if fitting < self.anchors:
            self.anchors = max(self._low, int(fitting))
        else:
            self.anchors = min(self._high, int(min(fitting, 1.25 * self.anchors + 1)))
