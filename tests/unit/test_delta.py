"""Catches a sparse update that does not give back the sender's bits, and a payload that writes where it must not, or takes
memory by what it declares.
"""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_bridge import delta
from trainer_bridge.delta import HEADER_BYTES, Delta, Undo
from trainer_bridge.errors import DeltaError

WIDTHS = (1, 2, 4, 8)
BLOCKS = (1, 7, 256, 1 << 16)
"""Block sizes in elements and in bytes: of one, odd, about a gap byte's range, larger than the tensors here."""


def words(size: int, width: int, seed: int = 0) -> np.ndarray:
    """Random bits."""
    return np.frombuffer(np.random.default_rng(seed).bytes(size * width), f"u{width}").copy()


def changed_at(base: np.ndarray, indexes: np.ndarray | list[int]) -> np.ndarray:
    """A copy with one bit of each of these elements flipped, the highest or the lowest."""
    new = base.copy()
    top = base.dtype.type(1 << (8 * base.itemsize - 1))
    for number, index in enumerate(np.asarray(indexes, np.int64)):
        new[index] ^= top if number % 2 else base.dtype.type(1)
    return new


def decoded(payload: bytes) -> dict[int, bytes]:
    """Value by index, read byte by byte as the layout is described."""
    width, elements, changed, gap_bytes = struct.unpack("<4xB3xQQQ", payload[:HEADER_BYTES])
    assert len(payload) == HEADER_BYTES + gap_bytes + changed * width
    found, at = [], 0
    for byte in payload[HEADER_BYTES : HEADER_BYTES + gap_bytes]:
        if byte == 255:
            at += 255
        else:
            found.append(at + byte)
            at += byte + 1
    assert len(found) == changed and at <= elements
    values = payload[HEADER_BYTES + gap_bytes :]
    return {index: values[i * width : (i + 1) * width] for i, index in enumerate(found)}


def check_round_trip(base: np.ndarray, new: np.ndarray, block: int = 1 << 16) -> Delta | None:
    """Encode, read by hand, apply, undo; None where the whole tensor is no larger."""
    before, after = base.copy(), new.copy()
    made = delta.encode(base, new, block_elements=block)
    assert base.tobytes() == before.tobytes() and new.tobytes() == after.tobytes(), "encode wrote into its arguments"
    different = np.flatnonzero(base.reshape(-1) != new.reshape(-1))
    if made is None:
        return None
    assert made.changed == different.size and made.nbytes == len(made.payload) < new.nbytes
    assert decoded(made.payload) == {int(i): new.reshape(-1)[i].tobytes() for i in different}
    undo = delta.apply(base, made.payload, block_bytes=block)
    assert base.tobytes() == after.tobytes()
    assert undo.nbytes == made.nbytes - HEADER_BYTES
    undo.restore(base)
    assert base.tobytes() == before.tobytes()
    return made


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("density", [0, 0.001, 0.01, 0.03, 0.3, 1])
@pytest.mark.parametrize("size", [20_011, (1 << 16) + 1])
def test_any_width_and_density(width: int, density: float, size: int) -> None:
    base = words(size, width)
    new = changed_at(base, np.flatnonzero(np.random.default_rng(1).random(size) < density))
    made = check_round_trip(base, new)
    # One byte of index for each byte of value leaves no room at 100%, and at 30% there is some.
    assert (made is None) == (density == 1)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(
    "indexes",
    [
        [], [0], [4999], [0, 4999], [0, 1, 2], [254], [255], [256], [509], [510], [511], [0, 255], [0, 256], [0, 257], [1, 511],
        [3, 513], [3, 514], [255, 511], [6, 7], [255, 256], [511, 512], list(range(300, 900)),
    ],
    ids=str,
)  # fmt: skip
def test_gaps_about_the_range_of_a_byte_and_of_a_block(indexes: list[int], block: int) -> None:
    base = words(5000, 2)
    made = check_round_trip(base, changed_at(base, indexes), block)
    assert made is not None and made.changed == len(indexes)


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 508, 509, 510, 511, 764, 765, 766])
def test_a_gap_takes_a_byte_and_one_more_for_each_255(gap: int) -> None:
    base = words(5000, 2)
    made = check_round_trip(base, changed_at(base, [gap]))
    assert made is not None and made.nbytes == HEADER_BYTES + 1 + gap // 255 + 2


@pytest.mark.parametrize("width", WIDTHS)
def test_a_tensor_that_is_as_small_as_its_delta_goes_whole(width: int) -> None:
    for size in (0, 1, HEADER_BYTES // width):
        base = words(size, width)
        assert delta.encode(base, base.copy()) is None
    base = words(HEADER_BYTES // width + 1, width)
    assert check_round_trip(base, base.copy()) is not None
    # Room for one byte less than one changed element needs, and for one byte more.
    size = HEADER_BYTES // width + 1 + 1 // width
    for extra in range(3):
        base = words(size + extra, width)
        made = check_round_trip(base, changed_at(base, [0]))
        assert (made is None) == (HEADER_BYTES + 1 + width >= base.nbytes)


def test_scalars_empty_and_many_dimensions() -> None:
    assert delta.encode(np.array(3, np.int64), np.array(4, np.int64)) is None
    for shape in ((0,), (3, 0)):
        assert delta.encode(np.zeros(shape, np.uint16), np.zeros(shape, np.uint16)) is None
    base = words(7 * 5 * 11, 2).reshape(7, 5, 11)
    new = base.copy()
    new[6, 4, 10] ^= 1
    new[3, 0, 7] ^= 1
    assert check_round_trip(base, new) is not None


def test_values_are_bits() -> None:
    """Zeros of both signs differ; a NaN equals itself and differs from another one."""
    quiet, other = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    base = np.array([0.0, quiet, quiet, 1.0, *range(40)], np.float32)
    new = np.array([-0.0, quiet, other, 1.0, *range(40)], np.float32)
    made = delta.encode(base, new)
    assert made is not None and sorted(decoded(made.payload)) == [0, 2]
    undo = delta.apply(base, made.payload)
    assert base.tobytes() == new.tobytes()
    undo.restore(base)
    assert np.signbit(base[0]) == np.False_


@pytest.mark.parametrize(("dtype", "width"), [(np.bool_, 1), (np.float16, 2), (np.int32, 4), (np.int64, 8)])
def test_any_dtype_of_a_width(dtype: type, width: int) -> None:
    base = np.zeros(300, dtype)
    new = base.copy()
    new[[5, 299]] = 1
    made = delta.encode(base, new)
    assert made is not None and made.payload[4] == width
    delta.apply(base, made.payload)
    assert base.tobytes() == new.tobytes()


@pytest.mark.parametrize(("density", "least"), [(0.01, 40), (0.03, 15)])
def test_how_much_smaller_a_delta_is(density: float, least: float) -> None:
    """Sizes at the densities of one RL step in bf16; a wider index would miss them."""
    base = words(1 << 20, 2)
    new = changed_at(base, np.flatnonzero(np.random.default_rng(1).random(base.size) < density))
    made = delta.encode(base, new)
    assert made is not None
    assert base.nbytes / made.nbytes >= least


@settings(deadline=None, max_examples=150)
@given(data=st.data(), width=st.sampled_from(WIDTHS), size=st.integers(0, 1500), block=st.integers(1, 700))
def test_round_trips(data: st.DataObject, width: int, size: int, block: int) -> None:
    base = words(size, width)
    indexes = data.draw(st.sets(st.integers(0, size - 1), max_size=size // 3)) if size else set()
    check_round_trip(base, changed_at(base, sorted(indexes)), block)


def test_the_block_size_changes_nothing() -> None:
    base = words(3000, 2)
    new = changed_at(base, np.flatnonzero(np.random.default_rng(2).random(3000) < 0.02))
    payloads = {made.payload for block in BLOCKS if (made := delta.encode(base, new, block_elements=block))}
    assert len(payloads) == 1


@pytest.mark.parametrize("kind", [bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_payload_may_lie_anywhere(kind: type, shift: int) -> None:
    """A frame of the network, or a piece of shared memory: aligned or not; the undo keeps its own copy."""
    base = words(1000, 8)
    new = changed_at(base, [3, 500])
    made = delta.encode(base, new)
    assert made is not None
    before, buffer = base.copy(), bytearray(shift) + made.payload
    undo = delta.apply(base, kind(buffer)[shift:])
    assert base.tobytes() == new.tobytes()
    buffer[:] = bytes(len(buffer))
    undo.restore(base)
    assert base.tobytes() == before.tobytes()


def header(width: int, elements: int, changed: int, gap_bytes: int) -> bytes:
    return struct.pack("<4sB3xQQQ", b"sdd1", width, elements, changed, gap_bytes)


HUGE = 1 << 62
HOSTILE = {
    "empty": b"",
    "only half a header": header(2, 1000, 0, 0)[:20],
    "another magic": b"sdd2" + header(2, 1000, 0, 0)[4:],
    "padding that is not zero": header(2, 1000, 0, 0)[:6] + b"\1" + header(2, 1000, 0, 0)[7:],
    "another width": header(4, 1000, 1, 1) + bytes(5),
    "another tensor": header(2, 1001, 1, 1) + bytes(3),
    "cut short": header(2, 1000, 2, 2) + bytes(5),
    "something added": header(2, 1000, 2, 2) + bytes(7),
    "a huge count of changes": header(2, 1000, HUGE, 1) + bytes(3),
    "a huge count of gap bytes": header(2, 1000, 1, HUGE) + bytes(3),
    "counts that wrap around": header(2, 1000, (1 << 63) + 1, 1) + bytes(3),
    "fewer values than gaps": header(2, 1000, 1, 3) + bytes(5),
    "fewer gaps than values": header(2, 1000, 2, 1) + bytes(5),
    "gaps without values": header(2, 1000, 0, 1) + bytes(1),
    "values without gaps": header(2, 1000, 1, 0) + bytes(2),
    "an open gap at the end": header(2, 1000, 1, 2) + b"\0\xff" + bytes(2),
    "an index one beyond the end": header(2, 1000, 1, 4) + b"\xff\xff\xff\xeb" + bytes(2),
    "an index far beyond the end": header(2, 1000, 2, 400) + b"\0" + b"\xff" * 398 + b"\0" + bytes(4),
}


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE)
def test_a_malformed_payload_writes_nothing(payload: bytes) -> None:
    base = words(1000, 2)
    before = base.tobytes()
    with pytest.raises(DeltaError):
        delta.apply(base, payload)
    assert base.tobytes() == before


def test_the_last_index_that_fits() -> None:
    base = np.zeros(1000, np.uint16)
    delta.apply(base, header(2, 1000, 1, 4) + b"\xff\xff\xff\xea" + b"\1\0")
    assert np.flatnonzero(base).tolist() == [999]


def test_declared_counts_take_no_memory() -> None:
    base = words(1000, 2)
    tracemalloc.start()
    try:
        for payload in HOSTILE.values():
            with pytest.raises(DeltaError):
                delta.apply(base, payload)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_memory_is_bounded_by_blocks_and_the_delta() -> None:
    size = 1 << 22
    base = words(size, 2)
    new = base.copy()
    new[:: size // 40_000] ^= 1
    made = delta.encode(base, new)
    assert made is not None

    def peak_of(call: str) -> int:
        tracemalloc.start()
        try:
            assert delta.encode(base, new) if call == "encode" else delta.apply(base, made.payload)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    # A tenth of the bound would be there for indexes of the whole tensor alone.
    assert peak_of("encode") < 2 * made.nbytes + 60 * delta.BLOCK_ELEMENTS + 100_000
    assert peak_of("apply") < made.nbytes + 30 * delta.BLOCK_BYTES + 100_000


def check_hostile(base: np.ndarray, payload: bytes) -> None:
    """Refused and nothing written, or applied and taken back."""
    before = base.tobytes()
    try:
        undo = delta.apply(base, payload, block_bytes=16)
    except DeltaError:
        assert base.tobytes() == before
        return
    undo.restore(base)
    assert base.tobytes() == before


@settings(deadline=None, max_examples=200)
@given(payload=st.binary(max_size=200), with_header=st.booleans(), changed=st.integers(0, 60))
def test_random_bytes(payload: bytes, with_header: bool, changed: int) -> None:
    """Behind a header whose lengths fit, so that the gaps are read too."""
    if with_header:
        changed = min(changed, len(payload) // 2)
        payload = header(2, 1000, changed, len(payload) - 2 * changed) + payload
    check_hostile(words(1000, 2), payload)


@settings(deadline=None, max_examples=200)
@given(data=st.data(), seed=st.integers(0, 9))
def test_a_valid_payload_that_was_changed_or_cut(data: st.DataObject, seed: int) -> None:
    base = words(1000, 2)
    indexes = np.flatnonzero(np.random.default_rng(seed).random(1000) < 0.02)
    made = delta.encode(base, changed_at(base, indexes))
    assert made is not None
    payload = bytearray(made.payload)
    for _ in range(data.draw(st.integers(0, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    start, stop = data.draw(st.tuples(st.integers(0, 3), st.integers(0, len(payload))))
    check_hostile(base, bytes(payload[:stop] if start else payload))


class Failing(np.ndarray):
    """Fails at the second write, as an interrupted process would."""

    writes = 0

    def __setitem__(self, key: object, value: object) -> None:
        if self.flags.writeable and self.dtype == np.uint16 and self.size == 1000:
            Failing.writes += 1
            if Failing.writes == 2:
                super().__setitem__(key, value)
                raise KeyboardInterrupt
        super().__setitem__(key, value)


def test_an_interrupted_apply_leaves_nothing_behind() -> None:
    base = words(1000, 2)
    made = delta.encode(base, changed_at(base, list(range(0, 1000, 10))))
    assert made is not None
    before = base.tobytes()
    with pytest.raises(KeyboardInterrupt):
        delta.apply(base.view(Failing), made.payload, block_bytes=16)
    assert Failing.writes > 2, "nothing was taken back: the failure did not come in the middle"
    assert base.tobytes() == before


def test_arrays_that_cannot_be_used_are_refused() -> None:
    base, new = words(100, 2), words(100, 2, seed=1)
    for wrong in (new.view(np.float16), new[:50], new.reshape(10, 10), new.astype(np.uint32)):
        with pytest.raises(DeltaError, match="a base of uint16"):
            delta.encode(base, wrong)
    with pytest.raises(DeltaError, match="contiguous"):
        delta.encode(base[::2], new[::2])
    with pytest.raises(DeltaError, match="16 bytes"):
        delta.encode(base.astype(np.complex128), new.astype(np.complex128))
    made = delta.encode(base, base.copy())
    assert made is not None
    base.flags.writeable = False
    with pytest.raises(DeltaError, match="read-only"):
        delta.apply(base, made.payload)
    with pytest.raises(DeltaError, match="contiguous"):
        delta.apply(words(200, 2)[::2], made.payload)
    with pytest.raises(DeltaError, match="no contiguous bytes"):
        delta.apply(words(100, 2), memoryview(made.payload)[::2])


def test_an_undo_knows_its_tensor() -> None:
    undo = Undo(elements=10, gaps=b"\0", old=np.zeros(1, np.uint16))
    for wrong in (np.zeros(11, np.uint16), np.zeros(10, np.uint32)):
        with pytest.raises(DeltaError, match="an undo of 10 elements of 2 bytes"):
            undo.restore(wrong)
