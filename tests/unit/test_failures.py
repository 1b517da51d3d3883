"""Catches an engine that dies without saying why, and one that is said to have died of what came after."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_specdraft import failures


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """vLLM's logger, with its handlers put back."""
    logger = logging.getLogger("vllm")
    before = list(logger.handlers)
    yield logging.getLogger("vllm.v1.engine.core")
    logger.handlers[:] = before


def die(log: logging.Logger, message: str, error: BaseException) -> None:
    try:
        raise error
    except BaseException:
        log.exception(message)


def test_the_first_death_is_the_cause(tmp_path: Path, log: logging.Logger) -> None:
    """In one line, however many processes tell theirs and however long it is."""
    failures.watch(tmp_path)
    assert failures.first(tmp_path) is None
    die(log, "WorkerProc failed to start.", ValueError("no room\n  for the cache"))
    die(log, "EngineCore failed to start.", RuntimeError("a worker died"))
    assert failures.first(tmp_path) == "ValueError: no room for the cache"


def test_errors_that_the_engine_survives_are_no_death(tmp_path: Path, log: logging.Logger) -> None:
    failures.watch(tmp_path)
    die(log, "WorkerProc hit an exception.", ValueError("a draft was refused"))
    die(log, "Error in preprocessing prompt inputs", ValueError("bad prompt"))
    log.error("EngineCore failed, without a reason")
    assert failures.first(tmp_path) is None


def test_an_earlier_server_s_death_is_forgotten(tmp_path: Path, log: logging.Logger) -> None:
    failures.watch(tmp_path)
    die(log, "EngineCore failed to start.", ValueError("old"))
    failures.forget(tmp_path)
    assert failures.first(tmp_path) is None
    failures.forget(tmp_path)
    die(log, "EngineCore encountered a fatal error.", ValueError("new"))
    assert failures.first(tmp_path) == "ValueError: new"


def test_watching_twice_is_watching_once(tmp_path: Path, log: logging.Logger) -> None:
    before = len(logging.getLogger("vllm").handlers)
    failures.watch(tmp_path)
    failures.watch(tmp_path)
    assert len(logging.getLogger("vllm").handlers) == before + 1


def test_nowhere_to_note_it_is_no_second_failure(tmp_path: Path, log: logging.Logger) -> None:
    failures.watch(tmp_path / "gone")
    die(log, "EngineCore failed to start.", ValueError("x"))
    assert failures.first(tmp_path / "gone") is None


def test_a_long_message_is_cut_and_an_empty_one_has_a_type() -> None:
    assert failures.in_one_line(ValueError("y" * 2000)).endswith("y ...")
    assert len(failures.in_one_line(ValueError("y" * 2000))) < 600
    assert failures.in_one_line(KeyError()) == "KeyError"
