"""Catches a receiver that a frame, a client or a year of updates can bring down: hostile, truncated, doubled, lost and late frames,
clients without a key or a part in the update, memory that grows.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any

import pytest

from tests.distributed.clients import RawClient, bridge, messages_of, offer
from tests.distributed.stand import PLAN, Stand, TensorEngine, stands
from tests.distributed.weights import nudged, raw, weights
from trainer_bridge import connect, wire
from trainer_bridge.config import ReceiverConfig
from trainer_bridge.errors import ConfigError, DeadlineError, SecurityError, UpdateError
from trainer_bridge.receiver import Receiver
from trainer_bridge.security import make_keys


def test_a_delta_against_a_wrong_base_is_refused_loudly(stand: Stand) -> None:
    """Case C6, on the wire itself."""
    with RawClient(stand) as client:
        client.say(offer("u1", base_version=7))
        refused = client.hear()
        assert isinstance(refused, wire.Refused)
        assert refused.code == "base"
        assert "the engine holds none; send it whole" in refused.reason


def test_hostile_frames_are_dropped_with_a_counter_and_the_receiver_lives(stand: Stand) -> None:
    with RawClient(stand) as client:
        for frames in ([b""], [b"\xdd\xff\xff\xff\xff"], [b"\x81" * 1000], [b"a", b"b", b"c", b"d"], [os.urandom(300)], [b"\xc1"]):
            client.socket.send_multipart(frames)
        client.socket.send_multipart([wire.encode(offer("u1")), b"a payload that belongs nowhere"])
        client.say(wire.Ping(client="raw"))
        assert isinstance(client.hear(), wire.Pong)
    found = stand.state()
    assert found["counters"]["malformed"] == 7
    assert found["thread"]


FAULTS = ["truncated", "duplicated", "flipped", "missing", "swapped", "late"]


@pytest.mark.parametrize("fault", FAULTS)
def test_frames_truncated_duplicated_reordered_or_late_never_make_a_version(stand: Stand, fault: str) -> None:
    """Case C6's kind: whatever the network does to frames, the engine serves v or all of v+1."""
    with RawClient(stand) as client:
        client.say(offer("u1"))
        assert isinstance(client.hear(), wire.Accepted)
        sent = messages_of(weights(1), "u1")
        if fault == "truncated":
            sent[1] = (sent[1][0], sent[1][1][:-4])
        elif fault == "duplicated":
            sent.insert(2, sent[1])
        elif fault == "flipped":
            sent[1] = (sent[1][0], bytes([sent[1][1][0] ^ 1]) + sent[1][1][1:])
        elif fault == "missing":
            del sent[3]
        elif fault == "swapped":
            sent[2], sent[0] = sent[0], sent[2]
        for message, payload in sent:
            client.say(message, payload)
        client.say(wire.Finish(update="u1", rank=0, pieces=len(sent)))
        outcome = client.hear()
        if fault == "late":
            assert outcome.state == "VERIFIED"
            client.say(*sent[0])
            client.say(wire.Commit(update="u1"))
            assert client.hear().state == "COMMITTED"
            # And again, for an update that is over.
            client.say(*sent[0])
            assert client.hear().state == "COMMITTED"
            return
        if fault == "swapped":
            # Each piece says where it belongs.
            assert outcome.state == "VERIFIED"
            return
        assert outcome.state == "ABORTED"
        assert outcome.reason
    found = stand.state()
    assert (found["policy_version"], found["tensors"], found["thread"]) == (0, {}, True)


def test_a_commit_without_verification_is_refused(stand: Stand) -> None:
    """Case C2: an early end."""
    with RawClient(stand) as client:
        client.say(offer("u1"))
        client.hear()
        client.say(wire.Commit(update="u1"))
        outcome = client.hear()
        assert outcome.state == "ABORTED"
        assert "needs to be VERIFIED" in outcome.reason
        assert stand.state()["policy_version"] == 0


def test_a_repeated_commit_is_answered_with_what_came_of_it(stand: Stand) -> None:
    """Case C7: the reply was lost, the retry is safe."""
    with RawClient(stand) as client:
        client.say(offer("u1"))
        client.hear()
        sent = messages_of(weights(1), "u1")
        for message, payload in sent:
            client.say(message, payload)
        client.say(wire.Finish(update="u1", rank=0, pieces=len(sent)))
        assert client.hear().state == "VERIFIED"
        client.say(wire.Commit(update="u1"))
        assert client.hear().state == "COMMITTED"
        for again in (wire.Commit(update="u1"), wire.Query(update="u1"), offer("u1")):
            client.say(again)
            answer = client.hear()
            assert (answer.state, answer.policy_version) == ("COMMITTED", 1)


def test_another_job_waits_for_its_turn_and_may_not_touch_an_update(stand: Stand) -> None:
    with RawClient(stand) as client, bridge(stand, job="other") as b:
        client.say(offer("u1"))
        client.hear()
        with pytest.raises(UpdateError, match="job 'raw' is updating to version 1"), b.update(version=1):
            pass
        b.members[0].send(wire.Abort(update="u1", reason="mine now"))
        time.sleep(0.3)
        client.say(wire.Query(update="u1"))
        assert client.hear().state == "OFFERED"
    assert stand.state()["counters"]["hostile"] == 1


def test_an_offer_that_cannot_be_taken_supersedes_nothing(stand: Stand) -> None:
    with RawClient(stand) as client:
        client.say(offer("u1"))
        client.hear()
        client.say(offer("u2", carrier="pigeons"))
        assert (refused := client.hear()).code == "carrier" and "open: shm, tcp, zmq" in refused.reason
        with bridge(stand, job="raw", rank=1, world=2) as b:
            member = b.members[0]
            member.send(offer("u3"))
            assert "rank 0 leads" in member.receive(time.monotonic() + 5).reason
        client.say(wire.Query(update="u1"))
        assert client.hear().state == "OFFERED"


def test_a_connection_without_the_token_is_closed(stand: Stand) -> None:
    with RawClient(stand) as client:
        client.say(offer("u1", carrier="tcp"))
        host, _, port = client.hear().address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5) as intruder:
            intruder.sendall(b"SDT1" + bytes(32))
            assert intruder.recv(1) == b""
        client.say(wire.Query(update="u1"))
        assert client.hear().state == "OFFERED"
    until = time.monotonic() + 5
    while stand.state()["counters"].get("hostile_connections") != 1:
        assert time.monotonic() < until, "the intruder was not counted"
        time.sleep(0.05)


# -- security ------------------------------------------------------------------------------------------------------------


def test_an_open_address_needs_keys_or_the_word_insecure() -> None:
    with pytest.raises(SecurityError, match="open to other machines: give keys"):
        Receiver(ReceiverConfig(bind="tcp://0.0.0.0:0"), PLAN, TensorEngine(0))
    with pytest.raises(SecurityError, match="open to other machines"):
        connect("tcp://192.0.2.1:5555", connect_timeout_s=1)


def test_with_keys_only_those_who_have_one_come_in(tmp_path: Any) -> None:
    make_keys(tmp_path / "ours")
    make_keys(tmp_path / "theirs")
    config = ReceiverConfig(keys=tmp_path / "ours", silence_s=2.0)
    with stands(config=config) as (stand,):
        with bridge(stand, keys=tmp_path / "ours", carrier="zmq") as b, b.update(version=1) as update:
            update.target(weights(1).items())
        assert stand.state()["tensors"] == raw(weights(1))
        for keys in (None, tmp_path / "theirs"):
            with pytest.raises(DeadlineError, match="did not answer"):
                bridge(stand, keys=keys, connect_timeout_s=1)
        b = bridge(stand, keys=tmp_path / "ours", carrier="tcp")
        with b, pytest.raises(ConfigError, match="is not encrypted"), b.update(version=2):
            pass


# -- memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("carrier", ["shm", "tcp", "zmq"])
def test_memory_is_flat_over_many_updates(stand: Stand, carrier: str) -> None:
    with bridge(stand, carrier=carrier, delta=carrier != "shm") as b:

        def run(first: int, count: int) -> None:
            for version in range(first, first + count):
                with b.update(version=version) as update:
                    update.target(nudged(weights(1), version).items())
                    update.draft(weights(version, model=1).items())

        run(1, 30)
        before, staging = stand.ask("rss"), stand.state()["staging"]
        threads = threading.active_count()
        run(31, 100)
        assert stand.ask("rss") - before < 6e6
        assert stand.state()["staging"] == staging
        assert threading.active_count() == threads
        assert stand.state()["policy_version"] == 130
