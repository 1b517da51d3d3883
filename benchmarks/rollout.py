"""What live learning is worth and what it costs: none, first and live draft on held-out prompts, after a bounded time of idle
learning; then the same server with taps and learning switched on and off. Of several draft types, ``--draft eagle3,dflash``: all of
them after the same time, against none and each other.

``python -m benchmarks.rollout --json`` prints progress on standard error and one JSON object as the last line of standard
output. Correctness comes first: the greedy tokens of every arm against the stock engine's, on every held-out prompt.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import costs, played
from benchmarks.draft_types import TypesBenchmark
from benchmarks.learning import learn
from vllm_specdraft.demo import table
from vllm_specdraft.demo.arms import Arms, Verdict
from vllm_specdraft.demo.client import Client, Sampling
from vllm_specdraft.demo.compare import B1, B1_T1, B8, FIRST, LIVE, NONE, ArmSummary, Measurement
from vllm_specdraft.demo.interrupts import Interrupts
from vllm_specdraft.demo.prompts import PromptSource
from vllm_specdraft.demo.run import known_type, rhythm_arguments, rhythm_of, settings
from vllm_specdraft.demo.session import Session, identities

IDLE_CAP_MINUTES = 15.0
MAX_TOKENS = 128
BATCH = 8
WARM_ROUNDS = 2
"""Rounds until what is allocated once is allocated."""
BURSTS = 40
"""Bursts of the interference measurement, to either arm."""
_SAMPLED_SEED = 20_000


def batches_of(pairs: int) -> int:
    """How many batches of eight are measured: half as many as pairs, for each takes several times as long."""
    return max(1, pairs // 2)


def held_out_prompts(pairs: int) -> int:
    """Prompts for the pairs, the batches and one warm-up."""
    return pairs + BATCH * batches_of(pairs) + 1


class RolloutBenchmark:
    """Learning in the demo's rhythm, then the three phases of the comparison."""

    def __init__(self, *, session: Session, interrupts: Interrupts, idle_minutes: float, pairs: int) -> None:
        self._session = session
        self._interrupts = interrupts
        self._idle_budget_s = 60.0 * idle_minutes
        self._pairs = pairs
        self._learned: dict[str, Any] = {}
        self._memory: list[int] = []
        self._costs: dict[str, Any] = {}
        self._identities: dict[str, dict[str, str]] = {}
        self.result: dict[str, Any] = {}

    def play(self, target: Path | None) -> None:
        """Fill `result`."""
        session = self._session
        target = session.prepare(target)
        session.record.add(target=str(target), settings=settings())
        live = session.start_live(target)
        session.console.line(table.round_header())
        self._interrupts.run(self._learn(live))
        none = session.start_none(target)
        self._interrupts.run(self._compare(live, none))

    async def _learn(self, client: Client) -> None:
        """Until the learning seconds reach the budget, and never more idle time than the cap."""
        session = self._session

        def on_round(status: dict[str, Any]) -> None:
            # The replay fills up to its bound, as it should; everything else must not grow.
            self._memory.append(session.rss_bytes() - status["replay"]["bytes"])

        async with client:
            await learn(session, client, budget_s=self._idle_budget_s, cap_s=60.0 * IDLE_CAP_MINUTES, on_round=on_round)
            self._learned = await session.freeze(client)

    async def _compare(self, live: Client, none: Client) -> None:
        session, pairs = self._session, self._pairs
        prompts = session.prompts.evaluation
        single = [[prompt] for prompt in prompts[:pairs]]
        batched = [prompts[start : start + BATCH] for start in range(pairs, len(prompts) - 1, BATCH)]
        greedy = Sampling(max_tokens=MAX_TOKENS)
        async with live, none:
            arms = session.arms(live, none)
            await arms.warm_up(prompts[-1], greedy)
            one = await session.compare(arms, single, lambda pair: greedy, phase=B1)
            eight = await session.compare(arms, batched, lambda pair: greedy, phase=B8)
            identical = await self._correctness(arms, {B1: one, B8: eight})
            sampled = await session.compare(arms, single, _sampled, phase=B1_T1)
            await self._measure_costs(live)
        summaries = {phase: self._report(phase, measured) for phase, measured in ((B1, one), (B1_T1, sampled), (B8, eight))}
        self.result = self._result(summaries, greedy_identical=identical)
        session.record.add(results=self.result)

    async def _measure_costs(self, client: Client) -> None:
        """Taps and learning on and off in the live server; its draft and its prompts are those of the comparison."""
        session, prompts = self._session, self._session.prompts.evaluation
        progress = session.console.progress
        # Whichever arm had the last turn.
        await client.publish(session.live_draft)
        overheads = {
            batch: await costs.tap_overhead(client, prompts, pairs=self._pairs, batch=batch, progress=progress)
            for batch in (1, BATCH)
        }
        session.console.clear()
        session.console.line(f"taps, wall time with over without: {overheads}")
        bursts = max(4, BURSTS * self._pairs // 10)
        found = await costs.interference(client, prompts, bursts=bursts, progress=progress)
        session.console.clear()
        session.console.line(f"{found}")
        self._costs = {
            "tap_overhead": round(max(overheads.values()), 4),
            "ttft_added_p95_ms": round(found.ttft_added_p95_ms, 2),
            "slice_ms_p95": round(found.slice_ms_p95, 2),
            "itl_p95_ratio_learning": round(found.itl_p95_ratio, 4),
            "rss_growth_bytes": self._rss_growth(),
        }
        session.record.add(costs=self._costs)

    def _rss_growth(self) -> int | None:
        """Growth of the server's memory, replay aside, from the third round on; None when there were too few rounds."""
        return self._memory[-1] - self._memory[WARM_ROUNDS] if len(self._memory) > WARM_ROUNDS + 1 else None

    async def _correctness(self, arms: Arms, phases: dict[str, list[Measurement]]) -> bool:
        """Whether all greedy answers are the stock engine's, ties aside; says what is not."""
        verdicts: list[Verdict] = []
        for phase, measured in phases.items():
            found = await self._session.judge(arms, measured)
            self._identities[phase] = identities(measured, found)
            verdicts += found
        self._session.console.line(f"greedy tokens against {NONE}: {len(verdicts)} answers differ")
        for verdict in verdicts:
            self._session.console.line(f"  {verdict}")
        return all(verdict.tie for verdict in verdicts)

    def _report(self, phase: str, measured: list[Measurement]) -> dict[str, ArmSummary]:
        summaries = self._session.summarise(measured, phase=phase)
        self._session.console.line(f"{phase}:")
        for line in table.comparison_lines(summaries, self._identities.get(phase, {})):
            self._session.console.line("  " + line)
        return {summary.arm: summary for summary in summaries}

    def _result(self, summaries: dict[str, dict[str, ArmSummary]], *, greedy_identical: bool) -> dict[str, Any]:
        one, record = summaries[B1], self._session.record
        return {
            "ratio_live_vs_none_b1": round(one[LIVE].ratio, 4),
            "ratio_live_vs_none_b1_t1": round(summaries[B1_T1][LIVE].ratio, 4),
            "ratio_live_vs_none_b8": round(summaries[B8][LIVE].ratio, 4),
            "ratio_first_vs_none_b1": round(one[FIRST].ratio, 4),
            "accepted_length_first": round(one[FIRST].accepted_length, 4),
            "accepted_length_live": round(one[LIVE].accepted_length, 4),
            "step_ms": {arm: None if item.step_ms is None else round(item.step_ms, 2) for arm, item in one.items()},
            "greedy_identical": greedy_identical,
            **self._costs,
            "idle_minutes": round(self._session.idle_s / 60.0, 2),
            "learned_seconds": self._learned["learning"]["seconds"],
            "learned_tokens": self._learned["learning"]["tokens"],
            "draft_versions": self._learned["draft_version"],
            "pairs": self._pairs,
            "machine": record.machine_line,
            "commit": record.commit or "unknown",
        }


def _sampled(pair: int) -> Sampling:
    return Sampling(max_tokens=MAX_TOKENS, temperature=1.0, seed=_SAMPLED_SEED + pair)


def parser() -> argparse.ArgumentParser:
    """The benchmark's options."""
    made = played.parser("rollout", __doc__)
    made.add_argument(
        "--idle-minutes",
        type=float,
        default=12.0,
        metavar="M",
        help=f"learning time, at most {IDLE_CAP_MINUTES:.0f} (default 12)",
    )
    made.add_argument("--pairs", type=int, default=10, metavar="N", help="interleaved pairs at batch 1 (default %(default)s)")
    made.add_argument(
        "--learned", type=Path, metavar="RUN", help="of several draft types: compare those that an earlier run left in runs/<time>"
    )
    rhythm_arguments(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code: 0, 1 after an error, 130 after Ctrl-C or SIGTERM."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options_parser = parser()
    options = options_parser.parse_args(arguments)
    if not 0 < options.idle_minutes <= IDLE_CAP_MINUTES or options.pairs < 1:
        options_parser.error(f"--idle-minutes must lie in (0, {IDLE_CAP_MINUTES:.0f}] and --pairs be at least 1")
    try:
        kinds = list(dict.fromkeys(known_type(name) for name in options.draft.split(",")))
        rhythm = rhythm_of(options)
    except ValueError as error:
        options_parser.error(str(error))
    several = len(kinds) > 1

    def prompts() -> PromptSource:
        evaluation = TypesBenchmark.prompts(options.pairs) if several else held_out_prompts(options.pairs)
        return PromptSource(evaluation=evaluation, seed=options.seed)

    def make(session: Session, interrupts: Interrupts) -> TypesBenchmark | RolloutBenchmark:
        if not several:
            return RolloutBenchmark(session=session, interrupts=interrupts, idle_minutes=options.idle_minutes, pairs=options.pairs)
        return TypesBenchmark(
            kinds, session=session, interrupts=interrupts, budget_s=60.0 * options.idle_minutes, cap_s=60.0 * IDLE_CAP_MINUTES,
            pairs=options.pairs, learned=options.learned,
        )  # fmt: skip

    config = {key: getattr(options, key) for key in ("idle_minutes", "pairs", "kv_gib", "draft")}
    return played.play(
        "rollout", options, arguments, title="Rollout benchmark", kind=kinds[0], rhythm=rhythm, prompts=prompts, make=make,
        config=config,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
