"""Engine taps: hidden states of accepted tokens only, gathered by request and absolute position while the engine generates.

The runner's forward sees, per request, the last accepted token followed by draft tokens; the sampler then says how many of
them stand. Rows of rejected drafts are never copied. A row is stored at its absolute position, so chunked prefill, preemption
and resumption need no cases of their own: a position computed again is written again.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from trainer_bridge.taps import TapSample


def _group_of(prompt_ids: Sequence[int]) -> str:
    """Siblings of one prompt share its hash, whatever the request ids."""
    return hashlib.blake2b(repr(list(prompt_ids)).encode(), digest_size=12).hexdigest()


class _Rows:
    """Growing row store of one request: taps and final state side by side, and which positions are known."""

    def __init__(self, width: int) -> None:
        self._data = torch.empty(256, width)
        self._known = torch.zeros(256, dtype=torch.bool)

    def write(self, start: int, rows: torch.Tensor) -> None:
        stop = start + rows.shape[0]
        if stop > self._data.shape[0]:
            capacity = max(stop, 2 * self._data.shape[0])
            data, known = torch.empty(capacity, self._data.shape[1]), torch.zeros(capacity, dtype=torch.bool)
            data[: self._data.shape[0]], known[: self._known.shape[0]] = self._data, self._known
            self._data, self._known = data, known
        self._data[start:stop] = rows
        self._known[start:stop] = True

    def take(self, count: int) -> torch.Tensor | None:
        """Rows ``0..count-1``, or None when one of them was never seen."""
        if count > self._data.shape[0] or not bool(self._known[:count].all()):
            return None
        return self._data[:count].clone()


@dataclass(kw_only=True)
class StepRows:
    """One request's share of one engine step."""

    request_id: str
    start: int
    """Absolute position of the first row."""
    rows: slice
    """Rows of the step's flat batch that belong to the request, drafts included."""
    num_drafts: int
    """Draft tokens among them, at the end."""
    sampled: Sequence[int]
    """Tokens that stand after this step: accepted drafts and the bonus token; empty while the prompt is prefilled."""


@dataclass(kw_only=True)
class FinishedRequest:
    """What the engine knows of a request when it ends."""

    request_id: str
    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]
    stop_ids: frozenset[int]
    """Token ids that end an answer: what follows the first one inside an accepted run was never returned."""
    max_answer_tokens: int | None


@dataclass
class TapCounters:
    """Running totals, since start."""

    draft_steps: int = 0
    """Target steps that verified drafts, counted per request."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Draft tokens that stood."""
    generated_tokens: int = 0
    per_position: list[int] = field(default_factory=list)
    """``[k]``: steps in which the first i + 1 drafts stood."""


class EngineTap:
    """Collects rows while requests run and hands a `TapSample` on when one ends."""

    def __init__(
        self,
        *,
        tap_layers: Sequence[int],
        num_speculative_tokens: int,
        policy_version: Callable[[], int],
        max_sample_tokens: int = 1 << 20,
        deliver: Callable[[TapSample], object],
    ) -> None:
        self.tap_layers = tuple(tap_layers)
        self.counters = TapCounters(per_position=[0] * num_speculative_tokens)
        self.dropped: Counter[str] = Counter()
        self._policy_version, self._deliver = policy_version, deliver
        self._max_sample_tokens = max_sample_tokens
        self._rows: dict[str, _Rows] = {}
        self._versions: dict[str, int] = {}

    def step(self, parts: Sequence[StepRows], taps: Sequence[torch.Tensor], final: torch.Tensor) -> None:
        """Store the rows that stand after one engine step.

        Args:
            parts: the requests of the step.
            taps: per tap layer ``[tokens, hidden]``, the step's flat batch.
            final: ``[tokens, hidden]``, after the target's final norm.
        """
        for part in parts:
            self._count(part)
            standing = part.rows.stop - part.rows.start - part.num_drafts
            if part.num_drafts:
                standing += max(0, len(part.sampled) - 1)
            rows = slice(part.rows.start, part.rows.start + standing)
            joined = torch.cat([*(tap[rows] for tap in taps), final[rows]], -1).float()
            store = self._rows.get(part.request_id)
            if store is None:
                store = self._rows[part.request_id] = _Rows(joined.shape[1])
                self._versions[part.request_id] = self._policy_version()
            store.write(part.start, joined)

    def _count(self, part: StepRows) -> None:
        counters = self.counters
        counters.generated_tokens += len(part.sampled)
        if not part.num_drafts or not part.sampled:
            return
        accepted = len(part.sampled) - 1
        counters.draft_steps += 1
        counters.drafted_tokens += part.num_drafts
        counters.accepted_tokens += accepted
        for position in range(min(accepted, len(counters.per_position))):
            counters.per_position[position] += 1

    def discard(self, request_id: str) -> None:
        """The request ended and gives no sample."""
        self._rows.pop(request_id, None)
        self._versions.pop(request_id, None)

    def finish(self, request: FinishedRequest) -> TapSample | None:
        """The request ended: build its sample and deliver it. None when it gave none (counted in `dropped`)."""
        rows = self._rows.pop(request.request_id, None)
        version = self._versions.pop(request.request_id, -1)
        if rows is None:
            return None
        answer = self._returned(request)
        if not answer or len(request.prompt_ids) + len(answer) < 2:
            self.dropped["no_answer"] += 1
            return None
        if version != self._policy_version():
            # Rows of two policies in one sample: no head is the teacher of both.
            self.dropped["policy_changed"] += 1
            return None
        # The first rows of a long answer need no later ones.
        ids = torch.tensor([*request.prompt_ids, *answer][: self._max_sample_tokens])
        if len(ids) <= len(request.prompt_ids):
            self.dropped["prompt_too_long"] += 1
            return None
        taken = rows.take(len(ids) - 1)
        if taken is None:
            # A prefix-cache hit: the engine never computed the first rows of this prompt.
            self.dropped["hole"] += 1
            return None
        hidden = taken.shape[1] // (len(self.tap_layers) + 1)
        mask = torch.zeros(len(ids), dtype=torch.bool)
        mask[len(request.prompt_ids) :] = True
        sample = TapSample(
            request_id=request.request_id,
            group_id=_group_of(request.prompt_ids),
            policy_version=version,
            token_ids=ids,
            positions=torch.arange(len(ids)),
            loss_mask=mask,
            tap_layers=self.tap_layers,
            taps=taken[:, :-hidden].contiguous(),
            final=taken[:, -hidden:].contiguous(),
            final_is_normed=True,
        )
        self._deliver(sample)
        return sample

    def _returned(self, request: FinishedRequest) -> list[int]:
        """Answer tokens up to the end the scheduler saw: the worker's own list may run on inside an accepted run."""
        answer = list(request.answer_ids)
        if request.max_answer_tokens is not None:
            answer = answer[: request.max_answer_tokens]
        for index, token in enumerate(answer):
            if token in request.stop_ids:
                return answer[: index + 1]
        return answer
