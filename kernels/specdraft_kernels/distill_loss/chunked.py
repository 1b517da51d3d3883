"""Loss and gradients a chunk of rows at a time, over one process's vocabulary or over slices of it in a process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from specdraft_kernels.distill_loss import matmuls
from specdraft_kernels.distill_loss.row_statistics import RowStatistics, combine
from specdraft_kernels.distill_loss.teacher import Reader, TeacherRows


class Chunk(Protocol):
    """One chunk's logits, from statistics to gradient. Made from the draft's logits ``[R, V]`` and the teacher's rows."""

    own: RowStatistics

    def __init__(self, scores: torch.Tensor, teacher: TeacherRows) -> None: ...

    def gradient(self, whole: RowStatistics, scale: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Everything but the two tensors that get a gradient."""

    read: Reader
    rows: torch.Tensor
    """``[N]`` the draft rows that count, those of one teacher row side by side."""
    teacher_rows: torch.Tensor
    """``[N]`` the teacher's row of each."""
    scale: torch.Tensor
    """``[N]`` weight over normaliser of each, in the accumulation dtype."""
    chunk_rows: int
    group: dist.ProcessGroup | None
    chunk: type[Chunk]
    gradient_dtype: torch.dtype | None
    """Of the factors of the products that make the gradients; None: the inputs' own."""


def _loss_and_gradients(
    hidden: torch.Tensor, head: torch.Tensor, plan: Plan, *, wants_hidden: bool, wants_head: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The loss, and the gradients ``[T, H]`` and ``[V, H]`` that are wanted, all in the accumulation dtype."""
    dtype, count = plan.scale.dtype, plan.rows.shape[0]
    d_hidden = torch.zeros_like(hidden, dtype=dtype) if wants_hidden else None
    d_head = torch.zeros_like(head, dtype=dtype) if wants_head else None
    losses = torch.empty_like(plan.scale)
    narrow = plan.gradient_dtype
    factor = head if narrow is None or d_hidden is None else head.to(narrow)
    for start in range(0, count, plan.chunk_rows):
        part = slice(start, start + plan.chunk_rows)
        rows, scale = plan.rows[part], plan.scale[part]
        inputs = hidden.index_select(0, rows)
        chunk = plan.chunk(matmuls.scores(inputs, head, dtype), plan.read(plan.teacher_rows[part]))
        whole = combine(chunk.own, plan.group)
        losses[part] = scale * whole.cross_entropy()
        if d_hidden is None and d_head is None:
            continue
        gradient = chunk.gradient(whole, scale)
        if d_hidden is not None:
            d_hidden[rows] = matmuls.into_hidden(gradient, factor, narrow)
        if d_head is not None:
            matmuls.add_into_head(d_head, gradient, inputs, narrow)
    if d_hidden is not None and plan.group is not None:
        dist.all_reduce(d_hidden, group=plan.group)
    return losses.sum(), d_hidden, d_head


class _ChunkedLoss(torch.autograd.Function):
    """The gradients are ready when the loss is: the backward only multiplies them by the gradient of the loss."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, head: torch.Tensor, plan: Plan) -> torch.Tensor:
        wants_hidden, wants_head, _ = ctx.needs_input_grad
        loss, *gradients = _loss_and_gradients(hidden, head, plan, wants_hidden=wants_hidden, wants_head=wants_head)
        # In the accumulation dtype until then: a loss scale may lift what an fp16 number cannot hold yet.
        ctx.save_for_backward(*gradients)
        ctx.dtype = hidden.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # They are constants by now: what is differentiated again would silently lack this part.
            raise RuntimeError("distill_loss has no second derivative: leave create_graph out, or pass backend='naive'")
        gradients = (None if each is None else (each * grad_output).to(ctx.dtype) for each in ctx.saved_tensors)
        return (*gradients, None)


def chunked_loss(hidden: torch.Tensor, head: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The loss, a 0-d tensor of the accumulation dtype."""
    if torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad):
        return _ChunkedLoss.apply(hidden, head, plan)
    return _loss_and_gradients(hidden.detach(), head.detach(), plan, wants_hidden=False, wants_head=False)[0]
