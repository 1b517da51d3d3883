"""Catches a sample that is another one when it arrives, one that is lost, and a stream that floods a busy engine."""

from __future__ import annotations

import time

import pytest
import torch

from tests.distributed.stand import Stand
from trainer_bridge.errors import SampleError
from trainer_bridge.taps import TapSample
from trainer_bridge.taps.stream import SampleStream, unpack


def sample(index: int, *, tokens: int = 20) -> TapSample:
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
