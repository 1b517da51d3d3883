"""Catches an update that is not a transaction: bytes that differ, a model half at a version, a failure that nobody hears of, one
that keeps the next update out, memory or files left behind. Real processes and sockets, a stand-in for the engine.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.distributed.clients import bridge
from tests.distributed.stand import PLAN, Stand, stands
from tests.distributed.weights import nudged, raw, weights
from trainer_bridge import connect
from trainer_bridge.errors import BridgeError, ConfigError, DeadlineError, UpdateError
from trainer_bridge.shards import Shard

CARRIERS = ["shm", "tcp", "zmq", "gloo"]


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
