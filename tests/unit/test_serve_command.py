"""Catches a server that is started otherwise than the user asked: an own option that is overruled, a plain engine with our
plugin in it, other plugins switched off, an open port.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.builders import dflash_config, dflash_draft, draft, draft_config
from trainer_bridge.draft import checkpoint
from trainer_bridge.draft.dflash import DFlash
from vllm_specdraft import cpu, engine_options, serve
from vllm_specdraft.config import ENVIRONMENT, EngineConfig, SettingsError
from vllm_specdraft.serve import Command

PLUGINS = {"specdraft", "lora_resolver", "metrics_extra"}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A CPU build on a machine with four cores and one library to preload, whatever runs the test."""
    monkeypatch.setattr(serve, "_on_cpu", lambda: True)
    monkeypatch.setattr(serve, "_plugin_names", lambda: set(PLUGINS))
    monkeypatch.setattr(cpu, "preloads", lambda: ["/lib/libfast.so", "/lib/libomp.so"])
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setenv("SPECDRAFT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def draft_dir(tmp_path: Path) -> Path:
    """A tiny draft checkpoint."""
    directory = tmp_path / "draft"
    checkpoint.save(directory, draft(dtype=torch.float32).state_dict(), draft_config())
    return directory


@pytest.fixture
def built(draft_dir: Path, tmp_path: Path) -> Any:
    """Build the command for a command line: ours and vLLM's options together, as the user writes them."""

    def build(*arguments: str, **environ: str) -> Command:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        serve.add_arguments(parser)
        args, extra = parser.parse_known_args(["--state-dir", str(tmp_path / "state"), *arguments])
        serve.check_ranges(args)
        options = engine_options.read(extra)
        return serve.build(Path("/models/target"), args, options, None if args.plain else draft_dir, environ)

    return build


def values_of(command: Command, option: str) -> list[str]:
    """All values of an option, in both spellings and in order."""
    argv = command.argv
    found = [argv[i + 1] for i, word in enumerate(argv) if word == option]
    return found + [word.partition("=")[2] for word in argv if word.startswith(f"{option}=")]


def config_of(command: Command) -> EngineConfig:
    return EngineConfig.from_mapping(json.loads(command.environment[ENVIRONMENT]))


# What goes to vLLM.


def test_the_server_is_vllm_s_own_on_this_python(built: Any) -> None:
    command = built()
    assert command.argv[:3] == [sys.executable, "-m", "vllm_specdraft.serve_entry"]
    assert values_of(command, "--model") == ["/models/target"]


def test_nobody_else_is_let_in_by_default(built: Any) -> None:
    for command in (built(), built("--plain")):
        assert values_of(command, "--host") == ["127.0.0.1"]


@pytest.mark.parametrize("words", [("--host", "0.0.0.0"), ("--host=0.0.0.0",)])
def test_the_user_s_host_wins(built: Any, words: Sequence[str]) -> None:
    assert values_of(built(*words), "--host") == ["0.0.0.0"]


@pytest.mark.parametrize("words", [("--dtype", "bfloat16"), ("--dtype=bfloat16",)])
def test_the_user_s_dtype_wins(built: Any, words: Sequence[str]) -> None:
    assert values_of(built(), "--dtype") == ["float32"]
    assert values_of(built(*words), "--dtype") == ["bfloat16"]


def test_an_option_whose_name_begins_alike_is_another_one(built: Any) -> None:
    command = built("--host-name-of-something", "x")
    assert values_of(command, "--host") == ["127.0.0.1"]


@pytest.mark.parametrize("word", ["--no-enforce-eager", "--no_enforce_eager", "--enforce-eager", "--enforce_eager"])
def test_the_user_s_choice_of_eager_mode_wins(built: Any, word: str) -> None:
    assert built().argv.count("--enforce-eager") == built("--plain").argv.count("--enforce-eager") == 1
    command = built("--plain", word)
    assert [w for w in command.argv if "enforce" in w] == [word]


def test_other_options_go_through_in_their_order(built: Any) -> None:
    words = ["--port", "8123", "--max-model-len", "512", "--served-model-name", "a", "b"]
    argv = built(*words, "--num-speculative-tokens", "2").argv
    start = argv.index("--port")
    assert argv[start : start + len(words)] == words
    assert "--num-speculative-tokens" not in argv


def test_a_gpu_build_gets_no_cpu_settings(built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_on_cpu", lambda: False)
    command = built("--no-governor")
    assert set(command.environment) == {ENVIRONMENT, "VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER"}
    assert not {"--dtype", "--enforce-eager"} & set(command.argv)
    assert "num_speculative_tokens_per_batch_size" not in values_of(command, "--speculative-config")[0]


def test_the_runner_that_is_tapped_is_chosen(built: Any) -> None:
    assert built().environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert "VLLM_USE_V2_MODEL_RUNNER" not in built("--plain").environment


# Speculation.


def test_the_speculative_config_names_method_draft_and_tokens(built: Any, draft_dir: Path) -> None:
    command = built("--num-speculative-tokens", "5", "--speculate-up-to", "0", "--no-governor")
    (text,) = values_of(command, "--speculative-config")
    found = json.loads(text)
    assert found.pop("disable_eagle_block_drop") is True, "what is cached of a prompt would be a block less"
    assert found == {"method": "eagle3", "model": str(draft_dir), "num_speculative_tokens": 5}
    assert values_of(command, "--worker-extension-cls") == [serve.WORKER_EXTENSION]


def test_the_draft_decides_method_and_number_of_tokens(built: Any, draft_dir: Path) -> None:
    """Unless the number is given; the engine and the learner hear the same one."""
    shutil.rmtree(draft_dir)
    DFlash().save(draft_dir, dflash_draft(dtype=torch.float32).state_dict(), dflash_config())
    for words, tokens in (((), DFlash().default_tokens), (("--num-speculative-tokens", "6"), 6)):
        command = built(*words)
        found = json.loads(values_of(command, "--speculative-config")[0])
        assert (found["method"], found["num_speculative_tokens"]) == ("dflash", tokens)
        assert json.loads(command.environment[ENVIRONMENT])["num_speculative_tokens"] == tokens
        assert any(f"(dflash, {tokens} tokens a step)" in note for note in command.notes)


@pytest.mark.parametrize("limit", [1, 4, 8, 100])
def test_the_schedule_covers_every_batch_size_once(built: Any, limit: int) -> None:
    """In full up to the limit, one token up to twice as many, none above: without a gap or an overlap."""
    command = built("--speculate-up-to", str(limit), "--no-governor")
    schedule = json.loads(values_of(command, "--speculative-config")[0])["num_speculative_tokens_per_batch_size"]
    assert schedule[0][0] == 1
    assert schedule[-1][1] >= 1_000_000
    for before, after in itertools.pairwise(schedule):
        assert after[0] == before[1] + 1

    def drafted(batch: int) -> int:
        (found,) = [tokens for low, high, tokens in schedule if low <= batch <= high]
        return found

    assert [drafted(n) for n in (1, limit, limit + 1, 2 * limit, 2 * limit + 1, 5000)] == [3, 3, 1, 1, 0, 0]


def test_on_a_cpu_there_is_a_limit_by_default_and_the_note_names_it(built: Any) -> None:
    command = built("--no-governor")
    schedule = json.loads(values_of(command, "--speculative-config")[0])["num_speculative_tokens_per_batch_size"]
    limit = schedule[0][1]
    assert 1 <= limit <= 16
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    assert f"CPU default: {limit};" in " ".join(parser.format_help().split())
    assert any(f"batches up to {limit} in full" in note for note in command.notes)


def test_the_governor_takes_the_place_of_a_schedule(built: Any) -> None:
    """vLLM is told of a schedule, or it would ask nobody; which one does not matter."""
    command = built("--num-speculative-tokens", "5", "--speculate-up-to", "7")
    (text,) = values_of(command, "--speculative-config")
    assert json.loads(text)["num_speculative_tokens_per_batch_size"] == [[1, serve.LARGEST_BATCH, 5]]
    assert values_of(command, "--scheduler-cls") == [serve.SCHEDULER]
    found = config_of(command)
    assert found.governor and found.speculate_up_to == 7
    assert any("where it is measured to pay, batches up to 7" in note for note in command.notes)


def test_without_a_governor_the_scheduler_is_vllm_s(built: Any) -> None:
    command = built("--no-governor")
    assert not values_of(command, "--scheduler-cls") and not config_of(command).governor


# The engine's config.


def test_our_options_reach_the_engine(built: Any, draft_dir: Path, tmp_path: Path) -> None:
    command = built(
        "--num-speculative-tokens", "2", "--no-learn", "--no-auto-publish", "--slice-ms", "75", "--replay-mb", "12.5",
        "--learning-rate", "0.004",
    )  # fmt: skip
    assert config_of(command) == EngineConfig(
        draft_dir=str(draft_dir),
        state_dir=str(tmp_path / "state"),
        num_speculative_tokens=2,
        learn=False,
        auto_publish=False,
        slice_ms=75.0,
        replay_bytes=12_500_000,
        learning_rate=0.004,
    )
    assert (tmp_path / "state").is_dir()


def test_by_default_it_learns_and_publishes(built: Any) -> None:
    found = config_of(built())
    assert (found.learn, found.auto_publish) == (True, True)


@pytest.mark.parametrize("option", ["--slice-ms", "--num-speculative-tokens", "--replay-mb", "--learning-rate", "--kv-gib"])
@pytest.mark.parametrize("value", ["0", "-1"])
def test_values_out_of_range_are_refused_by_the_name_of_the_option(built: Any, option: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"{option} is {value}(.0)?, must be above 0"):
        built(option, value)


@pytest.mark.parametrize("option", ["--slice-ms", "--replay-mb", "--learning-rate"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_what_is_no_finite_number_is_refused(built: Any, option: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"{option} is {value}, must be above 0"):
        built(option, value)


def test_a_negative_limit_is_refused(built: Any) -> None:
    with pytest.raises(SettingsError, match="--speculate-up-to is -1"):
        built("--speculate-up-to", "-1")


def test_the_policy_that_answers_wait_for_reaches_the_engine(built: Any) -> None:
    assert config_of(built()).min_policy_version == 0
    assert config_of(built("--min-policy-version", "12")).min_policy_version == 12
    with pytest.raises(SettingsError, match="--min-policy-version is -1"):
        built("--min-policy-version", "-1")


@pytest.mark.parametrize("value", ["many", "0", "-2", "1.5", ""])
def test_a_cache_size_of_the_environment_that_vllm_would_stumble_over_is_refused(
    built: Any, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", value)
    with pytest.raises(SettingsError, match=r"VLLM_CPU_KVCACHE_SPACE is .*--kv-gib"):
        built()
    assert built("--kv-gib", "3")


def test_what_an_earlier_server_died_of_is_forgotten(built: Any, tmp_path: Path) -> None:
    """Or the next server that ends would be said to have died of it."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "failure.txt").write_text("ValueError: long ago")
    built()
    assert not (tmp_path / "state" / "failure.txt").exists()


def test_each_process_has_a_state_directory_of_its_own_and_sweeps_those_of_the_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C16: one that a killed server left behind goes; that of a living process and other people's folders stay."""
    monkeypatch.setattr(serve.tempfile, "tempdir", str(tmp_path))
    gone, alive = 2**22 + 17, os.getppid()
    for name in (f"specdraft-state-{gone}-x1", f"specdraft-state-{alive}-x2", "specdraft-state-mine", "something-else"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "status.json").write_text("{}")
    found, another = serve.new_state_dir(), serve.new_state_dir()
    assert found != another, "nothing of an earlier process of the same number"
    another.rmdir()
    assert list(found.iterdir()) == []
    assert found.stat().st_mode & 0o777 == 0o700
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {found.name, f"specdraft-state-{alive}-x2", "specdraft-state-mine", "something-else"}


# Plugins.


def test_a_plain_server_has_no_config_and_no_plugin_of_ours(built: Any) -> None:
    command = built("--plain")
    assert ENVIRONMENT not in command.environment
    assert command.environment["VLLM_PLUGINS"].split(",") == ["lora_resolver", "metrics_extra"]
    assert not {"--speculative-config", "--worker-extension-cls"} & set(command.argv)
    assert "specdraft" not in " ".join(command.argv[3:])
    assert {"VLLM_CPU_OMP_THREADS_BIND", "LD_PRELOAD"} <= set(command.environment), "the same settings otherwise"


@pytest.mark.parametrize(("mine", "expected"), [("a,specdraft,b", "a,b"), ("a", "a"), ("", "")])
def test_a_plain_server_keeps_the_user_s_choice_of_plugins_but_ours(built: Any, mine: str, expected: str) -> None:
    assert built("--plain", VLLM_PLUGINS=mine).environment["VLLM_PLUGINS"] == expected


def test_all_installed_plugins_stay_on(built: Any) -> None:
    """vLLM loads only what is named once anything is named."""
    found = built().environment["VLLM_PLUGINS"].split(",")
    assert set(found) == PLUGINS
    assert len(found) == len(PLUGINS)


@pytest.mark.parametrize(
    ("mine", "expected"),
    [("a,b", "a,b,specdraft"), ("specdraft,b", "specdraft,b"), ("", "specdraft"), ("a,,a", "a,specdraft")],
)
def test_the_user_s_plugins_are_kept_and_ours_is_added(built: Any, mine: str, expected: str) -> None:
    assert built(VLLM_PLUGINS=mine).environment["VLLM_PLUGINS"] == expected


# Settings of the CPU engine.


def test_all_cores_are_for_the_worker(built: Any) -> None:
    assert built().environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-3"


@pytest.mark.parametrize(
    ("cores", "text"),
    [([0], "0"), ([0, 1], "0-1"), ([0, 1, 2, 5], "0-2,5"), ([3, 5, 7], "3,5,7"), ([0, 1, 4, 5, 6, 9, 10], "0-1,4-6,9-10")],
)
def test_cores_become_ranges(cores: list[int], text: str) -> None:
    assert cpu._ranges(cores) == text


def test_cores_that_the_process_may_not_use_are_left_alone(built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda _: {9, 2, 3, 8})
    assert built().environment["VLLM_CPU_OMP_THREADS_BIND"] == "2-3,8-9"


@pytest.mark.parametrize("words", [("--tensor-parallel-size", "2"), ("--tensor_parallel_size=2",), ("-tp", "2")])
def test_tensor_parallel_workers_share_the_cores(built: Any, words: Sequence[str]) -> None:
    command = built(*words)
    assert command.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-1|2-3"
    start = command.argv.index(words[0])
    assert tuple(command.argv[start : start + len(words)]) == words


def test_the_user_s_preloads_are_kept_behind_ours(built: Any) -> None:
    assert built().environment["LD_PRELOAD"] == "/lib/libfast.so:/lib/libomp.so"
    assert built(LD_PRELOAD="/my/lib.so").environment["LD_PRELOAD"] == "/lib/libfast.so:/lib/libomp.so:/my/lib.so"


def test_without_a_library_to_preload_the_user_is_told(built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "preloads", lambda: [])
    command = built(LD_PRELOAD="/my/lib.so")
    assert "LD_PRELOAD" not in command.environment
    assert any("slower" in note for note in command.notes)


@pytest.mark.parametrize("name", ["VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE"])
def test_what_the_user_set_stays_and_is_noted_as_theirs(built: Any, name: str) -> None:
    command = built(**{name: "17"})
    assert name not in command.environment
    assert any(name in note and "17 (yours)" in note for note in command.notes)


def test_the_cache_size_of_the_command_line_wins(built: Any) -> None:
    assert built("--kv-gib", "3").environment["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert built("--kv-gib", "3", VLLM_CPU_KVCACHE_SPACE="17").environment["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert 1 <= int(built().environment["VLLM_CPU_KVCACHE_SPACE"]) <= 4


# The guard.


def test_the_guard_stands_in_front_of_the_plugin_s_server_alone(built: Any) -> None:
    """Beside what the user adds, and after it, for vLLM puts the last one outermost."""
    command = built("--middleware", "mine.Middleware")
    assert values_of(command, "--middleware") == ["mine.Middleware", "vllm_specdraft.security.Guard"]
    assert values_of(built("--plain"), "--middleware") == []
