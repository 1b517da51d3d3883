"""Catches a block drafter's slot that sees a wrong key: the trunk from its anchor on, another block or document, an unused slot."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from specdraft_kernels.block_attention import block_attention

from tests.ops.shapes import BACKENDS, gradients_of, leaves_of, needs
from tests.tolerances import OPERATOR_FP64, assert_close

NAMES = ("q", "k_trunk", "v_trunk", "k_block", "v_block")
CU = torch.tensor([0, 6, 6, 7, 12])
DOCUMENT = torch.tensor([0, 0, 0, 2, 3, 3, 3])
PREFIX = torch.tensor([0, 3, 6, 1, 0, 2, 2])
"""Nothing before it, the middle, right after the document's last row, two blocks with one anchor."""
SLOTS = torch.tensor([4, 1, 3, 4, 2, 4, 0])


def oracle(leaves: Sequence[torch.Tensor], slots: Sequence[int]) -> torch.Tensor:
    """One slot, one head, one key at a time."""
    q, k_trunk, v_trunk, k_block, v_block = leaves
    blocks, width, heads, size = q.shape
    out = []
    for b in range(blocks):
        start = int(CU[DOCUMENT[b]])
        rows, own = range(start, start + int(PREFIX[b])), range(slots[b])
        for slot in range(width):
            for head in range(heads):
                kv = head // (heads // k_trunk.shape[1])
                keys = [k_trunk[r, kv] for r in rows] + [k_block[b, j, kv] for j in own]
                values = [v_trunk[r, kv] for r in rows] + [v_block[b, j, kv] for j in own]
                if slot < slots[b]:
                    weights = torch.stack([(q[b, slot, head] * key).sum() / size**0.5 for key in keys]).softmax(-1)
                    out.append(sum(weight * value for weight, value in zip(weights, values, strict=True)))
                else:
                    out.append(torch.zeros(size, dtype=q.dtype))
    return torch.stack(out).view(q.shape)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slots", [None, SLOTS], ids=["whole blocks", "some slots"])
@pytest.mark.parametrize(("size", "share"), [(40, 3), (64, 1), (80, 4), (128, 8)])
def test_output_and_every_gradient_equal_the_loops(backend: str, slots: torch.Tensor | None, size: int, share: int) -> None:
    leaves = leaves_of((7, 4, share, size), (12, 1, size), (7, 4, 1, size))
    with needs(backend):
        found, lse = block_attention(*leaves, CU, DOCUMENT, PREFIX, slots=slots, backend=backend)
        found_gradients = gradients_of(found, leaves)
    expected = oracle(leaves, [4] * 7 if slots is None else slots.tolist())
    assert_close(found, expected, OPERATOR_FP64, "output")
    assert lse.shape == (7, 4, share)
    for name, mine, theirs in zip(NAMES, found_gradients, gradients_of(expected, leaves), strict=True):
        assert_close(mine, theirs, OPERATOR_FP64, f"d {name}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_an_unused_slot_holds_does_not_matter(backend: str) -> None:
    leaves = leaves_of((7, 4, 2, 40), (12, 1, 40), (7, 4, 1, 40))
    dirty = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    unused = torch.arange(4) >= SLOTS[:, None]
    with torch.no_grad():
        for which in (0, 3, 4):
            dirty[which][unused] = float("nan")
    found = []
    for given in (leaves, dirty):
        with needs(backend):
            out, lse = block_attention(*given, CU, DOCUMENT, PREFIX, slots=SLOTS, backend=backend)
            found.append((out, lse, *gradients_of(out, given)))
    for clean, other in zip(*found, strict=True):
        assert torch.equal(clean, other)
    assert bool(found[0][1][unused].isneginf().all()) and not found[0][0][unused].any()


def test_what_does_not_fit_is_refused() -> None:
    leaves = leaves_of((7, 4, 2, 8), (12, 1, 8), (7, 4, 1, 8))
    with pytest.raises(ValueError, match="at most the rows of its document"):
        block_attention(*leaves, CU, DOCUMENT, PREFIX + 1)
    with pytest.raises(ValueError, match="7 blocks need document and prefix"):
        block_attention(*leaves, CU, DOCUMENT[:3], PREFIX)
    with pytest.raises(ValueError, match="in the order of their documents"):
        block_attention(*leaves, CU, DOCUMENT, PREFIX.flip(0) * 0 + torch.tensor([3, 2, 1, 1, 0, 0, 0]))
    with pytest.raises(ValueError, match=r"must be \[7 blocks, slots"):
        block_attention(*leaves[:4], leaves[4][:, :2], CU, DOCUMENT, PREFIX)
    with pytest.raises(ValueError, match="needs the queries of all 4 slots, not of 2"):
        block_attention(leaves[0][:, :2], *leaves[1:], CU, DOCUMENT, PREFIX, slots=SLOTS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_of_some_slots_are_those_of_all(backend: str) -> None:
    """Of a slot without a query the others still see keys and values, and its query's gradient is that of nothing."""
    leaves = leaves_of((7, 4, 2, 40), (12, 1, 40), (7, 4, 1, 40))
    with needs(backend):
        whole, _ = block_attention(*leaves, CU, DOCUMENT, PREFIX, backend=backend)
        weights = torch.linspace(-1, 2, whole.numel(), dtype=whole.dtype).view(whole.shape).clone()
        weights[:, 0] = 0
        wanted = torch.autograd.grad((whole * weights).sum(), leaves)
        some, lse = block_attention(leaves[0][:, 1:], *leaves[1:], CU, DOCUMENT, PREFIX, backend=backend)
        found = torch.autograd.grad((some * weights[:, 1:]).sum(), leaves)
    assert some.shape == (7, 3, 2, 40) and lse.shape == (7, 3, 2)
    assert_close(some, whole[:, 1:], OPERATOR_FP64, "output")
    for name, mine, theirs in zip(NAMES, found, wanted, strict=True):
        assert_close(mine, theirs, OPERATOR_FP64, f"d {name}")
