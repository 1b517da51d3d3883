"""Every gradient of branch attention against autograd through a dense score matrix, fp64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from specdraft_kernels.branch_attention import branch_attention

LENGTHS = (37, 1, 0, 16, 90, 5)
HEADS, KV_HEADS, SIZE = 6, 2, 40


def _dense(leaves: Sequence[torch.Tensor], document: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    q, k, v, k_branch, v_branch = leaves
    share = q.shape[1] // k.shape[1]
    k, v, k_branch, v_branch = (x.repeat_interleave(share, -2) for x in (k, v, k_branch, v_branch))
    seen = (document[anchors][:, None] == document) & (torch.arange(k.shape[0]) <= anchors[:, None])
    trunk = torch.einsum("ahd,nhd->ahn", q, k).masked_fill(~seen[:, None], float("-inf"))
    scores = torch.cat([trunk, torch.einsum("ahd,aphd->ahp", q, k_branch)], -1) * q.shape[-1] ** -0.5
    weights = scores.softmax(-1)
    rows = k.shape[0]
    return torch.einsum("ahn,nhd->ahd", weights[..., :rows], v) + torch.einsum("ahp,aphd->ahd", weights[..., rows:], v_branch)


def largest_error() -> float:
    """Largest error of an output or gradient of the default backend, relative to the largest entry of the same tensor."""
    random = torch.Generator().manual_seed(0)
    rows, worst = sum(LENGTHS), 0.0
    cu = torch.tensor([0, *itertools.accumulate(LENGTHS)])
    document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    for passes, every in itertools.product(range(4), (1, 3)):
        anchors = torch.arange(0, rows, every)
        shapes = [(len(anchors), HEADS, SIZE), *[(rows, KV_HEADS, SIZE)] * 2, *[(len(anchors), passes, KV_HEADS, SIZE)] * 2]
        leaves = [torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_() for shape in shapes]
        found, _ = branch_attention(*leaves, cu, anchors=anchors)
        expected = _dense(leaves, document, anchors)
        weight = torch.randn(found.shape, generator=random, dtype=torch.float64)
        used = leaves if passes else leaves[:3]
        pairs = [(found, expected)]
        pairs += zip(*(torch.autograd.grad((out * weight).sum(), used) for out in (found, expected)), strict=True)
        worst = max([worst, *(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs)])
    return worst
