"""Catches a tensor that is cut or laid out wrong, an element that came twice or never, and digests or checks that see nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from trainer_bridge import plan as planning
from trainer_bridge import staging
from trainer_bridge.digest import CHUNK_BYTES, digest, digest_and_check, tensor_digest
from trainer_bridge.errors import ConfigError, PlanError
from trainer_bridge.plan import Coverage, Layout, Plan, read_header, split
from trainer_bridge.wire import Piece, Spec

PLAN = Plan(
    target=(Spec("a", "float32", (5, 4)), Spec("b", "bfloat16", (3,)), Spec("c", "float32", ())),
    draft=(Spec("d", "int64", (2, 2)),),
)


def piece(tensor: int, start: tuple[int, ...], shape: tuple[int, ...], model: int = 0) -> Piece:
    return Piece(model=model, tensor=tensor, start=start, shape=shape, nbytes=0, digest=bytes(16))  # type: ignore[arg-type]


@settings(max_examples=300, deadline=None)
@given(shape=st.lists(st.integers(0, 7), max_size=4).map(tuple), bucket=st.integers(1, 300), itemsize=st.sampled_from([1, 2, 4, 8]))
def test_boxes_cover_a_tensor_once_are_contiguous_and_fit(shape: tuple[int, ...], bucket: int, itemsize: int) -> None:
    seen = np.zeros(shape, int)
    for start, part in split(shape, itemsize=itemsize, bucket_bytes=bucket):
        box = seen[(*(slice(s, s + n) for s, n in zip(start, part, strict=True)), ...)]
        assert box.flags.c_contiguous
        assert prod(part) * itemsize <= max(bucket, itemsize)
        box += 1
    assert (seen == 1).all()


def test_a_layout_has_a_place_for_every_tensor_and_casts_only_floats() -> None:
    layout = Layout.of(PLAN, ("bfloat16", "plan"))
    assert [layout.dtype(0, t) for t in range(3)] == ["bfloat16", "bfloat16", "bfloat16"]
    assert layout.dtype(1, 0) == "int64"
    assert layout.offsets == ((0, 64, 128), (192,))
    assert Layout.of(PLAN, ("plan", "bfloat16")).dtype(1, 0) == "int64"
    with pytest.raises(PlanError, match="wire dtype 'int64' is none"):
        Layout.of(PLAN, ("int64", "plan"))
    with pytest.raises(PlanError, match="is complex64, which cannot be sent"):
        Plan(target=(Spec("a", "complex64", (1,)),))


def test_a_box_is_a_view_of_its_elements() -> None:
    layout = Layout.of(PLAN, ("plan", "plan"))
    memory = np.zeros(layout.nbytes, np.uint8)
    layout.box(memory, piece(0, (1, 2), (3, 2)))[...] = 7
    assert memory[:80].view(np.uint32).reshape(5, 4)[1:4, 2:].tolist() == [[7, 7]] * 3
    assert memory[:80].view(np.uint32).sum() == 42
    assert layout.box(memory, piece(2, (), ())).shape == ()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (piece(0, (3, 0), (3, 4)), r"a box \[3, 4\] at \[3, 0\], the shape is \[5, 4\]"),
        (piece(0, (0,), (5,)), "1 dimensions"),
        (piece(9, (0,), (1,)), "tensor 9 of the target: the engine takes 3"),
        (piece(1, (0,), (1,), model=1), "tensor 1 of the draft"),
    ],
)
def test_a_box_outside_its_tensor_is_refused(bad: Piece, message: str) -> None:
    layout = Layout.of(PLAN, ("plan", "plan"))
    with pytest.raises(PlanError, match=message):
        layout.box(np.zeros(layout.nbytes, np.uint8), bad)


def test_coverage_counts_every_element_once() -> None:
    coverage = Coverage(PLAN)
    coverage.add(piece(0, (0, 0), (5, 2)))
    assert (coverage.missing(0), coverage.begun(0), coverage.complete(0)) == (["a", "b", "c"], ["a"], 0)
    with pytest.raises(PlanError, match="came twice"):
        coverage.add(piece(0, (4, 1), (1, 2)))
    coverage = Coverage(PLAN)
    for part in (piece(0, (0, 0), (5, 2)), piece(0, (0, 2), (5, 2)), piece(2, (), ())):
        coverage.add(part)
    assert (coverage.missing(0), coverage.begun(0), coverage.models()) == (["b"], [], (True, False))
    with pytest.raises(PlanError, match="came twice"):
        coverage.add(piece(2, (), ()))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"])
@pytest.mark.parametrize("place", [0, 5, -1])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_every_number_that_is_none_is_seen(dtype: str, place: int, value: float) -> None:
    kind = getattr(torch, dtype)
    if dtype == "float8_e4m3fn" and value == value:
        pytest.skip("this type has no infinity")
    good = torch.linspace(-3, 3, 11).to(kind)
    good[3] = torch.finfo(kind).max
    good[4] = -torch.finfo(kind).max
    words = good.view(torch.uint8).numpy().view(f"u{kind.itemsize}")
    found, finite = digest_and_check(words, dtype)
    assert finite
    assert found == digest(words)
    bad = good.clone()
    bad[place] = value
    assert not digest_and_check(bad.view(torch.uint8).numpy().view(f"u{kind.itemsize}"), dtype)[1]


@pytest.mark.parametrize("count", [0, 1, CHUNK_BYTES // 4 - 1, CHUNK_BYTES // 4, CHUNK_BYTES // 4 + 1])
def test_a_digest_does_not_depend_on_how_it_is_walked(count: int) -> None:
    words = np.arange(count, dtype=np.uint32)
    assert digest_and_check(words, "float32")[0] == digest(words.tobytes()) == digest(memoryview(words))
    if count:
        other = words.copy()
        other[-1] ^= 1
        assert digest_and_check(other, "float32")[0] != digest(words)


def test_a_header_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16), "c": torch.zeros((), dtype=torch.int64)}, path)
    found = read_header(path)
    assert found["a"] == Spec("a", "float32", (2, 3))
    assert (found["b"].dtype, found["c"].shape) == ("bfloat16", ())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="damaged or half-written"):
        read_header(path)


def test_staging_is_found_by_path_grows_and_goes(tmp_path: Path) -> None:
    mine = staging.Staging("a job/with: signs")
    mine.ensure(1000)
    assert mine.path is not None
    first = mine.path
    theirs = staging.Mapping().of(str(first), mine.nbytes)
    theirs[5] = 9
    assert mine.memory[5] == 9
    assert oct(first.stat().st_mode)[-3:] == "600"
    mine.ensure(500)
    assert mine.path == first
    mine.ensure(5000)
    assert mine.path != first and not first.exists()
    last = mine.path
    mine.close()
    assert last is not None and not last.exists()
    with pytest.raises(ConfigError, match="is no staging file"):
        staging.Mapping().of("/etc/passwd", 10)
    with pytest.raises(ConfigError, match="has no room for"):
        mine.ensure(1 << 50)


def test_what_a_killed_owner_left_is_swept_and_nothing_else() -> None:
    """Cases B16, C16: by the lock on it, not by a number that another process may have by now."""
    code = (
        "import os, signal\nfrom trainer_bridge.staging import Staging\ns = Staging('killed')\ns.ensure(4096)\n"
        "print(s.path, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    left = Path(done.stdout.strip())
    mine = staging.Staging("alive")
    mine.ensure(4096)
    again = staging.Staging("third")
    assert not left.exists()
    assert mine.path is not None and mine.path.exists()
    mine.close()
    again.close()


def test_two_processes_of_one_host_know_it() -> None:
    code = "from trainer_bridge.staging import host_id\nprint(host_id())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ})
    assert done.stdout.strip() == staging.host_id() != ""
    assert json.dumps(staging.host_id())


def test_a_tensors_digest_does_not_depend_on_how_it_travelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "BLOCK_BYTES", 64)
    words = np.arange(5 * 3 * 7, dtype=np.float32)
    shape, data = (5, 3, 7), words.view(np.uint8)
    whole = tensor_digest(data, shape, 4)
    boxes = list(planning.blocks(shape, itemsize=4))
    known = {box: digest(np.ascontiguousarray(words.reshape(shape)[planning.place(*box)])) for box in boxes}
    assert len(boxes) == 10
    assert tensor_digest(np.zeros(0, np.uint8), shape, 4, known) == whole
    # Boxes that are no blocks, those of other ranks say, are of no use and do no harm.
    assert tensor_digest(data, shape, 4, {((0, 0, 0), (5, 3, 1)): bytes(16)}) == whole
    data[-1] ^= 1
    assert tensor_digest(data, shape, 4) != whole
    assert tensor_digest(data[:28], (7,), 4) == digest(data[:28])
