"""Settings of both ends of the bridge, and the rule for addresses. Imports no torch."""

from __future__ import annotations

import difflib
import ipaddress
import socket
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from trainer_bridge.errors import ConfigError, SecurityError
from trainer_bridge.plan import BLOCK_BYTES
from trainer_bridge.wire import Running

CarrierName = Literal["auto", "shm", "tcp", "zmq", "gloo", "nccl"]
UNENCRYPTED = frozenset({"tcp", "gloo", "nccl"})
"""Carriers whose data plane no key protects."""

Config = TypeVar("Config")


def make(kind: type[Config], options: dict[str, Any]) -> Config:
    """A config of a kind from keyword options. Raises `ConfigError` that names the nearest known option."""
    known = [entry.name for entry in fields(kind)]  # type: ignore[arg-type]
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f", known: {', '.join(known)}"
            raise ConfigError(f"unknown option {key!r}{hint}")
    return kind(**options)


@dataclass(frozen=True, kw_only=True)
class BridgeConfig:
    """The trainer's end."""

    job: str = "default"
    """Names the run. A trainer that starts again under the same name takes over from the one that died."""
    rank: int = 0
    """This process among those that send weights; rank 0 leads."""
    world: int = 1
    """How many processes send weights."""
    carrier: CarrierName = "auto"
    """How the bytes travel. ``auto``: shared memory on the engine's host; else ``zmq`` when keys are set, else ``tcp``."""
    dtype: str = "plan"
    """Dtype of floating-point target tensors on the wire; ``plan``: as in the engine's launch checkpoint."""
    draft_dtype: str = "plan"
    """The same for the draft."""
    cast: bool = False
    """Whether tensors may be narrowed to the wire dtype; without it only casts that lose nothing are made."""
    delta: bool = False
    """Send only what changed since the last committed version, where that is smaller; keeps a copy of the weights in memory."""
    running: Running = "recompute"
    """What running requests do: ``recompute`` their KV cache and go on, ``keep`` it and go on, ``drain`` first, or ``abort``."""
    bucket_bytes: int = BLOCK_BYTES
    """Small tensors are packed up to so many bytes, larger ones are split, in bytes."""
    streams: int = 2
    """Connections per engine of the ``tcp`` carrier."""
    connect_timeout_s: float = 20.0
    """Longest wait for an engine's first word, in seconds."""
    offer_timeout_s: float = 30.0
    """Longest wait until an update is open, in seconds."""
    transfer_timeout_s: float = 600.0
    """Longest time from the offer to the commit, in seconds."""
    commit_timeout_s: float = 300.0
    """Longest wait for an engine that swaps, in seconds; draining comes on top."""
    drain_timeout_s: float = 300.0
    """Longest wait for running requests under ``drain``, in seconds."""
    heartbeat_s: float = 0.5
    """Time between two signs of life, in seconds."""
    sample_window_bytes: int = 64 << 20
    """Samples on their way that the engine has not answered, in bytes."""
    keys: Path | None = None
    """Directory with ``trainer.key_secret`` and ``server.key`` (``specdraft keys``); None: no encryption."""
    insecure: bool = False
    """Allow addresses of other machines without keys, and data planes that no key protects."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ConfigError(f"rank {self.rank} of {self.world}: ranks count from 0")
        if self.carrier not in get_args(CarrierName):
            raise ConfigError(f"carrier {self.carrier!r}, known: {', '.join(get_args(CarrierName))}")
        if self.running not in get_args(Running):
            raise ConfigError(f"running {self.running!r}, known: {', '.join(get_args(Running))}")
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name.endswith(("_s", "_bytes")) and not value > 0:
                raise ConfigError(f"{entry.name} is {value}, must be above 0")
        if self.streams < 1:
            raise ConfigError(f"streams is {self.streams}, must be at least 1")
        if not self.job or len(self.job) > 128:
            raise ConfigError("job must be a name of 1 to 128 characters")


@dataclass(frozen=True, kw_only=True)
class ReceiverConfig:
    """The engine's end."""

    bind: str = "tcp://127.0.0.1:0"
    """Address of the control plane; port 0: the system chooses."""
    job: str = "server"
    """Part of the staging file's name."""
    silence_s: float = 5.0
    """A rank that gave no sign of life for so long is taken for dead and its update is aborted, in seconds."""
    max_data_bytes: int = 256 << 20
    """Largest payload of one data frame, in bytes."""
    sample_window_bytes: int = 64 << 20
    """Samples on their way into the replay, per client, in bytes."""
    keys: Path | None = None
    """Directory with ``server.key_secret`` and ``clients/`` (``specdraft keys``); None: no encryption."""
    insecure: bool = False
    """Allow an address of other machines without keys, and data planes that no key protects."""


def check_address(address: str, *, keys: Path | None, insecure: bool, option: str) -> tuple[str, int]:
    """Host and port of ``tcp://HOST:PORT``. Raises `ConfigError`, or `SecurityError` for one that needs keys and has none."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    if not address.startswith("tcp://") or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{option} {address!r} is no address: give tcp://HOST:PORT")
    if keys is None and not insecure and not is_loopback(host):
        raise SecurityError(
            f"{option} {address} is open to other machines: give keys (made by `specdraft keys DIR`), use 127.0.0.1, "
            "or allow it with insecure=True (--insecure) if the network itself keeps others out"
        )
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine alone. Raises `ConfigError` for a name that does not resolve."""
    if host in ("*", ""):
        return False
    try:
        found = socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{host} cannot be resolved ({getattr(error, 'strerror', None) or error})") from None
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)
