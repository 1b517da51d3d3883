"""The learner's state on disk: what is needed to go on after a restart, written so that no crash can leave half of it.

One safetensors file with the trainable tensors, the optimizer's moments, and a header that says what they belong to. It is
written under another name and renamed; the header carries a digest of the tensors. A file that does not fit is refused by
name, never quietly replaced: days of learning may be in it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trainer_bridge.draft import checkpoint, registry
from trainer_bridge.errors import CheckpointError

FORMAT = "specdraft-learner-1"
FILE = "learner.safetensors"
SERVED = "served"
"""Folder beside `FILE`: the draft that is served, in the public layout."""
VERSION_KEY = "specdraft_draft_version"
"""Where the served draft's ``config.json`` keeps its version."""
_KNOB = "move it away to start anew, or name another --checkpoint-dir"
_MODEL, _FIRST, _SECOND = "model.", "exp_avg.", "exp_avg_sq."


@dataclass(kw_only=True)
class LearnerState:
    """A copy of everything the learner would lose."""

    model: dict[str, torch.Tensor]
    """Trainable draft, checkpoint names."""
    first_moments: dict[str, torch.Tensor]
    """AdamW's ``exp_avg`` by parameter name; empty before the first step."""
    second_moments: dict[str, torch.Tensor]
    optimizer_steps: int
    progress: dict[str, Any]
    """Fields of the learner's progress."""
    draft_version: int
    """Version of the served draft when this was taken."""
    rollbacks: int = 0
    served_digest: str = ""
    identity: dict[str, Any] = field(default_factory=dict)
    """What the tensors belong to; see `identity_of`."""


def identity_of(draft_config: Mapping[str, Any]) -> dict[str, Any]:
    """What a learner's state must share with the engine to be of use: the draft's architecture and every shape in it."""
    keys = (
        "architectures", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "num_hidden_layers", "vocab_size", "draft_vocab_size",
    )  # fmt: skip
    taps = registry.of_config(draft_config).tap_layers(draft_config)
    return {**{key: draft_config.get(key) for key in keys}, "tap_layers": list(taps)}


def write(directory: Path, state: LearnerState) -> None:
    """Write `state` so that a reader sees the whole old file or the whole new one, whenever the machine stops."""
    tensors = {
        **{_MODEL + name: tensor for name, tensor in state.model.items()},
        **{_FIRST + name: tensor for name, tensor in state.first_moments.items()},
        **{_SECOND + name: tensor for name, tensor in state.second_moments.items()},
    }
    header = {key: value for key, value in vars(state).items() if key not in ("model", "first_moments", "second_moments")}
    metadata = {"format": FORMAT, "state": json.dumps(header), "digest": checkpoint.digest_of(tensors)}
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f".{FILE}.{os.getpid()}-{threading.get_native_id()}.tmp"
    try:
        save_file(tensors, temporary, metadata=metadata)
        checkpoint.sync(temporary)
        temporary.replace(directory / FILE)
        checkpoint.sync(directory)
    finally:
        temporary.unlink(missing_ok=True)


def read(directory: Path, identity: Mapping[str, Any]) -> LearnerState | None:
    """The state in `directory`, or None when there is none yet.

    Raises `CheckpointError` that names the file when it is cut short, damaged, of another program, or of another draft.
    """
    path = directory / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a file handle, no mapping
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or half-written ({error}); {_KNOB}") from None
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no learner state of this program (format {metadata.get('format')}); {_KNOB}")
    if checkpoint.digest_of(tensors) != metadata.get("digest"):
        raise CheckpointError(f"{path} is damaged: its tensors are not those it was written with; {_KNOB}")
    header = json.loads(metadata["state"])
    for key, value in identity.items():
        if header["identity"].get(key) != value:
            raise CheckpointError(
                f"{path} belongs to another draft: its {key} is {header['identity'].get(key)}, this engine's {value}; {_KNOB}"
            )
    parts: dict[str, dict[str, torch.Tensor]] = {_MODEL: {}, _FIRST: {}, _SECOND: {}}
    for name, tensor in tensors.items():
        prefix = next(p for p in (_SECOND, _FIRST, _MODEL) if name.startswith(p))
        parts[prefix][name.removeprefix(prefix)] = tensor
    return LearnerState(model=parts[_MODEL], first_moments=parts[_FIRST], second_moments=parts[_SECOND], **header)


def served_draft(directory: Path) -> Path | None:
    """The draft that an earlier server kept in `directory`, or None when it kept none yet."""
    found = directory / SERVED
    if not found.exists():
        # Where folders cannot be exchanged in one step, a kill between the two steps leaves the old one beside its place.
        for old in directory.glob(f".{SERVED}-*-old"):
            old.rename(found)
            break
    return found if found.exists() else None


class Checkpointer:
    """Writes states in a thread of its own, one at a time, so that neither learning nor generation waits for the disk."""

    def __init__(self, directory: Path, *, interval_s: float, draft_config: Mapping[str, Any]) -> None:
        self.directory = directory
        self.saved_unix_time_s: float | None = None
        self.error: str | None = None
        self._interval_s, self._draft_config = interval_s, dict(draft_config)
        self._due = time.monotonic() + interval_s
        self._thread: threading.Thread | None = None
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = hold(directory, "--checkpoint-dir")
        # What a killed process was in the middle of.
        for old in directory.glob(f".{FILE}.*.tmp"):
            old.unlink(missing_ok=True)
        served_draft(directory)
        for old in directory.glob(f".{SERVED}-*"):
            shutil.rmtree(old, ignore_errors=True)

    @property
    def due(self) -> bool:
        """Whether the interval is over and no earlier write is still under way."""
        return time.monotonic() >= self._due and not self.busy

    @property
    def busy(self) -> bool:
        """Whether a write is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, state: LearnerState, served: Mapping[str, torch.Tensor] | None = None) -> None:
        """Write `state`, and the served draft when it changed. Call only when not `busy`; nobody may write the tensors after."""
        self._due = time.monotonic() + self._interval_s
        self._thread = threading.Thread(target=self._write, args=(state, served), name="specdraft-checkpoint", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float = 60.0) -> None:
        """Wait for the write that is under way."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _write(self, state: LearnerState, served: Mapping[str, torch.Tensor] | None) -> None:
        _step_aside()
        try:
            if served is not None:
                config = {**self._draft_config, VERSION_KEY: state.draft_version}
                registry.of_config(config).save(self.directory / SERVED, served, config)
            write(self.directory, state)
            self.saved_unix_time_s, self.error = time.time(), None
        except Exception as error:  # noqa: BLE001 - whatever it is, the next checkpoint tries again and the status says so
            self.error = f"checkpoint not written: {type(error).__name__}: {error}"
            logging.getLogger(__name__).error("%s: %s", self.directory, self.error)


def hold(directory: Path, option: str) -> IO[str]:
    """Hold a directory for this process. Raises `CheckpointError` when another one holds it; a dead one holds nothing."""
    import fcntl

    file = (directory / ".lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise CheckpointError(f"{directory} is in use by another server: give each its own {option}") from None
    return file


def _step_aside() -> None:
    """Let this thread run on any core, and only on time that nobody else wants. Linux; elsewhere nothing happens."""
    thread = threading.get_native_id()
    try:
        os.sched_setaffinity(thread, range(os.cpu_count() or 1))
        os.setpriority(os.PRIO_PROCESS, thread, 19)
    except (AttributeError, OSError):
        return
