"""Catches a decoder that a hostile or broken frame can crash, hang, or have allocate more than the frame's own size warrants."""

from __future__ import annotations

import os
import time
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer_bridge import wire
from trainer_bridge.errors import WireError

PIECE = wire.Piece(model=0, tensor=3, start=(0, 5), shape=(2, 7), nbytes=56, digest=bytes(range(16)), delta=True)
MESSAGES: list[Any] = [
    wire.Hello(protocol=1, job="j", client="c", rank=0, world=2),
    wire.Ping(client="c"),
    wire.Offer(
        update="u", version=3, base_version=2, world=1, carrier="shm", dtypes=("plan", "bfloat16"), partial=True,
        running="drain", drain_timeout_s=1.5, deadline_s=10.0,
    ),
    wire.Attach(version=3, rank=1, carrier="tcp", deadline_s=2.0),
    wire.Join(update="u", address="127.0.0.1:5", rank=1, world=2, timeout_s=3.0),
    wire.Staged(update="u", pieces=(PIECE, PIECE)),
    wire.Data(update="u", pieces=(PIECE,)),
    wire.Finish(update="u", rank=0, pieces=9),
    wire.Commit(update="u"),
    wire.Abort(update="u", reason="because"),
    wire.Query(update="u"),
    wire.Sample(
        sequence=1, request_id="r", group_id="g", policy_version=3, tap_layers=(1, 2), final_is_normed=True,
        tensors=(wire.Spec("taps", "float32", (3, 4)),), digest=bytes(16),
    ),
]  # fmt: skip
ANSWERS: list[Any] = [
    wire.Welcome(
        protocol=1, server="s", host="h", policy_version=1, draft_version=2, base_version=None, base_dtypes=("plan", "plan"),
        target=(wire.Spec("a", "float32", (2,)),), draft=(), ignored={"b": "tied"}, carriers=("shm",), max_data_bytes=5,
        sample_window_bytes=6,
    ),
    wire.Accepted(
        update="u", dtypes=("plan", "plan"), staging="/dev/shm/x", staging_bytes=7, offsets=((0, 64), ()), address="", token=b"t"
    ),
    wire.Refused(update="u", code="busy", reason="r"),
    wire.Outcome(update="u", state="ABORTED", reason="r", policy_version=1, draft_version=2, report={"a": 1, "b": [1.5, None]}),
    wire.Pong(server="s", policy_version=1, draft_version=2),
    wire.SampleTaken(sequence=4, taken=False, reason="full"),
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_of_the_trainer_come_back_as_they_were(message: Any) -> None:
    assert wire.decode_from_trainer(wire.encode(message)) == message
    with pytest.raises(WireError):
        wire.decode_from_engine(wire.encode(message))


@pytest.mark.parametrize("message", ANSWERS, ids=lambda m: type(m).__name__)
def test_messages_of_the_engine_come_back_as_they_were(message: Any) -> None:
    assert wire.decode_from_engine(wire.encode(message)) == message
    with pytest.raises(WireError):
        wire.decode_from_trainer(wire.encode(message))


def test_every_message_is_in_the_round_trips() -> None:
    kinds = {type(m) for m in (*MESSAGES, *ANSWERS)}
    assert kinds == {kind for kind in vars(wire).values() if isinstance(kind, type) and issubclass(kind, wire._Message)} - {
        wire._Message
    }


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"", "ends in the middle"),
        (b"\xdd\xff\xff\xff\xff", "promises more"),
        (b"\xdf\xff\xff\xff\xff", "promises more"),
        (b"\xc6\xff\xff\xff\xff", "promises more"),
        (b"\xdc\xff\xff" + b"\x00" * 10, "promises more"),
        (b"\x91" * 100 + b"\x00", "nests deeper"),
        (b"\xc1", "tag 0xc1"),
        (b"\xd4\x01\x00", "tag 0xd4"),
        (b"\xc0\xc0", "too many"),
        (msgspec.msgpack.encode({"type": "ping"}), "client"),
        (msgspec.msgpack.encode({"type": "ping", "client": "c", "more": 1}), "more"),
        (msgspec.msgpack.encode({"type": "nothing"}), "nothing"),
        (msgspec.msgpack.encode({"type": "ping", "client": 5}), "int"),
        (msgspec.msgpack.encode({"type": "ping", "client": "c" * 600}), "512"),
        (msgspec.msgpack.encode({"type": "finish", "update": "u", "rank": -1, "pieces": 0}), "0"),
        (msgspec.msgpack.encode({"type": "commit", "update": ""}), "1"),
    ],
)
def test_what_is_no_message_is_refused_with_the_reason(frame: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        wire.decode_from_trainer(frame)


def test_a_frame_beyond_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(WireError, match="a control frame of 101 bytes, the limit is 100"):
        wire.decode_from_trainer(bytes(101), limit=100)


def mutated(draw: Any) -> bytes:
    """A valid frame with bytes changed, cut out, doubled or put in."""
    frame = bytearray(wire.encode(draw(st.sampled_from(MESSAGES))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(frame)))
        kind = draw(st.sampled_from(["set", "cut", "insert", "truncate", "double"]))
        if kind == "set" and at < len(frame):
            frame[at] = draw(st.integers(0, 255))
        elif kind == "cut":
            del frame[at : at + draw(st.integers(1, 8))]
        elif kind == "insert":
            frame[at:at] = draw(st.binary(max_size=12))
        elif kind == "truncate":
            del frame[at:]
        else:
            frame = frame + frame
    return bytes(frame)


tags = st.sampled_from([bytes([tag]) for tag in range(0x80, 0xE0)])
hostile = st.one_of(
    st.binary(max_size=400),
    st.composite(mutated)(),
    st.lists(st.one_of(tags, st.binary(max_size=9)), max_size=40).map(b"".join),
)


@settings(max_examples=20_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(frame=hostile)
def test_hostile_frames_raise_nothing_but_a_wire_error(frame: bytes) -> None:
    """20,000 inputs: no crash, no hang, no allocation beyond a small multiple of the frame."""
    began = time.perf_counter()
    tracemalloc.start()
    try:
        wire.decode_from_trainer(frame)
    except WireError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 64 * len(frame) + 100_000
    assert time.perf_counter() - began < 2


def test_a_large_frame_of_small_items_takes_no_more_than_its_share() -> None:
    """The worst that passes the scan: a frame full of the shortest items there are."""
    frame = b"\xdd" + (1_000_000).to_bytes(4, "big") + b"\x90" * 1_000_000
    began = time.perf_counter()
    tracemalloc.start()
    with pytest.raises(WireError):
        wire.decode_from_trainer(frame)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * len(frame)
    assert time.perf_counter() - began < 20
    with pytest.raises(WireError):
        wire.decode_from_trainer(os.urandom(wire.MAX_CONTROL_BYTES))
