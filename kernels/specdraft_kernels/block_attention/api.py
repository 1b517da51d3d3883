"""Block attention (DFlash, arXiv 2602.06036): many blocks with prefixes of their own length, in one call."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specdraft_kernels.interval_attention import Spans, interval_attention


def block_attention(
    q: torch.Tensor,
    k_trunk: torch.Tensor,
    v_trunk: torch.Tensor,
    k_block: torch.Tensor,
    v_block: torch.Tensor,
    cu_seqlens: torch.Tensor,
    document: torch.Tensor,
    prefix: torch.Tensor,
    *,
    slots: torch.Tensor | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every slot of a block sees the first ``prefix`` trunk rows of the block's document, and all slots of the block.

    Worked example: documents of 5 and 3 rows (``cu_seqlens = [0, 5, 8]``), ``document = [0, 1]``, ``prefix = [4, 1]``: the slots of
    block 0 see trunk rows 0..3, those of block 1 row 5, and each block sees itself.

    Args:
        q: ``[B, Wq, Hq, D]``: queries of ``Wq`` slots of each block, all ``W`` or some. ``Hq`` is a multiple of ``Hkv``.
        k_trunk, v_trunk: ``[N, Hkv, D]``.
        k_block, v_block: ``[B, W, Hkv, D]``: the slots' own keys and values.
        cu_seqlens: ``[documents + 1]``, where documents begin, and the last one's end.
        document: ``[B]`` int64, the blocks' documents, ascending.
        prefix: ``[B]`` int64, how many trunk rows of its document a block sees; ascending within a document. It is named apart from
            the document because a block may stand right after a document's last row.
        slots: ``[B]`` int64, how many slots of a block are in use, from the first; all by default. The others give zeros, are seen
            by nobody and may hold anything. Needs the queries of all slots.
        scale, backend: see `interval_attention`.

    Returns:
        ``out [B, Wq, Hq, D]`` and ``lse [B, Wq, Hq]`` (fp32, fp64 for fp64; no gradient flows through it).

    Raises:
        ValueError: shapes that do not fit; blocks out of order or prefixes beyond their document (looked at on the CPU only).
    """
    blocks, queries = q.shape[:2]
    width = k_block.shape[1]
    if document.shape != (blocks,) or prefix.shape != (blocks,):
        raise ValueError(f"{blocks} blocks need document and prefix [{blocks}], not {tuple(document.shape)}, {tuple(prefix.shape)}")
    if k_block.shape[0] != blocks or v_block.shape != k_block.shape:
        raise ValueError(
            f"block keys {tuple(k_block.shape)} and values {tuple(v_block.shape)} must be [{blocks} blocks, slots, heads, size]"
        )
    if slots is not None and queries != width:
        raise ValueError(f"slots= needs the queries of all {width} slots, not of {queries}")
    spans = block_spans(cu_seqlens, document, prefix, width=width, queries=queries, slots=slots)

    def attend(q: torch.Tensor, k_block: torch.Tensor, v_block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return interval_attention(q, k_trunk, v_trunk, k_block, v_block, spans, scale=scale, backend=backend)

    return of_used_slots(attend, q, k_block, v_block, slots)


def of_used_slots(
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    q: torch.Tensor,
    k_block: torch.Tensor,
    v_block: torch.Tensor,
    slots: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``attend(q [B * W, Hq, D], k_block, v_block)`` as ``[B, W, ...]``; an unused slot reaches no sum and no gradient."""
    used = None
    if slots is not None:
        used = (torch.arange(q.shape[1], device=q.device) < slots[:, None])[..., None, None]
        q, k_block, v_block = (torch.where(used, x, torch.zeros_like(x)) for x in (q, k_block, v_block))
    out, lse = attend(q.flatten(0, 1), k_block, v_block)
    out, lse = out.view(q.shape), lse.view(q.shape[:3])
    if used is None:
        return out, lse
    return torch.where(used, out, torch.zeros_like(out)), lse.masked_fill(~used[..., 0], float("-inf"))


def block_spans(
    cu_seqlens: torch.Tensor,
    document: torch.Tensor,
    prefix: torch.Tensor,
    *,
    width: int,
    queries: int | None = None,
    slots: torch.Tensor | None = None,
) -> Spans:
    """What the slots of `block_attention` see, ``[B * Wq]``; by default of all `width` slots."""
    cu = cu_seqlens.to(torch.int64)
    first = cu[document]
    stop = first + prefix
    if cu.device.type == "cpu" and prefix.numel() and (int(prefix.min()) < 0 or bool((stop > cu[document + 1]).any())):
        raise ValueError("a block's prefix must be 0 or more, and at most the rows of its document")
    own = torch.full_like(first, width) if slots is None else slots.to(torch.int64)
    count = width if queries is None else queries
    return Spans(first=first.repeat_interleave(count), stop=stop.repeat_interleave(count), own=own.repeat_interleave(count))
