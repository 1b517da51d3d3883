"""Catches a plan that is not what the engine serves, a receiver process that outlives its server, one that hides why it
did not start."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from vllm_specdraft.cli import main
from vllm_specdraft.sync_process import LENGTH, Pipe, plan_of


@pytest.fixture
def directories(tmp_path: Path) -> tuple[Path, Path]:
    target, draft = tmp_path / "target", tmp_path / "draft"
    for directory in (target, draft):
        directory.mkdir()
    (target / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    first = {"model.embed_tokens.weight": torch.zeros(4, 2), "lm_head.weight": torch.zeros(4, 2)}
    second = {"model.norm.weight": torch.zeros(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(1)}
    save_file(first, target / "model-00001-of-00002.safetensors")
    save_file(second, target / "model-00002-of-00002.safetensors")
    save_file({"fc.weight": torch.zeros(2, 6), "d2t": torch.zeros(3, dtype=torch.int64)}, draft / "model.safetensors")
    return target, draft


def test_a_plan_is_what_the_checkpoints_hold_less_what_the_engine_derives(directories: tuple[Path, Path]) -> None:
    """Case B8: of a tied model the embedding decides, wherever its file has a head."""
    plan = plan_of(*directories)
    assert [spec.name for spec in plan.target] == ["model.embed_tokens.weight", "model.norm.weight"]
    assert [(spec.name, spec.dtype) for spec in plan.draft] == [("d2t", "int64"), ("fc.weight", "float32")]
    assert set(plan.ignored) == {"lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"}


def start(directories: tuple[Path, Path], **changes: Any) -> subprocess.Popen[bytes]:
    target, draft = directories
    settings = {
        "target": str(target), "draft": str(draft), "bind": "tcp://127.0.0.1:0", "keys": None, "insecure": False, "job": "test",
        "policy_version": 3, "draft_version": 1, **changes,
    }  # fmt: skip
    command = [sys.executable, "-m", "vllm_specdraft.sync_process", json.dumps(settings)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def test_the_process_says_where_it_listens_and_ends_with_its_input(directories: tuple[Path, Path]) -> None:
    process = start(directories)
    assert process.stdin is not None and process.stdout is not None
    pipe = Pipe(process.stdout, process.stdin)
    ready = pipe.read()
    assert ready is not None and ready["ready"].startswith("tcp://127.0.0.1:")
    pipe.write({"id": 7, "counters": True})
    assert pipe.read() == {"id": 7, "counters": {}}
    process.stdin.close()
    assert process.wait(10) == 0


def test_why_it_did_not_start_is_said(directories: tuple[Path, Path]) -> None:
    process = start(directories, bind="tcp://0.0.0.0:0")
    assert process.stdin is not None and process.stdout is not None
    failed = Pipe(process.stdout, process.stdin).read()
    assert failed is not None and "open to other machines" in failed["failed"]
    assert process.wait(10) == 1


def test_frames_are_whole_or_the_end(tmp_path: Path) -> None:
    path = tmp_path / "frames"
    frame = msgspec.msgpack.encode({"a": 1})
    path.write_bytes(LENGTH.pack(len(frame)) + frame + b"\x00\x00")
    with path.open("rb") as source, (tmp_path / "sink").open("wb") as sink:
        pipe = Pipe(source, sink)
        assert pipe.read() == {"a": 1}
        assert pipe.read() is None


def test_the_command_makes_keys_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "keys"
    assert main(["keys", str(directory)]) == 0
    assert "server.key_secret" in capsys.readouterr().out
    assert (directory / "server.key_secret").stat().st_mode & 0o077 == 0
    assert main(["keys", str(directory)]) == 1
    assert "holds keys already" in capsys.readouterr().err


def test_a_rollback_without_a_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollback", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.startswith("specdraft: no answer from http://127.0.0.1:9/specdraft/rollback")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sync-bind", "tcp://0.0.0.0:5577"], "--sync-bind tcp://0.0.0.0:5577 is open to other machines: give keys"),
        (["--sync-bind", "localhost"], "--sync-bind 'localhost' is no address"),
        (["--sync-keys", "/nowhere"], "/nowhere/server.key_secret is no key file"),
    ],
)
def test_a_server_that_could_take_no_weights_says_so_before_it_starts(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "/nowhere", *options]) == 1
    assert message in capsys.readouterr().err


def test_a_taken_address_is_named_with_its_knob(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "/nowhere", "--sync-bind", f"tcp://127.0.0.1:{port}"]) == 1
    assert (
        f"port {port} of 127.0.0.1 is taken by another server: stop it, or choose another one with --sync-bind"
        in capsys.readouterr().err
    )
