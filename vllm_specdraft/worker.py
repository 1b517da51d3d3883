"""The worker's side: an extension class whose methods vLLM can call, and the agent behind it.

With tensor parallelism the first rank has the `WorkerAgent`, which taps, learns and decides; the others have a `FollowerAgent`,
which only serves what it is given.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_specdraft import compat
from vllm_specdraft.agent import WorkerAgent
from vllm_specdraft.config import EngineConfig
from vllm_specdraft.governor.proposer import GovernedProposer
from vllm_specdraft.heap import Heap
from vllm_specdraft.ranks import Ranks, frozen_target
from vllm_specdraft.swap import DraftSwap
from vllm_specdraft.updates import PolicyUpdates

_TIDY_S = 0.3
"""Quiet time after which a follower gives memory back, a piece at a time, in seconds."""
_agent: WorkerAgent | FollowerAgent | None = None


def agent_of_process() -> WorkerAgent | FollowerAgent:
    """The agent of this worker's process. Raises `RuntimeError` where there is none."""
    if _agent is None:
        raise RuntimeError(
            "specdraft taps and learns in a worker process of its own, and this worker has none: "
            "use the multiprocess executor (distributed_executor_backend='mp')"
        )
    return _agent


class SpecdraftWorker:
    """Mixed into vLLM's worker class (``--worker-extension-cls``); all names carry our prefix."""

    def specdraft_start(self) -> WorkerAgent | FollowerAgent:
        """Build the agent once the models are loaded. Called by the patched worker loop."""
        config = EngineConfig.from_environment()
        if config is None:
            raise RuntimeError("specdraft's worker extension is set but SPECDRAFT_CONFIG is not: use `specdraft serve`")
        runner = self.model_runner  # type: ignore[attr-defined]
        compat.check_engine(runner)
        ranks = Ranks()
        target = frozen_target(runner, ranks)
        global _agent
        _agent = WorkerAgent(runner, config, ranks, target) if ranks.leads else FollowerAgent(runner, config, ranks)
        return _agent

    @property
    def specdraft_agent(self) -> WorkerAgent | FollowerAgent:
        """The agent behind these methods."""
        return agent_of_process()

    def specdraft_swap(self, request: dict[str, Any]) -> dict[str, Any]:
        """Swap a draft in. See `WorkerAgent.swap`."""
        return agent_of_process().swap(request)

    def specdraft_sync(self, request: dict[str, Any]) -> dict[str, Any]:
        """Build an update aside, drop it, or take a sample. See `WorkerAgent.sync`."""
        if request["op"] == "discard":
            # A session of vLLM's own weight transfer whose client is gone would keep every later one out.
            self._weight_update_active = False
        return agent_of_process().sync(request)

    def specdraft_commit(self, request: dict[str, Any]) -> dict[str, Any]:
        """Serve the update that was built. See `WorkerAgent.commit`."""
        return agent_of_process().commit(request)

    def specdraft_control(self, request: dict[str, Any]) -> dict[str, Any]:
        """Pause, resume, save, or just report. See `WorkerAgent.control`."""
        return agent_of_process().control(request)


class FollowerAgent:
    """A tensor-parallel rank that serves what the first rank decides."""

    def __init__(self, runner: Any, config: EngineConfig, ranks: Ranks) -> None:
        self._runner, self._ranks, self._swapper = runner, ranks, DraftSwap(runner)
        self._heap = Heap()
        self._proposer = GovernedProposer(runner, gap_bytes=config.gap_bytes) if config.governor else None
        self._updates = PolicyUpdates(runner, ranks, self._swapper, self._heap, keep_previous=config.keep_previous)

    def catch_up(self) -> None:
        """What the last step left to be done."""
        if self._proposer is not None:
            self._proposer.catch_up()

    def wait_s(self) -> float:
        """How long to wait for a message: there is hardly anything else to do."""
        return _TIDY_S if self._heap.wanted else 3600.0

    def window_open(self) -> None:
        """Give memory back; only the first rank learns."""
        if not self._updates.building:
            self._heap.tidy()

    def close(self) -> None:
        """Nothing is held."""

    def swap(self, request: dict[str, Any]) -> dict[str, Any]:
        """Serve the draft that the first rank names."""
        with torch.inference_mode(False):
            wanted = self._ranks.share(dict)
            self._swapper.apply(wanted["state"], self._ranks.all_agree)
        return {}

    def sync(self, request: dict[str, Any]) -> dict[str, Any]:
        """Build this rank's part of an update."""
        with torch.inference_mode(False):
            if request["op"] == "open":
                self._updates.open(request["manifest"])
            elif request["op"] == "build":
                done, total, built = self._updates.build(self._ranks.share(float))
                return {"done": done, "total": total, "built": built}
            elif request["op"] == "discard":
                self._updates.discard()
        return {}

    def commit(self, request: dict[str, Any]) -> dict[str, Any]:
        """Put this rank's part in, or back."""
        with torch.inference_mode(False):
            wanted = self._ranks.share(dict)
            if request.get("rollback"):
                self._updates.roll_back(wanted["draft"])
                changed = True
            else:
                changed = self._updates.commit(wanted["draft"], version=0, served=None, target_digest="")
            if changed:
                frozen_target(self._runner, self._ranks)
        return {}

    def control(self, request: dict[str, Any]) -> dict[str, Any]:
        """The first rank answers."""
        return {}
