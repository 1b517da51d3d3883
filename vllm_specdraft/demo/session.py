"""One run from the model to the comparison: servers, rounds, frozen drafts. Shared by the demo and the benchmark.

The caller owns the order of the steps; whatever happens, `close` stops every process that was started.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from vllm_specdraft.console import Console
from vllm_specdraft.demo import table
from vllm_specdraft.demo.arms import Arms, Verdict
from vllm_specdraft.demo.client import Client, Sampling
from vllm_specdraft.demo.compare import ARMS, FIRST, LIVE, NONE, ArmSummary, Difference, Measurement, differences, summarise
from vllm_specdraft.demo.prompts import Prompt, PromptSource
from vllm_specdraft.demo.record import RunRecord
from vllm_specdraft.demo.rhythm import Burst, RhythmConfig, burst, pause
from vllm_specdraft.drafts import DEFAULT_TYPE

READY_TIMEOUT_S = 300.0
KV_GIB = 2
_PUBLISH_WAIT_S = 15.0
_PUBLISH_POLL_S = 0.3


class SessionError(RuntimeError):
    """A run cannot go on; the text says why and what to do."""


class ServerLike(Protocol):
    """What a session needs of a server process."""

    url: str

    def start(self) -> None:
        """Start the process."""

    def wait_ready(self, timeout_s: float) -> None:
        """Return when it answers, or raise."""

    def stop(self) -> None:
        """End the process and its children; harmless when it never started."""

    def freeze(self) -> None:
        """Stop its processes where they are."""

    def thaw(self) -> None:
        """Let them go on."""

    def rss_bytes(self) -> int:
        """Resident memory of the process and its children."""


class Session:
    """Two servers, one record, one console."""

    def __init__(
        self,
        *,
        record: RunRecord,
        console: Console,
        prompts: PromptSource,
        rhythm: RhythmConfig,
        kv_gib: int = KV_GIB,
        options: Sequence[str] = (),
        kind: str = DEFAULT_TYPE,
        governor: bool = False,
        environment: Mapping[str, str] | None = None,
        make_server: Callable[..., ServerLike] | None = None,
    ) -> None:
        """`kv_gib`: KV cache of each server in GiB; fixed, for the second one would find less memory free and choose less.
        `options`: further options of the specdraft server. `kind`: type of the first draft. `governor`: let the server draft only
        where it pays. `environment`: variables that all servers get beside the present ones.

        `make_server` builds a server like `vllm_specdraft.launch.Server`, which is the default.
        """
        self.record = record
        self.console = console
        self.prompts = prompts
        self.rhythm = rhythm
        self.rounds: list[Burst] = []
        self.idle_s = 0.0
        self.kv_gib, self.kind = kv_gib, kind
        self._options = ("--kv-gib", str(kv_gib))
        self._live_options = (*self._options, *options)
        self._governor, self._environment = governor, environment
        self._make_server = make_server or _server_class()
        self._servers: list[ServerLike] = []
        self._server_of: dict[Client, ServerLike] = {}
        self._published: set[int] = set()
        self._serving: str | None = None

    @property
    def server_log(self) -> Path:
        """Where the specdraft server writes."""
        return self.record.directory / "server.log"

    @property
    def none_log(self) -> Path:
        """Where the stock server writes."""
        return self.record.directory / "none.log"

    @property
    def first_draft(self) -> Path:
        """The draft as it was before any learning."""
        return self.record.directory / "first_draft"

    @property
    def live_draft(self) -> Path:
        """The draft that was served when learning stopped."""
        return self.record.directory / "live_draft"

    def prepare(self, target: Path | None) -> Path:
        """Make the default model ready unless a target is named, and write the first draft; return the target."""
        from vllm_specdraft import drafts, embedded

        if target is None:
            with self.console.working("the default model (converted once, then cached)"):
                target = embedded.ensure()
        with self.console.working(f"the first draft ({self.kind}), warm-started from the model's own weights"):
            drafts.init(target, self.first_draft, kind=self.kind)
        return target

    def start_live(self, target: Path, *, draft: Path | None = None, name: str | None = None) -> Client:
        """Start a specdraft server on a draft, the first one by default, and wait until it answers.

        `name`: of its log and of its line in the chart, where there are several.
        """
        self._published.clear()
        self._serving = name
        log_path = self.record.directory / f"{name}.log" if name else self.server_log
        server = self._make_server(
            target,
            draft=draft or self.first_draft,
            log_path=log_path,
            extra=self._live_options,
            governor=self._governor,
            environment=self._environment,
            state_dir=self.record.directory / (f"state-{name}" if name else "state"),
        )
        return self._start(server, "the specdraft server (40 to 60 s)", log_path)

    def start_none(self, target: Path) -> Client:
        """Start the stock server, without plugin and speculation, and wait until it answers."""
        server = self._make_server(
            target, draft=None, log_path=self.none_log, extra=self._options, plain=True, environment=self._environment
        )
        return self._start(server, "the stock server for the comparison (30 to 60 s)", self.none_log)

    def _start(self, server: ServerLike, what: str, log_path: Path) -> Client:
        # Noted before it starts: an interrupt in the middle of the start must find it.
        self._servers.append(server)
        with self.console.working(what):
            server.start()
            server.wait_ready(READY_TIMEOUT_S)
        self.record.event("server_ready", url=server.url, log=log_path.name)
        client = Client(server.url, log_path=log_path)
        self._server_of[client] = server
        return client

    def server_of(self, client: Client) -> ServerLike:
        """The server that it speaks to."""
        return self._server_of[client]

    def rss_bytes(self) -> int:
        """Resident memory of the server that was started first."""
        return self._servers[0].rss_bytes()

    def close(self) -> None:
        """Stop every server that was started."""
        while self._servers:
            self._servers.pop().stop()

    async def play_burst(self, client: Client, *, index: int) -> dict[str, Any]:
        """Play the burst of round `index` (from 1) and print its row; return the status after it."""

        def on_answer(finished: int) -> None:
            self.console.progress(f"       burst {index}: {finished} of {self.rhythm.rollouts} rollouts")

        on_answer(0)
        prompts = self.prompts.take(self.rhythm.prompts)
        result = await burst(client, prompts, self.rhythm, on_answer=on_answer)
        self.rounds.append(result)
        status = await client.status()
        self.record.event(
            "burst", round=index, **self._named(), tokens_per_s=result.tokens_per_s, **asdict(result), **_learning(status)
        )
        self._note_publishes(status)
        row = table.round_line(index=index, burst=result, status=status)
        self.console.line(row)
        return status

    async def play_pause(
        self, client: Client, *, enough: Callable[[dict[str, Any]], bool] = lambda status: False
    ) -> dict[str, Any]:
        """Leave the server alone for one pause, reporting what it learns; return the status after it."""
        began_s = self.record.elapsed_s

        def on_status(status: dict[str, Any], left_s: float) -> None:
            self.record.event("poll", idle_state=status["idle_state"], **self._named(), **_learning(status))
            self._note_publishes(status)
            self.console.progress(table.pause_line(status, left_s))

        status = await pause(client, self.rhythm, on_status=on_status, enough=enough)
        wall_s = self.record.elapsed_s - began_s
        self.idle_s += wall_s
        self.record.event("pause", wall_s=wall_s, replay=status["replay"], **_learning(status))
        self.console.clear()
        if status["last_error"]:
            self.console.line(f"       the server reports: {status['last_error']}")
        return status

    async def play_none_burst(self, client: Client, prompts: Sequence[Prompt]) -> Burst:
        """The same burst on the stock server, as the reference of the rollouts' speed."""
        self.console.progress("       the same burst on the stock server")
        result = await burst(client, prompts, self.rhythm, plain=True)
        self.record.event("none_burst", tokens_per_s=result.tokens_per_s, **asdict(result))
        return result

    async def freeze(self, client: Client, directory: Path | None = None) -> dict[str, Any]:
        """Stop learning and save the served draft, as the live arm's by default; return the status."""
        status = await client.train("pause")
        # A candidate that passed its gate a moment ago is still on its way: it belongs to the live arm.
        ends = time.monotonic() + _PUBLISH_WAIT_S
        while status["learning"]["candidate_ready"] and time.monotonic() < ends:
            await asyncio.sleep(_PUBLISH_POLL_S)
            status = await client.status()
        await client.save(directory or self.live_draft)
        self._note_publishes(status)
        self.record.event("frozen", draft_version=status["draft_version"], digest=status["draft_digest"], **_learning(status))
        return status

    def arms(self, live: Client, none: Client) -> Arms:
        """The three arms, once learning is frozen and both servers run."""
        return Arms(clients={NONE: none, FIRST: live, LIVE: live}, drafts={FIRST: self.first_draft, LIVE: self.live_draft})

    async def compare(
        self,
        arms: Arms,
        groups: Sequence[Sequence[Prompt]],
        sampling: Callable[[int], Sampling],
        *,
        phase: str,
        more: Callable[[int], bool] = lambda pair: True,
    ) -> list[Measurement]:
        """Interleaved pairs, one per group of prompts sent at once; ends early when `more` says no before a pair."""
        measured: list[Measurement] = []

        def on_turn(item: Measurement) -> None:
            measured.append(item)
            fields = asdict(item)
            # The prompts follow from their names and would be most of the file.
            del fields["prompt_ids"]
            self.record.event("turn", phase=phase, tokens=item.tokens, tokens_per_s=item.tokens_per_s, **fields)

        for pair, group in enumerate(groups):
            if not more(pair):
                break
            self.console.progress(f"       {phase}: pair {pair + 1} of {len(groups)}")
            await arms.run_pair(pair, group, sampling(pair), on_turn=on_turn)
        self.console.clear()
        return measured

    async def judge(self, arms: Arms, measured: Sequence[Measurement]) -> list[Verdict]:
        """Every difference between the greedy answers, judged by the stock server."""
        found: list[Difference] = differences(measured, arms.names)
        verdicts = [await arms.judge(difference) for difference in found]
        for verdict in verdicts:
            self.record.event("difference", tie=verdict.tie, logprobs=verdict.logprobs, **asdict(verdict.difference))
        return verdicts

    def summarise(self, measured: Sequence[Measurement], *, phase: str, arms: Sequence[str] = ARMS) -> list[ArmSummary]:
        """The arms over the complete pairs, noted in the record. Raises `SessionError` when no pair is complete."""
        summaries = summarise(measured, arms)
        if not summaries:
            raise SessionError(f"the comparison ({phase}) has no complete pair: give the run more time or fewer rounds")
        self.record.event("comparison", phase=phase, arms=[asdict(summary) for summary in summaries])
        return summaries

    def _named(self) -> dict[str, str]:
        """The server that learns now, where there are several."""
        return {"server": self._serving} if self._serving else {}

    def _note_publishes(self, status: dict[str, Any]) -> None:
        for publish in status["publishes"]:
            if publish["draft_version"] in self._published:
                continue
            self._published.add(publish["draft_version"])
            self.record.event("publish", at_s=self.record.since_start_s(publish["unix_time_s"]), **publish)
            self.console.line(table.publish_line(publish))


def identities(measured: Sequence[Measurement], verdicts: Sequence[Verdict]) -> dict[str, str]:
    """For *first* and *live*, in words, whether their greedy tokens are the stock engine's."""
    answers = {arm: sum(len(item.token_ids) for item in measured if item.arm == arm) for arm in ARMS}
    words = {}
    for arm in (FIRST, LIVE):
        mine = [verdict for verdict in verdicts if verdict.difference.arm == arm]
        ties = sum(verdict.tie for verdict in mine)
        words[arm] = table.identity_of(arm, answers=answers[arm], differing=len(mine), ties=ties)
    return words


def _learning(status: dict[str, Any]) -> dict[str, Any]:
    """What the record keeps of the learner's state."""
    learning = status["learning"]
    kept = ("tokens", "steps", "slice_ms_p95", "loss", "held_out_served", "held_out_candidate")
    return {
        "learned_s": learning["seconds"],
        **{("learned_" + key if key in ("tokens", "steps") else key): learning[key] for key in kept},
    }


def _server_class() -> Callable[..., ServerLike]:
    from vllm_specdraft import launch

    return launch.Server
