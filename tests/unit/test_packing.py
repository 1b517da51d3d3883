"""Catches a label, a teacher row or a document that is off by one: everything downstream would still run,
and learn rubbish.

The samples are made so that a row says where it comes from: ``final[i]`` of sample ``s`` holds ``100 * s + i``.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import HIDDEN, TAP_LAYERS, generator, sample
from trainer_bridge.draft.packing import AnchorSampling, PackedBatch, microbatches, pack
from trainer_bridge.taps import TapSample

MASKS = st.lists(st.text(alphabet=".A", min_size=2, max_size=14), min_size=1, max_size=5)
"""Loss masks of a few samples: prompts, answers, holes between answers, prompts only."""


def numbered(mask: str, index: int, **fields: object) -> TapSample:
    """Sample number `index`: token ids ``1000 * (index + 1) + i``, rows that say where they come from."""
    n = len(mask)
    rows = 100.0 * index + torch.arange(n - 1.0)[:, None]
    values = {
        "tokens": [1000 * (index + 1) + i for i in range(n)],
        "taps": rows.repeat(1, len(TAP_LAYERS) * HIDDEN),
        "final": rows.repeat(1, HIDDEN),
    }
    return sample(mask, seed=index, **{**values, **fields})


def origin(batch: PackedBatch, row: int) -> tuple[int, int]:
    """Sample number and row within it that a packed row came from."""
    assert torch.equal(batch.taps[row, :HIDDEN], batch.final[row])
    return divmod(int(batch.final[row, 0]), 100)


def labels_of(batch: PackedBatch) -> dict[tuple[int, int, int], tuple[int, tuple[int, int]]]:
    """Label token and teacher row's origin of every (sample, anchor row, pass), passes counted from 1."""
    found = {}
    for index, anchor in enumerate(batch.anchors.tolist()):
        number, i = origin(batch, anchor)
        for d in range(1, batch.passes + 1):
            if batch.valid[index, d - 1]:
                key = (number, i, d)
                assert key not in found, f"{key} is labelled twice"
                found[key] = (int(batch.future_ids[anchor, d]), origin(batch, anchor + d))
    return found


def expected_labels(samples: list[TapSample], passes: int) -> dict[tuple[int, int, int], tuple[int, tuple[int, int]]]:
    """The same from the definition: pass d of anchor i predicts token ``i + d + 1`` from teacher row ``i + d``."""
    expected = {}
    for number, one in enumerate(samples):
        mask, n = one.loss_mask.tolist(), one.num_tokens
        for i in range(n - 1):
            if i + 2 >= n or not (mask[i + 1] and mask[i + 2]):
                continue
            for d in range(1, passes + 1):
                if i + d + 1 < n and mask[i + d + 1]:
                    expected[number, i, d] = (int(one.token_ids[i + d + 1]), (number, i + d))
    return expected


def test_the_worked_example_of_the_module() -> None:
    a, b, c, d, e, f, g = range(1, 8)
    samples = [sample("..AA", tokens=[a, b, c, d], seed=1), sample(".AA", tokens=[e, f, g], seed=2)]
    batch = pack(samples, passes=2)
    assert batch.document.tolist() == [0, 0, 0, 1, 1]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1]
    assert batch.future_ids.tolist() == [[b, c, d], [c, d, 0], [d, 0, 0], [f, g, 0], [g, 0, 0]]
    assert batch.anchors.tolist() == [1, 3]
    assert batch.valid.tolist() == [[True, False], [True, False]]
    assert batch.label_counts().tolist() == [2, 0]
    assert (batch.passes, batch.num_documents) == (2, 2)
    assert torch.equal(batch.taps, torch.cat([one.taps for one in samples]))
    assert torch.equal(batch.final, torch.cat([one.final for one in samples]))


def test_labels_and_teacher_rows_of_a_hand_made_sample() -> None:
    """Tokens 1000..1005, the last four generated: from row 1 the passes predict 1003, 1004, 1005."""
    batch = pack([numbered("..AAAA", 0)], passes=3)
    assert labels_of(batch) == {
        (0, 1, 1): (1003, (0, 2)),
        (0, 1, 2): (1004, (0, 3)),
        (0, 1, 3): (1005, (0, 4)),
        (0, 2, 1): (1004, (0, 3)),
        (0, 2, 2): (1005, (0, 4)),
        (0, 3, 1): (1005, (0, 4)),
    }


@settings(deadline=None, max_examples=60)
@given(masks=MASKS, passes=st.integers(1, 4))
def test_labels_follow_the_definition(masks: list[str], passes: int) -> None:
    samples = [numbered(mask, number) for number, mask in enumerate(masks)]
    assert labels_of(pack(samples, passes)) == expected_labels(samples, passes)


@pytest.mark.parametrize("passes", [1, 3, 7])
def test_the_last_token_is_a_label_and_the_last_row_its_teacher(passes: int) -> None:
    """D6: 34 tokens have 33 rows; the last token, which has no row, is the last label of the last anchors."""
    one = numbered("." * 20 + "A" * 14, 0)
    assert one.taps.shape[0] == 33
    batch = pack([one], passes)
    assert batch.taps.shape[0] == 33
    labels = labels_of(batch)
    assert batch.anchors.max() == 31
    assert [key for key in labels if key[1] == 31] == [(0, 31, 1)]
    for d in range(1, passes + 1):
        assert labels[0, 32 - d, d] == (1033, (0, 32))
        assert (0, 33 - d, d) not in labels


def test_prompts_are_never_anchors_and_never_labels() -> None:
    """A15: only generated tokens count, with a second prompt between two answers as well."""
    batch = pack([numbered("...AAA..AAA", 0), numbered("......", 1)], passes=3)
    labels = labels_of(batch)
    # Row 2 reads the last prompt token, but what follows it was generated: the engine drafts from there.
    assert {i for _, i, _ in labels} == {2, 3, 7, 8}
    assert {token for token, _ in labels.values()} == {1004, 1005, 1009, 1010}
    assert not (batch.document[batch.anchors] == 1).any()


def test_a_span_keeps_the_whole_trunk_and_drops_rows_nobody_needs() -> None:
    one = numbered("..AAAAAAAA", 0)
    batch = pack([one], 2, [torch.tensor([3, 4])])
    assert batch.anchors.tolist() == [3, 4]
    # Anchor 4's second pass takes row 6 as its teacher; rows 7 and 8 serve nobody.
    assert [origin(batch, row)[1] for row in range(batch.taps.shape[0])] == [0, 1, 2, 3, 4, 5, 6]
    whole = labels_of(pack([one], 2))
    assert labels_of(batch) == {key: value for key, value in whole.items() if key[1] in (3, 4)}


def test_positions_are_the_samples_own() -> None:
    batch = pack([sample("..AA", start=5), sample(".AAA", start=0, seed=1)], 1)
    assert batch.positions.tolist() == [5, 6, 7, 0, 1, 2]


def test_half_precision_states_are_cast_on_purpose() -> None:
    """D20: bf16 states meet an fp32 draft; the cast happens here and nowhere else."""
    one = sample("..AA")
    half = sample("..AA", taps=one.taps.bfloat16(), final=one.final.bfloat16())
    batch = pack([half], 1)
    assert batch.taps.dtype == batch.final.dtype == torch.float32
    assert torch.equal(batch.taps, half.taps.float())


@settings(deadline=None, max_examples=80)
@given(masks=MASKS, passes=st.integers(1, 3), max_anchors=st.integers(1, 9), max_rows=st.integers(1, 30))
def test_microbatches_cover_every_anchor_once(masks: list[str], passes: int, max_anchors: int, max_rows: int) -> None:
    samples = [numbered(mask, number) for number, mask in enumerate(masks)]
    found: dict[tuple[int, int, int], tuple[int, tuple[int, int]]] = {}
    counts = torch.zeros(passes, dtype=torch.int64)
    for batch in microbatches(samples, passes, max_anchors, max_rows):
        assert 0 < batch.anchors.shape[0] <= max_anchors
        assert batch.num_documents == 1 or batch.taps.shape[0] <= max_rows
        part = labels_of(batch)
        assert not part.keys() & found.keys()
        found |= part
        counts += batch.label_counts()
        for anchor in batch.anchors.tolist():
            number, i = origin(batch, anchor)
            trunk = [origin(batch, row) for row in range(anchor - i, anchor + 1)]
            assert trunk == [(number, row) for row in range(i + 1)], "an anchor lost a part of its trunk"
            assert len(set(batch.document[anchor - i : anchor + 1].tolist())) == 1
    assert found == expected_labels(samples, passes)
    assert torch.equal(counts, pack(samples, passes).label_counts())


def test_a_share_of_the_anchors_goes_beyond_the_first_pass() -> None:
    """The first pass is everybody's; later labels are all of an anchor's or none, and about the share that was asked for."""
    whole = pack([sample("." + "A" * 400)], 3)
    sampling = AnchorSampling(deep_share=0.25, random=generator(0))
    some = pack([sample("." + "A" * 400)], 3, sampling=sampling)
    assert torch.equal(some.valid[:, 0], whole.valid[:, 0])
    stays = some.valid[:, 1]
    assert 60 < int(stays.sum()) < 140
    assert torch.equal(some.valid[stays], whole.valid[stays])
    assert not some.valid[~stays, 1:].any()
    # Drawn anew each time.
    again = pack([sample("." + "A" * 400)], 3, sampling=sampling)
    assert not torch.equal(again.valid, some.valid)


def test_a_share_of_the_anchors_is_trained_at_all() -> None:
    """Whole anchors, drawn anew each time; what is counted is what is there, and an answer never loses all of its anchors."""
    samples = [sample("." + "A" * 400), sample("." + "A" * 3, seed=1)]
    sampling = AnchorSampling(share=0.1, random=generator(0))
    drawn = [list(microbatches(samples, 3, 16, 5000, sampling)) for _ in range(2)]
    taken = []
    for batches in drawn:
        assert max(batch.anchors.shape[0] for batch in batches) <= 16
        # The long one is cut into several runs, each with its whole trunk.
        assert len(batches) > 1
        rows = [int(batch.positions[row]) for batch in batches for row in batch.anchors if batch.taps.shape[0] > 4]
        assert 20 < len(rows) < 70
        taken.append(rows)
    assert taken[0] != taken[1]
    tiny = AnchorSampling(share=1e-9, random=generator(1))
    for batch in microbatches(samples, 3, 16, 5000, tiny):
        counts = torch.bincount(batch.document[batch.anchors], minlength=batch.num_documents)
        assert counts.tolist() == [1] * batch.num_documents
