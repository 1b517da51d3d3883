"""Catches an update that is not given up whole when one of its parts fails, requests that stay paused, and a pause that was the
user's and is ended by us."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from vllm_specdraft.link import Link


class Core:
    """Answers utility calls as the engine core does; `failing` names one that raises."""

    def __init__(self, *, failing: str | None = None, pieces: int = 3) -> None:
        self.calls: list[str] = []
        self._failing, self._left = failing, pieces

    async def call_utility_async(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        operation = request.get("op", "rollback" if request.get("rollback") else name.removeprefix("specdraft_"))
        self.calls.append(operation)
        if operation == self._failing:
            raise RuntimeError(f"{operation} failed")
        if operation == "build":
            self._left -= 1
            return {"built": self._left <= 0}
        if operation in ("commit", "rollback"):
            return {"policy_version": 4, "draft_version": 9, "origin": "here", "report": {}}
        return {}


class Client:
    """The engine client, as far as pausing goes."""

    def __init__(self, core: Core, *, paused: bool = False, pause_takes_s: float = 0.0) -> None:
        self.engine_core, self.paused, self._takes = core, paused, pause_takes_s

    async def is_paused(self) -> bool:
        return self.paused

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert not clear_cache
        self.engine_core.calls.append(f"pause {mode}")
        self.paused = True
        await asyncio.sleep(self._takes)

    async def resume_generation(self) -> None:
        self.engine_core.calls.append("resume")
        self.paused = False


def commit(
    client: Client, tmp_path: Path, *, running: str = "recompute", timeout_s: float = 5.0, target: bool = True
) -> tuple[Link, Any]:
    """The link, and the record or the error."""
    link = Link(client, tmp_path, policy_version=3, draft_version=8)
    message = {"manifest": {"running": running, "drain_timeout_s": timeout_s, "target": [{}] if target else []}}
    try:
        return link, asyncio.run(link.commit(message))
    except Exception as error:  # noqa: BLE001 - what is raised is what the test looks at
        return link, error


def test_an_update_is_opened_built_in_pieces_and_committed(tmp_path: Path) -> None:
    core = Core()
    link, record = commit(Client(core), tmp_path)
    assert core.calls == ["open", "build", "build", "build", "commit"]
    assert (link.policy_version, link.draft_version) == (4, 9)
    assert record["report"].keys() == {"build_ms", "commit_ms"}


@pytest.mark.parametrize("failing", ["open", "build", "commit"])
def test_whatever_fails_the_rest_is_dropped_and_the_versions_stay(tmp_path: Path, failing: str) -> None:
    core = Core(failing=failing)
    link, error = commit(Client(core), tmp_path)
    assert str(error) == f"{failing} failed"
    assert core.calls[-2:] == [failing, "discard"]
    assert (link.policy_version, link.draft_version) == (3, 8)


@pytest.mark.parametrize(("running", "mode"), [("drain", "wait"), ("abort", "abort")])
def test_requests_are_out_of_the_way_before_and_admitted_again_after(tmp_path: Path, running: str, mode: str) -> None:
    core = Core(pieces=1)
    commit(Client(core), tmp_path, running=running)
    assert core.calls == ["open", "build", f"pause {mode}", "commit", "resume"]
    core = Core(pieces=1, failing="commit")
    commit(Client(core), tmp_path, running=running)
    assert core.calls[-3:] == ["commit", "resume", "discard"]


def test_a_draft_alone_disturbs_no_request(tmp_path: Path) -> None:
    core = Core(pieces=1)
    commit(Client(core), tmp_path, running="drain", target=False)
    assert core.calls == ["open", "build", "commit"]


def test_a_pause_of_the_user_s_stays(tmp_path: Path) -> None:
    core = Core(pieces=1)
    client = Client(core, paused=True)
    commit(client, tmp_path, running="drain")
    assert core.calls == ["open", "build", "commit"]
    assert client.paused


def test_requests_that_do_not_end_in_time_keep_the_old_version(tmp_path: Path) -> None:
    core = Core(pieces=1)
    client = Client(core, pause_takes_s=5.0)
    _, error = commit(client, tmp_path, running="drain", timeout_s=0.05)
    assert "requests still ran after 0.05 s: raise drain_timeout_s" in str(error)
    assert core.calls == ["open", "build", "pause wait", "resume", "discard"]
    assert not client.paused


def test_versions_that_came_another_way_are_taken_over(tmp_path: Path) -> None:
    link = Link(Client(Core()), tmp_path, policy_version=3, draft_version=8)
    link.follow(None)
    link.follow({"policy_version": 5, "draft_version": 8})
    assert (link.policy_version, link.draft_version) == (5, 8)


def test_a_rollback_is_one_commit(tmp_path: Path) -> None:
    core = Core()
    link = Link(Client(core), tmp_path, policy_version=5, draft_version=9)
    record = asyncio.run(link.roll_back())
    assert core.calls == ["rollback"]
    assert record["origin"] == "here"
    assert link.policy_version == 4
