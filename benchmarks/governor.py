"""Is speculation ever slower than none? The governed server against the stock engine, at batch sizes from 1 to 32 and while a batch
drains, with a draft that learned, one that is useless, and one that becomes useless in the middle; and against every fixed number
of draft tokens.

``python -m benchmarks.governor --json`` prints progress on standard error and one JSON object as the last line of standard
output. A pair is one batch that both servers answer in turns of a fraction of a second: of a steady one the time counts while
all of its requests decode, of a draining one from the first prompt to the last token. A bound is the one-sided lower 95% bound
of the mean of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import played
from benchmarks.governing.ratios import GOVERNED, NONE, Load, Ratios, fixed
from benchmarks.governing.slices import DEVELOPER, Side, Slices
from benchmarks.learning import learn
from trainer_bridge.draft import checkpoint, registry
from vllm_specdraft.demo import table
from vllm_specdraft.demo.client import Client, RequestError, Sampling, gather_or_cancel
from vllm_specdraft.demo.interrupts import Interrupts
from vllm_specdraft.demo.prompts import Prompt, PromptSource
from vllm_specdraft.demo.run import known_type, one_line, rhythm_arguments, rhythm_of, settings
from vllm_specdraft.demo.session import Session

LENGTHS = {1: 96, 2: 96, 4: 96, 8: 80, 16: 64, 32: 48}
"""Tokens of every answer of a steady batch, by batch size: its decoding takes some seconds at each."""
CANDIDATES = 2
"""Prompts that are asked for each one that is needed: those with long answers are taken."""
DRAIN = (8, 10, 12, 15, 18, 22, 27, 33, 40, 48, 58, 70, 85, 100, 115, 128)
"""Longest answers of a batch that drains, as rollouts do: half of the time a quarter of it runs."""
GROUPS = 3
"""Groups of prompts per load, in turn."""
PRECISE, MOST = 0.012, 3
"""Enough pairs when the bound is as near to the mean, or above 1; at most so many times ``--pairs``."""
STALE_AFTER = 2
"""Batches with the good draft before it is replaced by the useless one."""
STALE_PAIRS = 10
LEAK_WARM_SHARE = 0.3


def loads(batches: Sequence[int]) -> list[Load]:
    """These batch sizes, and a draining one."""
    steady = [Load(name=f"batch {batch}", lengths=(LENGTHS[batch],) * batch) for batch in batches]
    return [*steady, Load(name="draining", lengths=DRAIN, drains=True)]


class GovernorBenchmark:
    """Learn, then compare."""

    def __init__(
        self,
        *,
        session: Session,
        interrupts: Interrupts,
        idle_minutes: float,
        pairs: int,
        soak_minutes: float,
        batches: Sequence[int],
        learned: Path | None,
    ) -> None:
        """`learned`: a draft that learned already."""
        self._session, self._interrupts, self._loads = session, interrupts, loads(batches)
        self._budget_s, self._pairs, self._soak_s = 60 * idle_minutes, pairs, 60 * soak_minutes
        self._prompts: Sequence[Prompt] = ()
        self._needed = GROUPS * max(len(load.lengths) for load in self._loads)
        self._good, self._learned = learned or session.live_draft, learned is not None
        self.result: dict[str, Any] = {}

    def play(self, target: Path | None) -> None:
        """Fill `result`."""
        session = self._session
        target = session.prepare(target)
        session.record.add(target=str(target), settings=settings())
        live = session.start_live(target, draft=self._good if self._learned else None)
        if not self._learned:
            session.console.line(table.round_header())
            self._interrupts.run(self._learn(live))
        make_useless(self._good, self._useless)
        none = session.start_none(target)
        self._interrupts.run(self._compare(live, none))

    @property
    def _useless(self) -> Path:
        return self._session.record.directory / "useless_draft"

    async def _learn(self, client: Client) -> None:
        async with client:
            # In batches that pay for no draft the taps see all the same; what the draft learns from is not the question here.
            await learn(self._session, client, budget_s=self._budget_s, cap_s=1.5 * self._budget_s + 120)
            await self._session.freeze(client)

    async def _compare(self, live: Client, none: Client) -> None:
        session, record = self._session, self._session.record
        async with live, none:
            await live.train("pause")
            self._prompts = await self._with_long_answers(none)
            turns = Slices(
                none=Side(client=none, server=session.server_of(none)),
                governed=Side(client=live, server=session.server_of(live)),
            )
            good = {load.name: await self._against(turns, live, load, regret=True) for load in self._loads}
            await self._stale(turns, live)
            stale = self.result.pop("stale")
            await live.publish(self._useless)
            useless = {load.name: await self._against(turns, live, load, regret=False) for load in self._loads}
            await live.publish(self._good)
            soak = await self._soak(live)
            report = await live.speculate(None)
        bounds = [found["lower"] for found in (*good.values(), *useless.values(), *stale.values())]
        self.result = {
            "worst_ratio_vs_none": min(bounds),
            "best_ratio": max(found["ratio"] for found in good.values()),
            "regret_vs_best_fixed_k": max(found["regret"] for found in good.values()),
            "good_draft": good,
            "useless_draft": useless,
            "stale_draft": stale,
            "drain_soak": soak,
            "governor": {key: report[key] for key in ("trials", "trial_cost_s", "busy_s", "switches")},
            "pairs": self._pairs,
            "machine": record.machine_line,
            "commit": record.commit or "unknown",
        }
        record.add(results=self.result, governor=report)

    async def _with_long_answers(self, none: Client) -> Sequence[Prompt]:
        """Prompts whose greedy answers are as long as a steady batch needs, so that all of its requests run to its end."""
        longest, found = max(LENGTHS.values()), list[Prompt]()
        console, candidates, at_once = self._session.console, self._session.prompts.evaluation, max(LENGTHS)
        for start in range(0, len(candidates), at_once):
            if len(found) >= self._needed:
                break
            console.progress(f"       prompts with answers of {longest} tokens: {len(found)} of {self._needed}")
            some = candidates[start : start + at_once]
            answers = await gather_or_cancel([none.chat(one.question, Sampling(max_tokens=longest)) for one in some])
            found += [one for one, answer in zip(some, answers, strict=True) if len(answer.token_ids) == longest]
        console.clear()
        if len(found) < self._needed:
            raise RequestError(
                f"{len(found)} of {len(candidates)} prompts have answers of {longest} tokens, {self._needed} are needed"
            )
        return found

    def _group(self, load: Load, index: int) -> Sequence[Prompt]:
        count = len(load.lengths)
        start = index % GROUPS * count
        return [self._prompts[(start + i) % len(self._prompts)] for i in range(count)]

    async def _against(self, turns: Slices, live: Client, load: Load, *, regret: bool) -> dict[str, Any]:
        """One load's pairs: governed beside none, and for the regret every fixed number of tokens beside none: half as often, and
        on where one seems better than governed, for the best of several that were measured in two pairs is the luckiest."""
        console, most = self._session.console, (await live.status())["num_speculative_tokens"]
        fixes = [fixed(k) for k in range(most + 1)] if regret else []
        against = {arm: Ratios() for arm in (GOVERNED, *fixes)}
        governed = against[GOVERNED]
        async with turns:
            for index in range(GROUPS):
                console.progress(f"       {load.name}: warm-up {index + 1} of {GROUPS}")
                await turns.alone(GOVERNED, load, self._group(load, index))
            await turns.alone(NONE, load, self._group(load, 0))
            pair, rivals = 0, list[str]()
            while pair < self._pairs or (pair < MOST * self._pairs and (rivals or not _is_plain(governed))):
                console.progress(f"       {load.name}: pair {pair + 1}, governed over none {governed.mean:.3f} so far")
                arms = fixes if pair % 2 == 0 and pair < self._pairs else rivals
                for arm in (GOVERNED, *arms):
                    ratio = await turns.ratio(arm, load, self._group(load, pair), first=pair % 4 < 2)
                    against[arm].add(ratio)
                    self._session.record.event("pair", load=load.name, pair=pair, arm=arm, ratio=ratio)
                pair += 1
                rivals = [arm for arm in fixes if against[arm].mean > governed.mean and against[arm].half_width > PRECISE]
        found: dict[str, Any] = {"ratio": round(governed.mean, 4), "lower": round(governed.lower, 4), "pairs": len(governed.logs)}
        if fixes:
            best = max(fixes, key=lambda arm: against[arm].mean)
            found |= {
                "regret": round(against[best].mean / governed.mean - 1, 4),
                "best_fixed": int(best.rpartition(" ")[2]),
                "fixed": [round(against[arm].mean, 4) for arm in fixes],
            }
        console.clear()
        console.line(f"{load.name}: {found}")
        self._session.record.event("governor", load=load.name, **await live.speculate(None))
        return found

    async def _stale(self, turns: Slices, live: Client) -> None:
        """The draft becomes useless between two batches; all pairs from there on count."""
        found = {}
        for load in self._loads[:2]:
            ratios = Ratios()
            await live.publish(self._good)
            async with turns:
                for index in range(STALE_AFTER):
                    await turns.alone(GOVERNED, load, self._group(load, index))
            await live.publish(self._useless)
            async with turns:
                for index in range(STALE_PAIRS):
                    ratios.add(await turns.ratio(GOVERNED, load, self._group(load, index), first=index % 2 == 0))
            found[load.name] = {"ratio": round(ratios.mean, 4), "lower": round(ratios.lower, 4), "pairs": len(ratios.logs)}
            self._session.console.line(f"{load.name}, stale: {found[load.name]}")
        self.result["stale"] = found

    async def _soak(self, live: Client) -> dict[str, Any]:
        """Batches that drain, one after the other, with aborts in between: nothing hangs, and memory stays where it is."""
        draw, session = random.Random(0), self._session
        began, errors, batches, memory = time.monotonic(), 0, 0, list[tuple[float, int]]()
        while (now := time.monotonic() - began) < self._soak_s:
            session.console.progress(f"       soak: {now / 60:.1f} of {self._soak_s / 60:.0f} minutes, {batches} batches")
            lengths = [draw.choice(DRAIN) for _ in range(draw.randint(1, 24))]
            prompts = session.prompts.take(len(lengths))
            work = [
                live.chat(prompt.question, Sampling(max_tokens=length, temperature=draw.choice((0.0, 1.0))))
                for prompt, length in zip(prompts, lengths, strict=True)
            ]
            try:
                await gather_or_cancel(work)
            except RequestError as error:
                errors += 1
                session.console.line(f"soak: {one_line(error)}")
            batches += 1
            status = await live.status()
            memory.append((time.monotonic() - began, session.rss_bytes() - status["replay"]["bytes"]))
        warm = [rss for at, rss in memory if LEAK_WARM_SHARE * self._soak_s <= at < 2 * LEAK_WARM_SHARE * self._soak_s]
        late = [rss for at, rss in memory if at >= (1 - LEAK_WARM_SHARE) * self._soak_s]
        growth = round(median(late) - median(warm)) if warm and late else None
        return {"minutes": round(self._soak_s / 60, 1), "batches": batches, "errors": errors, "rss_growth_bytes": growth}


def _is_plain(ratios: Ratios) -> bool:
    """Whether more pairs would tell nothing that matters."""
    return ratios.half_width <= PRECISE or ratios.lower >= 1


def make_useless(draft: Path, out: Path) -> None:
    """A draft of the same shape with random weights: it proposes nothing that stands."""
    config = checkpoint.read_config(draft)
    kind = registry.of_config(config)
    generator = torch.Generator().manual_seed(0)
    state = {
        name: torch.randn(tensor.shape, generator=generator).to(tensor) * 0.02 if tensor.is_floating_point() else tensor
        for name, tensor in checkpoint.read_state(draft).items()
    }
    kind.save(out, state, config)


def parser() -> argparse.ArgumentParser:
    """The benchmark's options."""
    made = played.parser("governor", __doc__)
    made.add_argument("--idle-minutes", type=float, default=5.0, metavar="M", help="learning time of the draft (default 5)")
    made.add_argument(
        "--pairs", type=int, default=4, metavar="N", help="pairs per load, three times as many where they are noisy (default 4)"
    )
    made.add_argument(
        "--batches", default=",".join(map(str, LENGTHS)), metavar="A,B", help="batch sizes, of %(default)s, which is the default"
    )
    made.add_argument("--soak-minutes", type=float, default=30.0, metavar="M", help="of draining batches, at the end (default 30)")
    made.add_argument("--learned", type=Path, metavar="DIR", help="a draft checkpoint that learned already, instead of learning")
    rhythm_arguments(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code: 0, 1 after an error, 130 after Ctrl-C or SIGTERM."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options_parser = parser()
    options = options_parser.parse_args(arguments)
    if options.idle_minutes <= 0 or options.pairs < 2 or options.soak_minutes < 0:
        options_parser.error("--idle-minutes must be above 0, --pairs at least 2, --soak-minutes not negative")
    try:
        batches = [int(word) for word in options.batches.split(",")]
        if unknown := set(batches) - LENGTHS.keys():
            raise ValueError(f"--batches has {sorted(unknown)}, possible: {', '.join(map(str, LENGTHS))}")
        kind, rhythm = known_type(options.draft), rhythm_of(options)
    except ValueError as error:
        options_parser.error(str(error))

    def make(session: Session, interrupts: Interrupts) -> GovernorBenchmark:
        return GovernorBenchmark(
            session=session, interrupts=interrupts, idle_minutes=options.idle_minutes, pairs=options.pairs,
            soak_minutes=options.soak_minutes, batches=batches, learned=options.learned,
        )  # fmt: skip

    return played.play(
        "governor", options, arguments, title="Governor", kind=kind, rhythm=rhythm, governor=True, environment=DEVELOPER, make=make,
        prompts=lambda: PromptSource(evaluation=CANDIDATES * GROUPS * max(LENGTHS), seed=options.seed),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
