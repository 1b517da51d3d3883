"""Catches a gate that publishes noise, or that compares two drafts as if they had seen different samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from trainer_bridge.draft.interface import Acceptance
from vllm_specdraft.gate import Gate, Verdict


def acceptance(lengths: Sequence[float], anchors: Sequence[int]) -> Acceptance:
    """Samples of a mean accepted length each."""
    count = torch.tensor(anchors)
    return Acceptance(accepted_sum=torch.tensor(lengths, dtype=torch.float64) * count, anchors=count, hits=torch.zeros(3).long())


def decide(
    served: Sequence[float], candidate: Sequence[float], anchors: Sequence[int] | None = None, *, min_gain: float = 0.02
) -> Verdict:
    anchors = anchors or [20] * len(served)
    return Gate(min_gain=min_gain).decide([acceptance(served, anchors)], [acceptance(candidate, anchors)])


def noise(count: int) -> list[float]:
    """Gains per sample that go up and down by a quarter token around nothing."""
    return [0.25 if i % 2 else -0.25 for i in range(count)]


def test_an_equal_draft_is_not_published() -> None:
    verdict = decide([1.5, 2.0, 1.2], [1.5, 2.0, 1.2], min_gain=0.0)
    assert (verdict.gain, verdict.standard_error, verdict.publish) == (0.0, 0.0, False)


def test_a_worse_draft_is_not_published() -> None:
    verdict = decide([2.0, 2.1, 1.9, 2.0], [1.5, 1.6, 1.4, 1.5])
    assert verdict.gain == pytest.approx(-0.5)
    assert not verdict.publish


def test_a_clear_gain_is_published_with_its_numbers() -> None:
    verdict = decide([1.5, 1.6, 1.4, 1.5, 1.5, 1.5], [1.9, 2.1, 1.8, 2.0, 1.9, 2.0])
    assert verdict.publish
    assert (verdict.served, verdict.candidate) == (pytest.approx(1.5), pytest.approx(1.95))
    assert verdict.gain == pytest.approx(0.45)
    assert 0 < verdict.standard_error < 0.1


def test_a_gain_below_the_least_one_is_not_published_however_certain() -> None:
    served = [1.5] * 50
    assert decide(served, [1.519] * 50).standard_error == pytest.approx(0, abs=1e-12)
    assert not decide(served, [1.519] * 50).publish
    assert decide(served, [1.521] * 50).publish


def test_a_gain_within_its_error_is_not_published() -> None:
    """The same mean gain: with a spread that could have made it, no; without, yes."""
    served = [1.5] * 8
    gains = [0.5, -0.3, 0.6, -0.4, 0.4, -0.2, 0.5, -0.3]
    noisy = decide(served, [1.5 + gain for gain in gains])
    steady = decide(served, [1.6] * 8)
    assert noisy.gain == pytest.approx(0.1) == steady.gain
    assert noisy.standard_error > noisy.gain
    assert not noisy.publish
    assert steady.publish


@pytest.mark.parametrize(("errors", "publish"), [(1.9, False), (2.1, True)])
def test_the_gain_must_exceed_two_standard_errors(errors: float, publish: bool) -> None:
    """Beyond the least gain: the gate looks at nearly the same samples again and again."""
    spread = decide([1.5] * 16, [1.5 + gain for gain in noise(16)]).standard_error
    mean = 0.02 + errors * spread
    verdict = decide([1.5] * 16, [1.5 + mean + gain for gain in noise(16)])
    assert verdict.gain == pytest.approx(mean)
    assert verdict.standard_error == pytest.approx(spread)
    assert verdict.publish is publish


def test_few_samples_say_nothing_about_their_spread() -> None:
    """Five that agree by chance have hardly any error."""
    assert not decide([1.5] * 5, [2.5] * 5).publish
    assert decide([1.5] * 6, [2.5] * 6).publish


def test_the_error_is_the_textbook_one_for_samples_of_one_size() -> None:
    """Equal anchors: the standard error of a mean of independent gains."""
    gains = torch.tensor([0.3, 0.1, -0.2, 0.4, 0.15], dtype=torch.float64)
    verdict = decide([1.5] * 5, (1.5 + gains).tolist())
    assert verdict.gain == pytest.approx(float(gains.mean()))
    assert verdict.standard_error == pytest.approx(float(gains.std(correction=1)) / math.sqrt(5))


def test_long_samples_weigh_by_their_anchors() -> None:
    verdict = decide([1.0, 2.0], [2.0, 2.0], [30, 10])
    assert verdict.served == pytest.approx(1.25)
    assert verdict.gain == pytest.approx(0.75)


def test_one_sample_leaves_the_error_infinite() -> None:
    verdict = decide([1.0], [3.0], [1000])
    assert verdict.gain == pytest.approx(2.0)
    assert verdict.standard_error == math.inf
    assert not verdict.publish


def test_no_anchors_decide_nothing() -> None:
    verdict = decide([1.0, 1.0], [1.0, 1.0], [0, 0])
    assert (verdict.gain, verdict.standard_error, verdict.publish) == (0.0, math.inf, False)


def test_the_error_shrinks_with_the_number_of_samples() -> None:
    verdicts = [decide([1.5] * n, [1.6 + gain for gain in noise(n)]) for n in (8, 32, 128)]
    errors = [verdict.standard_error for verdict in verdicts]
    assert errors[0] > 1.8 * errors[1] > 1.8 * 1.8 * errors[2]
    assert [verdict.publish for verdict in verdicts] == [False, False, True]


def test_drafts_are_compared_sample_by_sample() -> None:
    """Samples differ far more than drafts do: a small steady gain shows through, the same gain at random does not."""
    served = [1.0, 3.0, 1.2, 2.8, 1.1, 3.1]
    paired = decide(served, [length + 0.1 for length in served])
    shuffled = decide(served, [length + 0.1 for length in reversed(served)])
    assert paired.gain == pytest.approx(shuffled.gain)
    assert paired.standard_error < 1e-9
    assert paired.publish
    assert shuffled.standard_error > 0.5
    assert not shuffled.publish


def test_microbatches_only_cut_the_list_of_samples() -> None:
    served, candidate, anchors = [1.5, 1.6, 1.4, 1.9], [1.9, 1.5, 1.8, 2.0], [3, 8, 5, 2]
    whole = decide(served, candidate, anchors)
    cut = Gate(min_gain=0.02).decide(
        [acceptance(served[:1], anchors[:1]), acceptance(served[1:], anchors[1:])],
        [acceptance(candidate[:1], anchors[:1]), acceptance(candidate[1:], anchors[1:])],
    )
    assert cut == whole
