"""One chunk's logits in plain PyTorch, on any device: every exponential is taken once, and kept where the logit was."""

from __future__ import annotations

import torch

from specdraft_kernels.distill_loss.row_statistics import RowStatistics
from specdraft_kernels.distill_loss.teacher import TeacherRows


def _exponentials_(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn ``logits [R, V]`` into exponentials over the row's maximum; gives the maxima and the sums ``[R]``."""
    if logits.shape[1] == 0:  # A rank without columns: `amax` knows no maximum of nothing.
        return logits.new_full(logits.shape[:1], float("-inf")), logits.new_zeros(logits.shape[:1])
    peak = logits.amax(1)
    # A slice that holds only -inf is nothing, not NaN: another rank's slice has the row's probability.
    logits.sub_(peak.masked_fill(peak == float("-inf"), 0)[:, None]).exp_()
    return peak, logits.sum(1)


class EagerChunk:
    """Statistics of one chunk when it is made, the gradient of its logits when those of the whole vocabulary are known."""

    def __init__(self, scores: torch.Tensor, teacher: TeacherRows) -> None:
        """`scores`: ``[R, V]`` the draft's logits, of the accumulation dtype; they are overwritten."""
        weight = teacher.logits.to(scores.dtype)
        peak_t, total_t = _exponentials_(weight)
        if teacher.whose is not None:
            weight, peak_t, total_t = (each.index_select(0, teacher.whose) for each in (weight, peak_t, total_t))
        cross = torch.linalg.vecdot(weight, scores)
        peak_s, total_s = _exponentials_(scores)
        self.own = RowStatistics(torch.stack([peak_s, peak_t]), torch.stack([total_s, total_t, cross]))
        self._scores, self._weight = scores, weight

    def gradient(self, whole: RowStatistics, scale: torch.Tensor) -> torch.Tensor:
        """``[R, V]`` scale * (softmax(s) - softmax(t)), in the memory of the logits.

        Args:
            whole: of the same rows over the whole vocabulary.
            scale: ``[R]``.
        """
        # The exponentials stand over the maximum of these columns, the sums over that of all.
        student, teacher = (self.own.peak - whole.peak).exp() * scale / whole.total[:2]
        return self._scores.mul_(student[:, None]).addcmul_(self._weight, teacher[:, None], value=-1)
