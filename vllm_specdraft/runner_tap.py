"""Binds the engine tap to a vLLM model runner: wraps two of its methods on the instance, nothing on the class."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from trainer_bridge.taps import TapSample
from vllm_specdraft.governor import plan
from vllm_specdraft.taps import EngineTap, FinishedRequest, StepRows

T = TypeVar("T")


class RunnerTap:
    """Reads accepted rows around sampling, and finished requests before the next step removes them.

    ``sample_tokens`` is the seam because it is called for every step that ran the target; the drafter's own call is skipped
    for a whole batch near the draft's length limit. What is read is stored later (`catch_up`), while the engine core plans the
    next step and the worker would only wait for it.
    """

    def __init__(
        self,
        runner: Any,
        *,
        tap_layers: Sequence[int],
        num_speculative_tokens: int,
        policy_version: Callable[[], int],
        max_sample_tokens: int,
        limit_bytes: int,
        deliver: Callable[[TapSample], object],
        step_began: Callable[[], None],
        step_ended: Callable[[], None],
        failed: Callable[[Exception], None],
        governed: Callable[[dict[str, Any]], None],
    ) -> None:
        """`failed` is told when tapping raised; then nothing is tapped any more, and the engine runs on. `governed` is told what
        the governor reports, who sits in another process."""
        self._runner = runner
        self._step_began, self._step_ended, self._failed = step_began, step_ended, failed
        self._governed = governed
        self._broken = False
        self.in_step = False
        """Between a step's forward and the end of its sampling: whoever works now holds the step up."""
        self._later: deque[Callable[[], object]] = deque()
        self.collector = EngineTap(
            tap_layers=tap_layers,
            num_speculative_tokens=num_speculative_tokens,
            policy_version=policy_version,
            max_sample_tokens=max_sample_tokens,
            limit_bytes=limit_bytes,
            deliver=deliver,
        )
        self._max_model_len = runner.model_config.max_model_len
        self._execute_model, self._sample_tokens = runner.execute_model, runner.sample_tokens
        runner.execute_model, runner.sample_tokens = self._on_execute, self._on_sample

    def catch_up(self) -> None:
        """Store what the last step left, unless the next one is half done. Called before every message, and every step."""
        while self._later and not self.in_step:
            self._guarded(self._later.popleft())

    def _on_execute(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self.catch_up()
        for request_id in scheduler_output.finished_req_ids:
            self._guarded(self._finish, request_id)
        if (report := getattr(scheduler_output, plan.REPORT, None)) is not None:
            self._guarded(self._governed, report)
        if scheduler_output.total_num_scheduled_tokens:
            self.in_step = True
            self._step_began()
        try:
            return self._execute_model(scheduler_output, *args, **kwargs)
        except BaseException:
            # No sampling will follow: without this the window would stay shut for ever.
            self._end_step()
            raise

    def _on_sample(self, *args: Any, **kwargs: Any) -> Any:
        state = self._runner.execute_model_state
        # Read before sampling: bookkeeping moves the batch's counters on.
        starts = self._guarded(self._starts) if state is not None else None
        try:
            output = self._sample_tokens(*args, **kwargs)
            if starts is not None and state.aux_hidden_states is not None:
                self._later.append(partial(self._store, starts, state, output))
            return output
        finally:
            if state is not None:
                self._end_step()

    def _end_step(self) -> None:
        self.in_step = False
        self._step_ended()

    def _guarded(self, work: Callable[..., T], *args: Any) -> T | None:
        """A guest in the engine's step: what it raises must not end the step."""
        if self._broken:
            return None
        try:
            return work(*args)
        except Exception as error:  # noqa: BLE001 - told, and tapping ends
            self._broken = True
            self._failed(error)
            return None

    def _starts(self) -> list[int]:
        """Position of each request's first row."""
        batch = self._runner.input_batch
        return batch.num_computed_tokens_cpu[: len(batch.req_ids)].tolist()

    def _store(self, starts: list[int], state: Any, output: Any) -> None:
        planned, ids = state.scheduler_output, self._runner.input_batch.req_ids
        if not planned.scheduled_spec_decode_tokens and planned.total_num_scheduled_tokens == len(ids):
            tokens = sum(map(len, output.sampled_token_ids))
            if self.collector.plain_step(ids, starts, tokens, state.aux_hidden_states, state.hidden_states):
                return
        parts = self._parts(planned, starts, output)
        self.collector.step(parts, state.aux_hidden_states, state.hidden_states)

    def _parts(self, scheduler_output: Any, starts: list[int], output: Any) -> list[StepRows]:
        parts, offset = [], 0
        for index, request_id in enumerate(self._runner.input_batch.req_ids):
            count = scheduler_output.num_scheduled_tokens[request_id]
            drafts = scheduler_output.scheduled_spec_decode_tokens.get(request_id, ())
            parts.append(
                StepRows(
                    request_id=request_id,
                    start=starts[index],
                    rows=slice(offset, offset + count),
                    num_drafts=len(drafts),
                    of_draft=not getattr(scheduler_output, plan.VERIFIES_TEXT, False),
                    prompt_ids=self._runner.requests[request_id].prompt_token_ids or (),
                    refused=_refusal(self._runner.requests[request_id]),
                    sampled=output.sampled_token_ids[output.req_id_to_index[request_id]],
                )
            )
            offset += count
        return parts

    def _finish(self, request_id: str) -> None:
        """Read what the runner knows of a request; its sample is built later."""
        request = self._runner.requests.get(request_id)
        if request is None or request.prompt_token_ids is None or request.sampling_params is None:
            self._later.append(partial(self.collector.discard, request_id))
            return
        params = request.sampling_params
        finished = FinishedRequest(
            request_id=request_id,
            prompt_ids=request.prompt_token_ids,
            answer_ids=list(request.output_token_ids),
            stop_ids=frozenset((params.stop_token_ids or ()) if params.ignore_eos else params.all_stop_token_ids),
            max_answer_tokens=params.max_tokens,
            max_total_tokens=self._max_model_len,
        )
        self._later.append(partial(self.collector.finish, finished))


def _refusal(request: Any) -> str | None:
    """Why a request gives no sample: it is no text of the policy. None when it may give one."""
    embeds = request.prompt_embeds is not None or request.prompt_is_token_ids is not None
    if request.prompt_token_ids is None or request.sampling_params is None or request.mm_features or embeds:
        return "no_prompt_ids"
    # An adapter makes another policy of the target: its states have another teacher.
    return "adapter" if request.lora_request is not None else None
