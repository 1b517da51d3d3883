"""Catches a command line that does not do what was asked, and one that answers a slip with a traceback, with a page of usage, or
after the minute that an engine takes to start.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.builders import dflash_config, dflash_draft, draft, draft_config, target_dir
from trainer_bridge.draft import checkpoint
from trainer_bridge.draft.dflash import DFlash
from vllm_specdraft import cli, drafts, embedded, preflight, serve
from vllm_specdraft.config import ENVIRONMENT, EngineConfig
from vllm_specdraft.launch import free_port
from vllm_specdraft.serve import Command


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A CPU build, and an environment without settings of our own."""
    monkeypatch.setattr(serve, "_on_cpu", lambda: True)
    monkeypatch.setenv("SPECDRAFT_CACHE", str(tmp_path / "cache"))
    for name in ("VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def draft_dir(tmp_path: Path) -> Path:
    """A tiny draft checkpoint."""
    directory = tmp_path / "draft"
    checkpoint.save(directory, draft(dtype=torch.float32).state_dict(), draft_config())
    return directory


def values_of(command: Command, option: str) -> list[str]:
    """All values of an option, in order."""
    return [command.argv[i + 1] for i, word in enumerate(command.argv) if word == option]


def config_of(command: Command) -> EngineConfig:
    return EngineConfig.from_mapping(json.loads(command.environment[ENVIRONMENT]))


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch, draft_dir: Path, dflash_dir: Path, tmp_path: Path) -> list[Command]:
    """The commands that would have replaced this process."""
    seen: list[Command] = []
    monkeypatch.setattr(serve, "become", seen.append)
    monkeypatch.setattr(embedded, "ensure", lambda **_: target_dir(tmp_path / "default-model"))
    monkeypatch.setattr(embedded, "is_converted", lambda: True)
    monkeypatch.setattr(drafts, "auto", lambda target, kind: {drafts.DEFAULT_TYPE: draft_dir, "dflash": dflash_dir}[kind])
    monkeypatch.setattr(preflight, "available_bytes", lambda: 64 * preflight.GIB)
    return seen


@pytest.fixture
def dflash_dir(tmp_path: Path) -> Path:
    """A tiny draft checkpoint of the other type."""
    DFlash().save(tmp_path / "dflash", dflash_draft(dtype=torch.float32).state_dict(), dflash_config())
    return tmp_path / "dflash"


@pytest.fixture
def target(tmp_path: Path) -> str:
    """A model directory that the tiny draft fits."""
    return str(target_dir(tmp_path / "mine"))


@pytest.fixture
def port() -> str:
    """A port that nothing listens on."""
    return str(free_port())


@pytest.mark.parametrize(("word", "method"), [("auto", "eagle3"), ("eagle3", "eagle3"), ("dflash", "dflash")])
def test_serve_makes_a_draft_of_the_type_that_is_named(
    word: str, method: str, target: str, port: str, become: list[Command]
) -> None:
    assert cli.main(["serve", target, "--draft", word, "--port", port]) == 0
    (command,) = become
    assert json.loads(values_of(command, "--speculative-config")[0])["method"] == method


def test_serve_without_a_target_serves_the_embedded_model(
    become: list[Command], draft_dir: Path, tmp_path: Path, port: str
) -> None:
    """The value of an option is not a target."""
    assert cli.main(["serve", "--port", port]) == 0
    (command,) = become
    assert values_of(command, "--model") == [str(tmp_path / "default-model")]
    assert values_of(command, "--port") == [port]
    assert config_of(command).draft_dir == str(draft_dir)


def test_serve_with_a_target(
    become: list[Command], target: str, tmp_path: Path, port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", target, "--plain", "--port", port]) == 0
    assert cli.main(["serve", target, "--port", port, "--state-dir", str(tmp_path / "s"), "--slice-ms", "33"]) == 0
    plain, full = become
    assert values_of(plain, "--model") == values_of(full, "--model") == [target]
    assert values_of(full, "--port") == [port]
    assert config_of(full).slice_ms == 33.0
    assert f"specdraft: serving {target}" in capsys.readouterr().out


def test_a_plain_server_may_be_given_the_name_of_a_model(become: list[Command], port: str) -> None:
    """vLLM fetches it; a path that is not there is a slip."""
    assert cli.main(["serve", "someone/some-model", "--plain", "--port", port]) == 0
    assert values_of(become[0], "--model") == ["someone/some-model"]
    assert cli.main(["serve", "/nowhere/some-model", "--plain", "--port", port]) == 1
    assert len(become) == 1


def test_a_draft_that_an_earlier_server_kept_is_served_on(
    become: list[Command], target: str, draft_dir: Path, tmp_path: Path, port: str
) -> None:
    kept = tmp_path / "kept"
    (kept / "served").parent.mkdir()
    shutil.copytree(draft_dir, kept / "served")
    assert cli.main(["serve", target, "--port", port, "--checkpoint-dir", str(kept)]) == 0
    found = config_of(become[0])
    assert (found.draft_dir, found.checkpoint_dir) == (str(kept / "served"), str(kept))


# What is refused before anything starts.


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What a user sees of an error: one line on stderr that begins with our name, and no traceback."""
    seen = capsys.readouterr()
    assert seen.out == ""
    assert re.fullmatch(r"specdraft: [^\n]+\n", seen.err), seen.err
    return seen.err


def refused(arguments: Sequence[str], become: list[Command], capsys: pytest.CaptureFixture[str]) -> str:
    """The line for a command that must not start anything."""
    try:
        code = cli.main(arguments)
    except SystemExit as ended:
        code = ended.code
    assert code not in (0, None)
    assert become == []
    return one_line(capsys)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("--speculative-config", "{}"), "--speculative-config"),
        (("--speculative_config={}",), "--speculative-config"),
        (("-sc", "{}"), "-sc"),
        (("--worker-extension-cls", "a.B"), "--worker-extension-cls"),
        (("--pipeline-parallel-size", "2"), "--pipeline-parallel-size"),
        (("--pipeline_parallel_size=2",), "--pipeline-parallel-size"),
        (("-pp", "2"), "-pp"),
        (("-dp=2",), "-dp"),
        (("--no-enforce-eager",), "--no-enforce-eager"),
        (("--no_enforce_eager",), "--no-enforce-eager"),
        (("--async-scheduling",), "--async-scheduling"),
    ],
    ids=" ".join,
)
def test_options_that_contradict_the_plugin_are_refused_by_name(
    words: Sequence[str], name: str, become: list[Command], target: str, port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the spelling; a plain server takes them all, as they are."""
    message = refused(["serve", target, "--port", port, *words], become, capsys)
    assert re.search(f"{name} does not go with specdraft .*--plain", message)
    assert cli.main(["serve", target, "--plain", "--port", port, *words]) == 0
    argv = become[0].argv
    start = argv.index(words[0])
    assert tuple(argv[start : start + len(words)]) == words


def test_a_second_target_is_refused_with_a_plain_server_too(
    become: list[Command], target: str, port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for plain in ([], ["--plain"]):
        message = refused(["serve", target, "--port", port, "--model", "/models/other", *plain], become, capsys)
        assert "--model does not go" in message and "right after `serve`" in message


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("--num-speculatve-tokens", "--num-speculative-tokens"),
        ("--max-modellen", "--max-model-len"),
        ("--max_modellen=512", "--max-model-len"),
        ("--slice-m", "--slice-ms"),
        ("--hos", "--host"),
    ],
)
def test_an_option_that_nobody_has_is_named_with_the_one_that_was_meant(
    wrong: str, meant: str, become: list[Command], target: str, port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ours or vLLM's; a beginning of a name is no name."""
    message = refused(["serve", target, "--port", port, wrong, "5"], become, capsys)
    assert f"unknown option {wrong.partition('=')[0].replace('_', '-')}; did you mean {meant}?" in message


def test_a_host_that_others_reach_needs_a_key_or_the_word_for_it(
    become: list[Command],
    target: str,
    port: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On the command line and in a file; the line names all three ways out."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    file = tmp_path / "config.yaml"
    file.write_text('host: "0.0.0.0"\n')
    base = ["serve", target, "--port", port]
    for words in (["--host", "0.0.0.0"], ["--host="], ["--host", "::"], ["--config", str(file)], ["--host", "0", "--plain"]):
        message = refused([*base, *words], become, capsys)
        for knob in ("--api-key", "--host 127.0.0.1", "--insecure"):
            assert knob in message
    assert cli.main([*base, "--host", "0.0.0.0", "--api-key", "secret"]) == 0
    assert "WARNING" not in capsys.readouterr().err
    assert cli.main([*base, "--host", "0.0.0.0", "--insecure"]) == 0
    assert "WARNING: --host 0.0.0.0 without an API key" in capsys.readouterr().err
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert cli.main([*base, "--config", str(file)]) == 0
    assert values_of(become[-1], "--host") == [], "the file's host stands"


def test_keys_are_never_printed(become: list[Command], target: str, port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", target, "--port", port, "--api-key", "hush-hush"]) == 0
    seen = capsys.readouterr()
    assert "API key" in seen.out
    assert "hush" not in seen.out + seen.err


def test_a_port_that_is_taken_is_named(become: list[Command], target: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = str(other.getsockname()[1])
        message = refused(["serve", target, "--port", taken], become, capsys)
    assert f"port {taken}" in message and "--port" in message


def test_a_target_without_enough_memory_is_refused_with_the_numbers(
    become: list[Command], target: str, port: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "available_bytes", lambda: 2 * preflight.GIB)
    words = ["serve", target, "--port", port, "--kv-gib", "3", "--replay-mb", "2147.483648"]
    assert cli.main(words) == 1
    message = capsys.readouterr().err
    for part in ("KV cache 3.0", "replay 2.5", "2.0 GiB are free", "--kv-gib", "--replay-mb"):
        assert part in message
    assert become == []


def test_a_draft_of_another_target_is_refused_by_what_differs(
    become: list[Command], draft_dir: Path, tmp_path: Path, port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(target_dir(tmp_path / "other", hidden_size=16))
    message = refused(["serve", other, "--port", port, "--draft", str(draft_dir)], become, capsys)
    assert "hidden_size is 8, the target's is 16" in message


def test_a_directory_that_cannot_be_written_is_named(
    become: list[Command], target: str, tmp_path: Path, port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for option in ("--state-dir", "--checkpoint-dir"):
        message = refused(["serve", target, "--port", port, option, str(tmp_path / "file" / "below")], become, capsys)
        assert f"{option} {tmp_path / 'file' / 'below'} cannot be written" in message


@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "http://127.0.0.1:1", "--jsn"],
        ["status", "http://127.0.0.1:1", "more"],
        ["model", "--port", "8123"],
        ["draft", "info", "somewhere", "--force"],
        ["draft", "init", "target", "out", "--draft-vocab", "5"],
        ["serv"],
        [],
    ],
    ids=" ".join,
)
def test_unknown_arguments_of_other_commands_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing runs, and nothing is guessed from a beginning."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "specdraft" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status", "http://127.0.0.1:1", "--jsn"], "unknown option --jsn; did you mean --json?"),
        (["model", "--forced=yes"], "unknown option --forced; did you mean --force?"),
        (["draft", "init", "target", "out", "--draft-vocab", "5"], "did you mean --draft-vocab-size?"),
        (["draft", "info", "one", "two"], "unexpected argument 'two'"),
        (["serve", "--slice-ms", "soon"], "argument --slice-ms: invalid float value: 'soon'"),
    ],
)
def test_a_slip_on_the_command_line_is_answered_with_one_line(
    arguments: list[str], message: str, become: list[Command], capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(arguments, become, capsys)


@pytest.mark.parametrize("command", ["info", "serve"])
def test_a_draft_that_is_not_there_is_named(
    command: str, become: list[Command], target: str, port: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "nowhere")
    arguments = ["draft", "info", missing] if command == "info" else ["serve", target, "--port", port, "--draft", missing]
    message = refused(arguments, become, capsys)
    assert missing in message
    assert "specdraft draft init" in message


def test_a_draft_that_is_a_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "draft.safetensors"
    file.write_text("")
    assert cli.main(["draft", "info", str(file)]) == 1
    assert str(file) in one_line(capsys)


def test_a_target_that_is_not_there_is_named(tmp_path: Path, port: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the first draft is made on the way."""
    missing = str(tmp_path / "nowhere")
    for arguments in (["serve", missing, "--port", port], ["draft", "init", missing, str(tmp_path / "out")]):
        assert cli.main(arguments) == 1
        assert f"{missing} is no model directory" in one_line(capsys)
    assert not (tmp_path / "out").exists()


def test_text_that_is_none_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    binary = tmp_path / "text.bin"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    for file in (binary, tmp_path / "nowhere.txt"):
        assert cli.main(["draft", "init", "target", "out", "--text", str(file)]) == 1
        assert f"--text {file}" in one_line(capsys)


def test_a_draft_is_described(draft_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["draft", "info", str(draft_dir)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^type +eagle3$", text, re.MULTILINE)
    assert checkpoint.digest_of(checkpoint.read_state(draft_dir)) in text
