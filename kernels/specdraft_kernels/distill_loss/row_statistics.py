"""What one pass over a slice of the vocabulary leaves per row, and how two slices' leavings become one."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist


class RowStatistics(NamedTuple):
    """Of R rows, over the columns seen so far; s are the draft's logits and t the teacher's."""

    peak: torch.Tensor
    """``[2, R]`` max s and max t."""
    total: torch.Tensor
    """``[3, R]`` sum of exp(s - max s), of exp(t - max t), and of exp(t - max t) * s."""

    def cross_entropy(self) -> torch.Tensor:
        """``[R]`` log-sum-exp of s minus the teacher's mean of s."""
        return self.peak[0] + self.total[0].log() - self.total[2] / self.total[1]


def combine(own: RowStatistics, group: dist.ProcessGroup | None) -> RowStatistics:
    """The statistics over all ranks' slices, on every rank: one reduction for the maxima, one for the sums."""
    if group is None:
        return own
    peak = own.peak.clone()
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    student, teacher = (own.peak - peak).exp().unbind()
    total = own.total * torch.stack([student, teacher, teacher])
    dist.all_reduce(total, group=group)
    return RowStatistics(peak, total)
