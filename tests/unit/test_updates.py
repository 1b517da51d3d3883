"""Catches an update that somebody else dropped and that is built for ever after, and one that leaves no memory for the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainer_bridge.errors import BridgeError
from trainer_bridge.staging import Staging
from vllm_specdraft import preflight
from vllm_specdraft.heap import Heap
from vllm_specdraft.updates import NO_PREVIOUS, PolicyUpdates


def updates() -> PolicyUpdates:
    """Of a rank that is alone, over a target that is not touched here."""
    runner: Any = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float32), vllm_config=None, get_model=lambda: nn.Linear(2, 2)
    )
    ranks: Any = SimpleNamespace(size=1, all_agree=lambda fine: fine)
    return PolicyUpdates(runner, ranks, SimpleNamespace(), Heap(), keep_previous=True)  # type: ignore[arg-type]


def manifest(staging: Staging, **changes: Any) -> dict[str, Any]:
    return {"path": str(staging.path), "bytes": staging.nbytes, "version": 1, "target": [], "draft": [], **changes}


@pytest.fixture
def staging() -> Any:
    made = Staging("test")
    made.ensure(4096)
    yield made
    made.close()


def test_a_dropped_update_can_neither_be_built_nor_committed(staging: Staging) -> None:
    found = updates()
    found.open(manifest(staging))
    assert found.build(0.1) == (0, 0, True)
    found.discard()
    for step in (lambda: found.build(0.1), found.manifest):
        with pytest.raises(BridgeError, match="no update is open"):
            step()


def test_there_is_nothing_to_go_back_to_before_an_update() -> None:
    with pytest.raises(BridgeError, match=NO_PREVIOUS):
        updates().roll_back(None)


def test_an_update_without_room_is_refused_before_it_is_built(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "available_bytes", lambda: 300 << 20)
    entry = {"name": "a", "dtype": "float32", "shape": [1 << 26], "offset": 0, "digest": ""}
    with pytest.raises(MemoryError, match=r"268 MB, and 315 MB are free; make the KV cache"):
        updates().open(manifest(staging, target=[entry]))


def test_a_draft_whose_bytes_changed_after_they_were_verified_is_not_read(staging: Staging) -> None:
    from trainer_bridge.digest import digest

    staging.memory[:16] = np.arange(16)
    entry = {"name": "a", "dtype": "float32", "shape": [4], "offset": 0, "digest": digest(staging.memory[:16]).hex()}
    found = updates()
    found.open(manifest(staging, draft=[entry]))
    before = found.draft()
    staging.memory[3] ^= 1
    with pytest.raises(BridgeError, match="a was written again after it was verified"):
        found.draft()
    assert before is not None and before["a"].view(torch.uint8).tolist() == list(range(16))
