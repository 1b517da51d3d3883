"""Branch attention in plain PyTorch: the reference, in any floating dtype, differentiable by autograd."""

from __future__ import annotations

import torch


def branch_attention(
    q: torch.Tensor,
    k_trunk: torch.Tensor,
    v_trunk: torch.Tensor,
    k_branch: torch.Tensor,
    v_branch: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    """Softmax attention of every query over its visible trunk rows and its own branch rows (EAGLE-3, training-time test).

    The branch never mixes between queries: query ``a`` sees ``k_branch[a]`` and no other row's branch.

    Args:
        q: ``[A, Hq, D]`` queries, already rotated. They may be any subset of the trunk's rows (the anchors).
        k_trunk, v_trunk: ``[N, Hkv, D]`` keys (rotated) and values of pass 1, all rows. ``Hq`` is a multiple of ``Hkv``.
        k_branch, v_branch: ``[A, P, Hkv, D]`` the query's own keys and values of passes 2..d; ``P`` may be 0.
        visible: ``[A, N]`` bool, True where a query may see a trunk row: same document, not later than the anchor.

    Returns:
        ``[A, Hq, D]``. A query that sees no key at all gives zeros.
    """
    anchors, heads, size = q.shape
    groups = k_trunk.shape[1]
    if heads % groups:
        raise ValueError(f"{heads} query heads cannot share {groups} key/value heads evenly")
    grouped = q.view(anchors, groups, heads // groups, size) * size**-0.5
    trunk = torch.einsum("aghd,ngd->aghn", grouped, k_trunk)
    trunk = trunk.masked_fill(~visible[:, None, None, :], float("-inf"))
    branch = torch.einsum("aghd,apgd->aghp", grouped, k_branch)
    scores = torch.cat([trunk, branch], dim=-1)
    # A row without any key has only -inf: its softmax is NaN, and it must be zeros.
    weights = scores.softmax(-1) if bool(visible.any(-1).all()) else scores.softmax(-1).nan_to_num()
    rows = k_trunk.shape[0]
    out = torch.einsum("aghn,ngd->aghd", weights[..., :rows], v_trunk)
    out = out + torch.einsum("aghp,apgd->aghd", weights[..., rows:], v_branch)
    return out.reshape(anchors, heads, size)
