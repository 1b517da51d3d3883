"""The three products around one chunk's logits, with sums and results in the accumulation dtype whatever the inputs' dtype.

Only where the caller asks for narrow factors of the two gradients is each product rounded as they are, once.

Half-width inputs are widened a block of the head at a time, so that no widened copy of the head exists. On CUDA bf16 goes
through the tensor cores, which sum in fp32. fp16 does not: the gradient of a logit is easily below its smallest number.
"""

from __future__ import annotations

import torch

_BLOCK = 4096
"""Rows of the head (tokens of the vocabulary) that are widened at a time."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, fp32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _on_tensor_cores(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_cuda and tensor.dtype == torch.bfloat16 and dtype == torch.float32


def scores(hidden: torch.Tensor, head: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Logits ``[R, V]`` of `dtype` from ``hidden [R, H]`` and ``head [V, H]``."""
    if head.dtype == dtype:
        return hidden @ head.T
    if _on_tensor_cores(head, dtype):
        return torch.mm(hidden, head.T, out_dtype=dtype)
    hidden, out = hidden.to(dtype), hidden.new_empty(hidden.shape[0], head.shape[0], dtype=dtype)
    for columns, block in zip(out.split(_BLOCK, dim=1), head.split(_BLOCK), strict=True):
        columns.copy_(hidden @ block.to(dtype).T)
    return out


def into_hidden(gradient: torch.Tensor, head: torch.Tensor, narrow: torch.dtype | None = None) -> torch.Tensor:
    """Gradient ``[R, H]`` of the hidden states from that of the logits ``[R, V]`` and ``head [V, H]``; both factors `narrow`."""
    if narrow is not None:
        return (gradient.to(narrow) @ head.to(narrow)).to(gradient.dtype)
    if head.dtype == gradient.dtype:
        return gradient @ head
    if _on_tensor_cores(head, gradient.dtype):
        return torch.mm(gradient.to(head.dtype), head, out_dtype=gradient.dtype)
    out = gradient.new_zeros(gradient.shape[0], head.shape[1])
    for columns, block in zip(gradient.split(_BLOCK, dim=1), head.split(_BLOCK), strict=True):
        out.addmm_(columns, block.to(gradient.dtype))
    return out


def add_into_head(out: torch.Tensor, gradient: torch.Tensor, hidden: torch.Tensor, narrow: torch.dtype | None = None) -> None:
    """Add to ``out [V, H]`` the head's gradient from that of the logits ``[R, V]`` and ``hidden [R, H]``; both factors `narrow`."""
    if narrow is not None:
        out.add_(gradient.to(narrow).T @ hidden.to(narrow))
        return
    if not _on_tensor_cores(hidden, out.dtype):
        out.addmm_(gradient.T, hidden.to(out.dtype))
        return
    short = gradient.to(hidden.dtype)
    for rows, columns in zip(out.split(_BLOCK), short.split(_BLOCK, dim=1), strict=True):
        rows.add_(torch.mm(columns.T, hidden, out_dtype=out.dtype))
