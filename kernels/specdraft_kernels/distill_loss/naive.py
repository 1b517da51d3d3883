"""The loss from whole logits, in plain PyTorch: the reference, in any floating dtype, differentiable by autograd."""

from __future__ import annotations

import torch

from specdraft_kernels.distill_loss.matmuls import accumulation_dtype
from specdraft_kernels.distill_loss.teacher import Teacher, TeacherLogits


def naive_loss(
    hidden: torch.Tensor,
    head: torch.Tensor,
    teacher: Teacher,
    *,
    normaliser: torch.Tensor,
    weights: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `distill_loss`. Holds several ``[T, V]`` and the teacher's ``[U, Vt]``, in fp32 or fp64."""
    dtype = accumulation_dtype(hidden.dtype)
    weights = torch.ones(hidden.shape[0], device=hidden.device) if weights is None else weights
    # Rows that do not count leave before the first product: 0 * NaN would be NaN.
    rows = weights.nonzero().squeeze(1)
    row = torch.arange(hidden.shape[0], device=hidden.device) if teacher.row is None else teacher.row
    with torch.no_grad():
        if isinstance(teacher, TeacherLogits):
            logits = teacher.logits.to(dtype)
        else:
            logits = teacher.hidden.to(dtype) @ teacher.head.to(dtype).T
        if kept is not None:
            logits = logits[:, kept]
        probability = logits[row[rows]].softmax(-1)
    scores = hidden[rows].to(dtype) @ head.to(dtype).T
    # Not logsumexp(scores) minus the mean of scores: of logits in the thousands, that leaves an fp32 gradient three digits.
    losses = -(probability * scores.log_softmax(-1)).sum(-1)
    return (losses * weights[rows].to(dtype)).sum() / normaliser
