"""Catches samples that depend on how sequences were split, that hold padding or another document's rows, that teach nothing, or
whose rows and tokens are off by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from specdraft_kernels.zigzag_ring import ZigzagLayout

from tests.builders import HIDDEN, TAP_LAYERS, VOCAB, frozen_target, generator
from tests.distributed.processes import on_ranks
from trainer_bridge.cotrain.microbatch import Microbatch
from trainer_bridge.cotrain.samples import SampleCollector
from trainer_bridge.errors import TapOrderError
from trainer_bridge.taps import TapSample

ANSWERS = (("..AAA", "A", "..A.AA..", "..."), ("", ".A", "A", ".AAAAAAAAAA", "....", "AA......"))
"""Two microbatches; per document and token ``A`` where it was generated. What follows the last A is padding, or a prompt alone."""
PROMPTS = (("p", "q", "p", "r"), ())
FIELDS = ("token_ids", "positions", "loss_mask", "taps", "final")


def made(step: int, index: int, dtype: torch.dtype = torch.float64) -> tuple[Microbatch, torch.Tensor, torch.Tensor]:
    """A microbatch with its whole hidden states, another one in every step."""
    documents, random = ANSWERS[index], generator(10 * step + index)
    mask = torch.tensor([token == "A" for token in "".join(documents)])
    microbatch = Microbatch(
        token_ids=torch.randint(VOCAB, mask.shape, generator=random), loss_mask=mask,
        lengths=tuple(len(document) for document in documents), prompts=PROMPTS[index],
    )  # fmt: skip
    taps = torch.randn(mask.shape[0], len(TAP_LAYERS) * HIDDEN, generator=random, dtype=torch.float64)
    return microbatch, taps.to(dtype), torch.randn(mask.shape[0], HIDDEN, generator=random, dtype=torch.float64).to(dtype)


def collector(context: Any = None) -> SampleCollector:
    return SampleCollector(tap_layers=TAP_LAYERS, policy_version=7, name="rank-2", context=context)


def collected(
    collects: SampleCollector, step: int, *, rank: int = 0, ranks: int = 1, dtype: torch.dtype = torch.float64
) -> list[TapSample]:
    """One step on this rank."""
    batches = [made(step, index, dtype) for index in range(len(ANSWERS))]
    rows = collects.begin_step([microbatch for microbatch, _, _ in batches], frozen_target())
    for index, (microbatch, taps, final) in enumerate(batches):
        if ranks > 1:
            layout = ZigzagLayout(microbatch.lengths, ranks)
            taps, final = layout.split(taps, rank), layout.split(final, rank)
        assert rows[index] == final.shape[0]
        collects.add(index, taps.requires_grad_(), final.requires_grad_())
    assert collects.finish_step() is None
    return collects.samples


def plain(samples: Sequence[TapSample]) -> list[dict[str, Any]]:
    """As tensors and strings."""
    names = ("request_id", "group_id", "policy_version", "tap_layers", "final_is_normed")
    return [{name: getattr(one, name) for name in (*names, *FIELDS)} | {"digest": one.digest()} for one in samples]


def on_a_rank(_: Path) -> list[list[dict[str, Any]]]:
    collects, rank, ranks = collector(dist.group.WORLD), dist.get_rank(), dist.get_world_size()
    wide = [plain(collected(collects, step, rank=rank, ranks=ranks)) for step in range(2)]
    return [*wide, plain(collected(collects, 2, rank=rank, ranks=ranks, dtype=torch.bfloat16))]


def test_ranks_that_split_sequences_make_the_samples_of_one(tmp_path: Path) -> None:
    """Bitwise, on the first of them; the others make none."""
    collects = collector()
    alone = [plain(collected(collects, step)) for step in range(2)]
    alone.append(plain(collected(collects, 2, dtype=torch.bfloat16)))
    first, second = on_ranks(on_a_rank, 2, tmp_path)
    assert second == [[], [], []]
    assert [len(step) for step in first] == [len(step) for step in alone] == [5, 5, 5]
    for found, wanted in zip(itertools.chain(*first), itertools.chain(*alone), strict=True):
        assert found.keys() == wanted.keys()
        for name in FIELDS:
            assert found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name]), name
        assert all(found[name] == wanted[name] for name in found.keys() - set(FIELDS))


def test_documents_end_with_their_answer_and_rows_one_before() -> None:
    """Of ten documents five have an answer that a row could predict."""
    samples = collected(collector(), 0)
    kept = [(index, number, len(text.rstrip("."))) for index, texts in enumerate(ANSWERS) for number, text in enumerate(texts)]
    kept = [(index, number, count) for index, number, count in kept if count >= 2]
    assert len(samples) == len(kept) == 5
    for one, (index, number, count) in zip(samples, kept, strict=True):
        microbatch, taps, final = made(0, index)
        begin = sum(microbatch.lengths[:number])
        rows = slice(begin, begin + count - 1)
        assert torch.equal(one.token_ids, microbatch.token_ids[begin : begin + count])
        assert torch.equal(one.loss_mask, microbatch.loss_mask[begin : begin + count]) and bool(one.loss_mask[-1])
        assert torch.equal(one.taps, taps[rows]) and torch.equal(one.final, final[rows])
        assert one.positions.tolist() == list(range(count))
        assert (one.tap_layers, one.policy_version, one.final_is_normed) == (TAP_LAYERS, 7, True)
        assert not one.taps.requires_grad and not one.final.requires_grad


def test_siblings_share_a_prompt_and_no_two_samples_a_name() -> None:
    collects = collector()
    first, second = collected(collects, 0), collected(collects, 0)
    assert [one.group_id for one in first[:2]] == ["p", "p"]
    # Documents whose prompts have no names are nobody's siblings.
    assert [one.group_id for one in first[2:]] == [one.request_id for one in first[2:]]
    names = [one.request_id for one in [*first, *second]]
    assert len(set(names)) == len(names) == 10 and all(name.startswith("rank-2-") for name in names)
    collects.policy_version = 8
    assert {one.policy_version for one in collected(collects, 1)} == {8} and {one.policy_version for one in first} == {7}


def test_samples_keep_what_the_policy_overwrites_later() -> None:
    microbatch, taps, final = made(0, 0)
    collects = collector()
    collects.begin_step([microbatch], frozen_target())
    collects.add(0, taps, final)
    before = [one.digest() for one in collects.samples]
    taps.zero_()
    final.zero_()
    assert [one.digest() for one in collects.samples] == before


def test_microbatches_come_in_turn() -> None:
    collects = collector()
    (first, taps, final), (second, _, _) = made(0, 0), made(0, 1)
    assert collects.vocabulary() is None
    collects.begin_step([first, second], frozen_target())
    with pytest.raises(TapOrderError, match="microbatch 1 was given; it is the turn of microbatch 0"):
        collects.add(1, taps, final)
    collects.add(0, taps, final)
    with pytest.raises(TapOrderError, match="microbatch 0 was given; it is the turn of microbatch 1"):
        collects.add(0, taps, final)
    assert len(collects.samples) == 2
    collects.abort_step()
    assert collects.samples == []
    assert len(collected(collects, 0)) == 5
