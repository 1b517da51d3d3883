"""One chunk's logits in two Triton kernels: one pass reads them for the statistics, one turns them into their gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdraft_kernels.distill_loss.row_statistics import RowStatistics
from specdraft_kernels.distill_loss.teacher import TeacherRows

_BLOCK = 4096
"""Columns of a tile, at most; a power of two."""


@triton.jit
def _statistics_kernel(scores, teacher, index, out, rows, columns, scores_stride, teacher_stride, BLOCK: tl.constexpr):  # noqa: N803
    """Row `program_id(0)` of ``out [5, rows]``: max s, max t, sum e^(s - max s), sum e^(t - max t), sum e^(t - max t) s."""
    # 64 bit, because rows times columns passes 2^31.
    row = tl.program_id(0).to(tl.int64)
    s_row = scores + row * scores_stride
    t_row = teacher + tl.load(index + row) * teacher_stride
    dtype = scores.dtype.element_ty
    peak_s = tl.full((), float("-inf"), dtype)
    peak_t = tl.full((), float("-inf"), dtype)
    total_s = tl.full((), 0.0, dtype)
    total_t = tl.full((), 0.0, dtype)
    cross = tl.full((), 0.0, dtype)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        s = tl.load(s_row + column, mask=inside, other=float("-inf"))
        t = tl.load(t_row + column, mask=inside, other=float("-inf")).to(dtype)
        new_s = tl.maximum(peak_s, tl.max(s, 0))
        new_t = tl.maximum(peak_t, tl.max(t, 0))
        # As long as a row has shown nothing but -inf, -inf - -inf would be NaN.
        base_s = tl.where(new_s == float("-inf"), 0.0, new_s)
        base_t = tl.where(new_t == float("-inf"), 0.0, new_t)
        weight = tl.exp(t - base_t)
        rescale = tl.exp(peak_t - base_t)
        total_s = total_s * tl.exp(peak_s - base_s) + tl.sum(tl.exp(s - base_s), 0)
        total_t = total_t * rescale + tl.sum(weight, 0)
        # Beyond the row s is -inf, and so may it be elsewhere: 0 times it must be 0.
        cross = cross * rescale + tl.sum(weight * tl.where(weight > 0, s, 0.0), 0)
        peak_s = new_s
        peak_t = new_t
    tl.store(out + row, peak_s)
    tl.store(out + rows + row, peak_t)
    tl.store(out + 2 * rows + row, total_s)
    tl.store(out + 3 * rows + row, total_t)
    tl.store(out + 4 * rows + row, cross)


@triton.jit
def _gradient_kernel(
    scores,
    teacher,
    index,
    peak,
    factor,
    rows,
    columns,
    scores_stride,
    teacher_stride,
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Tile (row, block of columns) of ``scores`` becomes factor_s e^(s - max s) - factor_t e^(t - max t).

    ``peak [2, rows]`` and ``factor [2, rows]`` hold the draft's row and the teacher's.
    """
    row = tl.program_id(0).to(tl.int64)
    s_row = scores + row * scores_stride
    t_row = teacher + tl.load(index + row) * teacher_stride
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    s = tl.load(s_row + column, mask=inside, other=float("-inf"))
    t = tl.load(t_row + column, mask=inside, other=float("-inf")).to(s.dtype)
    student = tl.exp(s - tl.load(peak + row)) * tl.load(factor + row)
    taught = tl.exp(t - tl.load(peak + rows + row)) * tl.load(factor + rows + row)
    tl.store(s_row + column, student - taught, mask=inside)


def interpreted() -> bool:
    """Whether the kernels above run in Triton's interpreter, and so on the CPU: it was asked for at their import, and is now."""
    compiled = (isinstance(each, triton.JITFunction) for each in (_statistics_kernel, _gradient_kernel, tl.sum))
    return triton.knobs.runtime.interpret and not any(compiled)


class FusedChunk:
    """Statistics of one chunk when it is made, the gradient of its logits when those of the whole vocabulary are known."""

    def __init__(self, scores: torch.Tensor, teacher: TeacherRows) -> None:
        """`scores`: ``[R, V]`` the draft's logits, of the accumulation dtype; the gradient overwrites them."""
        self._scores, self._teacher = scores, teacher.logits.contiguous()
        assert scores.is_contiguous(), "the kernels walk along rows, and overwrite these"
        rows, columns = scores.shape
        self._index = torch.arange(rows, device=scores.device) if teacher.whose is None else teacher.whose
        self._block = min(_BLOCK, triton.next_power_of_2(max(1, columns)))
        out = scores.new_empty(5, rows)
        with torch.cuda.device_of(scores):
            _statistics_kernel[(rows,)](
                scores, self._teacher, self._index, out, rows, columns, scores.stride(0), self._teacher.stride(0), BLOCK=self._block
            )
        self.own = RowStatistics(out[:2], out[2:])

    def gradient(self, whole: RowStatistics, scale: torch.Tensor) -> torch.Tensor:
        """``[R, V]`` scale * (softmax(s) - softmax(t)), in the memory of the logits.

        Args:
            whole: of the same rows over the whole vocabulary.
            scale: ``[R]``.
        """
        scores, teacher = self._scores, self._teacher
        rows, columns = scores.shape
        if columns:  # A rank may hold no columns, and a grid of nothing cannot be launched.
            factor = (scale / whole.total[:2]).contiguous()
            with torch.cuda.device_of(scores):
                _gradient_kernel[(rows, triton.cdiv(columns, self._block))](
                    scores, teacher, self._index, whole.peak.contiguous(), factor,
                    rows, columns, scores.stride(0), teacher.stride(0), BLOCK=self._block,
                )  # fmt: skip
        return scores
