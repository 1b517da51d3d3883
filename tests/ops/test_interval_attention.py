"""Catches a wrong attention in any backend: a wrong key, mask, scale, head grouping or merge, in the output or in any gradient.

The oracle walks over queries, heads and keys one by one: it knows neither masks nor tiles nor log-sum-exps. Every backend that runs
on this machine is held against it; the Triton kernels run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from specdraft_kernels.interval_attention import Spans, interval_attention
from specdraft_kernels.interval_attention import tiles as tiling

from tests.builders import generator
from tests.ops.shapes import BACKENDS, gradients_of, leaves_of, needs
from tests.tolerances import OPERATOR_FP32, OPERATOR_FP64, assert_close

NAMES = ("q", "k", "v", "own_k", "own_v")


def spans(pairs: Sequence[tuple[int, int]], own: Sequence[int] | None = None) -> Spans:
    """From a list of (first, stop)."""
    first, stop = (torch.tensor(column, dtype=torch.int64) for column in zip(*pairs, strict=True))
    return Spans(first=first, stop=stop, own=None if own is None else torch.tensor(own))


def oracle(leaves: Sequence[torch.Tensor], spans: Spans) -> tuple[torch.Tensor, torch.Tensor]:
    """One query, one head, one list of keys at a time."""
    q, k, v, own_k, own_v = leaves
    queries, heads, size = q.shape
    share, width = heads // k.shape[1], queries // max(1, own_k.shape[0])
    own = [own_k.shape[1]] * queries if spans.own is None else spans.own.tolist()
    out, lse = [], []
    for a, (first, stop) in enumerate(zip(spans.first.tolist(), spans.stop.tolist(), strict=True)):
        for head in range(heads):
            kv = head // share
            keys = [k[n, kv] for n in range(first, stop)] + [own_k[a // width, j, kv] for j in range(own[a])]
            values = [v[n, kv] for n in range(first, stop)] + [own_v[a // width, j, kv] for j in range(own[a])]
            if not keys:
                out.append(torch.zeros(size, dtype=q.dtype))
                lse.append(torch.tensor(float("-inf"), dtype=q.dtype))
                continue
            scores = torch.stack([(q[a, head] * key).sum() / size**0.5 for key in keys])
            weights = scores.softmax(-1)
            out.append(sum(weight * value for weight, value in zip(weights, values, strict=True)))
            lse.append(scores.logsumexp(-1))
    return torch.stack(out).view(q.shape), torch.stack(lse).view(queries, heads)


CAUSAL = [(0, n + 1) for n in range(7)] + [(7, 7 + n + 1) for n in range(4)]
CASES = {
    "every row of two documents": spans(CAUSAL),
    "some rows": spans([CAUSAL[n] for n in (0, 3, 6, 7, 9)]),
    "one row": spans([(0, 1)]),
    "a window of 3": spans([(max(first, stop - 3), stop) for first, stop in CAUSAL]),
    "prefixes of blocks": spans([(0, 0)] * 2 + [(0, 5)] * 2 + [(0, 7)] * 2 + [(7, 9)] * 2),
    "a shard of a ring": spans([(0, 0), (0, 0), (0, 4), (0, 4), (0, 5), (0, 6), (7, 7), (7, 8), (7, 11), (7, 11)]),
    "nothing at all": spans([(0, 0), (4, 4), (11, 11)]),
    "own keys that some do not see": spans([CAUSAL[n] for n in (1, 4, 8, 8)] + [(11, 11)], own=[0, 1, 2, 0, 0]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("size", "share", "keys"), [(40, 3, 2), (64, 1, 0), (80, 4, 1), (128, 8, 3)])
def test_output_and_every_gradient_equal_the_loops(backend: str, case: str, size: int, share: int, keys: int) -> None:
    """E3: gradients against full attention, not only outputs."""
    seen = CASES[case]
    if seen.own is not None and keys < 2:
        seen = Spans(first=seen.first, stop=seen.stop, own=seen.own.clamp_max(keys))
    queries = seen.first.shape[0]
    leaves = leaves_of((queries, 2 * share, size), (11, 2, size), (queries, keys, 2, size))
    with needs(backend):
        found, found_lse = interval_attention(*leaves, seen, backend=backend)
        found_gradients = gradients_of(found, leaves)
    expected, expected_lse = oracle(leaves, seen)
    assert_close(found, expected, OPERATOR_FP64, "output")
    assert_close(found_lse.exp(), expected_lse.exp(), OPERATOR_FP64, "exp(lse)")
    for name, mine, theirs in zip(NAMES, found_gradients, gradients_of(expected, leaves), strict=True):
        assert_close(mine, theirs, OPERATOR_FP64, f"d {name}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_of_queries_share_their_own_keys(backend: str) -> None:
    seen = spans([(0, 3)] * 4 + [(0, 6)] * 4, own=[4, 4, 4, 4, 2, 2, 0, 1])
    leaves = leaves_of((8, 6, 40), (6, 2, 40), (2, 4, 2, 40))
    with needs(backend):
        found, _ = interval_attention(*leaves, seen, backend=backend)
        found_gradients = gradients_of(found, leaves)
    expected, _ = oracle(leaves, seen)
    assert_close(found, expected, OPERATOR_FP64)
    for name, mine, theirs in zip(NAMES, found_gradients, gradients_of(expected, leaves), strict=True):
        assert theirs.abs().max() > 1e-3, f"d {name} is nothing to compare with"
        assert_close(mine, theirs, OPERATOR_FP64, f"d {name}")


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "naive"])
@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_of_all_kinds_equal_the_dense_reference(backend: str, window: int | None, dtype: torch.dtype) -> None:
    """Long enough for several tiles: runs, gaps, a window's left edge, two documents."""
    rows = [*range(40), *range(44, 150, 3), 150, 151, *range(160, 240)]
    pairs = [(0 if row < 170 else 170, row + 1) for row in rows]
    if window:
        pairs = [(max(first, stop - window), stop) for first, stop in pairs]
    seen, whole = spans(pairs), leaves_of((len(pairs), 4, 32), (240, 2, 32), (len(pairs), 2, 2, 32))
    leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in whole]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    with needs(backend):
        found, _ = interval_attention(*leaves, seen, backend=backend)
        found_gradients = gradients_of(found, leaves)
    expected, _ = interval_attention(*exact, seen, backend="naive")
    tolerance = OPERATOR_FP32[dtype]
    assert_close(found, expected.to(dtype), tolerance, "output")
    for name, mine, theirs in zip(NAMES, found_gradients, gradients_of(expected, exact), strict=True):
        assert_close(mine, theirs.to(dtype), tolerance, f"d {name}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_huge_scores_and_queries_without_keys_give_no_nan(backend: str, dtype: torch.dtype) -> None:
    seen = spans([(0, 0), (0, 2), (0, 5), (5, 5)], own=[0, 1, 0, 0])
    leaves = [(100 * leaf.detach()).to(dtype).requires_grad_() for leaf in leaves_of((4, 2, 16), (5, 1, 16), (4, 1, 1, 16))]
    with needs(backend):
        found, lse = interval_attention(*leaves, seen, backend=backend, scale=1.0)
        gradients = gradients_of(found, leaves)
    assert lse[1:3].abs().max() > 1e4, "scores are not huge"
    assert bool(lse[[0, 3]].isneginf().all()) and not found[[0, 3]].any()
    for name, gradient in zip(NAMES, gradients, strict=True):
        assert bool(gradient.isfinite().all()), f"d {name} is not finite"
    assert not gradients[0][[0, 3]].any()


@pytest.mark.parametrize("seed", range(20))
def test_tiles_cover_what_is_seen_exactly_once(seed: int) -> None:
    """And no query of a tile sees nothing of it: a flash kernel's softmax over no key is undefined."""
    random = generator(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=random))

    pairs, base = [], 0
    for _ in range(draw(1, 5)):
        length, window = draw(1, 700), draw(1, 900) if draw(0, 2) else None
        every = draw(1, 4)
        for row in range(draw(0, length), length):
            if every == 1 or draw(0, every) == 0:
                stop = base + (row + 1 if draw(0, 12) or pairs else 0)
                stop = max(stop, pairs[-1][1] if pairs else 0)
                first = max(base, stop - window if window else base, pairs[-1][0] if pairs else 0)
                pairs.append((min(first, stop), stop))
        base += length
    if not pairs:
        pairs = [(0, 1)]
    seen = spans(pairs)
    seen.check(base)
    covered = torch.zeros(len(pairs), base, dtype=torch.int64)
    rows = torch.arange(base)
    inside = (rows >= seen.first[:, None]) & (rows < seen.stop[:, None])
    for tile in tiling.tiles(seen):
        part = torch.ones(tile.end - tile.begin, tile.high - tile.low, dtype=torch.int64)
        if tile.kind == "causal":
            assert part.shape[0] == part.shape[1]
            part = part.tril()
        elif tile.kind == "masked":
            part *= inside[tile.begin : tile.end, tile.low : tile.high]
            assert part.shape[0] <= tiling.BLOCK + 1 or part.shape[1] <= tiling.BLOCK
        assert bool(part.any(1).all()), tile
        covered[tile.begin : tile.end, tile.low : tile.high] += part
    assert torch.equal(covered, inside.long())


def test_what_does_not_fit_is_refused() -> None:
    seen = spans([(0, 1), (0, 2)])
    q, k, v, own_k, own_v = leaves_of((2, 6, 8), (2, 2, 8), (2, 1, 2, 8))
    with pytest.raises(ValueError, match="5 query heads cannot share 2"):
        interval_attention(q[:, :5], k, v, own_k, own_v, seen)
    with pytest.raises(ValueError, match="2 queries do not fall into 3 groups"):
        interval_attention(q, k, v, *(x.expand(2, 1, 2, 8)[:1].expand(3, 1, 2, 8) for x in (own_k, own_v)), seen)
    with pytest.raises(ValueError, match="one dtype: cast them"):
        interval_attention(q.float(), k, v, own_k, own_v, seen)
    with pytest.raises(ValueError, match="in the order of their documents"):
        interval_attention(q, k, v, own_k, own_v, spans([(0, 2), (0, 1)]))
    with pytest.raises(ValueError, match="outside of the trunk's 2 rows"):
        interval_attention(q, k, v, own_k, own_v, spans([(0, 2), (0, 3)]))
    with pytest.raises(ValueError, match="it is one of naive, torch, triton, flash_attn"):
        interval_attention(q, k, v, own_k, own_v, seen, backend="cuda")
    with pytest.raises(ValueError, match="needs CUDA tensors, not cpu"):
        interval_attention(q, k, v, own_k, own_v, seen, backend="flash_attn")
    with pytest.raises(ValueError, match="needs TRITON_INTERPRET=1"):
        interval_attention(q, k, v, own_k, own_v, seen, backend="triton")


def test_the_default_on_a_cpu_is_its_flash_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast path really runs: asked for nothing, the dense reference is never touched."""
    from specdraft_kernels.interval_attention import naive

    monkeypatch.setattr(naive, "forward", lambda *_: pytest.fail("the dense reference ran"))
    interval_attention(*leaves_of((2, 2, 8), (2, 1, 8), (2, 0, 1, 8)), spans([(0, 1), (0, 2)]))


@pytest.mark.parametrize(
    ("kernel", "wrong"),
    [
        ("forward_kernel", "output"),
        ("query_gradient_kernel", "d q"),
        ("trunk_gradient_kernel", "d k"),
        ("own_gradient_kernel", "d own_v"),
    ],
)
def test_a_tile_store_that_is_skipped_is_noticed(kernel: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above are worth: one program of the grid that leaves its tile as it was turns them red."""
    from specdraft_kernels.interval_attention import fused

    from tests.ops.faults import without_the_last_program

    seen = CASES["every row of two documents"]
    seen = spans([pair for pair in zip(seen.first.tolist(), seen.stop.tolist(), strict=True) for _ in range(3)])
    leaves = leaves_of((33, 2, 16), (33, 2, 16), (33, 2, 2, 16))
    monkeypatch.setattr(fused, kernel, without_the_last_program(getattr(fused, kernel)))
    with needs("triton"):
        found, _ = interval_attention(*leaves, seen, backend="triton")
        gradients = dict(zip([f"d {name}" for name in NAMES], gradients_of(found, leaves), strict=True))
    expected, _ = interval_attention(*leaves, seen, backend="naive")
    exact = dict(zip([f"d {name}" for name in NAMES], gradients_of(expected, leaves), strict=True))
    pairs = {"output": (found, expected), **{name: (gradients[name], exact[name]) for name in exact}}
    with pytest.raises(AssertionError, match="off by"):
        assert_close(*pairs[wrong], OPERATOR_FP64, wrong)
