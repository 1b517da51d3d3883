"""One differentiable call in front of the backends."""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

import torch

from specdraft_kernels.interval_attention.spans import Spans

BACKENDS = ("naive", "torch", "triton", "flash_attn")
_MODULES = {"naive": "naive", "torch": "cpu_flash", "triton": "fused", "flash_attn": "flash_attn_varlen"}


def choose_backend(name: str | None, device: torch.device) -> str:
    """The backend that computes: `name` if one is given; otherwise ``torch`` on a CPU and ``triton`` on a CUDA device.

    Raises `ValueError` for an unknown name, or for one that cannot run on this device: nothing is ever replaced silently.
    """
    if name is None:
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"no attention backend is the default on {device.type}: pass backend=, one of {', '.join(BACKENDS)}")
        return "triton" if device.type == "cuda" else "torch"
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r}: it is one of {', '.join(BACKENDS)}")
    if name == "torch" and device.type != "cpu":
        raise ValueError("attention backend 'torch' is the CPU's flash kernel: on a GPU take 'triton', 'flash_attn' or 'naive'")
    if name == "flash_attn" and device.type != "cuda":
        raise ValueError(f"attention backend 'flash_attn' needs CUDA tensors, not {device.type}: take 'torch' or 'naive'")
    if name == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"attention backend 'triton' on {device.type} needs TRITON_INTERPRET=1 in the environment before triton is imported; "
            "or take 'torch'"
        )
    return name


def load_backend(name: str) -> ModuleType:
    """The module of a backend. It has

    - ``forward(q, k, v, own_k, own_v, spans, scale) -> (out, lse)`` with `out` ``[A, Hq, D]`` and `lse` ``[A, Hq]``, and
    - ``backward(d_out, q, k, v, own_k, own_v, out, lse, spans, scale) -> (dq, dk, dv, d_own_k, d_own_v)``,

    all results in `accumulation_dtype` of the inputs. `out` and `lse` may be those of a longer row of keys than the ones passed:
    the gradients are then exactly this part's share of the whole (see README).
    """
    return importlib.import_module(f"specdraft_kernels.interval_attention.{_MODULES[name]}")


def interval_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    spans: Spans,
    *,
    scale: float | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of every query over its interval of trunk rows and its group's own keys.

    Args:
        q: ``[A, Hq, D]``, rotated. ``Hq`` is a multiple of ``Hkv``: query head h reads key head ``h // (Hq / Hkv)``.
        k, v: ``[N, Hkv, D]``, the trunk.
        own_k, own_v: ``[B, L, Hkv, D]``: ``L`` keys for each group of ``A / B`` consecutive queries; ``L`` may be 0.
        spans: what each query sees.
        scale: of the scores; ``D ** -0.5`` by default.
        backend: see `choose_backend`.

    Returns:
        ``out [A, Hq, D]`` in q's dtype and ``lse [A, Hq]``, the log of the softmax's denominator, in fp32 (fp64 for fp64). A query
        that sees no key at all gives zeros and -inf. No gradient flows through ``lse``.

    Raises:
        ValueError: shapes that do not fit, or spans out of order (these are looked at on the CPU only).
    """
    _check_shapes(q, k, v, own_k, own_v, spans)
    if q.device.type == "cpu":
        spans.check(k.shape[0])
    chosen = load_backend(choose_backend(backend, q.device))
    out, lse = _Interval.apply(q, k, v, own_k, own_v, spans, q.shape[-1] ** -0.5 if scale is None else scale, chosen)
    return out, lse


def _check_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own_k: torch.Tensor, own_v: torch.Tensor, spans: Spans
) -> None:
    queries, heads, size = q.shape
    kv_heads = k.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key/value heads evenly")
    if k.shape != v.shape or k.shape[2] != size:
        raise ValueError(f"keys {tuple(k.shape)} and values {tuple(v.shape)} must be equal, [rows, heads, {size}]")
    if own_k.shape != own_v.shape or own_k.shape[2:] != k.shape[1:]:
        raise ValueError(
            f"own keys {tuple(own_k.shape)} and values {tuple(own_v.shape)} must be [groups, keys, {kv_heads}, {size}]"
        )
    groups = own_k.shape[0]
    if queries % groups if groups else queries:
        raise ValueError(f"{queries} queries do not fall into {groups} groups of one size")
    if spans.first.shape[0] != queries:
        raise ValueError(f"spans of {spans.first.shape[0]} queries, but {queries} queries")
    if len({t.dtype for t in (q, k, v, own_k, own_v)}) > 1:
        raise ValueError("queries, keys and values must have one dtype: cast them explicitly")


class _Interval(torch.autograd.Function):
    """Forward and backward of one backend."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, own_k, own_v, spans, scale, backend = arguments
        out, lse = backend.forward(q, k, v, own_k, own_v, spans, scale)
        ctx.save_for_backward(q, k, v, own_k, own_v, out, lse)
        ctx.spans, ctx.scale, ctx.backend = spans, scale, backend
        ctx.mark_non_differentiable(lse)
        return out.to(q.dtype), lse

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, own_k, own_v, out, lse = ctx.saved_tensors
        found = ctx.backend.backward(gradients[0], q, k, v, own_k, own_v, out, lse, ctx.spans, ctx.scale)
        return (*(gradient.to(q.dtype) for gradient in found), None, None, None)
