"""Catches a restart that loses what was learned, goes on from half a file or another draft's, or writes over it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.builders import draft, draft_config
from tests.unit.test_learner import make, run, served_state
from trainer_bridge.draft import checkpoint
from trainer_bridge.errors import CheckpointError
from vllm_specdraft import learner_state
from vllm_specdraft.learner import Learner
from vllm_specdraft.learner_state import FILE, Checkpointer, LearnerState

IDENTITY = learner_state.identity_of(draft_config())


def learned() -> Learner:
    learner = make(evaluate_every_steps=1000)
    run(learner, 12)
    return learner


def export(learner: Learner) -> LearnerState:
    return learner.export(draft_version=3, served_digest="d", rollbacks=1)


def written(directory: Path) -> Learner:
    learner = learned()
    learner_state.write(directory, export(learner))
    return learner


def read_back(directory: Path) -> LearnerState:
    found = learner_state.read(directory, IDENTITY)
    assert found is not None
    return found


def test_a_restarted_learner_has_weights_optimizer_and_counts(tmp_path: Path) -> None:
    learner = written(tmp_path)
    saved = read_back(tmp_path)
    assert (saved.draft_version, saved.rollbacks, saved.optimizer_steps) == (3, 1, 12)
    other = make(evaluate_every_steps=1000, resumed=saved)
    assert checkpoint.digest_of(other.state()) == checkpoint.digest_of(learner.state())
    assert checkpoint.digest_of(other.state()) != checkpoint.digest_of(served_state())
    assert (other.progress.steps, other.progress.tokens) == (12, learner.progress.tokens)


def test_the_next_step_after_a_restart_is_the_one_that_would_have_been(tmp_path: Path) -> None:
    """Same samples in the same order: with the moments and the step count, both learners move alike, bit for bit."""
    learner = written(tmp_path)
    other = make(evaluate_every_steps=1000, resumed=read_back(tmp_path))
    for one in (learner, other):
        one.replay._random.seed(5)
        one.replay._order.clear()
        one._pieces = one._endless()
        one._budget.anchors = 512
        run(one, 3)
    assert checkpoint.digest_of(other.state()) == checkpoint.digest_of(learner.state())


def test_an_export_does_not_change_while_training_goes_on() -> None:
    learner = learned()
    saved = export(learner)
    before = {name: tensor.clone() for name, tensor in {**saved.model, **saved.first_moments}.items()}
    run(learner, 3)
    for name, tensor in {**saved.model, **saved.first_moments}.items():
        assert torch.equal(tensor, before[name])


def test_there_is_nothing_to_go_on_from_in_an_empty_directory(tmp_path: Path) -> None:
    assert learner_state.read(tmp_path, IDENTITY) is None
    assert learner_state.read(tmp_path / "nowhere", IDENTITY) is None


@pytest.mark.parametrize("kept", [0, 7, 400, -1])
def test_a_file_cut_short_is_refused_by_name(tmp_path: Path, kept: int) -> None:
    written(tmp_path)
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=f"{FILE} is damaged or half-written"):
        learner_state.read(tmp_path, IDENTITY)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / FILE
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="its tensors are not those it was written with"):
        learner_state.read(tmp_path, IDENTITY)


def test_a_file_of_another_program_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / FILE)
    with pytest.raises(CheckpointError, match="no learner state of this program"):
        learner_state.read(tmp_path, IDENTITY)


@pytest.mark.parametrize("key", ["hidden_size", "draft_vocab_size", "tap_layers", "architectures"])
def test_the_state_of_another_draft_is_refused_by_what_differs(tmp_path: Path, key: str) -> None:
    written(tmp_path)
    with pytest.raises(CheckpointError, match=f"another draft: its {key} is .*--checkpoint-dir"):
        learner_state.read(tmp_path, {**IDENTITY, key: "other"})


def wait(checkpointer: Checkpointer) -> None:
    checkpointer.wait()
    assert not checkpointer.busy


def test_the_checkpointer_writes_state_and_served_draft_in_the_background(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, interval_s=1000, draft_config=draft_config())
    assert not checkpointer.due
    learner = learned()
    checkpointer.start(export(learner), served_state())
    wait(checkpointer)
    assert checkpointer.error is None and checkpointer.saved_unix_time_s is not None
    assert checkpoint.digest_of(read_back(tmp_path).model) == checkpoint.digest_of(learner.state())
    served = learner_state.served_draft(tmp_path)
    assert served is not None
    assert checkpoint.digest_of(checkpoint.read_state(served)) == checkpoint.digest_of(served_state())
    assert checkpoint.read_config(served)[learner_state.VERSION_KEY] == 3
    checkpoint.read_into(draft(dtype=torch.float32), served)


def test_an_interval_makes_it_due_again(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, interval_s=0.01, draft_config=draft_config())
    time.sleep(0.02)
    assert checkpointer.due


def test_a_directory_that_cannot_be_written_is_reported_and_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    checkpointer = Checkpointer(tmp_path / "kept", interval_s=1, draft_config=draft_config())
    checkpointer.directory = tmp_path / "file" / "below"
    checkpointer.start(export(learned()))
    wait(checkpointer)
    assert checkpointer.error is not None and "checkpoint not written" in checkpointer.error
    assert checkpointer.saved_unix_time_s is None


def test_two_servers_never_share_a_directory(tmp_path: Path) -> None:
    first = Checkpointer(tmp_path, interval_s=1, draft_config=draft_config())
    with pytest.raises(CheckpointError, match="in use by another server"):
        Checkpointer(tmp_path, interval_s=1, draft_config=draft_config())
    del first
    gc.collect()
    Checkpointer(tmp_path, interval_s=1, draft_config=draft_config())


def test_what_a_killed_process_left_half_written_is_swept(tmp_path: Path) -> None:
    (tmp_path / f".{FILE}.123.tmp").write_bytes(b"half")
    (tmp_path / ".served-abc").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    Checkpointer(tmp_path, interval_s=1, draft_config=draft_config())
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "notes.txt"}


KILLED = """
import sys, torch
from pathlib import Path
from vllm_specdraft import learner_state
state = learner_state.LearnerState(model={"w": torch.zeros(2_000_000)}, first_moments={}, second_moments={}, optimizer_steps=0,
                                   progress={}, draft_version=0, identity={})
print("ready", flush=True)
for version in range(10_000):
    state.draft_version = version
    state.model["w"].fill_(version)
    learner_state.write(Path(sys.argv[1]), state)
"""


@pytest.mark.parametrize("delay_s", [0.05, 0.11, 0.19, 0.3])
def test_a_kill_at_any_moment_leaves_a_whole_state(tmp_path: Path, delay_s: float) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        while not (tmp_path / FILE).exists():
            time.sleep(0.005)
        time.sleep(delay_s)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    found = learner_state.read(tmp_path, {})
    assert found is not None
    assert bool((found.model["w"] == found.draft_version).all())
    assert load_file(tmp_path / FILE).keys() == {"model.w"}
