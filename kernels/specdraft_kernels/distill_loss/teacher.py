"""What a draft learns from: the teacher's logits, or the hidden states and the head that make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specdraft_kernels.distill_loss import matmuls


def _check_shape(name: str, tensor: torch.Tensor, dims: int) -> None:
    if tensor.ndim != dims or not tensor.is_floating_point():
        raise ValueError(f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, needed are floats in {dims} dimensions")


@dataclass(frozen=True, eq=False)
class TeacherLogits:
    """Logits that are there already."""

    logits: torch.Tensor
    """``[U, Vt]`` of any floating dtype; -inf for a token that the teacher never emits."""
    row: torch.Tensor | None = None
    """``[T]`` int64, the teacher row of every draft row; None when they are the same rows."""

    def __post_init__(self) -> None:
        _check_shape("the teacher's logits", self.logits, 2)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the teacher's logits."""
        return self.logits.shape[0], self.logits.shape[1]


@dataclass(frozen=True, eq=False)
class TeacherStates:
    """Logits to be made from hidden states, a chunk of rows at a time."""

    hidden: torch.Tensor
    """``[U, H']`` the teacher's states behind its last norm."""
    head: torch.Tensor
    """``[Vt, H']`` its output embedding, of the same dtype."""
    row: torch.Tensor | None = None
    """``[T]`` int64, the teacher row of every draft row; None when they are the same rows."""

    def __post_init__(self) -> None:
        _check_shape("the teacher's hidden", self.hidden, 2)
        _check_shape("the teacher's head", self.head, 2)
        if self.hidden.shape[1] != self.head.shape[1] or self.hidden.dtype != self.head.dtype:
            raise ValueError(
                f"the teacher's hidden is {self.hidden.dtype} of width {self.hidden.shape[1]}, its head {self.head.dtype} of "
                f"width {self.head.shape[1]}: they have to agree"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the teacher's logits."""
        return self.hidden.shape[0], self.head.shape[0]


Teacher = TeacherLogits | TeacherStates


class TeacherRows(NamedTuple):
    """The teacher's part of one chunk. The memory is the chunk's own: whoever reads it last may overwrite it."""

    logits: torch.Tensor
    """``[N, V]``, N at most the chunk's R."""
    whose: torch.Tensor | None
    """``[R]`` int64, which of the N rows is whose; None when row i is row i's."""


Reader = Callable[[torch.Tensor], TeacherRows]
"""From teacher rows ``[R]`` (sorted where rows are shared) to what they hold."""


def reader(teacher: Teacher, kept: torch.Tensor | None, dtype: torch.dtype) -> Reader:
    """How to read a few of the teacher's rows.

    Args:
        teacher: states become logits of `dtype`; logits that are there keep theirs.
        kept: ``[V]`` the columns to keep, or None for all.
        dtype: of the sums in the product.
    """
    if isinstance(teacher, TeacherLogits):
        logits = teacher.logits.detach()

        def gathered(rows: torch.Tensor) -> TeacherRows:
            # One gather of both, so that no [R, Vt] stands between.
            return TeacherRows(logits.index_select(0, rows) if kept is None else logits[rows[:, None], kept], None)

        return gathered

    hidden, shared = teacher.hidden.detach(), teacher.row is not None
    head = teacher.head.detach() if kept is None else teacher.head.detach().index_select(0, kept)

    def computed(rows: torch.Tensor) -> TeacherRows:
        index = None
        if shared:
            unique, inverse = torch.unique_consecutive(rows, return_inverse=True)
            if unique.numel() < rows.numel():
                rows, index = unique, inverse
        return TeacherRows(matmuls.scores(hidden.index_select(0, rows), head, dtype), index)

    return computed
