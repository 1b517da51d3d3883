"""Catches a setting that is misspelt and ignored, out of range and believed, or lost between two processes; and a config,
state machine or status that pulls torch into a process that cannot afford it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_specdraft import plugin
from vllm_specdraft.config import ENVIRONMENT, LEARN_DTYPES, EngineConfig, SettingsError

REPOSITORY = Path(__file__).resolve().parents[2]
PLACES = {"draft_dir": "/drafts/one", "state_dir": "/state"}


def config(**fields: Any) -> EngineConfig:
    return EngineConfig(**{**PLACES, **fields})


def other_value(field: dataclasses.Field[Any]) -> Any:
    """A value in range that is not the default."""
    default = getattr(config(), field.name)
    if isinstance(default, bool):
        return not default
    if field.name == "learn_dtype":
        return LEARN_DTYPES[-1]
    if isinstance(default, str):
        return default + "-2"
    if default is None:
        return {"int | None": 3, "float | None": 0.5}.get(str(field.type), "/somewhere")
    return default / 2 if isinstance(default, float) and default else default + 1


FIELDS = dataclasses.fields(EngineConfig)


def test_every_setting_survives_the_way_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = config(**{field.name: other_value(field) for field in FIELDS})
    assert all(getattr(changed, field.name) != getattr(config(), field.name) for field in FIELDS)
    assert EngineConfig.from_mapping(json.loads(changed.to_json())) == changed
    monkeypatch.setenv(ENVIRONMENT, changed.to_json())
    assert EngineConfig.from_environment() == changed


def test_equal_configs_have_equal_texts() -> None:
    assert config(seed=3).to_json() == EngineConfig(seed=3, state_dir="/state", draft_dir="/drafts/one").to_json()


def test_a_dtype_that_is_none_of_them_is_refused() -> None:
    with pytest.raises(SettingsError, match="learn_dtype is 'fp8', must be one of auto, float32, bfloat16"):
        config(learn_dtype="fp8")


@pytest.mark.parametrize("text", [None, ""])
def test_without_the_variable_there_is_no_config(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    if text is not None:
        monkeypatch.setenv(ENVIRONMENT, text)
    assert EngineConfig.from_environment() is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", "is no config"),
        ("5", "is no config"),
        ('{"draft_dir": "/d"}', "state_dir"),
        ('{"draft_dir": "/d", "state_dir": "/s", "slice_msec": 5}', "did you mean 'slice_ms'"),
        ('{"draft_dir": "/d", "state_dir": "/s", "slice_ms": "fast"}', "is no config"),
    ],
)
def test_a_broken_variable_is_named_in_one_line(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And ends a process of vLLM that loads the plugin with that line, not with a traceback through vLLM."""
    monkeypatch.setenv(ENVIRONMENT, text)
    with pytest.raises(SettingsError) as refused:
        EngineConfig.from_environment()
    assert ENVIRONMENT in str(refused.value) and message in str(refused.value)
    assert "\n" not in str(refused.value)
    with pytest.raises(SystemExit, match=ENVIRONMENT):
        plugin.register()


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("slice_msec", "unknown setting 'slice_msec'; did you mean 'slice_ms'"),
        ("Replay_bytes", "did you mean 'replay_bytes'"),
        ("warmup_step", "did you mean 'warmup_steps'"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest_one(key: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        EngineConfig.from_mapping({**PLACES, key: 5})


def test_a_setting_like_no_other_is_refused_without_a_guess() -> None:
    with pytest.raises(SettingsError, match=r"unknown setting 'xyzzy'$"):
        EngineConfig.from_mapping({**PLACES, "xyzzy": 5})


@pytest.mark.parametrize(
    "name",
    ["num_speculative_tokens", "slice_ms", "replay_bytes", "batch_samples", "evaluate_every_steps", "evaluate_samples",
     "min_samples", "learning_rate", "max_gradient_norm"],
)  # fmt: skip
@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_what_must_be_positive_is(name: str, value: float) -> None:
    with pytest.raises(SettingsError, match=f"{name} is {value}, must be above 0"):
        config(**{name: value})


@pytest.mark.parametrize("name", ["cool_ms", "warmup_steps", "weight_decay", "policy_version", "min_policy_version"])
def test_what_may_be_zero_may_not_be_less(name: str) -> None:
    assert getattr(config(**{name: 0}), name) == 0
    with pytest.raises(SettingsError, match=f"{name} is -1, must not be negative"):
        config(**{name: -1})


@pytest.mark.parametrize("value", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_the_held_out_share_leaves_something_on_both_sides(value: float) -> None:
    with pytest.raises(SettingsError, match="held_out_share"):
        config(held_out_share=value)


def test_a_config_cannot_be_changed_or_given_by_position() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().seed = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        EngineConfig("/drafts/one", "/state")  # type: ignore[misc]


@pytest.mark.parametrize("module", ["config", "idle", "status", "serve", "cli", "plugin"])
def test_light_modules_import_neither_torch_nor_an_engine(module: str) -> None:
    """The command line starts at once, and settings are in the environment before torch reads it."""
    code = (
        f"import sys, vllm_specdraft.{module}\nprint(*(n for n in ('torch', 'transformers', 'vllm', 'numpy') if n in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], f"{module} pulls in {done.stdout.strip()}"
