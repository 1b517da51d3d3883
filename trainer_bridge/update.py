"""One update on the trainer's side: offer, send, have it checked, commit; or abort."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from trainer_bridge import wire
from trainer_bridge.carriers import sending
from trainer_bridge.carriers.sending import Item, Sender
from trainer_bridge.config import BridgeConfig
from trainer_bridge.engines import Engines
from trainer_bridge.errors import BaseVersionError, BridgeError, ConfigError, DeadlineError, UpdateError
from trainer_bridge.members import Member
from trainer_bridge.pieces import Pieces
from trainer_bridge.plan import Layout, Plan
from trainer_bridge.session import UpdateState
from trainer_bridge.shards import Entry

logger = logging.getLogger(__name__)

_ABORT_S = 3.0
"""Longest wait for an engine to hear of an abort, in seconds."""


@dataclass(kw_only=True)
class UpdateResult:
    """What an update did."""

    update: str
    version: int
    draft_versions: dict[str, int] = field(default_factory=dict)
    """Draft version that each engine serves now."""
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Counts, bytes and times of each engine that committed."""
    failed: dict[str, str] = field(default_factory=dict)
    """Engines that were left behind, and why: they get all weights with the next update."""
    sent_bytes: int = 0
    """Payload bytes that this rank sent, per engine."""
    verified_s: float = 0.0
    """From the offer until every engine had everything and had checked it, in seconds; 0 on ranks that do not lead."""
    seconds: float = 0.0
    """From the offer to the commit, in seconds."""
    casts: Counter[str] = field(default_factory=Counter)
    """Tensors cast on the way, by ``from->to``."""
    ignored: list[str] = field(default_factory=list)
    """Tensors that the engines take and do not need."""


@dataclass(kw_only=True)
class _Way:
    """One engine's part in an update."""

    member: Member
    delta: bool
    sender: Sender
    outcome: wire.Outcome | None = None


class Update:
    """One update, as a context. `target` and `draft` may be called several times."""

    def __init__(self, engines: Engines, config: BridgeConfig, version: int, *, partial: bool) -> None:
        self._engines, self._config, self._version, self._partial = engines, config, version, partial
        self._ways: list[_Way] = []
        self._plan: Plan | None = None
        self._maker: Pieces | None = None
        self._bucket: list[Item] = []
        self._bucket_bytes = 0
        self._pieces = 0
        self._began = 0.0
        self.update = ""
        """Its id; the same on all ranks and engines."""
        self.state: UpdateState | None = None
        """Where it is, as far as this rank knows; None before it is opened."""
        self.result: UpdateResult | None = None
        """What came of it, once it is over."""

    # -- opening ---------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Update:
        config = self._config
        self._began = time.monotonic()
        members = self._engines.greet_all(config.connect_timeout_s)
        self._plan = members[0].plan
        self._maker = Pieces(self._plan, config)
        self.update = f"{config.job}-{self._version}-{secrets.token_hex(6)}"
        self.result = UpdateResult(update=self.update, version=self._version, casts=self._maker.casts, ignored=self._maker.ignored)
        self.result.failed.update({m.endpoint: m.dead for m in self._engines.members if m.dead is not None})
        try:
            # A rank that attaches hears from the engine when rank 0 does not come.
            deadline = self._began + config.offer_timeout_s + (_ABORT_S if config.rank else 0.0)
            asked = [(member, *self._ask(member)) for member in members]
            for member, carrier, with_delta in asked:
                self._open(member, carrier, with_delta, deadline)
            if self._config.carrier in ("gloo", "nccl"):
                self._broadcast()
            if not self._ways:
                raise DeadlineError("; ".join(f"{where}: {why}" for where, why in self.result.failed.items()))
        except BaseException as error:
            self._abort(f"opening failed: {error}")
            raise
        self._become(UpdateState.OFFERED)
        return self

    def _become(self, state: UpdateState) -> None:
        self.state = state
        self._engines.on_state(state)

    def _ask(self, member: Member) -> tuple[str, bool]:
        """Offer, or attach; the carrier, and whether deltas may be sent."""
        config, welcome, base = self._config, member.welcome, self._engines.base
        assert welcome is not None
        carrier = self._engines.carrier_for(member, config)
        dtypes = (config.dtype, config.draft_dtype)
        # Where bytes are merely copied, looking for what changed costs more than it saves.
        wanted = config.delta and carrier in ("tcp", "zmq")
        held = base.version is not None and (welcome.base_version, welcome.base_dtypes) == (base.version, base.dtypes)
        with_delta = wanted and held and base.dtypes == dtypes
        if config.delta and not with_delta:
            why = "shared memory is faster" if not wanted else "the engine holds no common base"
            logger.info("update to version %d goes whole to %s: %s", self._version, member.endpoint, why)
        if config.rank:
            timeout = config.offer_timeout_s
            member.send(wire.Attach(version=self._version, rank=config.rank, carrier=carrier, deadline_s=timeout))
            return carrier, with_delta
        offer = wire.Offer(
            update=self.update,
            version=self._version,
            base_version=base.version if with_delta else None,
            world=config.world,
            carrier=carrier,
            dtypes=dtypes,
            partial=self._partial,
            running=config.running,
            drain_timeout_s=config.drain_timeout_s,
            deadline_s=config.transfer_timeout_s,
        )
        member.send(offer)
        return carrier, with_delta

    def _open(self, member: Member, carrier: str, with_delta: bool, deadline: float) -> None:
        message = self._next(member, deadline)
        if message is None:
            return self._lost(member, f"the engine at {member.endpoint} did not open the update in time")
        if isinstance(message, wire.Refused):
            kind = BaseVersionError if message.code == "base" else UpdateError
            raise kind(f"the engine at {member.endpoint} refuses update {self.update}: {message.reason}")
        if not isinstance(message, wire.Accepted):
            raise UpdateError(f"the engine at {member.endpoint} answered an offer with {type(message).__name__}")
        assert self._plan is not None
        if self._config.rank:
            self.update = message.update
        layout = Layout.of(self._plan, message.dtypes)
        sender = self._sender(member, carrier, with_delta, message, layout)
        self._ways.append(_Way(member=member, delta=with_delta, sender=sender))

    def _sender(self, member: Member, carrier: str, with_delta: bool, accepted: wire.Accepted, layout: Layout) -> Sender:
        config = self._config
        if carrier == "shm":
            memory = self._engines.mapping(member.endpoint).of(accepted.staging, accepted.staging_bytes)
            return sending.ShmSender(memory, layout, self.update, member.send)
        if carrier == "zmq":
            return sending.ZmqSender(self.update, member.send, delta=with_delta)
        if carrier == "tcp":
            return sending.TcpSender(
                accepted.address, accepted.token, self.update,
                streams=config.streams, delta=with_delta, timeout_s=config.offer_timeout_s,
            )  # fmt: skip
        return sending.NoSender()

    def _broadcast(self) -> None:
        """One group over all engines: the first way sends, the others' engines hear the same."""
        from trainer_bridge.carriers.collective import Broadcast

        if self._config.world != 1:
            raise ConfigError(
                f"carrier {self._config.carrier!r} broadcasts from one rank: gather the tensors and use world=1, or use 'tcp'"
            )
        members = [way.member for way in self._ways]
        self._ways[0].sender = Broadcast(self._config.carrier, [m.send for m in members], self.update, self._config)

    # -- sending ---------------------------------------------------------------------------------------------------------

    def target(self, weights: Iterable[Entry]) -> None:
        """Send tensors of the target: ``(checkpoint name, tensor or Shard)``.

        They are read before this returns. Raises `PlanError` for a name or shape that the engines do not take, or a cast that
        was not allowed.
        """
        self._stream(wire.TARGET, weights)

    def draft(self, weights: Iterable[Entry]) -> None:
        """Send tensors of the draft: names of its public checkpoint layout."""
        self._stream(wire.DRAFT, weights)

    def _stream(self, model: int, weights: Iterable[Entry]) -> None:
        if not self._ways:
            raise UpdateError("open the update first: with bridge.update(version=...) as update")
        assert self._maker is not None
        if self.state is UpdateState.OFFERED:
            self._become(UpdateState.STAGING)
        for name, entry in weights:
            for item in self._maker.of(model, name, entry):
                if self._bucket and self._bucket_bytes + item.nbytes > self._config.bucket_bytes:
                    self._send_bucket()
                self._bucket.append(item)
                self._bucket_bytes += item.nbytes
            # An iterable may use its tensor again for the next entry: nothing of it is read after this.
            if all(way.sender.writes_at_once for way in self._ways):
                self._send_bucket()
            elif self._bucket_bytes > self._config.bucket_bytes // 2:
                self._send_bucket(flush=True)
            else:
                for item in self._bucket:
                    item.own()
        self._send_bucket(flush=True)

    def _send_bucket(self, *, flush: bool = False) -> None:
        items, self._bucket, self._bucket_bytes = self._bucket, [], 0
        assert self.result is not None
        if items:
            if self._config.delta:
                for item in items:
                    self._engines.base.compare(item)
            self._pieces += len(items)
            self.result.sent_bytes += sum(
                len(item.delta) if item.delta is not None and any(way.delta for way in self._ways) else item.nbytes
                for item in items
            )
        for way in list(self._ways):
            try:
                if items:
                    way.sender.send(items)
                if flush:
                    way.sender.flush()
            except (OSError, UpdateError) as error:
                self._check_aborted(way.member)
                self._lost(way.member, str(error))
        if not self._ways:
            raise UpdateError("; ".join(f"{where}: {why}" for where, why in self.result.failed.items()))

    def _check_aborted(self, member: Member) -> None:
        """An engine that gave the update up has closed its data plane, and said why on the control socket."""
        message = self._next(member, time.monotonic() + 1.0)
        if isinstance(message, wire.Outcome) and message.state == "ABORTED":
            raise UpdateError(f"the engine at {member.endpoint} aborted update {self.update}: {message.reason}")

    # -- ending ----------------------------------------------------------------------------------------------------------

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if error is not None:
            self._abort(f"{type(error).__name__}: {error}")
            return False
        try:
            self._commit()
        except BaseException as failure:
            self._abort(str(failure))
            raise
        return False

    def _commit(self) -> None:
        config, result = self._config, self.result
        assert result is not None
        self._send_bucket(flush=True)
        for way in self._ways:
            way.sender.close()
        self._tell_all(wire.Finish(update=self.update, rank=config.rank, pieces=self._pieces))
        deadline = self._began + config.transfer_timeout_s
        if config.rank == 0:
            self._await_all({"VERIFIED"}, deadline, "check what was sent")
            result.verified_s = time.monotonic() - self._began
            self._become(UpdateState.VERIFIED)
            self._tell_all(wire.Commit(update=self.update))
            deadline = time.monotonic() + config.commit_timeout_s
        else:
            deadline += config.commit_timeout_s
        deadline += config.drain_timeout_s if config.running == "drain" else 0.0
        self._await_all({"COMMITTED"}, deadline, "swap")
        self._become(UpdateState.COMMITTED)
        for way in self._ways:
            assert way.outcome is not None
            result.reports[way.member.endpoint] = way.outcome.report
            result.draft_versions[way.member.endpoint] = way.outcome.draft_version
            way.member.policy_version = way.outcome.policy_version
        result.seconds = time.monotonic() - self._began
        if config.delta:
            self._engines.base.committed(self._version, (config.dtype, config.draft_dtype))
        logger.info(
            "version %d committed on %d of %d engines: %.1f MB in %.2f s",
            self._version, len(result.reports), len(self._engines.members), result.sent_bytes / 1e6, result.seconds,
        )  # fmt: skip

    def _tell_all(self, message: wire.FromTrainer) -> None:
        """One engine that is gone must not keep the others from hearing."""
        for way in list(self._ways):
            try:
                way.member.send(message)
            except DeadlineError as error:
                self._lost(way.member, str(error))

    def _await_all(self, states: set[str], deadline: float, what: str) -> None:
        """Wait until every engine is in one of `states`. One that aborted before the commit aborts all; one that died is left."""
        assert self.result is not None
        for way in list(self._ways):
            outcome = self._await(way, states, deadline)
            if outcome is None:
                self._lost(way.member, f"the engine at {way.member.endpoint} did not {what} in time, or died")
            elif outcome.state == "ABORTED":
                text = f"the engine at {way.member.endpoint} aborted update {self.update}: {outcome.reason}"
                if states == {"VERIFIED"} or len(self._ways) == 1:
                    raise UpdateError(text)
                self._lost(way.member, text)
            else:
                way.outcome = outcome
        if not self._ways:
            failures = "; ".join(f"{where}: {why}" for where, why in self.result.failed.items())
            raise DeadlineError(f"no engine is left: {failures}")

    def _await(self, way: _Way, states: set[str], deadline: float) -> wire.Outcome | None:
        while True:
            message = self._next(way.member, min(deadline, time.monotonic() + 1.0))
            if isinstance(message, wire.Outcome) and message.update == self.update:
                if message.state in states | {"ABORTED", "COMMITTED"}:
                    return message
                if message.state == "UNKNOWN":
                    # It was started anew meanwhile.
                    return None
            if isinstance(message, wire.Refused):
                # Another server answers at this address: the one that had our update is gone.
                return None
            if message is None and (time.monotonic() >= deadline or self._engines.is_silent(way.member)):
                return None
            if message is None:
                try:
                    way.member.send(wire.Query(update=self.update))
                except DeadlineError:
                    return None

    def _next(self, member: Member, deadline: float) -> wire.FromEngine | None:
        """The next message of this update from an engine; None at the deadline, or when the engine is gone."""
        while True:
            message = member.receive(min(deadline, time.monotonic() + 1.0))
            if message is not None and not isinstance(message, wire.Welcome | wire.Pong):
                return message
            if message is None and (time.monotonic() >= deadline or self._engines.is_silent(member)):
                return None

    def _lost(self, member: Member, why: str) -> None:
        """Go on without an engine."""
        assert self.result is not None
        logger.error("engine %s is left behind at its version: %s", member.endpoint, why)
        member.dead = why
        self.result.failed[member.endpoint] = why
        for way in [way for way in self._ways if way.member is member]:
            way.sender.close()
            self._ways.remove(way)

    def _abort(self, reason: str) -> None:
        """Have every engine give the update up; best effort, for the deadline on their side does the same."""
        self._engines.base.aborted()
        self._become(UpdateState.ABORTED)
        for member in self._engines.members:
            if member.dead is not None or member._socket is None:
                continue
            try:
                member.send(wire.Abort(update=self.update, reason=reason[:2000]), timeout_s=_ABORT_S)
            except BridgeError as error:
                logger.warning("could not tell %s of the abort: %s", member.endpoint, error)
        for way in self._ways:
            way.sender.close()
        deadline = time.monotonic() + _ABORT_S
        for way in self._ways:
            self._await(way, set(), deadline)
