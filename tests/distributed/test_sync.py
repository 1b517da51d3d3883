"""Catches an update that is not a transaction: bytes that differ, a model half at a version, a failure that nobody hears of, one
that keeps the next update out, memory or files left behind. Real processes and sockets, a stand-in for the engine.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zmq

from tests.distributed.stand import PLAN, Stand, staging_files, stands
from tests.distributed.weights import raw, weights
from trainer_bridge import connect, wire
from trainer_bridge.config import ReceiverConfig
from trainer_bridge.errors import BridgeError, ConfigError, DeadlineError, SecurityError, UpdateError
from trainer_bridge.security import make_keys
from trainer_bridge.shards import Shard

CARRIERS = ["shm", "tcp", "zmq", "gloo"]


@pytest.fixture
def stand() -> Iterator[Stand]:
    with stands() as (made,):
        yield made
    assert not staging_files(made.process.pid), "shared memory was left behind"


def bridge(*made: Stand, **options: Any) -> Any:
    options = {
        "connect_timeout_s": 10,
        "offer_timeout_s": 10,
        "transfer_timeout_s": 30,
        "commit_timeout_s": 20,
        "heartbeat_s": 0.2,
        **options,
    }
    return connect([one.endpoint for one in made], **options)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_every_carrier_brings_the_same_bytes_of_target_and_draft_together(stand: Stand, carrier: str) -> None:
    """Cases A1, A2, A3, B1: one update carries both models, received once, digests equal, whatever the transport."""
    target, draft = weights(1), weights(2, model=1)
    with bridge(stand, carrier=carrier) as b:
        with b.update(version=1) as update:
            update.target(target.items())
            update.draft(draft.items())
        found = stand.state()
        assert found["tensors"] == raw(target) | raw(draft, "draft")
        assert (found["policy_version"], found["draft_version"]) == (1, 1)
        assert update.result.reports[stand.endpoint]["target_tensors"] == len(PLAN.target)
        with b.update(version=2) as update:
            update.target(weights(3).items())
    found = stand.state()
    assert found["tensors"] == raw(weights(3)) | raw(draft, "draft")
    assert (found["policy_version"], found["draft_version"], found["base_version"]) == (2, 1, 2)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("bucket_bytes", [1, 4, 67, 68, 69, 1600, 2243, 2244, 2245])
def test_tensors_of_any_size_are_split_and_packed(stand: Stand, carrier: str, bucket_bytes: int) -> None:
    """Case B4: buckets around every boundary (a row of 68 bytes, a tensor of 1600, one of 2244), down to one byte."""
    if carrier == "gloo" and bucket_bytes < 67:
        pytest.skip("hundreds of broadcasts of single elements show nothing more, and take minutes")
    with bridge(stand, carrier=carrier, bucket_bytes=bucket_bytes) as b, b.update(version=1) as update:
        update.target(weights(1).items())
    assert stand.state()["tensors"] == raw(weights(1))


def test_an_exception_in_the_block_aborts_and_the_next_update_succeeds(stand: Stand) -> None:
    """Case C7: a failed exchange can be retried."""
    with bridge(stand) as b:
        with pytest.raises(ZeroDivisionError), b.update(version=1) as update:
            update.target(list(weights(1).items())[:2])
            _ = 1 / 0
        found = stand.state()
        assert (found["policy_version"], found["tensors"], found["counters"]["aborted"]) == (0, {}, 1)
        with b.update(version=1) as update:
            update.target(weights(2).items())
    assert stand.state()["tensors"] == raw(weights(2))


BAD = {
    "unknown": ({"layer.wieght": torch.zeros(33, 17)}, "layer.wieght is no tensor .* did you mean layer.weight"),
    "shape": ({"layer.bias": torch.zeros(18)}, r"layer.bias has shape \[18\], the engine takes \[17\]"),
    "narrowed": (
        {"layer.bias": torch.zeros(17, dtype=torch.float64)},
        "layer.bias is float64, on the wire it would be float32.*cast=True",
    ),
    "nan": ({"layer.bias": torch.full((17,), torch.nan)}, "layer.bias of the target holds NaN"),
    "infinite 16 bit": ({"norm": torch.full((8,), torch.inf, dtype=torch.bfloat16)}, "norm of the target holds NaN or infinity"),
}


@pytest.mark.parametrize("carrier", ["shm", "tcp", "zmq"])
@pytest.mark.parametrize("fault", BAD)
def test_what_does_not_fit_is_refused_and_nothing_changes(stand: Stand, fault: str, carrier: str) -> None:
    """Cases B2, B9: names nobody takes, wrong shapes, silent casts and numbers that are none."""
    bad, message = BAD[fault]
    with bridge(stand, carrier=carrier) as b:
        with b.update(version=1) as update:
            update.target(weights(1).items())
        with pytest.raises(BridgeError, match=message), b.update(version=2) as update:
            update.target((weights(2) | bad).items())
        found = stand.state()
        assert (found["policy_version"], found["tensors"]) == (1, raw(weights(1)))
        with b.update(version=2) as update:
            update.target(weights(2).items())
    assert stand.state()["tensors"] == raw(weights(2))


def test_missing_tensors_are_an_error_with_their_names_and_counts(stand: Stand) -> None:
    """Case B2: 3 of 5 is said."""
    with (
        bridge(stand) as b,
        pytest.raises(UpdateError, match=r"3 of 5 tensors of the target came; missing: norm, scale"),
        b.update(version=1) as update,
    ):
        update.target(list(weights(1).items())[:3])
    with bridge(stand) as b, pytest.raises(UpdateError, match="holds no tensors"), b.update(version=1):
        pass


def test_a_partial_update_keeps_what_did_not_come(stand: Stand) -> None:
    new = weights(2)
    with bridge(stand, carrier="zmq") as b:
        with pytest.raises(UpdateError, match="holds no"), b.update(version=1, partial=True) as update:
            update.target([("norm", new["norm"])])
        with b.update(version=1) as update:
            update.target(weights(1).items())
        with b.update(version=2, partial=True) as update:
            update.target([("norm", new["norm"])])
        assert stand.state()["tensors"] == raw(weights(1) | {"norm": new["norm"]})
        with b.update(version=3, partial=True) as update:
            update.target([("scale", new["scale"])])
    assert stand.state()["tensors"] == raw(weights(1) | {"norm": new["norm"], "scale": new["scale"]})


def test_the_head_of_a_tied_model_is_taken_and_not_needed(stand: Stand) -> None:
    """Case B8: config says tied, the trainer holds both copies."""
    with bridge(stand) as b, b.update(version=1) as update:
        update.target([*weights(1).items(), ("lm_head.weight", torch.zeros(50, 8))])
    assert update.result.ignored == ["lm_head.weight"]
    assert stand.state()["tensors"] == raw(weights(1))


def test_casts_are_made_only_when_allowed_and_are_counted(stand: Stand) -> None:
    """Case B20."""
    half = {name: tensor.to(torch.bfloat16) for name, tensor in weights(1).items()}
    with bridge(stand) as b:
        with b.update(version=1) as update:
            update.target(half.items())
        assert update.result.casts == {"bfloat16->float32": 4}
        wide = {name: tensor.float() if name != "norm" else tensor for name, tensor in half.items()}
        assert stand.state()["tensors"] == raw(wide)
        with b.update(version=2, dtype="bfloat16", cast=True) as update:
            update.target(weights(2).items())
        assert update.result.casts == {"float32->bfloat16": 4}
        assert stand.state()["tensors"] == raw({name: tensor.to(torch.bfloat16) for name, tensor in weights(2).items()})


@pytest.mark.parametrize("carrier", ["shm", "tcp", "zmq"])
def test_strided_and_transposed_tensors_arrive_in_order(stand: Stand, carrier: str) -> None:
    target = weights(1)
    twisted = {name: t.t().contiguous().t() if t.ndim == 2 else torch.stack([t, t], -1)[..., 0] for name, t in target.items()}
    assert not twisted["embed"].is_contiguous()
    with bridge(stand, carrier=carrier) as b, b.update(version=1) as update:
        update.target(twisted.items())
    assert stand.state()["tensors"] == raw(target)


@pytest.mark.parametrize("carrier", ["shm", "tcp", "zmq"])
def test_an_iterable_may_use_one_tensor_for_every_entry(stand: Stand, carrier: str) -> None:
    """What is packed for later must not change with the caller's memory: its digest would change with it, and nobody notice."""
    wanted = weights(1)
    scratch = torch.empty(50 * 8)

    def reusing() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in wanted.items():
            if tensor.dtype == torch.float32:
                part = scratch[: tensor.numel()].view(tensor.shape) if tensor.numel() <= scratch.numel() else tensor.clone()
                yield name, part.copy_(tensor)
            else:
                yield name, tensor
            scratch.fill_(-1.0)

    with bridge(stand, carrier=carrier) as b, b.update(version=1) as update:
        update.target(reusing())
    assert stand.state()["tensors"] == raw(wanted)


# -- several ranks -------------------------------------------------------------------------------------------------------


def share(rank: int, seed: int) -> list[tuple[str, Any]]:
    """What rank 0 or 1 sends: rows and columns of the large ones, whole small ones."""
    full = weights(seed)
    rows = slice(0, 20) if rank == 0 else slice(20, 50)
    columns = slice(0, 9) if rank == 0 else slice(9, 17)
    mine: list[tuple[str, Any]] = [
        ("embed", Shard(tensor=full["embed"][rows], full_shape=(50, 8), start=(rows.start, 0))),
        ("layer.weight", Shard(tensor=full["layer.weight"][:, columns], full_shape=(33, 17), start=(0, columns.start))),
    ]
    names = ("layer.bias",) if rank == 0 else ("norm", "scale")
    return mine + [(name, full[name]) for name in names]


def send_share(endpoint: str, rank: int, carrier: str, seed: int, version: int, results: Any) -> None:
    try:
        with (
            connect(endpoint, rank=rank, world=2, carrier=carrier, offer_timeout_s=10, heartbeat_s=0.2, transfer_timeout_s=20) as b,
            b.update(version=version) as update,
        ):
            update.target(share(rank, seed))
        results.put((rank, "committed"))
    except BridgeError as error:
        results.put((rank, str(error)))


@pytest.mark.parametrize("carrier", ["shm", "tcp", "zmq"])
def test_each_rank_sends_its_share(stand: Stand, carrier: str) -> None:
    """Rows and columns from two processes make whole tensors; neither needs to know of the other."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    ranks = [context.Process(target=send_share, args=(stand.endpoint, r, carrier, 4, 1, results)) for r in (1, 0)]
    for process in ranks:
        process.start()
    assert sorted(results.get(timeout=60) for _ in ranks) == [(0, "committed"), (1, "committed")]
    for process in ranks:
        process.join(10)
    found = stand.state()
    assert (found["tensors"], found["policy_version"]) == (raw(weights(4)), 1)


def test_a_rank_that_never_comes_fails_the_update_at_its_deadline(stand: Stand) -> None:
    """Case C1: a deadline, an exception, and the engine is free for the next."""
    with (
        bridge(stand, world=2, transfer_timeout_s=2) as b,
        pytest.raises(UpdateError, match=r"deadline|in time"),
        b.update(version=1) as update,
    ):
        update.target(share(0, 1))
    with (
        bridge(stand, world=2, rank=1, offer_timeout_s=1) as b,
        pytest.raises(UpdateError, match="rank 0 offered no update"),
        b.update(version=1) as update,
    ):
        update.target(share(1, 1))
    with bridge(stand) as b, b.update(version=1) as update:
        update.target(weights(1).items())
    assert stand.state()["policy_version"] == 1


def test_two_ranks_that_send_the_same_rows_are_refused(stand: Stand) -> None:
    full = weights(1)
    twice = [("embed", Shard(tensor=full["embed"][:30], full_shape=(50, 8), start=(0, 0))),
             ("embed", Shard(tensor=full["embed"][29:], full_shape=(50, 8), start=(29, 0)))]  # fmt: skip
    with bridge(stand) as b, pytest.raises(UpdateError, match=r"embed: rows at .* came twice"), b.update(version=1) as update:
        update.target(twice)
        update.target((name, tensor) for name, tensor in full.items() if name != "embed")


# -- failures ------------------------------------------------------------------------------------------------------------


def test_the_engine_s_refusal_reaches_the_trainer_and_heals(stand: Stand) -> None:
    """Cases C1, C2: the error is read, the session closed, the next update succeeds."""
    with bridge(stand) as b:
        stand.set(refuse="the engine sleeps")
        with pytest.raises(UpdateError, match="the engine sleeps"), b.update(version=1) as update:
            update.target(weights(1).items())
        assert stand.state()["policy_version"] == 0
        stand.set(refuse=None)
        with b.update(version=1) as update:
            update.target(weights(1).items())
    assert stand.state()["policy_version"] == 1


def send_and_hang(endpoint: str, carrier: str, ready: Any) -> None:
    with connect(endpoint, carrier=carrier, heartbeat_s=0.2) as b, b.update(version=1) as update:
        update.target(list(weights(1).items())[:2])
        ready.set()
        time.sleep(120)


@pytest.mark.parametrize("carrier", ["shm", "tcp", "zmq"])
def test_a_killed_trainer_is_noticed_and_its_successor_takes_over_at_once(stand: Stand, carrier: str) -> None:
    """Case C16 too: nothing of the killed one is left."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    trainer = context.Process(target=send_and_hang, args=(stand.endpoint, carrier, ready))
    trainer.start()
    assert ready.wait(30)
    os.kill(trainer.pid or 0, signal.SIGKILL)
    trainer.join(10)
    with bridge(stand, carrier=carrier) as b, b.update(version=1) as update:
        update.target(weights(2).items())
    found = stand.state()
    assert (found["tensors"], found["counters"]["aborted"]) == (raw(weights(2)), 1)


def test_without_a_successor_the_silence_of_a_killed_trainer_ends_its_update(stand: Stand) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    trainer = context.Process(target=send_and_hang, args=(stand.endpoint, "tcp", ready))
    trainer.start()
    assert ready.wait(30)
    trainer.kill()
    deadline = time.monotonic() + 10
    while not stand.state()["counters"].get("aborted"):
        assert time.monotonic() < deadline, "the update of a dead trainer stays open"
        time.sleep(0.1)
    trainer.join(10)


def test_one_dead_engine_does_not_block_the_others() -> None:
    """Case C3: it is left behind, said so, and gets everything when it is back."""
    with stands(2) as (first, second), bridge(first, second) as b:
        second.kill()
        with b.update(version=1, offer_timeout_s=3, connect_timeout_s=2) as update:
            update.target(weights(1).items())
        assert first.state()["policy_version"] == 1
        assert update.result is not None
        assert (list(update.result.reports), list(update.result.failed)) == ([first.endpoint], [second.endpoint])


def test_an_engine_that_dies_in_the_middle_is_left_behind() -> None:
    """Case C3."""
    with stands(2) as (first, second), bridge(first, second, carrier="tcp", transfer_timeout_s=20) as b:
        with b.update(version=1) as update:
            update.target(list(weights(1).items())[:2])
            second.kill()
            update.target(list(weights(1).items())[2:])
        assert first.state()["tensors"] == raw(weights(1))
        assert list(update.result.failed) == [second.endpoint]


def test_a_joining_engine_gets_the_current_version_whole() -> None:
    """Cases C4, C13: an engine that is behind is healed by the next update, or by the same version again."""
    with stands(2) as (first, second):
        with bridge(first, carrier="tcp", delta=True) as b, b.update(version=5) as update:
            update.target(weights(1).items())
        with bridge(first, second, carrier="tcp", delta=True) as b:
            with b.update(version=5) as update:
                update.target(weights(1).items())
            assert second.state()["tensors"] == raw(weights(1))
            with b.update(version=6) as update:
                update.target(weights(2).items())
        assert first.state()["tensors"] == second.state()["tensors"] == raw(weights(2))


def test_no_engine_at_all_is_one_clear_error() -> None:
    with pytest.raises(DeadlineError, match="did not answer in 1 s: is it up"):
        connect("tcp://127.0.0.1:9", connect_timeout_s=1)
    with pytest.raises(ConfigError, match=r"no engine answers at http://127\.0\.0\.1:9"):
        connect("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="did you mean 'carrier'"):
        connect("tcp://127.0.0.1:9", carier="shm")


# -- deltas --------------------------------------------------------------------------------------------------------------


def nudged(base: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """A few elements of each large tensor changed."""
    changed = {name: tensor.clone() for name, tensor in base.items()}
    random = torch.Generator().manual_seed(seed)
    for name in ("embed", "layer.weight"):
        flat = changed[name].view(-1)
        flat[torch.randperm(flat.numel(), generator=random)[:5]] += 1.0
    return changed


@pytest.mark.parametrize("carrier", ["tcp", "zmq"])
def test_deltas_are_bitwise_the_full_update_and_smaller(stand: Stand, carrier: str) -> None:
    """Case C6: against the right base; and a base that the engine lost heals by itself."""
    one = weights(1)
    with bridge(stand, carrier=carrier, delta=True) as b:
        with b.update(version=1) as update:
            update.target(one.items())
        whole = update.result.sent_bytes
        two = nudged(one, 2)
        with b.update(version=2) as update:
            update.target(two.items())
        assert stand.state()["tensors"] == raw(two)
        assert update.result.sent_bytes < whole / 5
        # An aborted delta leaves the base as it was.
        three = nudged(two, 3)
        with pytest.raises(ZeroDivisionError), b.update(version=3) as update:
            update.target(three.items())
            _ = 1 / 0
        with b.update(version=3) as update:
            update.target(three.items())
        assert update.result.sent_bytes < whole / 5
        assert stand.state()["tensors"] == raw(three)
        # Another trainer moved the engine on: our base is not its.
        with bridge(stand, carrier=carrier) as other, other.update(version=4) as update:
            update.target(weights(9).items())
        four = nudged(three, 4)
        with b.update(version=5) as update:
            update.target(four.items())
        assert update.result.sent_bytes == whole
        assert stand.state()["tensors"] == raw(four)


def test_a_delta_against_a_wrong_base_is_refused_loudly(stand: Stand) -> None:
    """Case C6, on the wire itself."""
    with raw_client(stand) as client:
        client.say(offer("u1", base_version=7))
        refused = client.hear()
        assert isinstance(refused, wire.Refused)
        assert refused.code == "base"
        assert "the engine holds none; send it whole" in refused.reason


# -- the wire ------------------------------------------------------------------------------------------------------------


class RawClient:
    """Speaks the protocol by hand, also wrongly."""

    def __init__(self, stand: Stand) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.connect(stand.endpoint)

    def __enter__(self) -> RawClient:
        self.say(wire.Hello(protocol=wire.PROTOCOL, job="raw", client="raw", rank=0, world=1))
        assert isinstance(self.hear(), wire.Welcome)
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def say(self, message: Any, *more: bytes) -> None:
        self.socket.send_multipart([wire.encode(message), *more])

    def hear(self, timeout_s: float = 5.0) -> Any:
        assert self.socket.poll(1e3 * timeout_s), "the receiver says nothing"
        return wire.decode_from_engine(self.socket.recv())


def raw_client(stand: Stand) -> RawClient:
    return RawClient(stand)


def offer(update: str, **changes: Any) -> wire.Offer:
    fields: dict[str, Any] = {
        "update": update, "version": 1, "base_version": None, "world": 1, "carrier": "zmq", "dtypes": ("plan", "plan"),
        "partial": False, "running": "recompute", "drain_timeout_s": 1.0, "deadline_s": 20.0,
    }  # fmt: skip
    return wire.Offer(**{**fields, **changes})


def messages_of(tensors: dict[str, torch.Tensor], update: str) -> list[tuple[wire.Data, bytes]]:
    from trainer_bridge.carriers.sending import Item

    made = []
    for index, spec in enumerate(PLAN.target):
        tensor = tensors[spec.name].contiguous()
        item = Item(model=0, tensor=index, start=(0,) * tensor.ndim, source=tensor, dtype=tensor.dtype)
        made.append((wire.Data(update=update, pieces=(item.piece(),)), item.wired().tobytes()))
    return made


def test_hostile_frames_are_dropped_with_a_counter_and_the_receiver_lives(stand: Stand) -> None:
    with raw_client(stand) as client:
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
    with raw_client(stand) as client:
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
    with raw_client(stand) as client:
        client.say(offer("u1"))
        client.hear()
        client.say(wire.Commit(update="u1"))
        outcome = client.hear()
        assert outcome.state == "ABORTED"
        assert "needs to be VERIFIED" in outcome.reason
        assert stand.state()["policy_version"] == 0


def test_a_repeated_commit_is_answered_with_what_came_of_it(stand: Stand) -> None:
    """Case C7: the reply was lost, the retry is safe."""
    with raw_client(stand) as client:
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
    with raw_client(stand) as client, bridge(stand, job="other") as b:
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
    with raw_client(stand) as client:
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
    import socket

    with raw_client(stand) as client:
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
    from tests.distributed.stand import TensorEngine
    from trainer_bridge.receiver import Receiver

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


# -- samples -------------------------------------------------------------------------------------------------------------


def sample(index: int, *, tokens: int = 20) -> Any:
    from trainer_bridge.taps import TapSample

    random = torch.Generator().manual_seed(index)
    return TapSample(
        request_id=f"r{index}",
        group_id="g",
        policy_version=1,
        token_ids=torch.randint(0, 50, (tokens,), generator=random),
        positions=torch.arange(tokens),
        loss_mask=torch.arange(tokens) > 4,
        tap_layers=(1, 2, 3),
        taps=torch.randn(tokens - 1, 24, generator=random),
        final=torch.randn(tokens - 1, 8, generator=random),
        final_is_normed=True,
    )


def test_a_sample_arrives_bit_by_bit_so_its_loss_is_the_same(stand: Stand) -> None:
    from trainer_bridge.taps.stream import SampleStream, unpack

    sent = [sample(i) for i in range(5)]
    with SampleStream(stand.endpoint) as stream:
        for one in sent:
            stream.send(one)
        stream.flush()
        assert (stream.taken, stream.refused) == (5, {})
    # The stand-in takes them in no order.
    arrived = sorted((unpack(header, payload) for header, payload in stand.state()["samples"]), key=lambda one: one.request_id)
    assert [one.digest() for one in arrived] == [one.digest() for one in sent]
    assert all(torch.equal(a.taps, b.taps) and torch.equal(a.final, b.final) for a, b in zip(arrived, sent, strict=True))


def test_a_damaged_sample_is_refused(stand: Stand) -> None:
    from trainer_bridge.errors import SampleError
    from trainer_bridge.taps.stream import SampleStream, unpack

    with SampleStream(stand.endpoint) as stream:
        stream.send(sample(1))
        stream.flush()
    header, payload = stand.state()["samples"][0]
    for bad in (payload[:-1], payload + b"x", payload[:50] + bytes([payload[50] ^ 1]) + payload[51:]):
        with pytest.raises(SampleError):
            unpack(header, bad)
    with pytest.raises(SampleError, match="none of a sample's"):
        unpack({**header, "tensors": [["taps", "float32", [1 << 30, 1 << 30]]]}, payload)


def test_a_busy_engine_slows_the_stream_down_and_loses_nothing(stand: Stand) -> None:
    """Backpressure: no more than a window of bytes is on its way."""
    from trainer_bridge.taps.stream import SampleStream

    stand.set(sample_delay_s=0.2)
    size = sample(0).nbytes
    began = time.monotonic()
    with SampleStream(stand.endpoint, sample_window_bytes=2 * size) as stream:
        for index in range(8):
            stream.send(sample(index))
            assert len(stream._pending) <= 2
        stream.flush()
        assert stream.taken == 8
    assert time.monotonic() - began > 0.6
    assert sorted(header["request_id"] for header, _ in stand.state()["samples"]) == [f"r{i}" for i in range(8)]
