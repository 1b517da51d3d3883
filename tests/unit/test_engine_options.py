"""Catches an option of vLLM that is read otherwise than vLLM will read it, an option that exists and is refused, and a slip that is
found only by the engine.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_specdraft import engine_options
from vllm_specdraft.config import SettingsError
from vllm_specdraft.engine_options import EngineOptions


def config_file(directory: Path, text: str, name: str = "config.yaml") -> str:
    path = directory / name
    path.write_text(text)
    return str(path)


def test_the_defaults_are_ours_for_the_host_and_vllm_s_for_the_rest() -> None:
    found = engine_options.read([])
    assert (found.host, found.port, found.uds, found.api_keys, found.dtype) == ("127.0.0.1", 8000, None, (), None)


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--host", "::1"], "host", "::1"),
        (["--host=::1"], "host", "::1"),
        (["--host="], "host", ""),
        (["--host", "a", "--host", "b"], "host", "b"),
        (["--port=8123"], "port", 8123),
        (["--uds", "/tmp/s"], "uds", "/tmp/s"),
        (["--api-key", "a", "b", "--port", "8123"], "api_keys", ("a", "b")),
        (["--api_key=a"], "api_keys", ("a",)),
        (["--api-key", "a", "--api-key", "b"], "api_keys", ("b",)),
        (["--max-model-len", "512", "--dtype", "bfloat16"], "dtype", "bfloat16"),
    ],
)
def test_an_option_is_read_in_all_its_spellings(words: list[str], field: str, value: object) -> None:
    assert getattr(engine_options.read(words), field) == value
    assert engine_options.read(words).words == tuple(words)


def test_the_names_are_those_given_with_dashes() -> None:
    found = engine_options.read(["--max_model_len=512", "-tp", "2", "--seed", "-1", "--hf-overrides.rope_theta", "5"])
    assert found.names == {"--max-model-len", "-tp", "--seed", "--hf-overrides.rope-theta"}


def test_a_config_file_counts_and_the_command_line_is_stronger(tmp_path: Path) -> None:
    file = config_file(
        tmp_path,
        'host: "0.0.0.0"\nport: 8123\napi-key: [a, b]\nenforce-eager: false\nenable_prefix_caching: true\nhf-overrides: {x: 1}\n',
    )
    found = engine_options.read(["--config", file])
    assert (found.host, found.port, found.api_keys) == ("0.0.0.0", 8123, ("a", "b"))
    assert {"--host", "--no-enforce-eager", "--enable-prefix-caching", "--hf-overrides"} <= found.names
    assert engine_options.read(["--host", "::1", "--config", file]).host == "::1"


def test_a_config_file_in_one_word_is_split_for_vllm_which_would_not_read_it(tmp_path: Path) -> None:
    file = config_file(tmp_path, 'host: "0.0.0.0"\n')
    found = engine_options.read([f"--config={file}"])
    assert found.words == ("--config", file)
    assert found.host == "0.0.0.0"


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("host: [", "config.yaml", "is not valid YAML"),
        ("", "config.yaml", "it holds nothing"),
        ("- host", "config.yaml", "it holds a list"),
        ("host: a", "config.json", r"named \*.yaml"),
    ],
)
def test_a_broken_config_file_is_named(text: str, name: str, message: str, tmp_path: Path) -> None:
    file = config_file(tmp_path, text, name)
    with pytest.raises(SettingsError, match=f"--config {re.escape(file)}.*{message}") as refused:
        engine_options.read(["--config", file])
    assert "\n" not in str(refused.value)


def test_a_config_file_that_is_missing_forgotten_or_given_twice_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere.yaml")
    with pytest.raises(SettingsError, match=f"--config {missing} cannot be read"):
        engine_options.read(["--config", missing])
    with pytest.raises(SettingsError, match="--config needs"):
        engine_options.read(["--config"])
    with pytest.raises(SettingsError, match="twice"):
        engine_options.read(["--config", missing, f"--config={missing}"])


@pytest.mark.parametrize("port", ["0", "-1", "65536", "http", "80.5"])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(SettingsError, match=f"--port.*{re.escape(port)}|expected one argument"):
        engine_options.read([f"--port={port}"])


# Names.


def options(*names: str) -> EngineOptions:
    return engine_options.read(names)


@pytest.mark.parametrize(
    "word",
    [
        "--max-model-len", "--max_model_len=5", "--api-key", "--host", "--port", "--uds", "--served-model-name", "--seed",
        "--no-enable-prefix-caching", "--enable-prefix-caching", "--hf-overrides.rope_theta", "--compilation-config.pass_config.x",
        "--cudagraph-capture-sizes+", "--disable-log-stats", "--enable-log-requests", "--middleware", "--help", "--config",
        "--kv-cache-memory-bytes", "--gpu-memory-utilization", "--chat-template", "--root-path", "--allowed-origins", "-q",
    ],
)  # fmt: skip
def test_what_vllm_has_is_let_through(word: str, tmp_path: Path) -> None:
    value = config_file(tmp_path, "seed: 1\n") if word == "--config" else "8"
    engine_options.refuse_unknown(options(word, *([] if "=" in word else [value])), [])


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--num-speculatve-tokens", "; did you mean --num-speculative-tokens?"),
        ("--max-model-length", "; did you mean --max-model-len?"),
        ("--enabel-prefix-caching", "; did you mean --enable-prefix-caching?"),
        ("--max-model", "; did you mean --max-model-len?"),
        ("--xyzzy", ""),
    ],
)
def test_what_nobody_has_is_refused_with_the_nearest_name(word: str, hint: str) -> None:
    with pytest.raises(SettingsError, match=f"^{re.escape(f'unknown option {word}{hint}')}$"):
        engine_options.refuse_unknown(options(word, "5"), ["--num-speculative-tokens", "--slice-ms"])


def test_a_slip_in_a_config_file_is_found_too(tmp_path: Path) -> None:
    file = config_file(tmp_path, "max-modellen: 512\n")
    with pytest.raises(SettingsError, match="--max-modellen; did you mean --max-model-len"):
        engine_options.refuse_unknown(options("--config", file), [])


def test_the_search_for_names_needs_no_engine() -> None:
    """It is there to be quick."""
    code = (
        "import sys\nfrom vllm_specdraft import engine_options as e\n"
        "e.refuse_unknown(e.read(['--max-model-len', '5']), [])\n"
        "print(*(n for n in ('torch', 'vllm') if n in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
