"""One engine as the trainer sees it: its socket, what it said of itself, and whether it is there. Imports no torch."""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from trainer_bridge import security, wire
from trainer_bridge.config import BridgeConfig, check_address
from trainer_bridge.digest import view_of
from trainer_bridge.errors import ConfigError, DeadlineError, UpdateError, WireError
from trainer_bridge.plan import Plan

logger = logging.getLogger(__name__)

_RESOLVE_S = 0.2
_LOOK_MS = 500
"""Time between two looks at whether an engine still lives, while it takes nothing, in ms."""


def resolve(endpoint: str, timeout_s: float) -> str:
    """The control address behind what a user names: ``tcp://HOST:PORT`` as it is, or an engine's HTTP URL.

    Raises `ConfigError` when nothing answers there, or what answers has no weight sync; `DeadlineError` when it has, and its
    receiver, which may be on its way up again, is not there within `timeout_s` seconds.
    """
    if endpoint.startswith("tcp://"):
        return endpoint
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"{endpoint!r} is no engine: give its URL (http://HOST:PORT) or its sync address (tcp://HOST:PORT)")
    url = endpoint.rstrip("/").removesuffix("/v1") + "/specdraft/status"
    ends = time.monotonic() + timeout_s
    while (address := (sync := _sync_of(endpoint, url))["endpoint"]) is None:
        if time.monotonic() >= ends:
            why = sync.get("error") or "it is being started again"
            raise DeadlineError(f"the engine at {endpoint} has no receiver of weights after {timeout_s:g} s: {why}")
        time.sleep(_RESOLVE_S)
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if host in ("0.0.0.0", "[::]", "*"):
        # It listens everywhere: where it answered us is one such place.
        host = url.split("/")[2].rpartition(":")[0] or url.split("/")[2]
    return f"tcp://{host}:{port}"


def _sync_of(endpoint: str, url: str) -> dict[str, Any]:
    """What the engine's status says of weight sync. Raises `ConfigError`."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            sync = json.load(answer)["sync"]
        return {"endpoint": sync["endpoint"], "error": sync.get("error")}
    except (OSError, urllib.error.URLError, ValueError) as error:
        raise ConfigError(f"no engine answers at {url} ({getattr(error, 'reason', error)}): start `specdraft serve`") from None
    except (KeyError, TypeError):
        raise ConfigError(f"the engine at {endpoint} takes no weights: it was started with --no-sync") from None


class Member:
    """A connection to one engine. Used by one thread."""

    def __init__(self, context: zmq.Context, endpoint: str, config: BridgeConfig, client: str) -> None:
        self.endpoint, self._config, self._client, self._context = endpoint, config, client, context
        self.welcome: wire.Welcome | None = None
        self.policy_version = 0
        """That it serves, as far as it has told."""
        self.dead: str | None = None
        """Why it is left out; None while it is there."""
        self._socket: zmq.Socket | None = None
        self.is_silent: Callable[[], bool] = lambda: False
        """Whether it has stopped to answer heartbeats."""

    @property
    def plan(self) -> Plan:
        """What it takes."""
        assert self.welcome is not None
        return Plan(target=self.welcome.target, draft=self.welcome.draft, ignored=self.welcome.ignored)

    def greet(self, timeout_s: float) -> wire.Welcome:
        """Say hello and learn what the engine is. Raises `DeadlineError` when nobody answers, `UpdateError` when it refuses."""
        self.close()
        config = self._config
        self._socket = _connect(self._context, self.endpoint, config)
        self.send(
            wire.Hello(protocol=wire.PROTOCOL, job=config.job, client=self._client, rank=config.rank, world=config.world),
            timeout_s=timeout_s,
        )
        deadline = time.monotonic() + timeout_s
        while True:
            message = self.receive(deadline)
            if message is None:
                raise DeadlineError(
                    f"the engine at {self.endpoint} did not answer in {timeout_s:g} s: is it up, and is this its sync address?"
                )
            if isinstance(message, wire.Refused):
                raise UpdateError(f"the engine at {self.endpoint} refuses us: {message.reason}")
            if isinstance(message, wire.Welcome):
                self.welcome, self.dead, self.policy_version = message, None, message.policy_version
                return message

    def send(self, message: wire.FromTrainer, payload: np.ndarray | bytes | None = None, *, timeout_s: float = 30.0) -> None:
        """Send a message. Raises `DeadlineError` when the engine takes nothing for `timeout_s`, or is silent."""
        assert self._socket is not None
        deadline = time.monotonic() + timeout_s
        while not self._socket.poll(_LOOK_MS, zmq.POLLOUT):
            if time.monotonic() >= deadline or self.is_silent():
                raise DeadlineError(f"the engine at {self.endpoint} takes nothing any more: it died, or hangs")
        if payload is None:
            self._socket.send(wire.encode(message))
        else:
            self._socket.send(wire.encode(message), zmq.SNDMORE)
            self._socket.send(view_of(payload))

    def receive(self, deadline: float) -> wire.FromEngine | None:
        """The next message that is one, or None at the deadline (of `time.monotonic`)."""
        assert self._socket is not None
        while True:
            left_ms = int(1e3 * (deadline - time.monotonic()))
            if left_ms < 0 or not self._socket.poll(max(1, left_ms)):
                return None
            try:
                return wire.decode_from_engine(self._socket.recv())
            except WireError as error:
                logger.warning("a frame from %s is no message: %s", self.endpoint, error)

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close(linger=2000)
        self._socket = None


def _connect(context: zmq.Context, endpoint: str, config: BridgeConfig) -> zmq.Socket:
    check_address(endpoint, keys=config.keys, insecure=config.insecure, option="engine")
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 4)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_CONTROL_BYTES)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if config.keys is not None:
        security.guard_client(socket, Path(config.keys))
    socket.connect(endpoint)
    return socket


class Heartbeat:
    """Tells every engine that this process lives, and notes which engine answers. A thread with sockets of its own."""

    def __init__(self, context: zmq.Context, config: BridgeConfig, client: str) -> None:
        self._context, self._config, self._client = context, config, client
        self._heard: dict[str, float] = {}
        self._endpoints: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="specdraft-heartbeat", daemon=True)

    def start(self, endpoints: list[str]) -> None:
        """Begin."""
        self._endpoints = endpoints
        now = time.monotonic()
        self._heard = dict.fromkeys(endpoints, now)
        self._thread.start()

    def silent_s(self, endpoint: str) -> float:
        """How long an engine has not answered, in seconds."""
        return time.monotonic() - self._heard[endpoint]

    def stop(self) -> None:
        """End."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5)

    def _run(self) -> None:
        sockets = {endpoint: _connect(self._context, endpoint, self._config) for endpoint in self._endpoints}
        names: dict[Any, str] = {socket: endpoint for endpoint, socket in sockets.items()}
        poller = zmq.Poller()
        for socket in names:
            socket.setsockopt(zmq.SNDTIMEO, 0)
            poller.register(socket, zmq.POLLIN)
        frame = wire.encode(wire.Ping(client=self._client))
        try:
            while not self._stop.is_set():
                for socket in names:
                    try:
                        socket.send(frame)
                    except zmq.Again:
                        # It takes nothing: it is gone, and will not be heard.
                        continue
                until = time.monotonic() + self._config.heartbeat_s
                while (left := until - time.monotonic()) > 0 and not self._stop.is_set():
                    for socket, _ in poller.poll(max(1, int(1e3 * min(left, 0.2)))):
                        self._heard_from(names[socket], socket)
        finally:
            for socket in names:
                socket.close(linger=0)

    def _heard_from(self, endpoint: str, socket: zmq.Socket) -> None:
        try:
            message = wire.decode_from_engine(socket.recv())
        except WireError:
            return
        if isinstance(message, wire.Pong):
            self._heard[endpoint] = time.monotonic()
