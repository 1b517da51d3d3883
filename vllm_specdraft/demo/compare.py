"""The comparison's arithmetic: the order of arms, paired ratios, summaries, and where two token sequences part.

Words: *none* is the stock engine, *first* the draft as it was before any learning, *live* the draft that learned. A pair is
one prompt (or one batch of prompts) answered by every arm, one arm right after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

NONE, FIRST, LIVE = "none", "first", "live"
ARMS = (NONE, FIRST, LIVE)
B1, B1_T1, B8 = "b1", "b1_t1", "b8"
"""Phases: one greedy request at a time, one sampled at temperature 1, eight greedy ones at once."""
TIE_LOGPROB = 1e-4
"""Logprobs closer than this tie: another order of the same fp32 sums moves them as much."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One arm's turn in one pair."""

    arm: str
    """By its name."""
    pair: int
    """Which pair."""
    names: tuple[str, ...]
    """The prompts' names."""
    prompt_ids: tuple[tuple[int, ...], ...]
    """The prompts as tokens."""
    token_ids: tuple[tuple[int, ...], ...]
    """The answers as tokens."""
    wall_s: float
    """From the first request to the last answer, prefill included."""
    decode_s: float | None
    """Sum over the requests of the time from first to last token; None when the server did not tell."""
    draft_steps: int | None
    """Target steps that verified drafted tokens, times requests; None for the plain engine."""
    accepted_tokens: int | None
    """Drafted tokens that were accepted; None for the plain engine."""
    accepted_per_position: tuple[int, ...] | None = None
    """The same by place in the draft."""

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return sum(len(ids) for ids in self.token_ids)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of wall time."""
        return self.tokens / self.wall_s

    @property
    def decode_steps(self) -> int:
        """Target steps after the prefill, times requests: the plain engine takes one for each token but the first."""
        if self.draft_steps is not None:
            return self.draft_steps
        return sum(max(0, len(ids) - 1) for ids in self.token_ids)


@dataclass(frozen=True, kw_only=True)
class ArmSummary:
    """One arm over all pairs."""

    arm: str
    """By its name."""
    tokens_per_s: float
    """Median over the pairs."""
    ratio: float
    """Median over the pairs of this arm's tokens per second over the plain engine's in the same pair."""
    accepted_length: float
    """Tokens per target step of a request, bonus included; 1 for the plain engine."""
    step_ms: float | None
    """Mean time of a target step, drafting included, for one request at a time; None when a server did not tell."""
    accepted_share_per_position: tuple[float, ...] = ()
    """Of the steps that verified drafted tokens, the share in which all tokens up to this place in the draft were accepted."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place where an arm's greedy answer leaves the plain engine's."""

    arm: str
    """The arm that differs."""
    prompt: str
    """The prompt's name."""
    position: int
    """Index into the answer's tokens."""
    context_ids: tuple[int, ...]
    """Prompt and the answer's common tokens: what both arms had seen."""
    none_token: int | None
    """The plain engine's token there; None when its answer had ended."""
    arm_token: int | None
    """The arm's token there; None when its answer had ended."""


def order_of(pair: int, arms: Sequence[str] = ARMS) -> tuple[str, ...]:
    """The arms' order in a pair, rotated so that each arm comes first, second and third equally often."""
    start = pair % len(arms)
    return tuple(arms[start:]) + tuple(arms[:start])


def complete_pairs(measurements: Sequence[Measurement], arms: Sequence[str] = ARMS) -> dict[int, dict[str, Measurement]]:
    """Measurements by pair and arm; pairs that lack an arm (an interrupted run) are left out."""
    pairs: dict[int, dict[str, Measurement]] = {}
    for item in measurements:
        pairs.setdefault(item.pair, {})[item.arm] = item
    return {pair: by_arm for pair, by_arm in sorted(pairs.items()) if all(arm in by_arm for arm in arms)}


def paired_ratios(measurements: Sequence[Measurement], arm: str, *, baseline: str = NONE) -> list[float]:
    """For each complete pair, the arm's tokens per second over the baseline's."""
    return [
        by_arm[arm].tokens_per_s / by_arm[baseline].tokens_per_s
        for by_arm in complete_pairs(measurements, (arm, baseline)).values()
    ]


def summarise(measurements: Sequence[Measurement], arms: Sequence[str] = ARMS) -> list[ArmSummary]:
    """One summary per arm over the complete pairs, in their order; empty when no pair is complete."""
    pairs = complete_pairs(measurements, arms)
    if not pairs:
        return []
    kept = [item for by_arm in pairs.values() for item in by_arm.values()]
    return [_summary(arm, [item for item in kept if item.arm == arm], paired_ratios(kept, arm)) for arm in arms]


def _summary(arm: str, items: Sequence[Measurement], ratios: Sequence[float]) -> ArmSummary:
    steps = sum(item.draft_steps or 0 for item in items)
    accepted = sum(item.accepted_tokens or 0 for item in items)
    timed = [item for item in items if item.decode_s is not None]
    decode_steps = sum(item.decode_steps for item in timed)
    decode_s = sum(item.decode_s or 0.0 for item in timed)
    places = zip(*(item.accepted_per_position for item in items if item.accepted_per_position), strict=True)
    return ArmSummary(
        arm=arm,
        tokens_per_s=median(item.tokens_per_s for item in items),
        ratio=median(ratios),
        accepted_length=1.0 + accepted / steps if steps else 1.0,
        accepted_share_per_position=tuple(sum(counts) / steps for counts in places) if steps else (),
        step_ms=1000.0 * decode_s / decode_steps if decode_steps else None,
    )


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first place where two sequences differ, an end counting as a difference; None when they are equal.

    >>> first_difference([5, 6, 7], [5, 9, 7])
    1
    >>> first_difference([5, 6], [5, 6, 7])
    2
    """
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def differences(measurements: Sequence[Measurement], arms: Sequence[str] = ARMS) -> list[Difference]:
    """Every greedy answer that is not the plain engine's, with its first difference."""
    found = []
    for by_arm in complete_pairs(measurements, arms).values():
        none = by_arm[NONE]
        for arm in (arm for arm in arms if arm != NONE):
            answers = zip(none.names, none.prompt_ids, none.token_ids, by_arm[arm].token_ids, strict=True)
            for name, prompt_ids, expected, got in answers:
                position = first_difference(expected, got)
                if position is None:
                    continue
                found.append(
                    Difference(
                        arm=arm,
                        prompt=name,
                        position=position,
                        context_ids=prompt_ids + expected[:position],
                        none_token=expected[position] if position < len(expected) else None,
                        arm_token=got[position] if position < len(got) else None,
                    )
                )
    return found


def is_tie(difference: Difference, logprobs: Mapping[int, float], *, within: float = TIE_LOGPROB) -> bool:
    """Whether rounding explains a difference: its tokens are the two best, and their logprobs are within `within`."""
    tokens = {difference.none_token, difference.arm_token}
    best = sorted(logprobs, key=lambda token: logprobs[token], reverse=True)[:2]
    return set(best) == tokens and abs(logprobs[best[0]] - logprobs[best[1]]) <= within
