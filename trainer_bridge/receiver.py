"""The engine's end of the bridge: one loop over the control socket that stages updates and hands verified ones to the engine.

Runs in a process of its own beside the engine: digests, copies and hostile frames cost the engine no step and no lock. Imports no
torch, unless a collective carrier is used.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import zmq

from trainer_bridge import security, wire
from trainer_bridge.carriers.base import DataPlane
from trainer_bridge.carriers.receiving import open_data_plane
from trainer_bridge.config import UNENCRYPTED, ReceiverConfig, check_address, is_loopback
from trainer_bridge.errors import BaseVersionError, BridgeError, ConfigError, PlanError, UpdateError, WireError
from trainer_bridge.inbox import Inbox
from trainer_bridge.plan import Plan
from trainer_bridge.session import FINAL, UpdateSession
from trainer_bridge.staging import Staging, host_id

logger = logging.getLogger(__name__)

_REMEMBERED = 256
_POLL_MS = 200
_SLACK_BYTES = 1 << 20
Answer = dict[str, Any]


class Engine(Protocol):
    """What the receiver asks of the engine. Both calls return at once; `done` may be called from any thread."""

    policy_version: int
    draft_version: int

    def commit(self, manifest: Answer, done: Callable[[Answer], None]) -> None:
        """Serve a verified update. The answer: ``{"error": ...}``, or the record with ``policy_version``, ``draft_version``."""

    def take_sample(self, header: Answer, payload: bytes, done: Callable[[Answer], None]) -> None:
        """Put a sample into the replay. The answer: ``{"taken": bool, "reason": str}``."""


@dataclass(kw_only=True)
class _Client:
    """One connection of a trainer's process."""

    job: str
    client: str
    rank: int
    sample_bytes: int = 0


@dataclass(kw_only=True)
class _Active:
    """The update under way, and who is told of it."""

    session: UpdateSession
    offer: wire.Offer
    job: str
    token: bytes
    accepted: wire.Accepted
    began: float
    manifest: Answer = field(default_factory=dict)
    peers: set[bytes] = field(default_factory=set)
    data: DataPlane | None = None


class Receiver:
    """Serves trainers until `stop`. All state belongs to the thread that runs `run`; others use `post`."""

    def __init__(self, config: ReceiverConfig, plan: Plan, engine: Engine, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Binds at once. Raises `SecurityError`, `ConfigError`, or `zmq.ZMQError` when the address is taken."""
        self.config, self.plan = config, plan
        self.counters: Counter[str] = Counter()
        """Frames and updates by what became of them."""
        self.server = secrets.token_hex(8)
        self._engine, self._clock = engine, clock
        self._host, _ = check_address(config.bind, keys=config.keys, insecure=config.insecure, option="bind")
        self._loopback = is_loopback(self._host)
        self._staging = Staging(config.job)
        self._inbox = Inbox(plan, self._staging)
        self._clients: dict[bytes, _Client] = {}
        self._active: _Active | None = None
        self._waiting: list[tuple[bytes, wire.Attach, float]] = []
        self._outcomes: OrderedDict[str, wire.Outcome] = OrderedDict()
        self._posted: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._authenticator: Any = None
        try:
            self._bind()
        except BaseException:
            self._close()
            raise

    def _bind(self) -> None:
        socket, config = self._socket, self.config
        socket.setsockopt(zmq.MAXMSGSIZE, config.max_data_bytes + _SLACK_BYTES)
        # Data waits at the sender, where memory is accounted for, not here.
        socket.setsockopt(zmq.RCVHWM, 4)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.IPV6, int(":" in self._host))
        if config.keys is not None:
            self._authenticator = security.guard_server(self._context, socket, config.keys)
        elif not self._loopback:
            logger.warning("weight sync on %s without keys (--insecure): whoever reaches it can change the weights", config.bind)
        socket.bind(config.bind)
        self.endpoint: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """Address that trainers connect to."""

    @property
    def carriers(self) -> tuple[str, ...]:
        """Carriers that this engine takes, the preferred first."""
        open_data = self._loopback or self.config.insecure
        return ("shm", "tcp", "zmq", "gloo", "nccl") if open_data else ("shm", "zmq")

    # -- the loop --------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until `stop`."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        try:
            while not self._stopping.is_set():
                ready = dict(poller.poll(_POLL_MS))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                while self._posted:
                    self._posted.popleft()()
                if self._socket in ready:
                    self._receive()
                self._tick()
        finally:
            self._close()

    def stop(self) -> None:
        """End `run`; callable from any thread."""
        self._stopping.set()
        self.post(lambda: None)

    def post(self, work: Callable[[], None]) -> None:
        """Have the loop's thread call `work`; callable from any thread."""
        self._posted.append(work)
        os.eventfd_write(self._wake, 1)

    def _close(self) -> None:
        if self._active is not None and self._active.data is not None:
            self._active.data.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=200)
        self._staging.close()

    def _receive(self) -> None:
        """Take what waits, a bounded number of messages so that the clock is looked at."""
        for _ in range(64):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            identity = frames[0].bytes
            try:
                if not 2 <= len(frames) <= 3:
                    raise WireError(f"{len(frames) - 1} frames, a message has one or two")
                message = wire.decode_from_trainer(frames[1].buffer)
            except WireError as error:
                self._drop("malformed", error)
                continue
            self._handle(identity, message, frames[2].buffer if len(frames) == 3 else None)

    def _drop(self, kind: str, why: object) -> None:
        self.counters[kind] += 1
        # Whoever floods us must not flood the log.
        if self.counters[kind].bit_count() == 1:
            logger.warning("weight sync dropped a frame (%s, %d so far): %s", kind, self.counters[kind], why)

    def _handle(self, identity: bytes, message: wire.FromTrainer, payload: memoryview | None) -> None:
        self.counters["messages"] += 1
        if (payload is not None) != isinstance(message, wire.Data | wire.Sample):
            return self._drop("malformed", f"{type(message).__name__} with{'' if payload is not None else 'out'} payload")
        if isinstance(message, wire.Hello):
            return self._hello(identity, message)
        if isinstance(message, wire.Ping):
            return self._ping(identity, message)
        client = self._clients.get(identity)
        if client is None:
            return self._send(identity, wire.Refused(update="", code="closed", reason="this server does not know you: say hello"))
        if self._active is not None:
            self._active.session.alive(client.client, self._clock())
        if isinstance(message, wire.Offer):
            self._offer(identity, client, message)
        elif isinstance(message, wire.Attach):
            self._attach(identity, client, message)
        elif isinstance(message, wire.Sample):
            self._sample(identity, client, message, bytes(payload or b""))
        elif isinstance(message, wire.Query):
            self._send(identity, self._outcome_of(message.update))
        else:
            self._of_update(identity, client, message, payload)

    # -- who is there ----------------------------------------------------------------------------------------------------

    def _hello(self, identity: bytes, message: wire.Hello) -> None:
        if message.protocol != wire.PROTOCOL:
            reason = (
                f"the trainer speaks protocol {message.protocol}, this engine {wire.PROTOCOL}: install the same version on both"
            )
            return self._send(identity, wire.Refused(update="", code="protocol", reason=reason))
        if len(self._clients) > 4096:
            self._clients.clear()
        self._clients[identity] = _Client(job=message.job, client=message.client, rank=message.rank)
        inbox, engine = self._inbox, self._engine
        welcome = wire.Welcome(
            protocol=wire.PROTOCOL,
            server=self.server,
            host=host_id(),
            policy_version=engine.policy_version,
            draft_version=engine.draft_version,
            base_version=inbox.base_version if self._active is None else None,
            base_dtypes=inbox.base_dtypes,
            target=self.plan.target,
            draft=self.plan.draft,
            ignored=dict(self.plan.ignored),
            carriers=self.carriers,
            max_data_bytes=self.config.max_data_bytes,
            sample_window_bytes=self.config.sample_window_bytes,
        )
        self._send(identity, welcome)

    def _ping(self, identity: bytes, message: wire.Ping) -> None:
        if self._active is not None:
            self._active.session.alive(message.client, self._clock())
        engine = self._engine
        self._send(
            identity,
            wire.Pong(server=self.server, policy_version=engine.policy_version, draft_version=engine.draft_version),
        )

    # -- opening an update -----------------------------------------------------------------------------------------------

    def _offer(self, identity: bytes, client: _Client, offer: wire.Offer) -> None:
        if offer.update in self._outcomes:
            return self._send(identity, self._outcomes[offer.update])
        active = self._active
        if active is not None:
            if active.session.update == offer.update and active.session.ranks.get(client.rank) == client.client:
                # Our answer was lost.
                return self._send(identity, active.accepted)
            if active.session.committing or (active.job != client.job):
                reason = f"job {active.job!r} is updating to version {active.session.version}: try again when it is done"
                return self._refuse(identity, offer, "busy", reason)
            self._end(f"superseded by update {offer.update} of the same job")
        if client.rank != 0:
            return self._refuse(identity, offer, "plan", f"rank {client.rank} offers an update: rank 0 leads, the others attach")
        if offer.carrier not in self.carriers:
            keys = " (its bytes would travel unencrypted: --insecure allows it)" if offer.carrier in UNENCRYPTED else ""
            reason = f"carrier {offer.carrier!r} is not open here{keys}; open: {', '.join(self.carriers)}"
            return self._refuse(identity, offer, "carrier", reason)
        try:
            self._open(identity, client, offer)
        except BaseVersionError as error:
            self._refuse(identity, offer, "base", str(error))
        except ConfigError as error:
            self._refuse(identity, offer, "memory", str(error))
        except (PlanError, UpdateError) as error:
            self._refuse(identity, offer, "plan", str(error))

    def _open(self, identity: bytes, client: _Client, offer: wire.Offer) -> None:
        now = self._clock()
        session = UpdateSession(
            update=offer.update,
            version=offer.version,
            world=offer.world,
            deadline=now + offer.deadline_s,
            silence_s=self.config.silence_s,
        )
        session.join(client.rank, client.client, now)
        layout = self._inbox.open(offer)
        token = secrets.token_bytes(32)
        data = open_data_plane(offer.carrier, host=self._host, token=token, receiver=self)
        accepted = wire.Accepted(
            update=offer.update,
            dtypes=layout.dtypes,
            staging=str(self._staging.path) if offer.carrier == "shm" else "",
            staging_bytes=self._staging.nbytes,
            offsets=layout.offsets,
            address=data.address if data is not None else "",
            token=token,
        )
        self._active = _Active(
            session=session, offer=offer, job=client.job, token=token, accepted=accepted, began=now, data=data, peers={identity}
        )
        self.counters["offered"] += 1
        logger.info("update %s to version %d opened by job %r over %s", offer.update, offer.version, client.job, offer.carrier)
        self._send(identity, accepted)
        for waiting in list(self._waiting):
            self._try_attach(*waiting)

    def _attach(self, identity: bytes, client: _Client, attach: wire.Attach) -> None:
        waiting = (identity, attach, self._clock() + attach.deadline_s)
        self._waiting.append(waiting)
        self._try_attach(*waiting)

    def _try_attach(self, identity: bytes, attach: wire.Attach, until: float) -> None:
        active, client = self._active, self._clients.get(identity)
        if client is None or active is None or (active.job, active.offer.version) != (client.job, attach.version):
            return
        if active.session.state in FINAL:
            return
        self._waiting.remove((identity, attach, until))
        if attach.carrier != active.offer.carrier:
            reason = f"rank {client.rank} wants carrier {attach.carrier!r}, rank 0 offered {active.offer.carrier!r}"
            return self._send(identity, wire.Refused(update=active.offer.update, code="carrier", reason=reason))
        try:
            active.session.join(client.rank, client.client, self._clock())
        except UpdateError as error:
            return self._send(identity, wire.Refused(update=active.offer.update, code="plan", reason=str(error)))
        active.peers.add(identity)
        self._send(identity, active.accepted)

    def _refuse(self, identity: bytes, offer: wire.Offer, code: Any, reason: str) -> None:
        self.counters["refused"] += 1
        logger.warning("update %s to version %d refused: %s", offer.update, offer.version, reason)
        self._send(identity, wire.Refused(update=offer.update, code=code, reason=reason))

    # -- inside an update ------------------------------------------------------------------------------------------------

    def _of_update(self, identity: bytes, client: _Client, message: Any, payload: memoryview | None) -> None:
        active = self._active
        if active is None or active.session.update != message.update:
            # Late, duplicated, or of an update that was given up meanwhile: its sender is told so.
            self._drop("stale", f"{type(message).__name__} of update {message.update}")
            return self._send(identity, self._outcome_of(message.update))
        try:
            if active.session.ranks.get(client.rank) != client.client:
                # Not its update, so not its to end.
                return self._drop("hostile", f"{type(message).__name__} by a rank that did not join")
            if isinstance(message, wire.Abort):
                if active.session.committing:
                    return self._send(identity, self._outcome_of(message.update))
                return self._end(f"aborted by rank {client.rank}: {message.reason}")
            active.peers.add(identity)
            if isinstance(message, wire.Commit):
                return self._commit(active)
            if isinstance(message, wire.Finish):
                self._finish(active, client, message)
            elif isinstance(message, wire.Join):
                if active.data is None:
                    raise WireError(f"an update over {active.offer.carrier} has no group to join")
                active.data.join(message)
            elif active.session.committing or active.session.sent.get(client.rank) is not None:
                self._drop("stale", f"{type(message).__name__} after rank {client.rank} had finished")
            else:
                self._pieces(active, message, payload)
        except (BridgeError, ValueError) as error:
            self._end(str(error))

    def _pieces(self, active: _Active, message: wire.Staged | wire.Data, payload: memoryview | None) -> None:
        active.session.began()
        if payload is None:
            if active.offer.carrier != "shm":
                raise WireError(f"staged pieces in an update over {active.offer.carrier}")
            for piece in message.pieces:
                self._inbox.check(piece)
        else:
            data, at = np.frombuffer(payload, np.uint8), 0
            if sum(piece.nbytes for piece in message.pieces) != data.size:
                raise WireError(f"a payload of {data.size} bytes for pieces of {sum(p.nbytes for p in message.pieces)}")
            for piece in message.pieces:
                self._inbox.put(piece, data[at : at + piece.nbytes])
                at += piece.nbytes
        self._verify_if_all(active)

    def pieces_arrived(self, update: str, work: Callable[[Inbox], None]) -> None:
        """A data plane has pieces: have them checked on the loop's thread. Callable from any thread."""

        def arrived() -> None:
            active = self._active
            if active is None or active.session.update != update or active.session.state in FINAL:
                return self._drop("stale", f"data of update {update}")
            try:
                active.session.began()
                work(self._inbox)
                self._verify_if_all(active)
            except (BridgeError, ValueError) as error:
                self._end(str(error))

        self.post(arrived)

    def data_failed(self, update: str, reason: str) -> None:
        """A data plane gave up. Callable from any thread."""

        def failed() -> None:
            if self._active is not None and self._active.session.update == update and not self._active.session.committing:
                self._end(reason)

        self.post(failed)

    def dropped(self, kind: str, why: object) -> None:
        """A data plane dropped something hostile. Callable from any thread."""
        self.post(lambda: self._drop(kind, why))

    @property
    def inbox(self) -> Inbox:
        """Where pieces go; for the data planes, which write into parts of the memory that no one else writes."""
        return self._inbox

    def _finish(self, active: _Active, client: _Client, message: wire.Finish) -> None:
        active.session.finished(client.rank, client.client, message.pieces)
        self._verify_if_all(active)

    def _verify_if_all(self, active: _Active) -> None:
        session = active.session
        if len(session.sent) < session.world or session.state.value != "STAGING":
            return
        sent = sum(session.sent.values())
        if self._inbox.arrived < sent:
            # The rest is still on its way on another connection; the deadline is watching.
            return
        if self._inbox.arrived > sent:
            raise PlanError(f"{self._inbox.arrived} pieces arrived, {sent} were sent: frames were duplicated")
        if active.data is not None:
            active.data.close()
        active.manifest = self._inbox.verify()
        if not active.manifest["target"] and active.offer.version != self._engine.policy_version:
            raise PlanError(
                f"the draft alone for version {active.offer.version}, and the engine serves {self._engine.policy_version}: "
                "send the target too, or the draft for that version"
            )
        session.verified()
        active.manifest["report"]["staged_ms"] = round(1e3 * (self._clock() - active.began), 1)
        self._tell(active)

    def _commit(self, active: _Active) -> None:
        if active.session.committing:
            return
        active.session.commit_begins()
        update = active.session.update
        manifest = {
            **active.manifest,
            "update": update,
            "job": active.job,
            "running": active.offer.running,
            "drain_timeout_s": active.offer.drain_timeout_s,
        }
        self._engine.commit(manifest, lambda answer: self.post(lambda: self._committed(update, answer)))

    def _committed(self, update: str, answer: Answer) -> None:
        active = self._active
        if active is None or active.session.update != update:
            return
        if (error := answer.get("error")) is not None:
            active.session.committing = False
            return self._end(f"the engine refused it: {error}")
        active.session.committed()
        self._inbox.committed()
        active.manifest["report"].update(answer.get("report", {}))
        self.counters["committed"] += 1
        self._tell(active)
        self._active = None

    def _end(self, reason: str) -> None:
        """Abort the active update; the engine serves what it served."""
        active = self._active
        assert active is not None
        if active.data is not None:
            active.data.close()
        active.session.abort(reason)
        self._inbox.aborted()
        self.counters["aborted"] += 1
        logger.warning("update %s to version %d aborted: %s", active.session.update, active.session.version, reason)
        self._tell(active)
        self._active = None

    def _tell(self, active: _Active) -> None:
        """Everybody in an update learns its state."""
        session, engine = active.session, self._engine
        outcome = wire.Outcome(
            update=session.update,
            state=session.state.value,  # type: ignore[arg-type]
            reason=session.reason[:4000],
            policy_version=engine.policy_version,
            draft_version=engine.draft_version,
            report=active.manifest.get("report", {}),
        )
        if session.state in FINAL:
            self._outcomes[session.update] = outcome
            while len(self._outcomes) > _REMEMBERED:
                self._outcomes.popitem(last=False)
        for identity in active.peers:
            self._send(identity, outcome)

    def _outcome_of(self, update: str) -> wire.Outcome:
        if update in self._outcomes:
            return self._outcomes[update]
        active, engine = self._active, self._engine
        state, report = "UNKNOWN", {}
        if active is not None and active.session.update == update:
            state, report = active.session.state.value, active.manifest.get("report", {})
        return wire.Outcome(
            update=update,
            state=state,  # type: ignore[arg-type]
            reason="" if state != "UNKNOWN" else "this server never heard of it, or has forgotten it",
            policy_version=engine.policy_version,
            draft_version=engine.draft_version,
            report=report,
        )

    # -- samples ---------------------------------------------------------------------------------------------------------

    def _sample(self, identity: bytes, client: _Client, sample: wire.Sample, payload: bytes) -> None:
        def answer(taken: bool, reason: str) -> None:
            self.counters["samples_taken" if taken else "samples_refused"] += 1
            self._send(identity, wire.SampleTaken(sequence=sample.sequence, taken=taken, reason=reason[:1000]))

        if client.sample_bytes + len(payload) > self.config.sample_window_bytes:
            return answer(False, f"more than {self.config.sample_window_bytes} bytes of samples without waiting for answers")
        client.sample_bytes += len(payload)

        def done(found: Answer) -> None:
            def tell() -> None:
                client.sample_bytes -= len(payload)
                answer(bool(found.get("taken")), str(found.get("reason", "")))

            self.post(tell)

        header = {
            "request_id": sample.request_id,
            "group_id": sample.group_id,
            "policy_version": sample.policy_version,
            "tap_layers": list(sample.tap_layers),
            "final_is_normed": sample.final_is_normed,
            "tensors": [[spec.name, spec.dtype, list(spec.shape)] for spec in sample.tensors],
            "digest": sample.digest,
        }
        self._engine.take_sample(header, payload, done)

    # -- time ------------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now, active = self._clock(), self._active
        if active is not None and (reason := active.session.overdue(now)) is not None:
            self._end(reason)
        for waiting in [entry for entry in self._waiting if now >= entry[2]]:
            self._waiting.remove(waiting)
            reason = f"rank 0 offered no update to version {waiting[1].version} in {waiting[1].deadline_s:g} s"
            self._send(waiting[0], wire.Refused(update="", code="closed", reason=reason))

    def _send(self, identity: bytes, message: wire.FromEngine) -> None:
        try:
            self._socket.send_multipart([identity, wire.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # The client has gone, or takes nothing more: it will ask again, or be taken for dead.
            self._drop("unsent", error)
