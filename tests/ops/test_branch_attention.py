"""Catches a query of the training-time-test passes that sees a wrong key: another document's, a later row's, another row's branch,
one beyond its window, padding; and anchors that are not exactly the rows they stand for.

The oracle is told documents, rows and windows, and asks per key whether the serving engine's cache would hold it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from specdraft_kernels.branch_attention import branch_attention

from tests.builders import generator
from tests.ops.shapes import BACKENDS, gradients_of, leaves_of, needs
from tests.tolerances import OPERATOR_FP64, assert_close

NAMES = ("q", "k_trunk", "v_trunk", "k_branch", "v_branch")
LENGTHS = (7, 1, 0, 5)
"""Four packed documents: an odd one, one of a single row, an empty one; two rows of padding follow."""
ROWS = sum(LENGTHS) + 2
DOCUMENT = [d for d, length in enumerate(LENGTHS) for _ in range(length)] + [None, None]
CU = torch.tensor([0, *itertools.accumulate(LENGTHS)])
ANCHORS = (0, 3, 6, 7, 9, 12, 13)
"""First and last of the first document, the single row, rows between, the last row, and a row of padding."""


def oracle(leaves: Sequence[torch.Tensor], anchors: Sequence[int], window: int | None) -> torch.Tensor:
    """One query, one head, one key at a time."""
    q, k_trunk, v_trunk, k_branch, v_branch = leaves
    heads, size, passes = q.shape[1], q.shape[2], k_branch.shape[1]
    out = []
    for a, row in enumerate(anchors):
        at = row + passes
        near = [r for r in range(ROWS) if DOCUMENT[r] == DOCUMENT[row] is not None and r <= row and (not window or at - r < window)]
        own = [p for p in range(passes) if DOCUMENT[row] is not None and (not window or at - (row + 1 + p) < window)]
        for head in range(heads):
            kv = head // (heads // k_trunk.shape[1])
            keys = [k_trunk[r, kv] for r in near] + [k_branch[a, p, kv] for p in own]
            values = [v_trunk[r, kv] for r in near] + [v_branch[a, p, kv] for p in own]
            if keys:
                weights = torch.stack([(q[a, head] * key).sum() / size**0.5 for key in keys]).softmax(-1)
                out.append(sum(weight * value for weight, value in zip(weights, values, strict=True)))
            else:
                out.append(torch.zeros(size, dtype=q.dtype))
    return torch.stack(out).view(q.shape)


def inputs(queries: int, passes: int, *, size: int = 40, share: int = 3, seed: int = 0) -> list[torch.Tensor]:
    return leaves_of((queries, 2 * share, size), (ROWS, 2, size), (queries, passes, 2, size), seed=seed)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("anchors", [None, ANCHORS], ids=["all rows", "some rows"])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("passes", range(8))
def test_output_and_every_gradient_equal_the_loops(
    backend: str, anchors: Sequence[int] | None, window: int | None, passes: int
) -> None:
    """E3: gradients against full attention, not only outputs; D11, D12: odd lengths, padding, a document without rows."""
    rows = range(ROWS) if anchors is None else anchors
    leaves = inputs(len(rows), passes)
    chosen = None if anchors is None else torch.tensor(anchors)
    with needs(backend):
        found, _ = branch_attention(*leaves, CU, anchors=chosen, window=window, backend=backend)
        found_gradients = gradients_of(found, leaves)
    expected = oracle(leaves, rows, window)
    assert_close(found, expected, OPERATOR_FP64, "output")
    for name, mine, theirs in zip(NAMES, found_gradients, gradients_of(expected, leaves), strict=True):
        assert_close(mine, theirs, OPERATOR_FP64, f"d {name}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_document_knows_nothing_of_the_others(backend: str) -> None:
    """D9: other documents' rows leave a document's output bitwise unchanged, and get no gradient from it."""
    leaves = inputs(ROWS, 2)
    last = slice(8, 13)

    def run(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        with needs(backend):
            return branch_attention(*leaves, CU, backend=backend)[0]

    before = run(leaves)
    with torch.no_grad():
        changed = [leaf.clone() for leaf in leaves]
        for leaf in changed:
            leaf[:8] = 3.0 * leaf[:8] + 1.0
    assert torch.equal(before[last], run(changed)[last])
    with needs(backend):
        gradients = torch.autograd.grad(before[last].square().sum(), leaves)
    for name, gradient in zip(NAMES, gradients, strict=True):
        assert not gradient[:8].any() and not gradient[13:].any(), f"d {name}"
        assert gradient[last].abs().sum() > 0, f"d {name}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_sampled_anchors_are_bitwise_or_nearly_the_rows_they_stand_for(backend: str) -> None:
    leaves = inputs(ROWS, 2)
    chosen = torch.tensor(ANCHORS)
    with needs(backend):
        whole, whole_lse = branch_attention(*leaves, CU, backend=backend)
        some, some_lse = branch_attention(
            leaves[0][chosen], *leaves[1:3], leaves[3][chosen], leaves[4][chosen], CU, anchors=chosen, backend=backend
        )
    assert_close(some, whole[chosen], OPERATOR_FP64)
    assert_close(some_lse.exp(), whole_lse[chosen].exp(), OPERATOR_FP64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_branch_is_seen_by_its_own_query_only(backend: str) -> None:
    leaves = inputs(len(ANCHORS), 3)
    with needs(backend):
        out, _ = branch_attention(*leaves, CU, anchors=torch.tensor(ANCHORS), backend=backend)
        gradients = torch.autograd.grad(out[1].sum(), leaves[3:])
    for gradient in gradients:
        assert gradient[1].any()
        assert not gradient[[0, 2, 3, 4, 5, 6]].any()


def test_no_queries_and_no_rows_give_empty_results() -> None:
    leaves = inputs(0, 1)
    out, lse = branch_attention(*leaves, CU, anchors=torch.zeros(0, dtype=torch.int64))
    assert out.shape == (0, 6, 40) and lse.shape == (0, 6)
    out.sum().backward()
    assert not leaves[1].grad.any()
    empty = leaves_of((0, 6, 40), (0, 2, 40), (0, 1, 2, 40))
    assert branch_attention(*empty, torch.tensor([0]))[0].shape == (0, 6, 40)


def test_memory_grows_with_the_rows_and_not_with_their_square() -> None:
    """The largest tensor that a pass makes, forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor):
                    self.size = max(self.size, tensor.numel())
            return out

    largest = {}
    for rows in (1024, 4096):
        anchors = torch.arange(0, rows, 3)
        random = generator(0)
        shapes = [(len(anchors), 2, 8), (rows, 1, 8), (rows, 1, 8), (len(anchors), 2, 1, 8), (len(anchors), 2, 1, 8)]
        leaves = [torch.randn(shape, generator=random).requires_grad_() for shape in shapes]
        with Largest() as mode:
            branch_attention(*leaves, torch.tensor([0, rows]), anchors=anchors)[0].sum().backward()
        largest[rows] = mode.size
    assert largest[4096] <= 4.5 * largest[1024], largest
    assert largest[4096] < 4096 * 4096 / 3 / 4, largest


def test_what_does_not_fit_is_refused() -> None:
    leaves = inputs(3, 1)
    with pytest.raises(ValueError, match="3 queries over 15 trunk rows: name their rows with anchors="):
        branch_attention(*leaves, CU)
    with pytest.raises(ValueError, match=r"3 queries need as many anchors, not \(2,\)"):
        branch_attention(*leaves, CU, anchors=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="sort the anchors"):
        branch_attention(*leaves, CU, anchors=torch.tensor([5, 1, 9]))
    with pytest.raises(ValueError, match="rows of the trunk, 0 to 14"):
        branch_attention(*leaves, CU, anchors=torch.tensor([5, 9, 15]))
    with pytest.raises(ValueError, match="a window of 0 positions"):
        branch_attention(*leaves, CU, anchors=torch.tensor([0, 1, 2]), window=0)
    with pytest.raises(ValueError, match="must ascend from 0 to at most 15"):
        branch_attention(*leaves, torch.tensor([0, 16]), anchors=torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match="branch keys"):
        branch_attention(*leaves[:3], leaves[3][:2], leaves[4][:2], CU, anchors=torch.tensor([0, 1, 2]))
