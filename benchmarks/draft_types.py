"""Draft types against each other: each learns for the same time in a server of its own, then all answer the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from benchmarks.learning import learn
from vllm_specdraft.demo import table
from vllm_specdraft.demo.arms import Arms, Verdict
from vllm_specdraft.demo.client import Client, Sampling
from vllm_specdraft.demo.compare import NONE, ArmSummary
from vllm_specdraft.demo.interrupts import Interrupts
from vllm_specdraft.demo.run import settings
from vllm_specdraft.demo.session import Session

BATCHES = (1, 4, 16)
MAX_TOKENS = 128
_SAMPLED_SEED = 30_000


def _groups(batch: int, pairs: int) -> int:
    """Groups of so many prompts: large ones take several times as long."""
    return pairs if batch == 1 else max(2, pairs // 3)


class TypesBenchmark:
    """One server per type, one after the other while they learn; then all of them and the stock engine in turns."""

    def __init__(
        self,
        kinds: Sequence[str],
        *,
        session: Session,
        interrupts: Interrupts,
        budget_s: float,
        cap_s: float,
        pairs: int,
        learned: Path | None = None,
    ) -> None:
        """`budget_s`: learning time of each type, in seconds; `cap_s`: of idle time each; `pairs`: groups at batch 1.

        `learned`: directory of an earlier run whose drafts are compared again; nothing is learned then.
        """
        self._earlier = learned
        self._kinds, self._session, self._interrupts = tuple(kinds), session, interrupts
        self._budget_s, self._cap_s, self._pairs = budget_s, cap_s, pairs
        self._learned: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
        self.result: dict[str, Any] = {}

    @staticmethod
    def prompts(pairs: int) -> int:
        """Held-out prompts for all groups and one warm-up."""
        return sum(batch * _groups(batch, pairs) for batch in BATCHES) + 1

    def play(self, target: Path | None) -> None:
        """Fill `result`."""
        session = self._session
        target = session.prepare(target)
        session.record.add(target=str(target), settings=settings())
        clients = {}
        for kind in self._kinds:
            clients[kind] = self._start(target, kind)
            if self._earlier is None:
                session.console.line(f"{kind}:")
                session.console.line(table.round_header())
                self._interrupts.run(self._learn(kind, clients[kind]))
        none = session.start_none(target)
        self._interrupts.run(self._compare({NONE: none, **clients}))

    def _start(self, target: Path, kind: str) -> Client:
        from vllm_specdraft import drafts

        first = self._session.record.directory / f"first_draft_{kind}"
        drafts.init(target, first, kind=kind)
        return self._session.start_live(target, draft=first, name=kind)

    def _live(self, kind: str) -> Path:
        """The draft that was served when learning stopped."""
        return (self._earlier or self._session.record.directory) / f"live_draft_{kind}"

    async def _learn(self, kind: str, client: Client) -> None:
        session, curve = self._session, []

        def on_round(status: dict[str, Any]) -> None:
            learning = status["learning"]
            burst = session.rounds[-1]
            curve.append(
                {
                    "idle_minutes": round(learning["seconds"] / 60.0, 2),
                    "held_out": learning["held_out_candidate"],
                    "held_out_served": learning["held_out_served"],
                    "accepted_length_before": burst.accepted_length,
                }
            )

        # Both types see the same prompts.
        session.prompts.rewind()
        async with client:
            await learn(session, client, budget_s=self._budget_s, cap_s=self._cap_s, on_round=on_round)
            status = await session.freeze(client, self._live(kind))
        learning = status["learning"]
        self._learned[kind] = {
            "trained_tokens_per_s": round(learning["tokens"] / learning["seconds"], 1),
            "learned_tokens": learning["tokens"],
            "learned_seconds": learning["seconds"],
            "draft_versions": status["draft_version"],
            "accepted_length_by_idle_minute": curve,
        }

    async def _compare(self, clients: dict[str, Client]) -> None:
        session, names = self._session, tuple(clients)
        prompts, at = session.prompts.evaluation, 0
        verdicts: list[Verdict] = []
        found: dict[str, dict[str, ArmSummary]] = {}
        async with AsyncExitStack() as stack:
            for arm, client in clients.items():
                await stack.enter_async_context(client)
                if arm != NONE:
                    # A server that learned here would take the cores from the others' turns.
                    await client.train("pause")
            arms = Arms(clients=clients, drafts={kind: self._live(kind) for kind in self._kinds})
            await arms.warm_up(prompts[-1], Sampling(max_tokens=MAX_TOKENS))
            for batch in BATCHES:
                count = _groups(batch, self._pairs)
                groups = [prompts[at + batch * i : at + batch * (i + 1)] for i in range(count)]
                at += batch * count
                for phase, sampling in ((f"b{batch}", _greedy), (f"b{batch}_t1", _sampled)):
                    measured = await session.compare(arms, groups, sampling, phase=phase)
                    if sampling is _greedy:
                        verdicts += await session.judge(arms, measured)
                    summaries = session.summarise(measured, phase=phase, arms=names)
                    found[phase] = {summary.arm: summary for summary in summaries}
                    session.console.line(f"{phase}:")
                    for line in table.comparison_lines(summaries, {}):
                        session.console.line("  " + line)
        session.console.line(f"greedy tokens against {NONE}: {len(verdicts)} answers differ")
        for verdict in verdicts:
            session.console.line(f"  {verdict}")
        self.result = self._result(found, identical=all(verdict.tie for verdict in verdicts))
        session.record.add(results=self.result)

    def _result(self, found: dict[str, dict[str, ArmSummary]], *, identical: bool) -> dict[str, Any]:
        record = self._session.record
        better = max(self._kinds, key=lambda kind: found["b1"][kind].ratio)
        return {
            "ratio_live_vs_none_b1": round(found["b1"][better].ratio, 4),
            "better": better,
            "greedy_identical": identical,
            "none": {phase: {"tokens_per_s": round(arms[NONE].tokens_per_s, 2)} for phase, arms in found.items()},
            **{kind: self._of_type(kind, found) for kind in self._kinds},
            "pairs": self._pairs,
            "machine": record.machine_line,
            "commit": record.commit or "unknown",
        }

    def _of_type(self, kind: str, found: dict[str, dict[str, ArmSummary]]) -> dict[str, Any]:
        phases = {}
        for phase, arms in found.items():
            arm = arms[kind]
            phases[phase] = {
                "tokens_per_s": round(arm.tokens_per_s, 2),
                "ratio_vs_none": round(arm.ratio, 4),
                "accepted_length": round(arm.accepted_length, 4),
                "accepted_share_per_position": [round(share, 4) for share in arm.accepted_share_per_position],
                # In batches that are not drafted for, steps without a draft are not counted.
                "step_ms": round(arm.step_ms, 2) if arm.step_ms is not None and phase in ("b1", "b1_t1") else None,
            }
        return {**self._learned[kind], **phases}


def _greedy(pair: int) -> Sampling:
    return Sampling(max_tokens=MAX_TOKENS)


def _sampled(pair: int) -> Sampling:
    return Sampling(max_tokens=MAX_TOKENS, temperature=1.0, seed=_SAMPLED_SEED + pair)
