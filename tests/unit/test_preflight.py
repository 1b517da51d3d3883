"""Catches a server that starts, takes a minute, and then finds what could be seen before: a model that is not whole, a draft of
another target, a port that is taken, memory that is not there.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.builders import KEPT, VOCAB, dflash_config, dflash_draft, draft, draft_config, target_dir
from trainer_bridge.draft import checkpoint
from trainer_bridge.draft.dflash import DFlash
from trainer_bridge.errors import CheckpointError, ConfigError
from vllm_specdraft import fit, preflight, target
from vllm_specdraft.config import SettingsError
from vllm_specdraft.preflight import GIB, MemoryNeed

# The target.


def test_a_whole_target_is_read(tmp_path: Path) -> None:
    found = target.read(target_dir(tmp_path / "model"))
    target.check_shapes(found)
    assert found.config["hidden_size"] == 8
    assert found.parameters == VOCAB * 8


def test_parameters_are_counted_over_all_files_of_an_index(tmp_path: Path) -> None:
    directory = target_dir(tmp_path / "model")
    (directory / "model.safetensors").unlink()
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16)}, directory / "one.safetensors")
    save_file({"c": torch.zeros(2, 2, 2), "d": torch.zeros(())}, directory / "two.safetensors", metadata={"format": "pt"})
    weight_map = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors", "d": "two.safetensors"}
    (directory / target.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert target.read(directory).parameters == 15 + 7 + 8 + 1


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "is no model directory (no config.json)"),
    "half a config": (lambda d: half(d / "config.json"), "config.json is not valid JSON"),
    "a binary config": (lambda d: (d / "config.json").write_bytes(b"\xff\xfe\x00"), "config.json is not valid JSON"),
    "a list as config": (lambda d: (d / "config.json").write_text("[]"), "holds a list, needs a JSON object"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "no weights"),
    "half of the weights": (lambda d: half(d / "model.safetensors"), "model.safetensors is damaged or half-written"),
    "one byte less": (
        lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-1]),
        "model.safetensors is damaged or half-written",
    ),
    "empty weights": (lambda d: (d / "model.safetensors").write_bytes(b""), "model.safetensors is damaged or half-written"),
    "other bytes": (lambda d: (d / "model.safetensors").write_bytes(b"<html>not found</html>" * 9), "is damaged or half-written"),
    "a file of the index is missing": (
        lambda d: (d / target.INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001.safetensors"}})),
        "lacks model-00001.safetensors",
    ),
    "half an index": (lambda d: (d / target.INDEX).write_text('{"weight_'), f"{target.INDEX} is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_target_that_is_not_whole_is_named_in_one_line(damage: str, tmp_path: Path) -> None:
    directory = target_dir(tmp_path / "model")
    harm, message = DAMAGES[damage]
    harm(directory)
    with pytest.raises(ConfigError) as refused:
        target.read(directory)
    assert message in str(refused.value)
    assert str(directory) in str(refused.value) and "\n" not in str(refused.value)


def test_a_target_that_is_not_there_or_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it does not exist"):
        target.read(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is no model directory"):
        target.read(tmp_path / "file")


@pytest.mark.parametrize("value", [None, "many", 0, True])
def test_a_config_without_a_number_that_a_draft_needs_is_named(value: object, tmp_path: Path) -> None:
    found = target.read(target_dir(tmp_path / "model", num_hidden_layers=value))
    with pytest.raises(ConfigError, match="num_hidden_layers is"):
        target.check_shapes(found)


# The draft.


@pytest.fixture
def draft_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "draft"
    checkpoint.save(directory, draft(dtype=torch.float32).state_dict(), draft_config())
    return directory


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """The config of the target that the tiny draft fits."""
    return dict(target.read(target_dir(tmp_path / "target")).config)


def test_a_draft_that_fits_is_let_through(draft_dir: Path, config: dict[str, Any]) -> None:
    assert fit.check(draft_dir, config) == sum(parameter.numel() for parameter in draft().parameters())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", 16, "hidden_size is 8, the target's is 16"),
        ("vocab_size", 99, "vocab_size is 23, the target's is 99"),
        ("num_hidden_layers", 4, "it taps layers [1, 2, 4], the target has layers 1 to 3"),
    ],
)
def test_a_draft_of_another_target_is_refused_by_what_differs(
    field: str, value: int, message: str, draft_dir: Path, config: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError) as refused:
        fit.check(draft_dir, {**config, field: value})
    assert message in str(refused.value)
    assert "specdraft draft init" in str(refused.value)


def test_everything_that_differs_is_named_at_once(draft_dir: Path, config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"hidden_size.*vocab_size.*taps layers"):
        fit.check(draft_dir, {**config, "hidden_size": 1, "vocab_size": 2, "num_hidden_layers": 3})


def test_every_draft_type_is_held_against_the_target(tmp_path: Path, config: dict[str, Any]) -> None:
    directory = tmp_path / "dflash"
    DFlash().save(directory, dflash_draft(dtype=torch.float32).state_dict(), dflash_config())
    assert fit.check(directory, config) == sum(parameter.numel() for parameter in dflash_draft().parameters())
    with pytest.raises(CheckpointError, match=r"it taps layers \[1, 2, 4\], the target has layers 1 to 3"):
        fit.check(directory, {**config, "num_hidden_layers": 4})
    (directory / "mask_embedding.pt").unlink()
    with pytest.raises(CheckpointError, match=r"lacks mask_embedding.pt, which the engine reads"):
        fit.check(directory, config)


def rewrite(directory: Path, **fields: Any) -> None:
    """Change entries of a draft's config; None removes one."""
    path = directory / "config.json"
    values = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def retensor(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change tensors of a draft."""
    state = load_file(directory / "model.safetensors")
    change(state)
    save_file(state, directory / "model.safetensors")


def ids_for_offsets(state: dict[str, torch.Tensor]) -> None:
    """What d2t is mistaken for: the target ids themselves."""
    state["d2t"] = torch.tensor(KEPT)


HARMS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (lambda d: (d / "config.json").unlink(), "no config.json"),
    "half a config": (lambda d: half(d / "config.json"), "not valid JSON"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "no model.safetensors"),
    "half of the weights": (lambda d: half(d / "model.safetensors"), "damaged or half-written"),
    "another architecture": (lambda d: rewrite(d, architectures=["Medusa"]), "Medusa"),
    "an entry is missing": (lambda d: rewrite(d, draft_vocab_size=None), "draft_vocab_size"),
    "an entry of another kind": (lambda d: rewrite(d, num_attention_heads="four"), "describes no draft"),
    "fewer tap layers": (lambda d: rewrite(d, eagle_aux_hidden_state_layer_ids=[1, 2]), "fc.weight has shape (8, 24)"),
    "another head size": (lambda d: rewrite(d, head_dim=4), "self_attn"),
    "another draft vocabulary": (lambda d: rewrite(d, draft_vocab_size=5), "shape"),
    "a draft vocabulary as large as the target's": (lambda d: rewrite(d, draft_vocab_size=VOCAB), "d2t and t2d"),
    "no maps": (lambda d: retensor(d, lambda s: (s.pop("d2t"), s.pop("t2d"))), "d2t"),
    "ids in place of offsets": (lambda d: retensor(d, ids_for_offsets), "d2t and t2d contradict"),
    "ids out of range": (lambda d: retensor(d, lambda s: s["d2t"].fill_(VOCAB)), "d2t and t2d contradict"),
    "one token marked that nothing maps to": (lambda d: retensor(d, lambda s: s["t2d"].fill_(True)), "t2d marks"),
    "a value that is no number": (
        lambda d: retensor(d, lambda s: s["fc.weight"][0].fill_(float("nan"))),
        "fc.weight holds values that are not finite",
    ),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_draft_that_is_damaged_or_contradicts_itself_is_named_in_one_line(
    harm: str, draft_dir: Path, config: dict[str, Any]
) -> None:
    do, message = HARMS[harm]
    do(draft_dir)
    with pytest.raises(CheckpointError) as refused:
        fit.check(draft_dir, config)
    assert message in str(refused.value)
    assert str(draft_dir) in str(refused.value) and "\n" not in str(refused.value)


# Memory.


def need(**fields: int) -> MemoryNeed:
    return MemoryNeed(**{"target": GIB, "draft": GIB, "kv_cache": GIB, "replay": GIB, **fields})


def test_what_fits_is_let_through_to_the_last_byte() -> None:
    total = 4 * GIB + preflight.PROCESSES_BYTES
    preflight.check_memory(need(), total)
    with pytest.raises(SettingsError):
        preflight.check_memory(need(), total - 1)


def test_what_does_not_fit_is_refused_with_each_part_and_the_knobs() -> None:
    with pytest.raises(SettingsError) as refused:
        preflight.check_memory(need(kv_cache=8 * GIB, replay=2 * GIB, draft=0), 6 * GIB)
    text = str(refused.value)
    for part in ("target 1.0", "KV cache 8.0", "replay 2.0", "6.0 GiB are free", "--kv-gib", "--replay-mb"):
        assert part in text
    assert "draft" not in text, "what takes nothing is no news"


def test_weights_count_in_the_engine_s_precision() -> None:
    assert preflight.weights_bytes(10, None) == preflight.weights_bytes(10, "float32") == 40
    assert preflight.weights_bytes(10, "bfloat16") == preflight.weights_bytes(10, "half") == 20
    assert preflight.draft_bytes(10, learns=True) > preflight.draft_bytes(10, learns=False) > 40


def test_a_container_s_limit_counts_without_the_file_cache(tmp_path: Path) -> None:
    assert preflight.available_bytes(tmp_path) > 0, "no limit: what the system has"
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 700\n")
    assert preflight.available_bytes(tmp_path) == 1700
    (tmp_path / "memory.max").write_text("max\n")
    assert preflight.available_bytes(tmp_path) > 10**6
    (tmp_path / "memory").mkdir()
    for name, value in (("limit_in_bytes", "300"), ("usage_in_bytes", "100")):
        (tmp_path / "memory" / f"memory.{name}").write_text(value)
    (tmp_path / "memory" / "memory.stat").write_text("cache 0\n")
    assert preflight.available_bytes(tmp_path) == 200


# Port and places.


def test_a_free_port_is_let_through_and_left_free() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for _ in range(2):
        preflight.check_port("127.0.0.1", port)


@pytest.mark.parametrize("host", ["127.0.0.1", "", "localhost"])
def test_a_port_that_is_taken_is_named_with_the_knob(host: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SettingsError, match=f"port {port} of .* is taken .*--port"):
            preflight.check_port(host, port)


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(SettingsError, match=r"cannot be bound .*--host"):
        preflight.check_port("192.0.2.7", 8123)


def test_a_directory_is_made_and_left_empty(tmp_path: Path) -> None:
    preflight.check_writable("--state-dir", tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        with pytest.raises(SettingsError, match=f"--state-dir {re.escape(str(place))} cannot be written"):
            preflight.check_writable("--state-dir", place)


def test_a_socket_s_path_is_looked_at(tmp_path: Path) -> None:
    preflight.check_unix_socket(str(tmp_path / "s"))
    (tmp_path / "there").write_text("")
    for path, message in (
        (str(tmp_path / "there"), "is there already"),
        (str(tmp_path / "nowhere" / "s"), "its folder"),
        (str(tmp_path / ("s" * 110)), "longer than"),
    ):
        with pytest.raises(SettingsError, match=message):
            preflight.check_unix_socket(path)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
