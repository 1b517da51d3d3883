"""Catches a vLLM without one of the plugin's seams that is found out in the middle of serving, or by an error without a name."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from vllm_specdraft import compat
from vllm_specdraft.compat import UnsupportedVllmError


@pytest.fixture(autouse=True)
def version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing vLLM takes seconds, and its version is not what is tested."""
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.99.1")


@pytest.mark.parametrize(
    ("seam", "name"),
    [
        (("json", "JSONDecoder.moved_away"), "json:JSONDecoder.moved_away"),
        (("json.moved", "JSONDecoder"), "json.moved:JSONDecoder"),
    ],
)
def test_a_missing_seam_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, seam: tuple[str, str], name: str) -> None:
    """B19: whether the module moved or the attribute."""
    monkeypatch.setattr(compat, "SEAMS", (("json", "JSONDecoder.decode"), seam))
    with pytest.raises(UnsupportedVllmError, match=f"needs {name}, which vLLM 0.99.1 does not have; use vLLM 0.32"):
        compat.probe()


def test_an_untested_version_with_all_seams_is_taken_with_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compat, "SEAMS", (("json", "JSONDecoder.decode"),))
    with caplog.at_level(logging.WARNING):
        compat.probe()
    assert "tested with vLLM 0.32; this is 0.99.1" in caplog.text


def test_a_tested_version_is_taken_without_a_word(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(compat, "SEAMS", (("json", "JSONDecoder.decode"),))
    compat.probe()
    assert not caplog.text


def test_a_message_queue_that_cannot_be_looked_into_is_refused_by_name() -> None:
    whole = {"buffer": 1, "current_idx": 0, "local_reader_rank": 0, "shutting_down": False, "dequeue": 1}
    compat.check_queue(SimpleNamespace(**whole, _spin_condition=SimpleNamespace(wait=1)))
    with pytest.raises(UnsupportedVllmError, match=r"SimpleNamespace\._spin_condition\.wait of the worker's message queue"):
        compat.check_queue(SimpleNamespace(**whole, _spin_condition=SimpleNamespace()))
