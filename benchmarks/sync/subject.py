"""A server under test: what it says it serves, and whether its answers are exactly those of that version."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.sync.trainer import OTHER, A, B
from benchmarks.sync.weights import Weights, read, read_draft
from trainer_bridge.draft import checkpoint
from trainer_bridge.staging import PREFIX, SHARED_MEMORY
from vllm_specdraft import status_view
from vllm_specdraft.config import SettingsError
from vllm_specdraft.demo.client import MODEL
from vllm_specdraft.demo.session import SessionError
from vllm_specdraft.launch import Server

RECEIVER = "vllm_specdraft.sync_process"
TIE = 1e-3
"""Prompts of which two tokens come so near anywhere in the answer, in logprob, are not used: rounding may choose between them."""
_TOKENS = 24
_LOOKS = 5
_ANSWER_S = 300.0


class NoAnswerError(SessionError):
    """The server did not answer."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One of two versions of the model: checkpoints, what is sent of them, and what the engine must then say."""

    target: Path
    draft: Path
    weights: Weights
    draft_weights: Weights
    draft_digest: str

    @classmethod
    def of(cls, target: Path, draft: Path) -> Variant:
        """Read both checkpoints."""
        state = read_draft(draft)
        return cls(
            target=target, draft=draft, weights=read(target, draft), draft_weights=state, draft_digest=checkpoint.digest_of(state)
        )


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the server said, while its versions did not change."""

    status: dict[str, Any]
    answers: list[list[int]]

    @property
    def version(self) -> int:
        """Policy version."""
        return self.status["policy_version"]

    def names(self, update: str) -> bool:
        """Whether the status tells of an update, as the one that brought the version served."""
        return any(
            f"update {update} " in record["origin"] and record["policy_version"] == self.version
            for record in self.status["updates"]
        )


def complete(url: str, prompt: Sequence[int], **options: Any) -> dict[str, Any]:
    """The one choice of a greedy answer. Raises `NoAnswerError`."""
    body = {"model": MODEL, "prompt": list(prompt), "max_tokens": _TOKENS, "temperature": 0, "return_token_ids": True, **options}
    try:
        return status_view.post(f"{url}/v1/completions", body, key=None, timeout_s=_ANSWER_S)["choices"][0]
    except (SettingsError, OSError) as error:
        raise NoAnswerError(str(error)) from None


def reference(url: str, prompts: Sequence[Sequence[int]]) -> list[tuple[list[int], float]]:
    """Per prompt the greedy answer, and by how much the best token beat the second, where that was least, in logprob."""
    found = []
    for prompt in prompts:
        choice = complete(url, prompt, logprobs=2, return_tokens_as_token_ids=True)
        pairs = [sorted(best.values(), reverse=True)[:2] for best in choice["logprobs"]["top_logprobs"]]
        found.append((choice["token_ids"], min(first - second for first, second in pairs)))
    return found


class Subject:
    """One server after another, started on version 0 with variant A; what each version that was offered stands for."""

    def __init__(self, variants: dict[str, Variant], prompts: Sequence[Sequence[int]], answers: dict[str, list[list[int]]]) -> None:
        """`answers`: per variant those of the stock engine to the `prompts`."""
        self.variants, self._prompts, self._answers = variants, prompts, answers
        self.stands_for: dict[int, str] = {0: A}
        """Variant of each version that was offered."""
        self._family: list[psutil.Process] = []
        self._ever: list[psutil.Process] = []
        self._ports: set[int] = set()

    def attach(self, server: Server) -> None:
        """Another server is under test, at version 0."""
        self.server = server
        self.stands_for = {0: A}
        self.note_processes()

    @property
    def url(self) -> str:
        """Of the server."""
        return self.server.url

    def note_processes(self) -> None:
        """The processes that there are now are those that have to stay."""
        parent = psutil.Process(self.server.pid)
        self._family = [parent, *parent.children(recursive=True)]
        self._ever += self._family
        self._ports |= {int(self.url.rpartition(":")[2]), int(self.endpoint.rpartition(":")[2])}

    @property
    def endpoint(self) -> str:
        """Its sync address."""
        return self.status()["sync"]["endpoint"] or "tcp://none:0"

    def receiver(self) -> psutil.Process:
        """The process of its receiver. Raises `SessionError` when there is none."""
        for process in psutil.Process(self.server.pid).children(recursive=True):
            if RECEIVER in process.cmdline():
                return process
        raise SessionError("the server has no receiver process")

    def status(self) -> dict[str, Any]:
        """Raises `NoAnswerError`."""
        try:
            return status_view.fetch(status_view.url_of(self.url))
        except status_view.NoStatusError as error:
            raise NoAnswerError(str(error)) from None

    def next(self, version: int) -> tuple[int, str]:
        """The version after `version`, which stands for the other variant from now on."""
        which = OTHER[self.stands_for[version]]
        self.stands_for[version + 1] = which
        return version + 1, which

    def alive(self) -> bool:
        """Whether it answers, and every process that was there still is."""
        try:
            complete(self.url, self._prompts[0], max_tokens=1)
        except NoAnswerError:
            return False
        return all(_runs(process) for process in self._family)

    def look(self) -> Seen:
        """Status and answers of one pair of versions. Raises `NoAnswerError`."""
        for _ in range(_LOOKS):
            before = self.status()
            answers = [complete(self.url, prompt)["token_ids"] for prompt in self._prompts]
            after = self.status()
            if all(before[key] == after[key] for key in ("policy_version", "draft_version")):
                return Seen(status=after, answers=answers)
        raise NoAnswerError(f"the versions changed during each of {_LOOKS} rounds of answers")

    def is_whole(self, seen: Seen) -> bool:
        """Whether what was seen is one version, target and draft: the answers are the stock engine's, token for token."""
        which = self.stands_for.get(seen.version)
        if which is None:
            return False
        return seen.answers == self._answers[which] and seen.status["draft_digest"] == self.variants[which].draft_digest

    # -- what is left at the end -----------------------------------------------------------------------------------------

    def leftovers(self, job: str) -> list[str]:
        """Once all servers are stopped: processes, listening ports and staging files that are still there."""
        left = [f"process {process.pid}" for process in self._ever if _runs(process)]
        for port in self._ports:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    left.append(f"port {port}")
        name = "".join(c if c.isalnum() else "_" for c in job)[:40]
        return left + [str(path) for path in SHARED_MEMORY.glob(f"{PREFIX}{name}-*")]


def _runs(process: psutil.Process) -> bool:
    """Whether this very process lives: not one that was given its id later, and not one that only waits to be reaped."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def chosen(found: dict[str, list[tuple[list[int], float]]], count: int) -> list[int]:
    """Which prompts to use: the first ones that nothing but the weights decides. Raises `SessionError` when they are too few."""
    clear = [index for index, pair in enumerate(zip(found[A], found[B], strict=True)) if min(margin for _, margin in pair) > TIE]
    if len(clear) < count:
        raise SessionError(f"{len(clear)} of {len(found[A])} prompts have answers without ties, {count} are needed")
    if all(found[A][index][0] == found[B][index][0] for index in clear[:count]):
        raise SessionError("both versions give the same answers: neither could be told from the other")
    return clear[:count]
