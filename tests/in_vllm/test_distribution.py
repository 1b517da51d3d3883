"""Catches: speculative decoding that samples from anything but the target's distribution: parameters of another request, or none;
a rejected draft token that is drawn again; a bonus token out of place; a swap that leaks into what is sampled.

The exact distribution of the first four tokens after a prompt is computed with transformers for a tiny random target, and
compared with thousands of draws. All seeds are fixed. The chance that a right engine fails, had they been drawn anew, is below
1e-4 for all tests of this file together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.in_vllm import run_draws, tiny, tiny_engine
from tests.in_vllm.run_draws import KINDS, TOKENS, VOCAB
from vllm_specdraft import drafts

PROMPT = [5, 17, 9, 20, 3]
REQUESTS = 12000
ALPHA = 1e-6
"""Smallest p-value a comparison may have; some 20 comparisons are made."""
LEAST_EXPECTED = 5.0
"""Cells expected less often are pooled: the chi-square distribution holds from here on."""
SLICES = [(0,), (1,), (2,), (3,), (0, 1), (1, 2), (2, 3), (0, 3)]
"""Which of the four tokens are compared jointly."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logits of this spread give the likeliest token some four tenths of the mass."""
    directory = tmp_path_factory.mktemp("target") / "tiny"
    return tiny.save_target(directory, "llama", tied=False, vocab=VOCAB, spread=2.2, context=0.2, seed=11)


@pytest.fixture(scope="module")
def drawn(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """See `run_draws`."""
    out = tmp_path_factory.mktemp("draws")
    first = drafts.init(target, out / "first", draft_vocab_size=VOCAB - 1)
    arguments = {"target": str(target), "drafts": {"first": str(first)}, "out": str(out), "prompt": PROMPT, "requests": REQUESTS}
    tiny_engine.run_script("tests.in_vllm.run_draws", arguments, timeout_s=400)
    return torch.load(out / "draws.pt", weights_only=False)


@pytest.fixture(scope="module")
def logits(target: Path) -> list[torch.Tensor]:
    """Per depth ``d`` in 0..3 the target's logits ``[VOCAB] * (d + 1)`` after the prompt and any d tokens."""
    model, found = tiny.load(target), []
    for depth in range(TOKENS):
        contexts = torch.cartesian_prod(*[torch.arange(VOCAB)] * depth).view(-1, depth) if depth else torch.empty(1, 0).long()
        rows = []
        for part in contexts.split(4096):
            ids = torch.cat([torch.tensor(PROMPT).expand(len(part), -1), part], 1)
            with torch.no_grad():
                rows.append(model(ids, logits_to_keep=1).logits[:, 0])
        found.append(torch.cat(rows).view(*[VOCAB] * (depth + 1)))
    return found


def _constrained(logits: torch.Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """Probabilities ``[..., vocab]``: temperature, then the k best, then the fewest of them that reach `top_p`."""
    ordered, order = (logits.double() / temperature).sort(-1, descending=True)
    if top_k:
        ordered[..., top_k:] = -torch.inf
    chances = ordered.softmax(-1)
    before = chances.cumsum(-1) - chances
    chances = torch.where(before < top_p, chances, 0.0)
    return torch.zeros_like(chances).scatter(-1, order, chances / chances.sum(-1, keepdim=True))


def _joint(logits: list[torch.Tensor], **parameters: Any) -> torch.Tensor:
    """Joint distribution ``[VOCAB] * 4`` of the four tokens."""
    joint = torch.ones((), dtype=torch.float64)
    for step in logits:
        joint = joint[..., None] * _constrained(step, **parameters)
    return joint


def _p_value(tokens: torch.Tensor, joint: torch.Tensor, which: tuple[int, ...]) -> float:
    """Of a chi-square test that the columns `which` of `tokens` ``[n, 4]`` follow `joint`."""
    expected = joint.sum([d for d in range(TOKENS) if d not in which]).flatten() * len(tokens)
    index = torch.zeros(len(tokens), dtype=torch.int64)
    for column in which:
        index = index * VOCAB + tokens[:, column]
    counts = torch.bincount(index, minlength=expected.shape[0]).double()
    rare = expected < LEAST_EXPECTED
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    if float(expected[-1]) < LEAST_EXPECTED:
        expected = torch.cat([expected[:-2], expected[-2:].sum()[None]])
        counts = torch.cat([counts[:-2], counts[-2:].sum()[None]])
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor(expected.shape[0] - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def _tokens(drawn: dict[str, Any], kind: str) -> torch.Tensor:
    chosen = torch.tensor([run_draws.kind_of(index) == kind for index in range(REQUESTS)])
    return drawn["tokens"][chosen]


def test_drafts_were_accepted_and_rejected_and_swapped_while_drawing(drawn: dict[str, Any]) -> None:
    """Without this, the comparisons below might compare nothing but first tokens."""
    names = ("draft_steps", "drafted_tokens", "accepted_tokens")
    steps, drafted, accepted = (drawn["after"][name] - drawn["before"][name] for name in names)
    assert steps > REQUESTS
    assert 0.1 < accepted / drafted < 0.95
    assert len(drawn["swaps"]) >= 10
    assert all(swap["running"] > 0 for swap in drawn["swaps"])
    versions = [swap["draft_version"] for swap in drawn["swaps"]]
    assert versions == list(range(versions[0], versions[0] + len(versions)))


@pytest.mark.parametrize("kind", ["free", "narrow"])
@pytest.mark.parametrize("which", SLICES, ids=str)
def test_tokens_follow_the_targets_distribution(
    which: tuple[int, ...], kind: str, drawn: dict[str, Any], logits: list[torch.Tensor]
) -> None:
    assert _p_value(_tokens(drawn, kind), _joint(logits, **KINDS[kind]), which) > ALPHA


def test_a_token_that_top_k_and_top_p_exclude_is_never_drawn(drawn: dict[str, Any], logits: list[torch.Tensor]) -> None:
    """With a hair of room: a cumulative probability within rounding of top-p falls on either side."""
    wider = {**KINDS["narrow"], "top_p": KINDS["narrow"]["top_p"] + 1e-5}
    tokens = _tokens(drawn, "narrow")
    assert bool((_joint(logits, **wider)[tuple(tokens.T)] > 0).all())


def test_greedy_requests_in_the_same_batches_stay_greedy(drawn: dict[str, Any], target: Path) -> None:
    tokens = _tokens(drawn, "greedy")
    assert len(tokens) >= 500
    assert len(tokens.unique(dim=0)) == 1
    assert float(tiny.greedy_gaps(tiny.load(target), PROMPT, tokens[0].tolist()).max()) == 0


def test_the_comparison_notices_a_slightly_wrong_distribution(drawn: dict[str, Any], logits: list[torch.Tensor]) -> None:
    """The draws are not those of a temperature of 0.9, nor of a top-k of 7, nor of tokens drawn independently."""
    free, narrow = _tokens(drawn, "free"), _tokens(drawn, "narrow")
    assert _p_value(free, _joint(logits, temperature=0.9), (1,)) < ALPHA
    assert _p_value(narrow, _joint(logits, **{**KINDS["narrow"], "top_k": 7}), (1, 2)) < ALPHA
    joint = _joint(logits, temperature=1.0)
    second, third = joint.sum((0, 2, 3)), joint.sum((0, 1, 3))
    independent = torch.zeros_like(joint)
    independent[0, :, :, 0] = second[:, None] * third[None, :]
    assert _p_value(free, independent, (1, 2)) < ALPHA
