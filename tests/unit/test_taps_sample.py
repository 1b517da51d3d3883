"""Catches a broken sample that is trained on: each clause of the contract refuses what breaks it, by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.builders import HIDDEN, TAP_LAYERS, sample
from trainer_bridge.errors import SampleError
from trainer_bridge.taps import TapSample

GOOD = sample("..AAA", seed=6, start=3)


def with_value(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """A copy with one entry, in the middle, replaced."""
    changed = tensor.clone()
    changed.view(-1)[changed.numel() // 2] = value
    return changed


def shorter(name: str) -> dict[str, Any]:
    return {name: getattr(GOOD, name)[:-1]}


def test_a_good_sample_passes_and_is_returned() -> None:
    assert GOOD.validate() is GOOD
    assert (GOOD.num_tokens, GOOD.num_answer_tokens) == (5, 3)
    assert GOOD.nbytes == 5 * (8 + 8 + 1) + 4 * (len(TAP_LAYERS) + 1) * HIDDEN * 4


def test_states_in_half_precision_are_good() -> None:
    dataclasses.replace(GOOD, taps=GOOD.taps.bfloat16(), final=GOOD.final.half()).validate()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"request_id": ""}, "request_id is empty"),
        ({"policy_version": -1}, "policy_version -1 is negative"),
        (dataclasses.asdict(sample("A", tokens=[5])), "1 tokens; a sample needs at least 2"),
        (shorter("positions"), "positions has 4 rows for 5 tokens, needs 5"),
        (shorter("loss_mask"), "loss_mask has 4 rows for 5 tokens, needs 5"),
        (shorter("taps"), "taps has 3 rows for 5 tokens, needs 4"),
        (shorter("final"), "final has 3 rows for 5 tokens, needs 4"),
        ({"final": torch.ones(5, HIDDEN)}, "final has 5 rows for 5 tokens, needs 4"),
        ({"positions": torch.tensor([3, 4, 6, 7, 8])}, "not contiguous"),
        ({"positions": torch.tensor([3, 4, 4, 5, 6])}, "not contiguous"),
        ({"positions": torch.tensor([7, 6, 5, 4, 3])}, "not contiguous"),
        ({"tap_layers": TAP_LAYERS[:2]}, "taps are 24 wide, 2 layers of 8 need 16"),
        ({"taps": GOOD.taps[:, :16]}, "taps are 16 wide, 3 layers of 8 need 24"),
        ({"final_is_normed": False}, "before the norm"),
        ({"taps": with_value(GOOD.taps, float("nan"))}, "NaN or infinity"),
        ({"taps": with_value(GOOD.taps, float("-inf"))}, "NaN or infinity"),
        ({"final": with_value(GOOD.final, float("nan"))}, "NaN or infinity"),
        ({"final": with_value(GOOD.final, float("inf"))}, "NaN or infinity"),
        ({"loss_mask": GOOD.loss_mask.long()}, r"loss_mask is torch\.int64 with 1 dimensions, needs bool with 1"),
        ({"token_ids": GOOD.token_ids.float()}, "token_ids is torch.float32"),
        ({"positions": GOOD.positions.int()}, "positions is torch.int32"),
        ({"taps": GOOD.taps[:, 0]}, "taps is torch.float32 with 1 dimensions, needs floating with 2"),
        ({"final": GOOD.final.long()}, "final is torch.int64"),
    ],
)
def test_each_clause_refuses_what_breaks_it(change: dict[str, Any], message: str) -> None:
    """D1, D5, D6: as many rows as tokens less one, no holes, states after the norm, an owner and a version."""
    with pytest.raises(SampleError, match=message):
        dataclasses.replace(GOOD, **change).validate()


def test_a_refusal_names_the_sample() -> None:
    with pytest.raises(SampleError, match=r"^request-6: "):
        dataclasses.replace(GOOD, final_is_normed=False).validate()


def test_equal_samples_have_equal_digests() -> None:
    """Made again, and laid out differently in memory."""
    again = sample("..AAA", seed=6, start=3)
    assert again is not GOOD
    assert again.digest() == GOOD.digest()
    turned = dataclasses.replace(GOOD, taps=GOOD.taps.T.contiguous().T, positions=torch.arange(0, 20)[3:8])
    assert not turned.taps.is_contiguous()
    assert turned.digest() == GOOD.digest()


@pytest.mark.parametrize(
    "change",
    [
        {"request_id": "other"},
        {"group_id": "other"},
        {"policy_version": 4},
        {"tap_layers": (1, 2, 5)},
        {"final_is_normed": False},
        {"token_ids": GOOD.token_ids.roll(1)},
        {"positions": GOOD.positions + 1},
        {"loss_mask": ~GOOD.loss_mask},
        {"taps": with_value(GOOD.taps, 0.5)},
        {"final": with_value(GOOD.final, 0.5)},
        {"taps": GOOD.taps.bfloat16()},
        {"final": GOOD.final.view(2, -1)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_any_difference_changes_the_digest(change: dict[str, Any]) -> None:
    other: TapSample = dataclasses.replace(GOOD, **change)
    assert other.digest() != GOOD.digest()
