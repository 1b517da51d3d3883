"""An engine made by hand around one tap: it keeps a true row for every (request, position) and lays steps out as the runner
does, with rejected drafts' rows full of a value that must never be seen again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trainer_bridge.taps import TapSample
from vllm_specdraft.taps import EngineTap, FinishedRequest, StepRows

PROMPT = [11, 12, 13, 14, 15]
HIDDEN = 4
LAYERS = (1, 3, 5)
DRAFTS = 3
REJECTED = -777.0


def true_rows(request: str, layer: int, positions: range) -> torch.Tensor:
    """``[positions, HIDDEN]``: what this layer holds at these positions; no two of all rows are equal."""
    seed = sum(ord(c) * 31**i for i, c in enumerate(request)) % 1000
    base = torch.tensor([[1000.0 * seed + 100.0 * layer + position] for position in positions]).reshape(-1, 1)
    return base + torch.arange(HIDDEN) / HIDDEN


class Play:
    """An engine made by hand around one tap."""

    def __init__(self, **options: Any) -> None:
        self.policy_version = 5
        self.prompts: dict[str, Sequence[int]] = {}
        """Prompts of requests by id, where `PROMPT` is not meant."""
        self.delivered: list[TapSample] = []
        self.plain_steps = 0
        self.tap = EngineTap(
            tap_layers=LAYERS,
            num_speculative_tokens=DRAFTS,
            policy_version=lambda: self.policy_version,
            deliver=self.delivered.append,
            **options,
        )

    def step(self, *parts: tuple[str, int, int, int, Sequence[int]]) -> None:
        """One engine step of several requests: (request, first position, rows without drafts, drafts, sampled tokens)."""
        rows: list[StepRows] = []
        layers: list[list[torch.Tensor]] = [[] for _ in (*LAYERS, 0)]
        offset = 0
        for request, start, fed, drafts, sampled in parts:
            count = fed + drafts
            kept = fed + max(0, len(sampled) - 1) if drafts else fed
            rows.append(
                StepRows(
                    request_id=request,
                    start=start,
                    rows=slice(offset, offset + count),
                    num_drafts=drafts,
                    prompt_ids=self.prompts.get(request, PROMPT),
                    sampled=sampled,
                )
            )
            for index, layer in enumerate((*LAYERS, 0)):
                values = true_rows(request, layer, range(start, start + count))
                values[kept:] = REJECTED
                layers[index].append(values)
            offset += count
        joined = [torch.cat(parts) for parts in layers]
        # As the runner's tap does: the short way where it can be gone.
        if all(fed == 1 and not drafts for _, _, fed, drafts, _ in parts):
            tokens = sum(len(sampled) for *_, sampled in parts)
            ids, starts = [part[0] for part in parts], [part[1] for part in parts]
            if self.tap.plain_step(ids, starts, tokens, joined[:-1], joined[-1]):
                self.plain_steps += 1
                return
        self.tap.step(rows, joined[:-1], joined[-1])

    def finish(
        self, request: str, prompt: Sequence[int], answer: Sequence[int], *, stops: Sequence[int] = (), limit: int | None = None
    ) -> TapSample | None:
        return self.tap.finish(
            FinishedRequest(
                request_id=request,
                prompt_ids=prompt,
                answer_ids=answer,
                stop_ids=frozenset(stops),
                max_answer_tokens=limit,
            )
        )


def assert_whole(
    sample: TapSample | None, request: str, prompt: Sequence[int], answer: Sequence[int], *, filled: tuple[str, int] = ("", 0)
) -> None:
    """The sample keeps the contract (n tokens, n - 1 rows) and every row is the true one of its request and position.

    `filled`: a request that the first so many rows came from.
    """
    assert sample is not None
    sample.validate()
    n = len(prompt) + len(answer)
    assert sample.request_id == request
    assert sample.token_ids.tolist() == [*prompt, *answer]
    assert sample.positions.tolist() == list(range(n))
    assert sample.loss_mask.tolist() == [False] * len(prompt) + [True] * len(answer)
    assert (sample.tap_layers, sample.final_is_normed) == (LAYERS, True)
    source, count = filled

    def expected(layer: int) -> torch.Tensor:
        return torch.cat([true_rows(source, layer, range(count)), true_rows(request, layer, range(count, n - 1))])

    assert torch.equal(sample.taps, torch.cat([expected(layer) for layer in LAYERS], -1))
    assert torch.equal(sample.final, expected(0))
