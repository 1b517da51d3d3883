"""Catches a wrong attention in the training-time-test passes: a wrong key, mask, scale or head grouping, in the output or
in any gradient. The oracle below walks over queries, heads and keys one by one and knows nothing of masks.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from specdraft_kernels.branch_attention import branch_attention

from tests.builders import generator
from tests.tolerances import OPERATOR_FP64, assert_close

NAMES = ("q", "k_trunk", "v_trunk", "k_branch", "v_branch")
DOCUMENTS = (0,) * 7 + (1,) * 4
"""Two packed documents of 7 and 4 rows."""
ANCHORS = (0, 3, 6, 7, 9)
"""A subset of the rows: first and last of the first document, first of the second, and rows between."""


def inputs(size: int, group: int, branch: int, kv_heads: int = 2, seed: int = 0) -> list[torch.Tensor]:
    """Random leaves in the operator's order."""
    random, rows, anchors = generator(seed), len(DOCUMENTS), len(ANCHORS)
    shapes = [
        (anchors, group * kv_heads, size),
        (rows, kv_heads, size),
        (rows, kv_heads, size),
        (anchors, branch, kv_heads, size),
        (anchors, branch, kv_heads, size),
    ]
    return [torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_() for shape in shapes]


def visibility() -> torch.Tensor:
    """``[A, N]``: same document and not later."""
    document, anchors = torch.tensor(DOCUMENTS), torch.tensor(ANCHORS)
    return (document[anchors][:, None] == document) & (torch.arange(len(DOCUMENTS)) <= anchors[:, None])


def oracle(
    q: torch.Tensor, k_trunk: torch.Tensor, v_trunk: torch.Tensor, k_branch: torch.Tensor, v_branch: torch.Tensor
) -> torch.Tensor:
    """One query, one head, one list of keys at a time."""
    heads, kv_heads, size = q.shape[1], k_trunk.shape[1], q.shape[2]
    out = []
    for index, row in enumerate(ANCHORS):
        for head in range(heads):
            kv = head // (heads // kv_heads)
            seen = [r for r in range(row + 1) if DOCUMENTS[r] == DOCUMENTS[row]]
            passes = range(k_branch.shape[1])
            keys = [k_trunk[r, kv] for r in seen] + [k_branch[index, p, kv] for p in passes]
            values = [v_trunk[r, kv] for r in seen] + [v_branch[index, p, kv] for p in passes]
            weights = torch.exp(torch.stack([(q[index, head] * key).sum() for key in keys]) / size**0.5)
            total = sum(weight * value for weight, value in zip(weights, values, strict=True))
            out.append(total / weights.sum())
    return torch.stack(out).view(len(ANCHORS), heads, size)


@pytest.mark.parametrize(("size", "group", "branch"), list(itertools.product((40, 64, 80), (1, 3, 4), (0, 1, 2, 3))))
def test_output_and_every_gradient_equal_the_loops(size: int, group: int, branch: int) -> None:
    """E3: gradients against full attention, not only outputs."""
    leaves = inputs(size, group, branch)
    weight = torch.randn(leaves[0].shape, generator=generator(1), dtype=torch.float64)
    found = branch_attention(*leaves, visibility())
    expected = oracle(*leaves)
    assert_close(found, expected, OPERATOR_FP64, "output")
    found_gradients = torch.autograd.grad((found * weight).sum(), leaves)
    # Without a branch the loops never touch the (empty) branch tensors.
    expected_gradients = torch.autograd.grad((expected * weight).sum(), leaves, allow_unused=True, materialize_grads=True)
    for name, mine, theirs in zip(NAMES, found_gradients, expected_gradients, strict=True):
        assert theirs.numel() == 0 or theirs.abs().max() > 1e-3, f"d {name} is nothing to compare with"
        assert_close(mine, theirs, OPERATOR_FP64, f"d {name}")


def test_keys_of_the_other_document_and_of_later_rows_do_not_matter() -> None:
    """D9: other documents' rows leave a document's output bitwise unchanged, and get no gradient from it."""
    leaves = inputs(40, 3, 2)
    before = branch_attention(*leaves, visibility())
    others = [i for i, row in enumerate(ANCHORS) if DOCUMENTS[row] == 1]
    with torch.no_grad():
        changed = [leaf.clone() for leaf in leaves]
        changed[1][:7] += 3.0
        changed[2][:7] -= 5.0
    after = branch_attention(*changed, visibility())
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before, after)
    d_key, d_value = torch.autograd.grad(before[others].sum(), leaves[1:3])
    assert not d_key[:7].any() and not d_value[:7].any()
    # Anchor 9 sees rows 7..9; row 10 is later than every anchor.
    assert d_value[7:10].all() and not d_value[10].any()


def test_a_branch_is_seen_by_its_own_query_only() -> None:
    leaves = inputs(40, 1, 3)
    out = branch_attention(*leaves, visibility())
    d_key, d_value = torch.autograd.grad(out[1].sum(), leaves[3:])
    for gradient in (d_key, d_value):
        assert gradient[1].any()
        assert not gradient[[0, 2, 3, 4]].any()


@pytest.mark.parametrize("branch", [0, 2])
def test_a_row_with_nothing_to_see_gives_zeros_and_clean_gradients(branch: int) -> None:
    """Without visible trunk rows: zeros when there is no branch either, the branch alone otherwise. Never NaN."""
    leaves = inputs(40, 3, branch)
    visible = visibility()
    visible[2] = False
    out = branch_attention(*leaves, visible)
    whole = branch_attention(*leaves, visibility())
    rest = [0, 1, 3, 4]
    assert torch.equal(out[rest], whole[rest])
    if branch:
        grouped = leaves[0][2].view(2, 3, 40)
        weights = (torch.einsum("ghd,pgd->ghp", grouped, leaves[3][2]) / 40**0.5).softmax(-1)
        alone = torch.einsum("ghp,pgd->ghd", weights, leaves[4][2]).reshape(6, 40)
        assert_close(out[2], alone, OPERATOR_FP64, "branch alone")
    else:
        assert not out[2].any()
    gradients = torch.autograd.grad(out.square().sum(), leaves)
    for name, gradient in zip(NAMES, gradients, strict=True):
        assert bool(torch.isfinite(gradient).all()), f"d {name} is not finite"
    if not branch:
        assert not gradients[0][2].any()
    # A query that sees nothing takes nothing from the others' gradients.
    expected = torch.autograd.grad(whole[rest].square().sum(), leaves[1:3])
    found = torch.autograd.grad(branch_attention(*leaves, visible)[rest].square().sum(), leaves[1:3])
    for mine, theirs in zip(found, expected, strict=True):
        assert_close(mine, theirs, OPERATOR_FP64)


def test_no_anchors_give_an_empty_result() -> None:
    leaves = inputs(40, 3, 1)
    out = branch_attention(leaves[0][:0], leaves[1], leaves[2], leaves[3][:0], leaves[4][:0], visibility()[:0])
    assert out.shape == (0, 6, 40)


def test_heads_that_cannot_be_shared_evenly_are_refused() -> None:
    leaves = inputs(40, 3, 1)
    with pytest.raises(ValueError, match="5 query heads cannot share 2"):
        branch_attention(leaves[0][:, :5], *leaves[1:], visibility())
