"""The receiver of weights as a process of its own, beside the API server: ``python -m vllm_specdraft.sync_process JSON``.

Speaks with the API server through its standard input and output, in frames of msgpack (`vllm_specdraft.sync_link`). It ends when
its input ends, so it never outlives the server. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import zmq

from trainer_bridge.config import ReceiverConfig
from trainer_bridge.errors import BridgeError
from trainer_bridge.plan import Plan, read_header
from trainer_bridge.receiver import Receiver
from trainer_bridge.wire import Spec

LENGTH = struct.Struct(">I")
TIED = "the model ties its head to the embedding, whose new values decide"
DERIVED = "it is derived from the config"
_NICENESS = 5
"""Where the engine wants every core, it keeps three quarters of the one that bytes are checked on."""


def plan_of(target: Path, draft: Path) -> Plan:
    """What an engine of this target and draft takes: names, dtypes and shapes of their checkpoints. Raises `ConfigError`."""
    config = json.loads((target / "config.json").read_text())
    found: dict[str, Spec] = {}
    for file in sorted(target.glob("*.safetensors")):
        found.update(read_header(file))
    ignored = {name: DERIVED for name in found if name.endswith("rotary_emb.inv_freq")}
    if config.get("tie_word_embeddings"):
        ignored["lm_head.weight"] = TIED
    specs = tuple(spec for name, spec in sorted(found.items()) if name not in ignored)
    return Plan(
        target=specs, draft=tuple(spec for _, spec in sorted(read_header(draft / "model.safetensors").items())), ignored=ignored
    )


class Pipe:
    """Frames over two files; writing is safe from several threads."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._source, self._sink, self._lock = source, sink, threading.Lock()

    def write(self, message: dict[str, Any]) -> None:
        """Send one message; nothing happens when nobody reads any more."""
        frame = msgspec.msgpack.encode(message)
        try:
            with self._lock:
                self._sink.write(LENGTH.pack(len(frame)) + frame)
                self._sink.flush()
        except (BrokenPipeError, ValueError):
            # The server has gone; our input says so, too.
            pass

    def read(self) -> dict[str, Any] | None:
        """The next message; None at the end."""
        head = self._source.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return None
        frame = self._source.read(LENGTH.unpack(head)[0])
        return msgspec.msgpack.decode(frame)


class ServerEngine:
    """The engine, as the receiver knows it: calls go to the API server, answers come back."""

    def __init__(self, pipe: Pipe, policy_version: int, draft_version: int) -> None:
        self.policy_version, self.draft_version = policy_version, draft_version
        self._pipe = pipe
        self._ids = itertools.count()
        self._waiting: dict[int, Callable[[dict[str, Any]], None]] = {}

    def commit(self, manifest: dict[str, Any], done: Callable[[dict[str, Any]], None]) -> None:
        """Have the engine serve an update."""
        self._ask({"op": "commit", "manifest": manifest}, done)

    def take_sample(self, header: dict[str, Any], payload: bytes, done: Callable[[dict[str, Any]], None]) -> None:
        """Have the engine's replay take a sample."""
        self._ask({"op": "sample", "header": header, "payload": payload}, done)

    def _ask(self, message: dict[str, Any], done: Callable[[dict[str, Any]], None]) -> None:
        number = next(self._ids)
        self._waiting[number] = done
        self._pipe.write({"id": number, **message})

    def heard(self, message: dict[str, Any]) -> None:
        """The server answered, or tells new versions."""
        self.policy_version = message.get("policy_version", self.policy_version)
        self.draft_version = message.get("draft_version", self.draft_version)
        if (done := self._waiting.pop(message.get("id", -1), None)) is not None:
            done(message["answer"])


def main(argv: list[str]) -> int:
    """Serve until the input ends; the exit code."""
    # The terminal's Ctrl-C is for the server, which then closes our input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="specdraft sync: %(message)s")
    os.nice(_NICENESS)
    settings = json.loads(argv[0])
    pipe = Pipe(sys.stdin.buffer, sys.stdout.buffer)
    engine = ServerEngine(pipe, settings["policy_version"], settings["draft_version"])
    keys = settings["keys"]
    try:
        receiver = Receiver(
            ReceiverConfig(
                bind=settings["bind"], job=settings["job"], keys=Path(keys) if keys else None, insecure=settings["insecure"]
            ),
            plan_of(Path(settings["target"]), Path(settings["draft"])),
            engine,
        )
    except (BridgeError, OSError, ValueError, zmq.ZMQError) as error:
        pipe.write({"failed": f"{settings['bind']}: {error}"})
        return 1
    # The server ends us that way, and whoever ends the whole group of processes: the staging memory is given back first.
    signal.signal(signal.SIGTERM, lambda *_: receiver.stop())
    pipe.write({"ready": receiver.endpoint, "carriers": list(receiver.carriers)})
    threading.Thread(target=_listen, args=(pipe, engine, receiver), daemon=True).start()
    receiver.run()
    return 0


def _listen(pipe: Pipe, engine: ServerEngine, receiver: Receiver) -> None:
    while (message := pipe.read()) is not None:
        if message.get("counters"):
            # Behind what was posted before, so that they count it.
            receiver.post(lambda message=message: pipe.write({"id": message["id"], "counters": dict(receiver.counters)}))  # type: ignore[misc]
        else:
            receiver.post(lambda message=message: engine.heard(message))  # type: ignore[misc]
    receiver.stop()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # A thread that waits for its input must not keep the process.
    os._exit(code)
