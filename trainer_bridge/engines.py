"""The engines of one run as the trainer knows them: who is there, how bytes reach each, and what was sent before."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Sequence
from functools import partial

import zmq

from trainer_bridge.config import UNENCRYPTED, BridgeConfig
from trainer_bridge.delta_base import DeltaBase
from trainer_bridge.errors import ConfigError, DeadlineError, PlanError
from trainer_bridge.members import Heartbeat, Member, resolve
from trainer_bridge.session import UpdateState
from trainer_bridge.staging import Mapping, host_id

logger = logging.getLogger(__name__)

DEAD_S = 6.0
"""An engine that answers no heartbeat for so long, while something is waited for, is taken for dead, in seconds."""


class Engines:
    """Connections to all of them. Not for several threads at once."""

    def __init__(self, engines: Sequence[str], config: BridgeConfig) -> None:
        """Raises as `trainer_bridge.connect` does."""
        if not engines:
            raise ConfigError("name at least one engine")
        client = f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"
        self._context = zmq.Context()
        self._heartbeat = Heartbeat(self._context, config, client)
        self._mappings: dict[str, Mapping] = {}
        self.base = DeltaBase()
        self.on_state: Callable[[UpdateState], None] = lambda state: None
        self.members: list[Member] = []
        try:
            self.members = [Member(self._context, resolve(engine, config.connect_timeout_s), config, client) for engine in engines]
            self.greet_all(config.connect_timeout_s)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._heartbeat.start([member.endpoint for member in self.members])
        for member in self.members:
            member.is_silent = partial(self.is_silent, member)

    def close(self) -> None:
        """Let go of all of them."""
        self._heartbeat.stop()
        for member in self.members:
            member.close()
        self._context.destroy(linger=1000)

    def greet_all(self, timeout_s: float) -> list[Member]:
        """Engines that are there now. Raises when there is none."""
        for member in self.members:
            try:
                member.greet(timeout_s if member.dead is None else min(1.0, timeout_s))
            except DeadlineError as error:
                if member.dead is None:
                    logger.warning("engine %s is left out: %s", member.endpoint, error)
                member.dead = str(error)
        alive = [member for member in self.members if member.dead is None]
        if not alive:
            raise DeadlineError("; ".join(str(member.dead) for member in self.members))
        for member in alive[1:]:
            if member.plan != alive[0].plan:
                raise PlanError(f"the engines at {alive[0].endpoint} and {member.endpoint} serve different models or drafts")
        return alive

    def carrier_for(self, member: Member, config: BridgeConfig) -> str:
        """How bytes reach an engine. Raises `ConfigError` when the carrier that was asked for cannot."""
        welcome = member.welcome
        assert welcome is not None
        same_host = bool(welcome.host) and welcome.host == host_id()
        if config.carrier == "auto":
            if same_host:
                chosen, why = "shm", "the engine is on this host"
            elif config.keys is not None:
                chosen, why = "zmq", "another host, and keys are set"
            else:
                chosen, why = "tcp", "another host, and no keys"
            logger.info("carrier for %s: %s (%s)", member.endpoint, chosen, why)
            return chosen
        if config.carrier == "shm" and not same_host:
            raise ConfigError(
                f"carrier 'shm': the engine at {member.endpoint} shares no memory with this process; use 'auto' or 'tcp'"
            )
        if config.carrier in UNENCRYPTED and config.keys is not None and not config.insecure:
            raise ConfigError(f"carrier {config.carrier!r} is not encrypted: use 'zmq' with keys, or allow it with insecure=True")
        return config.carrier

    def mapping(self, endpoint: str) -> Mapping:
        """This process's mapping of an engine's staging memory."""
        return self._mappings.setdefault(endpoint, Mapping())

    def is_silent(self, member: Member) -> bool:
        """Whether an engine has stopped to answer heartbeats."""
        return self._heartbeat.silent_s(member.endpoint) > DEAD_S
