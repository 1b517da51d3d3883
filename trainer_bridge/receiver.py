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
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import zmq

from trainer_bridge import security, wire
from trainer_bridge.config import ReceiverConfig, check_address, is_loopback
from trainer_bridge.errors import WireError
from trainer_bridge.exchange import Answer, Client, Engine, Exchange
from trainer_bridge.inbox import Inbox
from trainer_bridge.plan import Plan
from trainer_bridge.staging import Staging, host_id

logger = logging.getLogger(__name__)

_POLL_MS = 200
_POSTED_AT_ONCE = 16
_SLACK_BYTES = 1 << 20
_MOST_CLIENTS = 4096
"""Connections that are remembered; the oldest go first, and may say hello again."""


class Receiver:
    """Serves trainers until `stop`. All state belongs to the thread that runs `run`; others use `post`."""

    def __init__(self, config: ReceiverConfig, plan: Plan, engine: Engine, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Binds at once. Raises `SecurityError`, `ConfigError`, or `zmq.ZMQError` when the address is taken."""
        self.config, self.plan = config, plan
        self.counters: Counter[str] = Counter()
        """Frames and updates by what became of them."""
        self.server = secrets.token_hex(8)
        self._engine = engine
        self._host, _ = check_address(config.bind, keys=config.keys, insecure=config.insecure, option="bind")
        self._loopback = is_loopback(self._host)
        self._staging = Staging(config.job)
        self._inbox = Inbox(plan, self._staging)
        self._clients: dict[bytes, Client] = {}
        self._exchange = Exchange(
            config=config,
            carriers=self.carriers,
            host=self._host,
            inbox=self._inbox,
            engine=engine,
            clients=self._clients,
            clock=clock,
            send=self._send,
            post=self.post,
            counters=self.counters,
        )
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
                ready = dict(poller.poll(0 if self._posted else _POLL_MS))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                # A bounded number, so that a trainer whose pieces take long to check is heard meanwhile.
                for _ in range(min(len(self._posted), _POSTED_AT_ONCE)):
                    self._posted.popleft()()
                self._receive()
                self._exchange.tick()
        finally:
            self._close()

    @property
    def inbox(self) -> Inbox:
        """What is held of the weights."""
        return self._inbox

    def stop(self) -> None:
        """End `run`; callable from any thread."""
        self._stopping.set()
        self.post(lambda: None)

    def post(self, work: Callable[[], None]) -> None:
        """Have the loop's thread call `work`; callable from any thread."""
        self._posted.append(work)
        os.eventfd_write(self._wake, 1)

    def _close(self) -> None:
        self._exchange.close()
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
                self._exchange.drop("malformed", error)
                continue
            self._handle(identity, message, frames[2].buffer if len(frames) == 3 else None)

    def _handle(self, identity: bytes, message: wire.FromTrainer, payload: memoryview | None) -> None:
        self.counters["messages"] += 1
        if (payload is not None) != isinstance(message, wire.Data | wire.Sample):
            return self._exchange.drop("malformed", f"{type(message).__name__} with{'' if payload is not None else 'out'} payload")
        if isinstance(message, wire.Hello):
            return self._hello(identity, message)
        if isinstance(message, wire.Ping):
            return self._ping(identity, message)
        client = self._clients.get(identity)
        if client is None:
            return self._send(identity, wire.Refused(update="", code="closed", reason="this server does not know you: say hello"))
        self._exchange.alive(client.client)
        if isinstance(message, wire.Offer):
            self._exchange.offer(identity, client, message)
        elif isinstance(message, wire.Attach):
            self._exchange.attach(identity, client, message)
        elif isinstance(message, wire.Sample):
            self._sample(identity, client, message, bytes(payload or b""))
        elif isinstance(message, wire.Query):
            self._send(identity, self._exchange.outcome_of(message.update))
        else:
            self._exchange.of_update(identity, client, message, payload)

    # -- who is there ----------------------------------------------------------------------------------------------------

    def _hello(self, identity: bytes, message: wire.Hello) -> None:
        if message.protocol != wire.PROTOCOL:
            reason = (
                f"the trainer speaks protocol {message.protocol}, this engine {wire.PROTOCOL}: install the same version on both"
            )
            return self._send(identity, wire.Refused(update="", code="protocol", reason=reason))
        while len(self._clients) >= _MOST_CLIENTS:
            self._clients.pop(next(iter(self._clients)))
        self._clients[identity] = Client(job=message.job, client=message.client, rank=message.rank)
        inbox, engine = self._inbox, self._engine
        welcome = wire.Welcome(
            protocol=wire.PROTOCOL,
            server=self.server,
            host=host_id(),
            policy_version=engine.policy_version,
            draft_version=engine.draft_version,
            base_version=inbox.base_version if not self._exchange.is_open else None,
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
        self._exchange.alive(message.client)
        engine = self._engine
        self._send(
            identity,
            wire.Pong(server=self.server, policy_version=engine.policy_version, draft_version=engine.draft_version),
        )

    # -- samples ---------------------------------------------------------------------------------------------------------

    def _sample(self, identity: bytes, client: Client, sample: wire.Sample, payload: bytes) -> None:
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

    def _send(self, identity: bytes, message: wire.FromEngine) -> None:
        try:
            self._socket.send_multipart([identity, wire.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # The client has gone, or takes nothing more: it will ask again, or be taken for dead.
            self._exchange.drop("unsent", error)
