"""Probes of every vLLM seam the plugin stands on: a clear refusal by name at start, not an attribute error in the middle."""

from __future__ import annotations

import importlib
import logging
from typing import Any

SEAMS: tuple[tuple[str, str], ...] = (
    ("vllm.v1.executor.multiproc_executor", "WorkerProc.worker_busy_loop"),
    ("vllm.v1.executor.multiproc_executor", "WorkerProc._execute_worker_rpc"),
    ("vllm.v1.executor.multiproc_executor", "MultiprocExecutor.collective_rpc"),
    ("vllm.distributed.device_communicators.shm_broadcast", "MessageQueue.dequeue"),
    ("vllm.distributed.parallel_state", "get_tp_group"),
    ("vllm.v1.engine.utils", "get_engine_process_shutdown_timeout"),
    ("vllm.v1.engine.core_client", "MPClient.shutdown"),
    ("vllm.v1.engine.core", "EngineCore.collective_rpc"),
    ("vllm.v1.engine.core", "EngineCore.set_weight_version"),
    ("vllm.v1.engine.core", "EngineCore.post_step"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.schedule"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output"),
    ("vllm.v1.core.sched.output", "SchedulerOutput.num_spec_tokens_to_schedule"),
    ("vllm.v1.spec_decode.llm_base_proposer", "SpecDecodeBaseProposer.propose"),
    ("vllm.v1.attention.backend", "CommonAttentionMetadata"),
    ("vllm.v1.engine.core_client", "AsyncMPClient.set_weight_version_async"),
    ("vllm.v1.engine.async_llm", "AsyncLLM.generate"),
    ("vllm.outputs", "CompletionOutput.weight_versions"),
    ("vllm.v1.core.block_pool", "BlockPool.reset_prefix_cache"),
    ("vllm.v1.core.block_pool", "BlockHashToBlockMap"),
    ("vllm.v1.sample.rejection_sampler", "expand_batch_to_tokens"),
    ("vllm.v1.sample.rejection_sampler", "apply_sampling_constraints"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._sample"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._bookkeeping_sync"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.execute_model"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.sample_tokens"),
    ("vllm.model_executor.model_loader.reload", "initialize_layerwise_reload"),
    ("vllm.model_executor.model_loader.reload", "finalize_layerwise_reload"),
    ("vllm.model_executor.model_loader.reload.layerwise", "LAYERWISE_INFO"),
)
"""(module, dotted name) of what is called, wrapped or replaced."""

QUEUE_ATTRIBUTES = ("buffer", "current_idx", "local_reader_rank", "shutting_down", "dequeue", "_spin_condition.wait")
"""What the worker's patched loop reads of its message queue."""

TESTED = ("0.32",)
"""vLLM versions (major.minor) the whole test suite ran on."""

logger = logging.getLogger(__name__)


class UnsupportedVllmError(RuntimeError):
    """The installed vLLM lacks a seam."""


def probe() -> None:
    """Raise `UnsupportedVllmError` that names the first seam which is missing; say so when this vLLM was never tested."""
    version = vllm_version()
    for module_name, dotted in SEAMS:
        try:
            _attribute(importlib.import_module(module_name), dotted)
        except (ImportError, AttributeError):
            raise _missing(f"{module_name}:{dotted}") from None
    if not version.startswith(tuple(f"{tested}." for tested in TESTED)):
        logger.warning(
            "specdraft was tested with vLLM %s; this is %s, in which all its seams were found", ", ".join(TESTED), version
        )


def check_queue(queue: Any) -> None:
    """Refuse a message queue that the worker's loop cannot look into. Raises `UnsupportedVllmError`."""
    for name in QUEUE_ATTRIBUTES:
        try:
            _attribute(queue, name)
        except AttributeError:
            raise _missing(f"{type(queue).__name__}.{name} of the worker's message queue") from None


def _attribute(found: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        found = getattr(found, part)
    return found


def _missing(seam: str) -> UnsupportedVllmError:
    return UnsupportedVllmError(
        f"specdraft needs {seam}, which vLLM {vllm_version()} does not have; use vLLM {' or '.join(TESTED)}, or start plain vLLM"
    )


def check_engine(runner: Any) -> None:
    """Refuse, by name, an engine whose steps the plugin would misread. Raises `UnsupportedVllmError`."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    parallel = runner.vllm_config.parallel_config
    if not isinstance(runner, GPUModelRunner):
        raise UnsupportedVllmError("specdraft needs the V1 model runner: set VLLM_USE_V2_MODEL_RUNNER=0")
    if runner.use_async_scheduling:
        raise UnsupportedVllmError("specdraft reads sampled tokens after each step: add --no-async-scheduling")
    for name in ("pipeline_parallel_size", "data_parallel_size", "nnodes"):
        if getattr(parallel, name, 1) != 1:
            option = f"--{name.replace('_', '-')}"
            raise UnsupportedVllmError(f"specdraft runs with tensor parallelism only so far: leave out {option}")
    if runner.drafter is None or not runner.use_aux_hidden_state_outputs:
        raise UnsupportedVllmError("specdraft needs a draft over tapped hidden states: the engine was started without one")


def vllm_version() -> str:
    """Version of the imported vLLM, whatever its distribution is called."""
    return getattr(importlib.import_module("vllm"), "__version__", "unknown")
