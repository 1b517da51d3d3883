"""Steps that draft nothing cost nothing of the draft, and the draft's KV cache is complete all the same once it drafts again.

vLLM runs the draft in every step, also in those whose drafts it throws away, because a draft that was left out has no keys and
values for that step's tokens. Here such a step only keeps the hidden states that the draft would have read, by the slot of the KV
cache that they belong to; the first step that drafts again gives them to the draft, for the requests that are in it. Slots are what
requests share (a prompt's blocks, a finished request's prefix), so nothing more has to be known of requests.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_WHOLE, _LOST = -1, -2
_PENDING_ROWS = 256
"""Rows that wait to be kept together."""
ROWS_PER_STEP = 2048
"""Rows that one step fills at most: coming back must not hold a step up for long."""


@dataclass
class GapCounters:
    """What was left out and made up for."""

    steps_without_draft: int = 0
    kept_rows: int = 0
    filled_rows: int = 0
    lost_rows: int = 0
    """Rows whose hidden states had to go before they were needed: the draft accepts less behind them."""
    fills: int = 0
    fill_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Gap:
    """Consecutive tokens of one request that the draft has not seen."""

    index: int
    """Of the request in the batch."""
    start: int
    """Position of the first."""
    slots: np.ndarray
    rows: np.ndarray
    """Where their hidden states are kept."""

    @property
    def end(self) -> int:
        return self.start + len(self.slots)


class DraftGaps:
    """What one runner's draft was left out of."""

    def __init__(self, runner: Any, *, limit_bytes: int) -> None:
        """`limit_bytes`: of hidden states kept; the oldest go first."""
        self._runner, self._drafter = runner, runner.drafter
        self._limit_bytes = limit_bytes
        self._propose = self._drafter.propose
        # The KV cache comes later than this object.
        self._block_size = 0
        self._row_of = np.zeros(0, np.int32)
        self._rows: torch.Tensor | None = None
        self._slot_of = np.zeros(0, np.int64)
        self._next = self._held = 0
        self._pending: list[tuple[np.ndarray, Sequence[torch.Tensor]]] = []
        self._pending_rows = 0
        self._whole: dict[str, tuple[int, int]] = {}
        """Requests without a gap before their last rows, which were these."""
        self.counters = GapCounters()

    def _allocate(self, width: int, like: torch.Tensor) -> None:
        """All memory at once: no rank may run out of it in the middle, while others go on."""
        self._block_size = int(self._drafter.block_size)
        slots = self._runner.kv_cache_config.num_blocks * self._block_size
        rows = max(1, min(slots, self._limit_bytes // (width * like.element_size())))
        self._row_of = np.full(slots, _WHOLE, np.int32)
        # Written to: a page that is new to the process takes microseconds, which steps would pay one by one.
        self._rows = torch.empty(rows, width, dtype=like.dtype, device=like.device).fill_(0)
        self._slot_of = np.full(rows, -1, np.int64)

    # -- a step without drafts ---------------------------------------------------------------------------------------------

    def leave_out(self, inputs: dict[str, Any]) -> None:
        """Keep what ``propose(**inputs)`` would have read."""
        metadata, hidden = inputs["common_attn_metadata"], inputs["target_hidden_states"]
        bounds = metadata.query_start_loc_cpu.numpy()
        slots = metadata.slot_mapping[: bounds[-1]].cpu().numpy()
        hidden = hidden[: bounds[-1]]
        refused = inputs.get("num_rejected_tokens_gpu")
        if refused is not None:
            # The last rows of each request are drafts that did not stand.
            ends = np.repeat(bounds[1:] - refused.cpu().numpy()[: len(bounds) - 1], np.diff(bounds))
            rows = np.flatnonzero(np.arange(bounds[-1]) < ends)
            slots, hidden = slots[rows], hidden[torch.from_numpy(rows)]
        self._left_out(slots, [hidden])
        self._keep_pending()

    def leave_out_plain(self, metadata: Any, states: Sequence[torch.Tensor]) -> None:
        """The same of a step in which every row stands; `states`: ``[rows, hidden]`` per tap layer, which side by side are what the
        draft reads."""
        count = int(metadata.query_start_loc_cpu[-1])
        slots = metadata.slot_mapping[:count].cpu().numpy()
        on_cpu = states[0].device.type == "cpu"
        # The slots are a buffer of the runner's; so are the states, where steps are captured as graphs.
        self._left_out(slots.copy() if on_cpu else slots, [state[:count] for state in states])
        if not on_cpu:
            self._keep_pending()

    def catch_up(self) -> None:
        """Between two steps: keep what waits, once it is enough to be worth a write."""
        if self._pending_rows >= _PENDING_ROWS:
            self._keep_pending()

    def _left_out(self, slots: np.ndarray, states: Sequence[torch.Tensor]) -> None:
        if self._rows is None:
            self._allocate(sum(state.shape[1] for state in states), states[0])
        self._pending.append((slots, states))
        self._pending_rows += len(slots)
        for request_id in self._runner.input_batch.req_ids:
            self._whole.pop(request_id, None)
        self.counters.steps_without_draft += 1

    def _keep_pending(self) -> None:
        """What waits is kept now, in its order. Many small writes would take longer than their rows."""
        pending, self._pending, self._pending_rows = self._pending, [], 0
        if not pending:
            return
        slots = np.concatenate([slots for slots, _ in pending])
        if len({len(states) for _, states in pending}) > 1:
            pending = [(slots, [torch.cat(list(states), -1)]) for slots, states in pending]
        columns = zip(*(states for _, states in pending), strict=True)
        self._keep(slots, [torch.cat(column) if len(column) > 1 else column[0] for column in columns])

    def _keep(self, slots: np.ndarray, states: Sequence[torch.Tensor]) -> None:
        assert self._rows is not None
        first = max(0, len(slots) - len(self._slot_of))
        self._lose(slots[:first])
        # In two parts where the end of the memory comes between.
        while first < len(slots):
            stop = first + min(len(slots) - first, len(self._slot_of) - self._next)
            self._write(self._next, slots[first:stop], [state[first:stop] for state in states])
            self._next = (self._next + stop - first) % len(self._slot_of)
            first = stop

    def _write(self, start: int, slots: np.ndarray, states: Sequence[torch.Tensor]) -> None:
        assert self._rows is not None
        stop = start + len(slots)
        taken = np.arange(start, stop)
        # The oldest make room.
        before = self._slot_of[start:stop]
        if before[-1] >= 0:
            self._lose(before[(before >= 0) & (self._row_of[np.maximum(before, 0)] == taken)])
        # A slot may come twice: what was in it last counts.
        different = np.unique(slots)
        self._held += int(np.count_nonzero(self._row_of[different] < 0))
        self._row_of[slots] = taken
        self._slot_of[start:stop] = slots
        column = 0
        for state in states:
            self._rows[start:stop, column : column + state.shape[1]] = state
            column += state.shape[1]
        self.counters.kept_rows += len(slots)

    def _lose(self, slots: np.ndarray) -> None:
        self._held -= int((self._row_of[slots] >= 0).sum())
        self._row_of[slots] = _LOST
        self.counters.lost_rows += len(slots)

    # -- the first steps with drafts ---------------------------------------------------------------------------------------

    def make_up(self, inputs: dict[str, Any]) -> None:
        """Before ``propose(**inputs)``: give the draft what it was left out of, as far as these requests need it."""
        self._keep_pending()
        if not (self._held or self.counters.lost_rows):
            return
        self._forget_requests()
        metadata = inputs["common_attn_metadata"]
        bounds = metadata.query_start_loc_cpu.numpy()
        # This step's own rows are drafted for as always.
        self._forget(metadata.slot_mapping[: bounds[-1]].cpu().numpy())
        firsts = inputs["target_positions"][torch.from_numpy(bounds[:-1].astype(np.int64))].tolist()
        left = min(ROWS_PER_STEP, self._drafter.max_num_tokens)
        began, filled = time.perf_counter(), 0
        while left > 0:
            gaps = self._first_gaps(metadata, bounds, firsts, left)
            if not gaps:
                break
            self._fill(gaps, inputs)
            count = sum(len(gap.slots) for gap in gaps)
            left, filled = left - count, filled + count
        if filled:
            self.counters.fills += 1
            self.counters.filled_rows += filled
            self.counters.fill_s += time.perf_counter() - began

    def _first_gaps(self, metadata: Any, bounds: np.ndarray, firsts: list[int], left: int) -> list[_Gap]:
        """The first gap of each request, `left` rows at most.

        One per request: with several layers a later gap's states depend on an earlier one's.
        """
        found = []
        for index, request_id in enumerate(self._runner.input_batch.req_ids[: len(firsts)]):
            first, last = firsts[index], firsts[index] + int(bounds[index + 1] - bounds[index])
            before = self._whole.get(request_id)
            if before is not None and before[0] <= first <= before[1]:
                self._whole[request_id] = (first, last)
                continue
            positions = np.arange(first)
            table = metadata.block_table_tensor[index].cpu().numpy()
            slots = table[positions // self._block_size].astype(np.int64) * self._block_size + positions % self._block_size
            rows = self._row_of[slots]
            missing = np.flatnonzero(rows >= 0)
            if not missing.size:
                self._whole[request_id] = (first, last)
                continue
            if left <= 0:
                continue
            breaks = np.flatnonzero(np.diff(missing) != 1)
            start = int(missing[0])
            end = start + min(int(breaks[0]) + 1 if breaks.size else missing.size, left)
            found.append(_Gap(index=index, start=start, slots=slots[start:end], rows=rows[start:end].astype(np.int64)))
            # Whoever shares them finds them whole: the draft sees all of a pass's keys.
            self._forget(slots[start:end])
            left -= end - start
        return found

    def _fill(self, gaps: list[_Gap], inputs: dict[str, Any]) -> None:
        """One pass of the draft over rows that it was not run for."""
        assert self._rows is not None
        hidden = self._rows[torch.from_numpy(np.concatenate([gap.rows for gap in gaps]))]
        positions = torch.from_numpy(np.concatenate([np.arange(gap.start, gap.end) for gap in gaps]))
        positions = positions.to(inputs["target_positions"])
        slots = torch.from_numpy(np.concatenate([gap.slots for gap in gaps]))
        slots = slots.to(inputs["common_attn_metadata"].slot_mapping)
        model = self._drafter.model
        if (store := getattr(model, "precompute_and_store_context_kv", None)) is not None:
            # A block drafter's trunk is nothing but keys and values; its pass would also write those of a block.
            store(model.combine_hidden_states(hidden), positions, slots)
        else:
            self._pass(gaps, inputs, hidden, positions, slots)

    def _pass(
        self, gaps: list[_Gap], inputs: dict[str, Any], hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        metadata, device = inputs["common_attn_metadata"], hidden.device
        tokens = self._runner.input_batch.token_ids_cpu
        bounds = torch.tensor([0, *itertools.accumulate(len(gap.slots) for gap in gaps)], dtype=torch.int32)
        ends = torch.tensor([gap.end for gap in gaps], dtype=torch.int32)
        ids = np.concatenate([tokens[gap.index, gap.start : gap.end] for gap in gaps])
        passed = CommonAttentionMetadata(
            query_start_loc=bounds.to(device),
            query_start_loc_cpu=bounds,
            seq_lens=ends.to(device),
            seq_lens_cpu_upper_bound=ends,
            num_reqs=len(gaps),
            num_actual_tokens=int(bounds[-1]),
            max_query_len=max(len(gap.slots) for gap in gaps),
            max_seq_len=int(ends.max()),
            block_table_tensor=metadata.block_table_tensor[[gap.index for gap in gaps]],
            slot_mapping=slots,
            causal=True,
        )
        self._propose(
            num_speculative_tokens=0,
            target_token_ids=torch.from_numpy(ids).to(inputs["target_token_ids"]),
            target_positions=positions,
            target_hidden_states=hidden,
            next_token_ids=torch.tensor([int(tokens[gap.index, gap.end]) for gap in gaps]).to(inputs["next_token_ids"]),
            token_indices_to_sample=None,
            sampling_metadata=inputs["sampling_metadata"],
            common_attn_metadata=passed,
            mm_embed_inputs=None,
            num_rejected_tokens_gpu=None,
            slot_mappings=None,
        )

    def skipped(self, metadata: Any) -> None:
        """vLLM left the draft out of a step by itself: what was kept for its slots is another request's."""
        self._keep_pending()
        if self._rows is not None:
            self._forget(metadata.slot_mapping[: int(metadata.query_start_loc_cpu[-1])].cpu().numpy())

    def _forget_requests(self) -> None:
        """Those that are gone."""
        batch = self._runner.input_batch.req_id_to_index
        if len(self._whole) > 2 * len(batch) + 64:
            self._whole = {request: rows for request, rows in self._whole.items() if request in batch}

    def _forget(self, slots: np.ndarray) -> None:
        """The draft has seen, or is about to see, what belongs there."""
        self._held -= int((self._row_of[slots] >= 0).sum())
        self._row_of[slots] = _WHOLE
