"""Draft checkpoints on disk: ``config.json`` and ``model.safetensors`` in the public layout that stock vLLM loads."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from trainer_bridge.errors import CheckpointError

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


def digest_of(state: Mapping[str, torch.Tensor]) -> str:
    """Hex digest over names, shapes, dtypes and bytes, whatever the order of the mapping."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(state):
        tensor = state[name].detach()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Have a file's content, or a folder's entries, on the disk before this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step (Linux). False when the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if rename(here, os.fsencode(first.absolute()), here, os.fsencode(second.absolute()), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EXDEV):
        return False
    raise OSError(code, os.strerror(code), str(second))


def _replace(directory: Path, staging: Path) -> None:
    """Put `staging` where `directory` is; the old folder ends up as `staging`. At no moment is there neither, on Linux."""
    if _exchange(staging, directory):
        return
    # Two steps, and a crash between them leaves both folders beside the path. A mere failure puts the old one back.
    retired = staging.with_name(staging.name + "-old")
    directory.rename(retired)
    try:
        staging.rename(directory)
    except OSError:
        retired.rename(directory)
        raise
    retired.rename(staging)


def save(
    directory: Path, state: Mapping[str, torch.Tensor], config: Mapping[str, Any], files: Mapping[str, bytes] | None = None
) -> None:
    """Write a checkpoint so that a reader, or a restart after a crash, sees the whole old one or the whole new one.

    It is written to a sibling folder, which then takes the place of `directory` in one step. Raises `CheckpointError` when
    `directory` is there and holds anything but an earlier checkpoint: saving must not delete what it did not write.

    Args:
        files: further ones by name, which engines read beside the weights.
    """
    if directory.exists():
        ours = {WEIGHTS, CONFIG, *(files or {})}
        others = sorted({path.name for path in directory.iterdir()} - ours) if directory.is_dir() else ["a file"]
        if others or not _same_kind(directory, config):
            raise CheckpointError(
                f"{directory} is there and is no draft checkpoint ({', '.join(others[:3]) or CONFIG}): name another"
            )
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in state.items()}, staging / WEIGHTS)
        (staging / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        for name, content in (files or {}).items():
            (staging / name).write_bytes(content)
        staging.chmod(0o755)
        for path in (*staging.iterdir(), staging):
            sync(path)
        if directory.exists():
            _replace(directory, staging)
        else:
            staging.rename(directory)
        sync(directory.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _same_kind(directory: Path, config: Mapping[str, Any]) -> bool:
    """Whether a folder is empty or holds a checkpoint of the same architecture."""
    if not any(directory.iterdir()):
        return True
    try:
        return read_config(directory).get("architectures") == config.get("architectures")
    except CheckpointError:
        return False


def read_config(directory: Path) -> dict[str, Any]:
    """The checkpoint's config. Raises `CheckpointError` when there is none."""
    path = Path(directory) / CONFIG
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{directory} is no draft checkpoint (no {CONFIG}): make one with `specdraft draft init`") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds a {type(config).__name__}, needs a JSON object")
    return config


def read_state(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint. Raises `CheckpointError` when the file is missing or cut short."""
    path = Path(directory) / WEIGHTS
    try:
        return load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no {WEIGHTS}") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or half-written: {error}") from None


def read_into(model: nn.Module, directory: Path) -> None:
    """Load a checkpoint into a model; every name and shape must match, both ways. Raises `CheckpointError`."""
    load_state(model, read_state(directory), str(directory))


def load_state(model: nn.Module, state: Mapping[str, torch.Tensor], origin: str) -> None:
    """Copy `state` into `model`; every name and shape must match, both ways. Raises `CheckpointError` naming `origin`."""
    wanted = model.state_dict()
    missing, unknown = sorted(wanted.keys() - state.keys()), sorted(state.keys() - wanted.keys())
    if missing or unknown:
        raise CheckpointError(f"{origin}: missing tensors {missing or 'none'}, unknown tensors {unknown or 'none'}")
    for name, tensor in state.items():
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(
                f"{origin}: {name} has shape {tuple(tensor.shape)}, its config asks for {tuple(wanted[name].shape)}"
            )
    model.load_state_dict({name: tensor.to(wanted[name].dtype) for name, tensor in state.items()})
