"""The one function of this operator: checks what it is given, and picks the backend by a rule."""

from __future__ import annotations

import torch
import torch.distributed as dist

from specdraft_kernels.distill_loss.chunked import Chunk, Plan, chunked_loss
from specdraft_kernels.distill_loss.eager import EagerChunk
from specdraft_kernels.distill_loss.matmuls import accumulation_dtype
from specdraft_kernels.distill_loss.naive import naive_loss
from specdraft_kernels.distill_loss.teacher import Teacher, reader

BACKENDS = ("naive", "torch", "triton")
"""`naive`: whole logits, for tests. `torch`: chunks, on any device. `triton`: chunks, on CUDA (or in Triton's interpreter)."""


def distill_loss(
    hidden: torch.Tensor,
    head: torch.Tensor,
    teacher: Teacher,
    *,
    normaliser: float | torch.Tensor,
    weights: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    chunk_rows: int = 512,
    group: dist.ProcessGroup | None = None,
    gradient_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Soft cross-entropy of the draft against its teacher: forward KL, up to the teacher's own entropy.

    With ``s = hidden @ head.T`` and the teacher's logits ``t`` of the row, both over the same V tokens::

        loss = sum over rows of weight / normaliser * (logsumexp(s) - sum_v softmax(t)_v s_v)

    Args:
        hidden: ``[T, H]`` what the draft's head reads.
        head: ``[V, H]`` of the same dtype (fp64, fp32, bf16 or fp16).
        teacher: its logits, or the states that make them. It gets no gradient.
        normaliser: what the sum is divided by: the labels (or their weights) of all microbatches and all data and context
            parallel ranks together, so that each counts once. Above zero.
        weights: ``[T]`` of any dtype, bool too; 1 everywhere by default. A constant: it gets no gradient. A row of weight 0
            is never read, nor is its entry in the teacher's `row`.
        kept: ``[V]`` int64, the teacher's column of every token of the draft; the teacher is renormalised over them. By
            default both have the same vocabulary. With `TeacherStates` this copies those rows of the teacher's head on
            every call: a caller with a fixed vocabulary can pass that copy as the head, and no `kept`.
        chunk_rows: rows of which logits exist at a time.
        group: ranks that split the vocabulary. Each passes its slice of `head` and the matching columns of the teacher
            (`kept` counts within the columns passed); slices may differ in size. All other arguments, and which of hidden
            and head require a gradient, have to be the same on every rank. Each gets the whole loss, the whole gradient of
            `hidden` and that of its own slice of `head`.
        gradient_dtype: of the factors of the two products that make the gradients, and of each product before it is added to the
            others: bf16 for fp32 inputs, say, on a processor that is faster in it. One that is no narrower than the inputs' changes
            nothing. The loss does not depend on it.
        backend: one of `BACKENDS`. By default `triton` for CUDA tensors and `torch` for all others.

    Returns:
        A 0-d tensor, fp64 for fp64 inputs and fp32 for all others. Gradients have the inputs' dtype and are summed in fp32
        (fp64); all backends but `naive` compute them together with the loss, and none of them twice differentiably.

    Raises:
        ValueError: what was given does not fit together, or the backend cannot run here.

    Example:
        Three passes of two anchors each, of which the last label is missing; passes share teacher rows::

            states = TeacherStates(final, target_head, row=torch.tensor([1, 4, 2, 5, 3, 0]))
            loss = distill_loss(hidden, head, states, weights=torch.tensor([1, 1, 0.8, 0.8, 0.64, 0]), normaliser=2)
    """
    _check_draft(hidden, head, weights, chunk_rows)
    _check_teacher(teacher, kept, hidden.shape[0], head.shape[0])
    backend = _backend_for(backend, hidden.device)
    dtype = accumulation_dtype(hidden.dtype)
    divisor = _divisor(normaliser, dtype, hidden.device)
    if head.shape[0] == 0 and group is None:
        raise ValueError("the head has no rows: an empty slice of the vocabulary needs a group that holds the rest")
    if backend == "naive" and group is not None:
        raise ValueError("backend 'naive' holds the whole vocabulary and knows no group: pass backend='torch' or 'triton'")
    if backend == "naive" and gradient_dtype is not None:
        raise ValueError(f"backend 'naive' takes every product in the inputs' dtype, not in {gradient_dtype}: pass another backend")
    rows, teacher_rows = _rows_that_count(hidden, teacher, weights)
    _check_range("the teacher's row", teacher_rows, teacher.shape[0])
    if kept is not None:
        _check_range("kept", kept, teacher.shape[1])
    weights = None if weights is None else weights.detach()
    # The dtypes of the products are part of the promise; autocast would choose others.
    with torch.autocast(hidden.device.type, enabled=False):
        if backend == "naive":
            return naive_loss(hidden, head, teacher, normaliser=divisor, weights=weights, kept=kept)
        counted = torch.ones_like(rows, dtype=dtype) if weights is None else weights.index_select(0, rows).to(dtype)
        plan = Plan(
            read=reader(teacher, kept, dtype), rows=rows, teacher_rows=teacher_rows, scale=counted / divisor,
            chunk_rows=chunk_rows, group=group, chunk=_chunk_of(backend, hidden.device),
            gradient_dtype=None if gradient_dtype is None or gradient_dtype.itemsize >= hidden.itemsize else gradient_dtype,
        )  # fmt: skip
        return chunked_loss(hidden, head, plan)


def _rows_that_count(hidden: torch.Tensor, teacher: Teacher, weights: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft rows of weight other than 0, and their teacher rows; sorted, so that rows which share one meet in a chunk."""
    rows = torch.arange(hidden.shape[0], device=hidden.device) if weights is None else weights.nonzero().squeeze(1)
    if teacher.row is None:
        return rows, rows
    teacher_rows, order = teacher.row.index_select(0, rows).sort(stable=True)
    return rows[order], teacher_rows


def _backend_for(backend: str | None, device: torch.device) -> str:
    """The backend asked for, or the device's."""
    if backend is None:
        return "triton" if device.type == "cuda" else "torch"
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is none of {', '.join(BACKENDS)}")
    return backend


def _chunk_of(backend: str, device: torch.device) -> type[Chunk]:
    if backend == "torch":
        return EagerChunk
    try:
        from specdraft_kernels.distill_loss import fused
    except ImportError as error:
        raise ValueError("backend 'triton' needs the package triton: install it, or pass backend='torch'") from error
    if device.type != "cuda" and not fused.interpreted():
        raise ValueError(
            f"backend 'triton' was asked for {device.type} tensors: it needs CUDA tensors, or TRITON_INTERPRET=1 in the "
            "environment before triton is first imported; backend='torch' runs anywhere"
        )
    return fused.FusedChunk


def _check_draft(hidden: torch.Tensor, head: torch.Tensor, weights: torch.Tensor | None, chunk_rows: int) -> None:
    if hidden.ndim != 2 or head.ndim != 2 or hidden.shape[1] != head.shape[1]:
        raise ValueError(f"hidden is {list(hidden.shape)} and head {list(head.shape)}: needed are [T, H] and [V, H]")
    if hidden.dtype != head.dtype or not hidden.is_floating_point():
        raise ValueError(f"hidden is {hidden.dtype} and head {head.dtype}: needed is one floating dtype for both")
    if weights is not None and weights.shape != hidden.shape[:1]:
        raise ValueError(f"weights is {list(weights.shape)}, needed is one for each of the {hidden.shape[0]} rows of hidden")
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}, needed is at least 1")


def _check_teacher(teacher: Teacher, kept: torch.Tensor | None, draft_rows: int, vocabulary: int) -> None:
    rows, columns = teacher.shape
    if teacher.row is None and rows != draft_rows:
        raise ValueError(f"the teacher has {rows} rows and the draft {draft_rows}: pass `row`, the teacher's row of each")
    if kept is None and columns != vocabulary:
        raise ValueError(f"the teacher has {columns} columns and the draft {vocabulary} tokens: pass `kept`, the column of each")
    for name, index, count in (("row", teacher.row, draft_rows), ("kept", kept, vocabulary)):
        if index is not None and (index.dtype != torch.int64 or index.shape != (count,)):
            raise ValueError(f"{name} is {index.dtype} of shape {list(index.shape)}, needed is int64 of shape [{count}]")


def _check_range(name: str, index: torch.Tensor, bound: int) -> None:
    """On a GPU an index out of range ends the process, and a negative one counts from the end in silence."""
    if index.numel() == 0:
        return
    least, most = torch.stack(torch.aminmax(index)).tolist()
    if least < 0 or most >= bound:
        raise ValueError(f"{name} reaches from {least} to {most}, needed are indices of 0 to {bound - 1}")


def _divisor(normaliser: float | torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    divisor = torch.as_tensor(normaliser, dtype=dtype).detach()
    if divisor.ndim:
        raise ValueError(f"normaliser is a tensor of shape {list(divisor.shape)}, needed is one number")
    # One on an accelerator is not looked at: that would wait for it.
    if divisor.device.type == "cpu" and not divisor > 0:
        raise ValueError(f"normaliser is {float(divisor)}, needed is a number above 0: pass 1 when there is nothing to count")
    return divisor.to(device)
