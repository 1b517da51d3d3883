"""Probes of every vLLM seam the plugin stands on: a clear refusal by name at start, not an attribute error in the middle."""

from __future__ import annotations

import importlib
from typing import Any

SEAMS: tuple[tuple[str, str], ...] = (
    ("vllm.v1.executor.multiproc_executor", "WorkerProc.worker_busy_loop"),
    ("vllm.v1.executor.multiproc_executor", "WorkerProc._execute_worker_rpc"),
    ("vllm.v1.engine.core", "EngineCore.collective_rpc"),
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
)
"""(module, dotted name) of what is called, wrapped or replaced."""

TESTED = ("0.32",)
"""vLLM versions (major.minor) the whole test suite ran on."""


class UnsupportedVllmError(RuntimeError):
    """The installed vLLM lacks a seam."""


def probe() -> None:
    """Raise `UnsupportedVllmError` that names the first seam which is missing."""
    for module_name, dotted in SEAMS:
        try:
            found = importlib.import_module(module_name)
            for part in dotted.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            raise UnsupportedVllmError(
                f"specdraft needs {module_name}:{dotted}, which vLLM {vllm_version()} does not have; "
                f"use vLLM {' or '.join(TESTED)}, or start plain vLLM"
            ) from None


def check_engine(runner: Any) -> None:
    """Refuse, by name, an engine whose steps the plugin would misread. Raises `UnsupportedVllmError`."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    parallel = runner.vllm_config.parallel_config
    if not isinstance(runner, GPUModelRunner):
        raise UnsupportedVllmError("specdraft needs the V1 model runner: set VLLM_USE_V2_MODEL_RUNNER=0")
    if runner.use_async_scheduling:
        raise UnsupportedVllmError("specdraft reads sampled tokens after each step: add --no-async-scheduling")
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if getattr(parallel, name) != 1:
            raise UnsupportedVllmError(f"specdraft runs with one worker so far: leave out --{name.replace('_', '-')}")
    if runner.drafter is None or not runner.use_aux_hidden_state_outputs:
        raise UnsupportedVllmError("specdraft needs a draft over tapped hidden states: the engine was started without one")


def vllm_version() -> str:
    """Version of the imported vLLM, whatever its distribution is called."""
    return getattr(importlib.import_module("vllm"), "__version__", "unknown")
