"""Every monkey patch of vLLM, one function each: why, and when it can go. All are idempotent."""

from __future__ import annotations

import functools
import logging
import threading
import time
from typing import Any

import torch

from vllm_specdraft import answers, compat
from vllm_specdraft.versions import version_label

logger = logging.getLogger(__name__)

TRANSFER_BACKEND = "specdraft"
"""Name of our backend among vLLM's for weight transfer."""
GRACE_S = 10.0
"""Longest that a stopping server waits for its engine, in seconds."""
_MARK = "_specdraft_patches"
"""Attribute of a patched function: the names of the patches in it."""


def install() -> None:
    """Install all patches in this process."""
    worker_learns_between_messages()
    engine_core_swaps_at_a_boundary()
    steps_without_drafts_fetch_none()
    steps_without_drafts_sample_plainly()
    seeded_requests_survive_chunked_prefill()
    sampling_parameters_reach_verified_tokens()
    engine_may_save_before_it_ends()
    answers_know_their_versions()


def _has(function: Any, patch: str) -> bool:
    """Whether `patch` is in a function already. By name: a method may be inherited with another patch in it."""
    return patch in getattr(function, _MARK, ())


def _mark(function: Any, patch: str) -> None:
    # What `functools.wraps` took over names the patches inside.
    setattr(function, _MARK, (*getattr(function, _MARK, ()), patch))


def worker_learns_between_messages() -> None:
    """Let a worker train the draft while no message waits for it.

    Why: vLLM has no idle hook. The worker's own loop is the one place that knows of a request at once and that costs the
    engine core nothing (a call from the core would spin there until the reply comes).
    Remove when: vLLM offers an idle callback in the worker.
    """
    from vllm.v1.executor.multiproc_executor import WorkerProc

    original = WorkerProc.worker_busy_loop
    if _has(original, "worker_learns_between_messages"):
        return

    @functools.wraps(original)
    def worker_busy_loop(self: Any) -> None:
        start = getattr(self.worker.worker, "specdraft_start", None)
        if start is None or self.rpc_broadcast_mq is None:
            return original(self)
        queue = self.rpc_broadcast_mq
        compat.check_queue(queue)
        agent = start()
        try:
            while True:
                agent.catch_up()
                if message_waits(queue, agent.wait_s()):
                    self._execute_worker_rpc(queue.dequeue(indefinite=True))
                else:
                    agent.window_open()
        finally:
            agent.close()

    _mark(worker_busy_loop, "worker_learns_between_messages")
    WorkerProc.worker_busy_loop = worker_busy_loop


def message_waits(queue: Any, timeout_s: float) -> bool:
    """Whether a message is there within `timeout_s`, without taking it.

    Not ``dequeue(timeout=...)``: a message too large for the ring is announced there and sent through a socket, and a time-out
    between the two would lose it. Also true when the queue was shut down, for then ``dequeue`` must raise.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        with queue.buffer.get_metadata(queue.current_idx) as flags:
            if queue.shutting_down or (flags[0] and not flags[queue.local_reader_rank + 1]):
                return True
        left_ms = 1e3 * (deadline - time.monotonic())
        if left_ms <= 0:
            return False
        queue._spin_condition.wait(timeout_ms=max(1, int(left_ms)))


def engine_core_swaps_at_a_boundary() -> None:
    """Give the engine core its calls: swap the draft in all workers, commit an update of target and draft, both with the KV
    cache of the old weights dropped; build an update aside; and everything else that the workers do on request.

    Why: swap and drop must happen between the same two steps, and vLLM's own prefix-cache reset refuses while a request runs.
    Only the first worker answers: when a worker's answer is an error, vLLM raises and leaves the answers of the others in
    their queues, where the next call would take them for its own.
    Remove when: vLLM salts prefix-cache entries with the draft's version, and reads all answers.
    """
    from vllm.v1.engine.core import EngineCore

    if hasattr(EngineCore, "specdraft_swap"):
        return

    def specdraft_swap(self: Any, request: dict[str, Any]) -> dict[str, Any]:
        record = self.model_executor.collective_rpc("specdraft_swap", args=(request,), unique_reply_rank=0)
        # What the next step gives comes from this pair.
        self.set_weight_version(version_label(record["policy_version"], record["draft_version"]))
        _tell_the_governor(self.scheduler)
        record["prefix_blocks_dropped"] = drop_prefix_cache(self.scheduler, f"draft-{record['draft_version']}")
        return record

    def specdraft_commit(self: Any, request: dict[str, Any]) -> dict[str, Any]:
        if self.model_executor.is_sleeping:
            raise RuntimeError("the engine sleeps and has no weights to replace: wake it up (POST /wake_up), then send it again")
        if request["running"] == "recompute":
            # Before the weights change: where this fails, nothing has changed.
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
        record = self.model_executor.collective_rpc("specdraft_commit", args=(request,), unique_reply_rank=0)
        label = version_label(record["policy_version"], record["draft_version"])
        self.set_weight_version(label)
        _tell_the_governor(self.scheduler)
        record["prefix_blocks_dropped"] = drop_prefix_cache(self.scheduler, label)
        return record

    def specdraft_sync(self: Any, request: dict[str, Any]) -> dict[str, Any]:
        return self.model_executor.collective_rpc("specdraft_sync", args=(request,), unique_reply_rank=0)

    def specdraft_control(self: Any, request: dict[str, Any]) -> dict[str, Any]:
        return self.model_executor.collective_rpc("specdraft_control", args=(request,), unique_reply_rank=0)

    def specdraft_govern(self: Any, request: dict[str, Any]) -> dict[str, Any]:
        governor = getattr(self.scheduler, "specdraft_governor", None)
        if governor is None:
            raise RuntimeError("there is no governor: the server was started with --no-governor")
        if "tokens" in request:
            governor.fix(request["tokens"])
        return governor.report()

    EngineCore.specdraft_govern = specdraft_govern
    EngineCore.specdraft_swap = specdraft_swap
    EngineCore.specdraft_commit = specdraft_commit
    EngineCore.specdraft_sync = specdraft_sync
    EngineCore.specdraft_control = specdraft_control


def _tell_the_governor(scheduler: Any) -> None:
    """What was accepted of the old pair says little of the new one."""
    if (tell := getattr(scheduler, "specdraft_weights_changed", None)) is not None:
        tell()


def steps_without_drafts_fetch_none() -> None:
    """Save the round trip to the workers for the drafts of a step that made none.

    Why: a step without drafts has to cost what it costs an engine that never drafts; vLLM asks all the same.
    Remove when: vLLM's engine core does not ask after ``num_spec_tokens_to_schedule == 0``.
    """
    from vllm.v1.engine.core import EngineCore

    original = EngineCore.post_step
    if _has(original, "steps_without_drafts_fetch_none"):
        return

    @functools.wraps(original)
    def post_step(self: Any, model_executed: bool) -> None:
        drafted = getattr(self.scheduler, "specdraft_drafted", None)
        if drafted is None or drafted():
            original(self, model_executed)

    _mark(post_step, "steps_without_drafts_fetch_none")
    EngineCore.post_step = post_step


def seeded_requests_survive_chunked_prefill() -> None:
    """Rewind a seeded request's random state after a partial prefill in a way that CPU generators know.

    Why: vLLM 0.32 samples for unfinished prefills too and then takes their generators back by an offset, which a CPU
    generator refuses with an exception: one request with ``seed`` and a prefill cut in two ends the whole engine.
    Remove when: the CPU model runner rewinds generators itself.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    sample, bookkeep = CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync
    if _has(sample, "seeded_requests_survive_chunked_prefill"):
        return

    @functools.wraps(sample)
    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        discarded = [i for i in generators if i < self.input_batch.num_reqs and self.discard_request_mask.np[i]]
        states = {i: generators[i].get_state() for i in discarded}
        output = sample(self, *args, **kwargs)
        for index, state in states.items():
            generators[index].set_state(state)
        return output

    @functools.wraps(bookkeep)
    def _bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            return bookkeep(self, *args, **kwargs)
        finally:
            self.input_batch.generators = generators

    _mark(_sample, "seeded_requests_survive_chunked_prefill")
    CPUModelRunner._sample = _sample
    CPUModelRunner._bookkeeping_sync = _bookkeeping_sync


def sampling_parameters_reach_verified_tokens() -> None:
    """Give every verified token its request's temperature, top-k and top-p on the CPU.

    Why: the CPU replacement of that kernel in vLLM 0.32 writes into a converted copy of its output whenever the output is
    not int64, which a temperature never is: the tokens get uninitialised memory instead, and speculative decoding at any
    temperature above 0 samples from something that is not the target's distribution.
    Remove when: the CPU kernel writes into its output.
    """
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if not current_platform.is_cpu() or rejection_sampler.expand_batch_to_tokens is expand_batch_to_tokens:
        return
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def steps_without_drafts_sample_plainly() -> None:
    """Sample a step that verifies no draft as an engine without drafts does.

    Why: with a speculative configuration vLLM 0.32 takes every step through the rejection sampler. Without a draft in it that
    copies the logits for nothing, and takes the largest top-k of no rows, which raises and ends the engine. The indices of drafts
    are computed for nothing as well, and the engine waits.
    Remove when: vLLM's model runner makes no `SpecDecodeMetadata` for a step without drafts.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner._sample
    if _has(original, "steps_without_drafts_sample_plainly"):
        return

    @functools.wraps(original)
    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        # One row of logits per request, in their order, in either case.
        without = spec_decode_metadata is not None and spec_decode_metadata.max_spec_len == 0
        return original(self, logits, None if without else spec_decode_metadata)

    _mark(_sample, "steps_without_drafts_sample_plainly")
    GPUModelRunner._sample = _sample
    metadata = GPUModelRunner._calc_spec_decode_metadata

    @functools.wraps(metadata)
    def _calc_spec_decode_metadata(self: Any, num_draft_tokens: Any, cu_num_scheduled_tokens: Any) -> Any:
        if num_draft_tokens.any():
            return metadata(self, num_draft_tokens, cu_num_scheduled_tokens)
        return _of_no_drafts(torch.from_numpy(cu_num_scheduled_tokens - 1).to(self.device))

    GPUModelRunner._calc_spec_decode_metadata = _calc_spec_decode_metadata


def _of_no_drafts(last_rows: Any) -> Any:
    """`SpecDecodeMetadata` of requests that verify nothing: ``[requests]`` rows whose logits are sampled from."""
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    return SpecDecodeMetadata(**_nothing(len(last_rows), last_rows.device, last_rows.dtype), logits_indices=last_rows)


@functools.lru_cache(maxsize=256)
def _nothing(requests: int, device: Any, dtype: Any) -> dict[str, Any]:
    """What such metadata have in common for so many requests; nothing of vLLM's writes into them."""
    nothing = torch.empty(0, dtype=dtype, device=device)
    ends = torch.arange(1, requests + 1, dtype=torch.int32, device=device)
    return {
        "draft_token_ids": nothing,
        "num_draft_tokens": [0] * requests,
        "cu_num_draft_tokens": torch.zeros_like(ends),
        "cu_num_sampled_tokens": ends,
        "target_logits_indices": nothing,
        "bonus_logits_indices": ends - 1,
    }


def engine_may_save_before_it_ends() -> None:
    """Give the engine's processes some seconds between being told to stop and being killed.

    Why: with vLLM's default of ``--shutdown-timeout 0`` the API server kills them at once, and with them what was learned since
    the last checkpoint. A larger time-out of vLLM's own would also make a stop wait for running answers.
    Remove when: vLLM gives every platform the window that it gives ROCm.
    """
    from vllm.v1.engine import utils

    original = utils.get_engine_process_shutdown_timeout
    if _has(original, "engine_may_save_before_it_ends"):
        return

    @functools.wraps(original)
    def get_engine_process_shutdown_timeout(request_timeout: float | None, process_timeout: float | None) -> float | None:
        if request_timeout == 0 and process_timeout == 0:
            return GRACE_S
        return original(request_timeout, process_timeout)

    _mark(get_engine_process_shutdown_timeout, "engine_may_save_before_it_ends")
    utils.get_engine_process_shutdown_timeout = get_engine_process_shutdown_timeout
    _an_asked_for_end_is_no_error()


def _an_asked_for_end_is_no_error() -> None:
    """Keep vLLM from logging a traceback because the engine that it told to stop has stopped before it was killed."""
    from vllm.v1.engine.core_client import MPClient

    shutdown, stopping = MPClient.shutdown, threading.Event()

    @functools.wraps(shutdown)
    def announced(self: Any, *args: Any, **kwargs: Any) -> None:
        stopping.set()
        shutdown(self, *args, **kwargs)

    def wanted(record: logging.LogRecord) -> bool:
        return not (stopping.is_set() and record.getMessage().startswith("AsyncLLM output_handler failed"))

    MPClient.shutdown = announced
    logging.getLogger("vllm.v1.engine.async_llm").addFilter(wanted)


def answers_know_their_versions() -> None:
    """Let the HTTP request that an answer is made for see what the engine says of the weights behind its tokens.

    Why: vLLM labels the tokens of each step with the weights that were served, and its OpenAI routes drop the labels.
    Remove when: those routes report `CompletionOutput.weight_versions`.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    original = AsyncLLM.generate
    if _has(original, "answers_know_their_versions"):
        return

    # No generator itself: requests are counted when they are made, in the order of their prompts, not when they first answer.
    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs, recorder = original(self, *args, **kwargs), answers.RECORDER.get()
        return outputs if recorder is None else recorder.follow(outputs)

    _mark(generate, "answers_know_their_versions")
    AsyncLLM.generate = generate


def weight_transfer_has_our_backend() -> None:
    """Register our backend with vLLM's weight transfer, and have the engine core follow an update that comes that way.

    Why: vLLM leaves it to the client to pause, to drop the prefix cache and to name the version; a client that forgets one of them
    gets answers out of two policies, labelled as one.
    Remove when: vLLM's ``finish_weight_update`` does all three.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.engine.core import EngineCore

    if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            TRANSFER_BACKEND, "vllm_specdraft.weight_transfer", "SpecdraftWeightTransferEngine"
        )
    original = EngineCore.collective_rpc
    if _has(original, "weight_transfer_has_our_backend"):
        return

    @functools.wraps(original)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        ours = method == "finish_weight_update" and _transfers_with_us(self.vllm_config)
        if ours:
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
        results = original(self, method, *args, **kwargs)
        if ours:
            found = self.specdraft_control({"action": "status"})
            label = version_label(found["policy_version"], found["draft_version"])
            self.set_weight_version(label)
            _tell_the_governor(self.scheduler)
            drop_prefix_cache(self.scheduler, label)
        return results

    _mark(collective_rpc, "weight_transfer_has_our_backend")
    EngineCore.collective_rpc = collective_rpc


def _transfers_with_us(vllm_config: Any) -> bool:
    transfer = vllm_config.weight_transfer_config
    return transfer is not None and transfer.backend == TRANSFER_BACKEND


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat each request's value for each of its tokens, with one value replaced.

    >>> # x = [a, b, c], cu_num_tokens = [2, 5, 6]  ->  [a, a, b, b, b, c]

    Args:
        x: ``[batch]`` values.
        cu_num_tokens: ``[batch]`` cumulative number of tokens.
        num_tokens: the last of them.
        replace_from, replace_to: value in `x` that becomes another; equal: none does.

    Returns:
        ``[num_tokens]``, dtype of `x`.
    """
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1, dtype=torch.int64))
    expanded = x.repeat_interleave(counts, output_size=num_tokens)
    return expanded if replace_from == replace_to else expanded.masked_fill(expanded == replace_from, replace_to)


def drop_prefix_cache(scheduler: Any, salt: str) -> int:
    """Make every cached block unreachable for later requests; running requests keep their blocks. The number dropped.

    Running requests go on with blocks whose draft KV is the old draft's: right in its outputs, merely less well accepted.
    What they cache from now on is salted, so no later request can reach it.
    """
    from vllm.v1.core.block_pool import BlockHashToBlockMap

    pool = scheduler.kv_cache_manager.block_pool
    dropped = 0
    for block in pool.blocks:
        if block.block_hash is not None:
            dropped += 1
            block.reset_hash()
    pool.cached_block_hash_to_block = BlockHashToBlockMap()
    pool.cached_block_hashes_by_block.clear()
    prefix = salt.encode()
    for request in scheduler.requests.values():
        request.cache_salt = f"{request.cache_salt or ''}{salt}"
        request.block_hashes = [type(value)(prefix + value) for value in request.block_hashes]
    return dropped
