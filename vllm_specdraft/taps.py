"""Engine taps: hidden states of accepted tokens only, gathered by request and absolute position while the engine generates.

The runner's forward sees, per request, the last accepted token followed by draft tokens; the sampler then says how many of
them stand. Rows of rejected drafts are never copied. A row is stored at its absolute position, so chunked prefill, preemption
and resumption need no cases of their own: a position computed again is written again. Positions that a prefix-cache hit
spared the engine are filled from whoever computed them (`vllm_specdraft.prefixes`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from trainer_bridge.taps import TapSample
from vllm_specdraft.acceptance import AcceptanceLog
from vllm_specdraft.prefixes import BLOCK_TOKENS, PrefixChain, PrefixIndex


def _group_of(prompt_ids: Sequence[int]) -> str:
    """Siblings of one prompt share its hash, whatever the request ids."""
    return hashlib.blake2b(repr(list(prompt_ids)).encode(), digest_size=12).hexdigest()


_ANSWER_ROWS = 64
"""Room for so much of an answer at first."""


class _Rows:
    """Growing row store of one request: taps and final state side by side, and which positions are known."""

    def __init__(self, width: int, limit: int, chain: PrefixChain, prompt_tokens: int) -> None:
        """`limit`: positions from this one on are not kept."""
        # NumPy: a step writes a row for each request, and a small write through torch takes several times as long.
        self._data = np.empty((min(prompt_tokens + _ANSWER_ROWS, limit), width), np.float32)
        self._known = np.zeros(len(self._data), bool)
        self._limit = limit
        self._prompt_tokens = prompt_tokens
        self.chain = chain
        self.indexed = 0
        """Blocks of the prompt that the prefix index knows of."""

    def write(self, start: int, sources: Sequence[np.ndarray]) -> None:
        """``[rows, width]`` each, side by side from position `start` on."""
        count = min(len(sources[0]), max(0, self._limit - start))
        stop, column = start + count, 0
        if stop > len(self._data):
            capacity = min(self._limit, max(stop, 2 * len(self._data)))
            data, known = np.empty((capacity, self._data.shape[1]), np.float32), np.zeros(capacity, bool)
            data[: len(self._data)], known[: len(self._known)] = self._data, self._known
            self._data, self._known = data, known
        for source in sources:
            self._data[start:stop, column : column + source.shape[1]] = source[:count]
            column += source.shape[1]
        self._known[start:stop] = True

    def put(self, position: int, row: np.ndarray) -> bool:
        """One row of the answer; False when that takes more than to write it."""
        if position >= len(self._data):
            return position >= self._limit
        if position < self._prompt_tokens:
            return False
        self._data[position] = row
        self._known[position] = True
        return True

    def grows_at(self, stop: int) -> bool:
        """Whether rows up to `stop` need more memory than the store has."""
        return min(stop, self._limit) > len(self._data)

    def first_rows(self, count: int) -> torch.Tensor | None:
        """Rows ``0..count-1``, which are the store's own memory; None when one of them was never seen."""
        if count > len(self._data) or not self._known[:count].all():
            return None
        return torch.from_numpy(self._data[:count])

    def take(self, count: int) -> torch.Tensor | None:
        """The same as `first_rows`, at the end of the store's life: they hold no more memory than they fill, and are no copy."""
        if (rows := self.first_rows(count)) is not None:
            del rows
            self._data.resize((count, self._data.shape[1]), refcheck=False)
            rows = torch.from_numpy(self._data)
        return rows

    @property
    def nbytes(self) -> int:
        return self._data.nbytes


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
    of_draft: bool = True
    """Whether the draft proposed them: only then do they say something of it."""
    prompt_ids: Sequence[int]
    refused: str | None = None
    """Why the request cannot be tapped, as it is counted; None when it can."""
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
    max_total_tokens: int | None = None
    """Longest prompt and answer together that the engine serves."""


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
        limit_bytes: int = 1 << 40,
        deliver: Callable[[TapSample], object],
    ) -> None:
        """`limit_bytes`: bound of the rows of running requests; requests that start beyond it are not tapped."""
        self.tap_layers = tuple(tap_layers)
        self.enabled = True
        """False: requests that start now are not tapped. Acceptance is counted all the same."""
        self.counters = TapCounters(per_position=[0] * num_speculative_tokens)
        self.acceptance = AcceptanceLog(num_speculative_tokens)
        self.dropped: Counter[str] = Counter()
        self.filled_rows = 0
        """Prompt rows that came from another request."""
        self.cut_samples = 0
        """Samples of which only the first `max_sample_tokens` tokens were kept."""
        self._policy_version, self._deliver = policy_version, deliver
        self._max_sample_tokens, self._limit_bytes = max_sample_tokens, limit_bytes
        self._prefixes = PrefixIndex()
        self._rows: dict[str, _Rows] = {}
        self._untapped: dict[str, str] = {}
        self._versions: dict[str, int] = {}

    @property
    def running_bytes(self) -> int:
        """Bytes of the rows of running requests."""
        return sum(store.nbytes for store in self._rows.values())

    def step(self, parts: Sequence[StepRows], taps: Sequence[torch.Tensor], final: torch.Tensor) -> None:
        """Store the rows that stand after one engine step.

        Args:
            parts: the requests of the step.
            taps: per tap layer ``[tokens, hidden]``, the step's flat batch.
            final: ``[tokens, hidden]``, after the target's final norm.
        """
        holes: list[tuple[StepRows, int]] = []
        found: list[np.ndarray] | None = None
        for part in parts:
            self._count(part)
            if part.request_id in self._untapped or part.start >= self._max_sample_tokens:
                if part.request_id not in self._rows:
                    self._untapped.setdefault(part.request_id, "prompt_too_long")
                continue
            standing = part.rows.stop - part.rows.start - part.num_drafts
            if part.num_drafts:
                standing += max(0, len(part.sampled) - 1)
            rows = slice(part.rows.start, part.rows.start + standing)
            store = self._rows.get(part.request_id)
            if store is None:
                store = self._open(part, width=sum(tap.shape[1] for tap in taps) + final.shape[1])
                if store is None:
                    continue
                if part.start:
                    holes.append((part, standing))
            elif store.grows_at(part.start + standing) and self.running_bytes > self._limit_bytes:
                self._give_up(part.request_id, "tap_memory")
                continue
            if found is None:
                # All rows of the step at once, where they have to come from another device, and only when somebody wants some.
                states = [*taps, final] if final.device.type == "cpu" else [torch.cat([*taps, final], -1)]
                found = [rows.float().cpu().numpy() for rows in states]
            store.write(part.start, [source[rows] for source in found])
            if not holes or holes[-1][0] is not part:
                self._index(store, min(part.start + standing, len(part.prompt_ids)))
        self._fill(holes)

    def plain_step(
        self, ids: Sequence[str], starts: Sequence[int], tokens: int, taps: Sequence[torch.Tensor], final: torch.Tensor
    ) -> bool:
        """Store the rows of a step that had one of each request, and no drafts: the same as `step`, sooner.

        Args:
            ids, starts: of the requests, and the position of each one's row.
            tokens: generated by the step.
            taps, final: as for `step`.

        Returns:
            False when `step` has to do it.
        """
        # NumPy: the engine core has a core of the machine for itself meanwhile, and torch would wait for a thread on it.
        found = np.concatenate([rows.float().cpu().numpy() for rows in (*taps, final)], -1) if self._rows else None
        for index, (request_id, start) in enumerate(zip(ids, starts, strict=True)):
            store = self._rows.get(request_id)
            if store is None:
                if request_id not in self._untapped:
                    return False
            elif found is not None and not store.put(start, found[index]):
                return False
        self.counters.generated_tokens += tokens
        return True

    def _open(self, part: StepRows, width: int) -> _Rows | None:
        """A store for a request that starts, or None when it is not tapped."""
        refused = part.refused or (None if self.enabled else "taps_off")
        if refused is None and self.running_bytes > self._limit_bytes:
            refused = "tap_memory"
        if refused is not None:
            self._untapped[part.request_id] = refused
            return None
        version = self._policy_version()
        store = _Rows(width, self._max_sample_tokens, PrefixChain(version, part.prompt_ids), len(part.prompt_ids))
        self._rows[part.request_id], self._versions[part.request_id] = store, version
        return store

    def _fill(self, holes: list[tuple[StepRows, int]]) -> None:
        """Fill the first rows of requests that start behind a prefix-cache hit.

        After all rows of the step are there, and again while that helps: what a hit spared one request, a sibling of the same
        step may have computed, behind a hit of its own.
        """
        while holes:
            left = []
            for part, standing in holes:
                store = self._rows[part.request_id]
                first = self._prefixes.find(store.chain, part.start)
                if first is None:
                    left.append((part, standing))
                    continue
                store.write(0, [first.numpy()])
                self.filled_rows += part.start
                self._index(store, min(part.start + standing, len(part.prompt_ids)))
            if len(left) == len(holes):
                break
            holes = left
        for part, _ in holes:
            # Without these rows nothing of the request can be learned from.
            self._give_up(part.request_id, "hole")

    def _give_up(self, request_id: str, reason: str) -> None:
        """Tap a request no longer; `reason` is counted when it ends."""
        del self._rows[request_id]
        self._untapped[request_id] = reason

    def _index(self, store: _Rows, known: int) -> None:
        """Let the prefix index know of the prompt's blocks among the first `known` rows."""
        if known // BLOCK_TOKENS > store.indexed:
            keys = store.chain.keys_until(known)
            self._prefixes.add(keys[store.indexed :], store)
            store.indexed = len(keys)

    def _count(self, part: StepRows) -> None:
        counters = self.counters
        counters.generated_tokens += len(part.sampled)
        if not part.num_drafts or not part.sampled or not part.of_draft:
            return
        accepted = len(part.sampled) - 1
        counters.draft_steps += 1
        counters.drafted_tokens += part.num_drafts
        counters.accepted_tokens += accepted
        self.acceptance.step(part.request_id, accepted, drafted=part.num_drafts)
        for position in range(min(accepted, len(counters.per_position))):
            counters.per_position[position] += 1

    def discard(self, request_id: str) -> None:
        """The request ended, and nothing is known of it that a sample needs."""
        self.acceptance.finish(request_id)
        self._versions.pop(request_id, None)
        if (reason := self._untapped.pop(request_id, None)) is not None:
            self.dropped[reason] += 1
        if self._rows.pop(request_id, None) is not None:
            self.dropped["no_prompt_ids"] += 1

    def finish(self, request: FinishedRequest) -> TapSample | None:
        """The request ended: build its sample and deliver it. None when it gave none (counted in `dropped`)."""
        self.acceptance.finish(request.request_id)
        rows = self._rows.pop(request.request_id, None)
        version = self._versions.pop(request.request_id, -1)
        untapped = self._untapped.pop(request.request_id, None)
        if untapped is not None:
            self.dropped[untapped] += 1
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
        whole = [*request.prompt_ids, *answer]
        ids = torch.tensor(whole[: self._max_sample_tokens])
        if len(ids) <= len(request.prompt_ids):
            self.dropped["prompt_too_long"] += 1
            return None
        taken = rows.take(len(ids) - 1)
        if taken is None:
            self.dropped["hole"] += 1
            return None
        self.cut_samples += len(ids) < len(whole)
        sample = self._sample(request, version, ids, taken)
        # A next turn's prompt may be this prompt and answer.
        chain = PrefixChain(version, ids.tolist())
        self._prefixes.add(chain.keys_until(len(ids) - 1), sample)
        self._deliver(sample)
        return sample

    def _sample(self, request: FinishedRequest, version: int, ids: torch.Tensor, rows: torch.Tensor) -> TapSample:
        hidden = rows.shape[1] // (len(self.tap_layers) + 1)
        mask = torch.zeros(len(ids), dtype=torch.bool)
        mask[len(request.prompt_ids) :] = True
        return TapSample(
            request_id=request.request_id,
            group_id=_group_of(request.prompt_ids),
            policy_version=version,
            token_ids=ids,
            positions=torch.arange(len(ids)),
            loss_mask=mask,
            tap_layers=self.tap_layers,
            taps=rows[:, :-hidden],
            final=rows[:, -hidden:],
            final_is_normed=True,
        )

    def _returned(self, request: FinishedRequest) -> list[int]:
        """Answer tokens up to the end the scheduler saw: the worker's own list may run on inside an accepted run.

        What runs on behind a stop string stays: the worker knows no text, and these tokens were sampled from the target too.
        """
        answer = list(request.answer_ids)
        if request.max_answer_tokens is not None:
            answer = answer[: request.max_answer_tokens]
        if request.max_total_tokens is not None:
            answer = answer[: max(0, request.max_total_tokens - len(request.prompt_ids))]
        for index, token in enumerate(answer):
            if token in request.stop_ids:
                return answer[: index + 1]
        return answer
