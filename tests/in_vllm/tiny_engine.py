"""An offline engine with the plugin over a tiny target, its engine core in this very process: for scripts of these tests.

In one process with the core, a script decides between which two steps something happens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer_bridge.draft import checkpoint, registry
from vllm_specdraft import cpu
from vllm_specdraft.config import ENVIRONMENT, EngineConfig

DRAFT_TOKENS = 3


def run_script(module: str, arguments: dict[str, Any], *, timeout_s: float, ranks: int = 1) -> None:
    """Run ``python -m module`` with JSON arguments and the engine's environment; raises with its last words on failure."""
    environment = {
        **os.environ,
        **cpu.choose({}, kv_gib=1, ranks=ranks).environment,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-m", module, json.dumps(arguments)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert result.returncode == 0, f"{result.stdout[-2000:]}\n{result.stderr[-4000:]}"


@contextmanager
def engine(target: str, config: EngineConfig, **options: Any) -> Iterator[Any]:
    """An ``LLM`` over `target` that drafts with the plugin; `options` go to vLLM. Ended, with its worker, at the end."""
    from vllm import LLM

    os.environ[ENVIRONMENT] = replace(config, num_speculative_tokens=DRAFT_TOKENS).to_json()
    method = registry.of_config(checkpoint.read_config(Path(config.draft_dir))).engine_method
    speculative = {"method": method, "model": config.draft_dir, "num_speculative_tokens": DRAFT_TOKENS}
    settings = {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "async_scheduling": False,
        # A worker without a process of its own has no loop in which the draft could learn.
        "distributed_executor_backend": "mp",
        "worker_extension_cls": "vllm_specdraft.worker.SpecdraftWorker",
        **options,
        "speculative_config": {**speculative, **options.get("speculative_config", {})},
    }
    llm = LLM(target, **settings)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def answers(llm: Any, prompts: Sequence[list[int]], params: Any) -> list[list[int]]:
    """Token ids of one answer per prompt, all at once."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def answers_stepwise(
    llm: Any, prompts: Sequence[list[int]], params: Sequence[Any], between: Callable[[int], None]
) -> list[list[int]]:
    """Answers as `answers` gives them; ``between(i)`` is called after the i-th engine step."""
    core, finished, step = llm.llm_engine, {}, 0
    for index, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        core.add_request(str(index), {"prompt_token_ids": prompt}, sampling)
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                finished[int(output.request_id)] = list(output.outputs[0].token_ids)
        between(step)
        step += 1
    return [finished[index] for index in range(len(prompts))]


def control(llm: Any, action: str, **request: Any) -> dict[str, Any]:
    """One action of the worker; its status after it."""
    return llm.collective_rpc("specdraft_control", args=({"action": action, **request},))[0]


def swap(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Swap a draft in between two steps, as ``POST /specdraft/publish`` does; the publish record."""
    return llm.llm_engine.engine_core.engine_core.specdraft_swap(request)


def learn(llm: Any, steps: int, *, timeout_s: float = 60.0) -> dict[str, Any]:
    """Let the worker learn in its idle window until it has made `steps` steps, then pause it; the status."""
    control(llm, "resume")
    deadline = time.monotonic() + timeout_s
    while (found := control(llm, "status"))["learning"]["steps"] < steps:
        assert time.monotonic() < deadline, found["learning"]
        time.sleep(0.1)
    return control(llm, "pause")


def config_of(arguments: dict[str, Any], name: str, **settings: Any) -> EngineConfig:
    """The plugin's config for the draft ``arguments["drafts"][name]``, with a state folder of its own."""
    state = Path(arguments["out"]) / f"state-{name}"
    state.mkdir(exist_ok=True)
    return EngineConfig(draft_dir=arguments["drafts"][name], state_dir=str(state), cool_ms=20.0, **settings)
