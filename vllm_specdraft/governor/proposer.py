"""What a step's drafts come from: the draft, the request's own text, or nothing. In every rank, as the scheduler planned it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_specdraft.governor import ngram, plan
from vllm_specdraft.governor.gaps import DraftGaps

logger = logging.getLogger(__name__)


class GovernedProposer:
    """Stands before one runner's ``drafter.propose``."""

    def __init__(self, runner: Any, *, gap_bytes: int) -> None:
        """`gap_bytes`: bound of the hidden states kept for a draft that was left out, in bytes."""
        self._runner = runner
        self.gaps = DraftGaps(runner, limit_bytes=gap_bytes)
        self._plan, self._propose, self._sample = runner.propose_draft_token_ids, runner.drafter.propose, runner.sample_tokens
        self._matches = self._broken = self._asked = False
        # Positions of several dimensions would need more than a number to be found again: there the draft runs in every step.
        if not (runner.drafter.uses_mrope or runner.uses_mrope):
            ngram.warm_up()
            runner.propose_draft_token_ids, runner.drafter.propose = self._on_plan, self._on_propose
            runner.sample_tokens = self._on_sample

    @torch.inference_mode()
    def catch_up(self) -> None:
        """Between two steps: what the last one left to be done."""
        self._guarded(self.gaps.catch_up)

    def _on_sample(self, *args: Any, **kwargs: Any) -> Any:
        state, self._asked = self._runner.execute_model_state, False
        output = self._sample(*args, **kwargs)
        if state is not None and not self._asked and state.spec_decode_common_attn_metadata is not None:
            # A request near the longest length: the whole batch goes without drafts.
            self.gaps.skipped(state.spec_decode_common_attn_metadata)
        return output

    def _on_plan(
        self,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        spec_decode_metadata: Any,
        common_attn_metadata: Any,
        slot_mappings: Any,
    ) -> Any:
        self._asked = True
        self._matches = getattr(scheduler_output, plan.FROM_TEXT, False)
        none_now = scheduler_output.num_spec_tokens_to_schedule == 0 and not self._matches
        none_before = spec_decode_metadata is not None and spec_decode_metadata.max_spec_len == 0
        if none_now and none_before and aux_hidden_states is not None:
            # Nothing of what vLLM prepares for the draft is needed: every row stands, and its hidden states are kept as they are.
            found = self._guarded(lambda: self._plainly(common_attn_metadata, aux_hidden_states))
            if found is not None:
                return found
        return self._plan(
            scheduler_output, sampled_token_ids, sampling_metadata, hidden_states, sample_hidden_states, aux_hidden_states,
            spec_decode_metadata, common_attn_metadata, slot_mappings,
        )  # fmt: skip

    def _on_propose(self, num_speculative_tokens: int, **inputs: Any) -> torch.Tensor:
        found = self._before(num_speculative_tokens, inputs)
        return found if found is not None else self._propose(num_speculative_tokens=num_speculative_tokens, **inputs)

    def _before(self, tokens: int, inputs: dict[str, Any]) -> torch.Tensor | None:
        """What a step without the draft proposes; None: the draft has to be asked, and has made up for what it missed."""

        def before() -> torch.Tensor | None:
            if tokens == 0 or self._matches:
                proposed = self._without_draft(tokens, inputs)
                self.gaps.leave_out(inputs)
                return proposed
            self.gaps.make_up(inputs)
            return None

        return self._guarded(before)

    def _plainly(self, metadata: Any, states: Sequence[torch.Tensor]) -> torch.Tensor:
        self.gaps.leave_out_plain(metadata, states)
        return self._without_draft(0, {"common_attn_metadata": metadata, "target_hidden_states": states[0]})

    def _guarded(self, work: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        """A guest in the engine's step: what it raises must not end the step, only its own part."""
        if self._broken:
            return None
        try:
            return work()
        except Exception:
            logger.exception("the draft runs in every step from here on: keeping what it is left out of failed")
            self._broken = True
        return None

    def _without_draft(self, tokens: int, inputs: dict[str, Any]) -> torch.Tensor:
        """``[requests, tokens]``, padded with -1."""
        device = inputs["target_hidden_states"].device
        # Of an earlier step's drafts.
        self._runner.drafter._last_draft_probs = None
        if tokens == 0:
            return torch.empty(inputs["common_attn_metadata"].num_reqs, 0, dtype=torch.int64, device=device)
        return ngram.propose(self._runner, inputs, tokens).to(device)
