"""Branch attention on packed sequences (EAGLE-3's training-time test, arXiv 2503.01840 section 3.2; as in arXiv 2609.07108)."""

from __future__ import annotations

import torch

from specdraft_kernels.interval_attention import Spans, interval_attention


def branch_attention(
    q: torch.Tensor,
    k_trunk: torch.Tensor,
    v_trunk: torch.Tensor,
    k_branch: torch.Tensor,
    v_branch: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    anchors: torch.Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of pass ``P + 1``: a query sees its document's trunk up to its own row, and its own ``P`` branch keys.

    The branch never mixes between queries: query ``a`` sees ``k_branch[a]`` and no other row's branch. That is the KV cache which a
    serving engine has when it drafts token ``P + 1`` after row ``a``.

    Worked example: documents of 3 and 2 rows (``cu_seqlens = [0, 3, 5]``), ``anchors = [1, 4]``, ``P = 2``. Query 0 sees trunk rows
    0, 1 and ``k_branch[0, 0], k_branch[0, 1]``; query 1 sees trunk rows 3, 4 and ``k_branch[1, 0], k_branch[1, 1]``.

    Args:
        q: ``[A, Hq, D]``, rotated to the position of row + P. ``Hq`` is a multiple of ``Hkv``.
        k_trunk, v_trunk: ``[N, Hkv, D]``: keys (rotated) and values of pass 1, all rows.
        k_branch, v_branch: ``[A, P, Hkv, D]``: the query's own keys and values of passes 2..P+1; ``P`` may be 0.
        cu_seqlens: ``[documents + 1]`` integers, where documents begin, and the last one's end. Rows from there on are padding: as
            queries they give zeros and as keys they are never seen. Documents may be empty.
        anchors: ``[A]`` int64 ascending rows of the queries; all ``N`` rows by default.
        window: how many of the latest positions a query sees, itself included; all by default. A query of pass ``P + 1`` stands
            ``P`` positions after its row, so it loses ``P`` trunk rows more.
        scale, backend: see `interval_attention`.

    Returns:
        ``out [A, Hq, D]`` and ``lse [A, Hq]`` (fp32, fp64 for fp64; no gradient flows through it).

    Raises:
        ValueError: shapes that do not fit, anchors out of order or outside (looked at on the CPU only), a window below 1.
    """
    if anchors is not None and anchors.shape != q.shape[:1]:
        raise ValueError(f"{q.shape[0]} queries need as many anchors, not {tuple(anchors.shape)}")
    if anchors is None and q.shape[0] != k_trunk.shape[0]:
        raise ValueError(f"{q.shape[0]} queries over {k_trunk.shape[0]} trunk rows: name their rows with anchors=")
    if k_branch.dim() != 4 or k_branch.shape[0] != q.shape[0]:
        raise ValueError(f"branch keys {tuple(k_branch.shape)} must be [{q.shape[0]} queries, passes, heads, size]")
    passes = k_branch.shape[1]
    k_branch, v_branch = within_window(k_branch, v_branch, window)
    spans = branch_spans(cu_seqlens, k_trunk.shape[0], anchors=anchors, window=window, passes=passes, branch=k_branch.shape[1])
    return interval_attention(q, k_trunk, v_trunk, k_branch, v_branch, spans, scale=scale, backend=backend)


def within_window(k_branch: torch.Tensor, v_branch: torch.Tensor, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The branch keys that a query still sees: where the branch is longer than the window, its oldest are out of sight for all."""
    if window is None:
        return k_branch, v_branch
    if window < 1:
        raise ValueError(f"a window of {window} positions: a query sees at least itself, so it is 1 or more; None for no window")
    oldest = max(0, k_branch.shape[1] - window)
    return k_branch[:, oldest:], v_branch[:, oldest:]


def branch_spans(
    cu_seqlens: torch.Tensor,
    rows: int,
    *,
    anchors: torch.Tensor | None = None,
    window: int | None = None,
    passes: int = 0,
    branch: int | None = None,
) -> Spans:
    """What the queries of `branch_attention` see; `branch`: how many branch keys they are given (`passes` by default)."""
    cu = cu_seqlens.to(torch.int64)
    if cu.dim() != 1 or cu.shape[0] < 1:
        raise ValueError(f"cu_seqlens {tuple(cu_seqlens.shape)} must be [documents + 1]")
    at = torch.arange(rows, device=cu.device) if anchors is None else anchors.to(torch.int64)
    if cu.device.type == "cpu" and (int(cu[0]) != 0 or int(cu[-1]) > rows or bool((cu.diff() < 0).any())):
        raise ValueError(f"cu_seqlens must ascend from 0 to at most {rows} trunk rows")
    if at.device.type == "cpu" and at.numel() and (int(at.min()) < 0 or int(at.max()) >= rows):
        raise ValueError(f"anchors must be rows of the trunk, 0 to {rows - 1}")
    # The document of a row is the last one that begins at or before it: the empty ones before it begin there too.
    document = torch.searchsorted(cu, at, right=True) - 1
    padding = at >= cu[-1]
    start = cu[document.clamp(0, max(0, cu.shape[0] - 2))]
    stop = torch.where(padding, rows, at + 1)
    first = torch.where(padding, rows, start)
    if window is not None:
        first = torch.maximum(first, torch.minimum(at + passes - window + 1, stop))
    keys = passes if branch is None else branch
    own = torch.where(padding, 0, keys)
    varlen = cu if anchors is None and window is None else None
    return Spans(first=first, stop=stop, own=own, cu_seqlens=varlen)
