"""Updates on the engine's side, from the offer to the commit: what each message does, and who is told of it. No sockets here."""

from __future__ import annotations

import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from trainer_bridge import wire
from trainer_bridge.carriers.base import DataPlane
from trainer_bridge.carriers.receiving import open_data_plane
from trainer_bridge.config import UNENCRYPTED, ReceiverConfig
from trainer_bridge.errors import BaseVersionError, BridgeError, ConfigError, PlanError, UpdateError, WireError
from trainer_bridge.inbox import Inbox
from trainer_bridge.session import FINAL, UpdateSession

logger = logging.getLogger(__name__)

_REMEMBERED = 256
"""Outcomes that a retry can still ask for."""
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
class Client:
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
    accepted: wire.Accepted
    began: float
    manifest: Answer = field(default_factory=dict)
    peers: set[bytes] = field(default_factory=set)
    data: DataPlane | None = None


class Exchange:
    """The one update that may be under way, those that wait for it, and what became of the ones before.

    Belongs to the receiver's thread; what data planes call from theirs is posted to it.
    """

    def __init__(
        self,
        *,
        config: ReceiverConfig,
        carriers: tuple[str, ...],
        host: str,
        inbox: Inbox,
        engine: Engine,
        clients: Mapping[bytes, Client],
        clock: Callable[[], float],
        send: Callable[[bytes, wire.FromEngine], None],
        post: Callable[[Callable[[], None]], None],
        counters: Counter[str],
    ) -> None:
        """`send` tells a connection something; `post` has the receiver's thread call something."""
        self.config, self.carriers = config, carriers
        self._host, self._inbox, self._engine, self._clients = host, inbox, engine, clients
        self._clock, self._send, self.post, self.counters = clock, send, post, counters
        self._active: _Active | None = None
        self._waiting: list[tuple[bytes, wire.Attach, float]] = []
        self._outcomes: OrderedDict[str, wire.Outcome] = OrderedDict()

    @property
    def is_open(self) -> bool:
        """Whether an update is under way."""
        return self._active is not None

    def alive(self, client: str) -> None:
        """A process of a trainer gave a sign of life."""
        if self._active is not None:
            self._active.session.alive(client, self._clock())

    def close(self) -> None:
        """Stop writing into the staging memory."""
        if self._active is not None and self._active.data is not None:
            self._active.data.close()

    def drop(self, kind: str, why: object) -> None:
        """Count a frame that is not acted on."""
        self.counters[kind] += 1
        # Whoever floods us must not flood the log.
        if self.counters[kind].bit_count() == 1:
            logger.warning("weight sync dropped a frame (%s, %d so far): %s", kind, self.counters[kind], why)

    # -- opening an update -----------------------------------------------------------------------------------------------

    def offer(self, identity: bytes, client: Client, offer: wire.Offer) -> None:
        """Open an update, or say why not. One of the same job that is still open is given up: its trainer began anew."""
        if offer.update in self._outcomes:
            return self._send(identity, self._outcomes[offer.update])
        if client.rank != 0:
            return self._refuse(identity, offer, "plan", f"rank {client.rank} offers an update: rank 0 leads, the others attach")
        if offer.carrier not in self.carriers:
            keys = " (its bytes would travel unencrypted: --insecure allows it)" if offer.carrier in UNENCRYPTED else ""
            reason = f"carrier {offer.carrier!r} is not open here{keys}; open: {', '.join(self.carriers)}"
            return self._refuse(identity, offer, "carrier", reason)
        active = self._active
        if active is not None:
            if active.session.update == offer.update and active.session.ranks.get(client.rank) == client.client:
                # Our answer was lost.
                return self._send(identity, active.accepted)
            if active.session.committing or (active.job != client.job):
                reason = f"job {active.job!r} is updating to version {active.session.version}: try again when it is done"
                return self._refuse(identity, offer, "busy", reason)
            self._end(f"superseded by update {offer.update} of the same job")
        if offer.partial and self._inbox.base_version != self._engine.policy_version:
            reason = (
                f"a partial update, and the engine holds no copy of the version it serves ({self._engine.policy_version}): send all"
            )
            return self._refuse(identity, offer, "base", reason)
        try:
            self._open(identity, client, offer)
        except BaseVersionError as error:
            self._refuse(identity, offer, "base", str(error))
        except ConfigError as error:
            self._refuse(identity, offer, "memory", str(error))
        except (PlanError, UpdateError) as error:
            self._refuse(identity, offer, "plan", str(error))

    def _open(self, identity: bytes, client: Client, offer: wire.Offer) -> None:
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
            staging=str(self._inbox.staging.path) if offer.carrier == "shm" else "",
            staging_bytes=self._inbox.staging.nbytes,
            offsets=layout.offsets,
            address=data.address if data is not None else "",
            token=token,
        )
        self._active = _Active(
            session=session, offer=offer, job=client.job, accepted=accepted, began=now, data=data, peers={identity}
        )
        self.counters["offered"] += 1
        logger.info("update %s to version %d opened by job %r over %s", offer.update, offer.version, client.job, offer.carrier)
        self._send(identity, accepted)
        for waiting in list(self._waiting):
            self._try_attach(*waiting)

    def attach(self, identity: bytes, client: Client, attach: wire.Attach) -> None:
        """Let a rank join, now or once rank 0 has offered."""
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

    def of_update(self, identity: bytes, client: Client, message: Any, payload: memoryview | None) -> None:
        """A message inside an update. What does not fit ends the update, unless its sender takes no part in it."""
        active = self._active
        if active is None or active.session.update != message.update:
            # Late, duplicated, or of an update that was given up meanwhile: its sender is told so.
            self.drop("stale", f"{type(message).__name__} of update {message.update}")
            return self._send(identity, self.outcome_of(message.update))
        try:
            if active.session.ranks.get(client.rank) != client.client:
                # Not its update, so not its to end.
                return self.drop("hostile", f"{type(message).__name__} by a rank that did not join")
            if isinstance(message, wire.Abort):
                if active.session.committing:
                    return self._send(identity, self.outcome_of(message.update))
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
                self.drop("stale", f"{type(message).__name__} after rank {client.rank} had finished")
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
                return self.drop("stale", f"data of update {update}")
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
        self.post(lambda: self.drop(kind, why))

    @property
    def inbox(self) -> Inbox:
        """Where pieces go; for the data planes, which write into parts of the memory that no one else writes."""
        return self._inbox

    def _finish(self, active: _Active, client: Client, message: wire.Finish) -> None:
        active.session.finished(client.rank, client.client, message.pieces)
        self._verify_if_all(active)

    def _verify_if_all(self, active: _Active) -> None:
        session = active.session
        if len(session.sent) < session.world or session.state.value != "STAGING":
            return
        sent = sum(session.sent.values())
        if self._inbox.arrived < sent and active.offer.carrier in ("shm", "zmq"):
            raise PlanError(f"{self._inbox.arrived} of {sent} pieces arrived: frames were lost")
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
            active.session.commit_failed(f"the engine refused it: {error}")
            return self._aborted(active)
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
        self._aborted(active)

    def _aborted(self, active: _Active) -> None:
        self._inbox.aborted()
        self.counters["aborted"] += 1
        session = active.session
        logger.warning("update %s to version %d aborted: %s", session.update, session.version, session.reason)
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

    def outcome_of(self, update: str) -> wire.Outcome:
        """What became of an update, or where it is."""
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

    def tick(self) -> None:
        """Give up what is overdue."""
        now, active = self._clock(), self._active
        if active is not None and (reason := active.session.overdue(now)) is not None:
            self._end(reason)
        for waiting in [entry for entry in self._waiting if now >= entry[2]]:
            self._waiting.remove(waiting)
            reason = f"rank 0 offered no update to version {waiting[1].version} in {waiting[1].deadline_s:g} s"
            self._send(waiting[0], wire.Refused(update="", code="closed", reason=reason))
