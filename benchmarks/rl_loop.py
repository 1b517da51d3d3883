"""Does a live draft pay in an RL run? The GRPO recipe on the same seeds and problems, with rollouts from the stock engine (none),
from a server whose draft stays as it was (frozen), from one whose draft learns in its idle windows (live), and from one whose draft
learns in the trainer's forward pass as well (cotrained).

``python -m benchmarks.rl_loop --json --arms none,frozen,live`` prints progress on standard error and one JSON object as the last
line of standard output. What is done of each arm and seed is kept: with ``--resume RUN`` a comparison is built up from several
calls.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks import played
from benchmarks.learning import learn
from recipes.tasks import TASKS, problems
from vllm_specdraft.demo import table
from vllm_specdraft.demo.client import Client
from vllm_specdraft.demo.interrupts import Interrupts
from vllm_specdraft.demo.prompts import Prompt, normalised
from vllm_specdraft.demo.run import known_type, rhythm_arguments, rhythm_of, settings
from vllm_specdraft.demo.session import KV_GIB, Session
from vllm_specdraft.launch import Server

NONE, FROZEN, LIVE, COTRAINED = ARMS = ("none", "frozen", "live", "cotrained")
COLOURS = {NONE: "#6b6b6b", FROZEN: "#e08214", LIVE: "#0b6fb8", COTRAINED: "#7b4fa3"}
WARM_SEED = 1_000_003
"""Problems of the warm-up; the runs' own come from small seeds."""
SERVED = ("--kv-gib", str(KV_GIB), "--logprobs-mode", "processed_logprobs")
"""Options of every server."""
TEMPERATURE = 0.6
"""Of the answers: at 1 a model of 135M parameters leaves the topic, and solves next to nothing."""
Z_95 = 1.96


class TaskPrompts:
    """Problems of the task in the demo's rhythm: what the draft learns from before the comparison."""

    evaluation: tuple[Prompt, ...] = ()

    def __init__(self, task: str, avoid: set[str]) -> None:
        """`avoid`: questions of the comparison."""
        self._task, self._avoid = task, avoid
        self.rewind()

    def rewind(self) -> None:
        """Begin anew."""
        self._stream: Iterator[Any] = problems(self._task, WARM_SEED)
        self._drawn = 0

    def take(self, count: int) -> list[Prompt]:
        """The next problems."""
        found: list[Prompt] = []
        while len(found) < count:
            item = next(self._stream)
            if normalised(item.question) not in self._avoid:
                self._drawn += 1
                found.append(Prompt(name=f"warm-{self._drawn}", question=item.question, answer=item.answer))
        return found


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is compared."""

    arms: tuple[str, ...]
    seeds: int
    steps: int
    groups: int
    samples: int
    concurrency: int
    max_tokens: int
    task: str
    warm_minutes: float
    learning_rate: float
    temperature: float
    learn_s: float


class RlLoopBenchmark:
    """Warm-up, then every arm and seed, then the comparison."""

    def __init__(self, *, session: Session, interrupts: Interrupts, plan: Plan, directory: Path) -> None:
        self._session, self._interrupts, self._plan = session, interrupts, plan
        self._directory = directory
        self.result: dict[str, Any] = {}

    def play(self, target: Path | None) -> None:
        """Fill `result`."""
        session, plan = self._session, self._plan
        target = session.prepare(target)
        session.record.add(target=str(target), settings=settings())
        if not self._warm.exists():
            live = session.start_live(target)
            session.console.line(table.round_header())
            self._interrupts.run(self._warm_up(live))
            session.close()
        # Arms in turn within each seed: what the machine does meanwhile meets all of them.
        for seed in range(plan.seeds):
            for index in range(len(plan.arms)):
                arm = plan.arms[(seed + index) % len(plan.arms)]
                if len(self._rows(arm, seed)) < plan.steps:
                    self._run(target, arm, seed)
        rows = [row for arm in plan.arms for seed in range(plan.seeds) for row in self._rows(arm, seed)]
        self.result = {**compared(rows, plan.arms), "machine": session.record.machine_line}
        self.result["commit"] = session.record.commit or "unknown"
        session.record.add(results=self.result, rows=rows)
        for line in lines_of(self.result["arms"]):
            session.console.line(line)
        session.console.line(self.result["verdict"])
        chart(rows, plan.arms, self._directory / "rl_loop.png", title=f"GRPO, {session.record.machine_line}")
        session.console.line(f"chart: {self._directory / 'rl_loop.png'}")

    @property
    def _warm(self) -> Path:
        return self._directory / "warm_draft"

    async def _warm_up(self, client: Client) -> None:
        async with client:
            budget_s = 60 * self._plan.warm_minutes
            await learn(self._session, client, budget_s=budget_s, cap_s=2 * budget_s)
            await self._session.freeze(client, self._warm)

    def _run(self, target: Path, arm: str, seed: int) -> None:
        """One arm's run of one seed, as far as it is not done."""
        plan, out = self._plan, self._directory / f"{arm}-{seed}"
        out.mkdir(parents=True, exist_ok=True)
        server = Server(
            target,
            draft=None if arm == NONE else self._warm,
            log_path=out / "server.log",
            extra=[*SERVED, *(["--no-learn"] if arm == FROZEN else [])],
            plain=arm == NONE,
            governor=True,
            # A stock server takes new weights from the disk, when asked over a route of this mode.
            environment={"VLLM_SERVER_DEV_MODE": "1"} if arm == NONE else None,
        )
        words = {
            "url": server.url, "model": target, "out": out, "task": plan.task, "steps": plan.steps, "groups": plan.groups,
            "samples": plan.samples, "concurrency": plan.concurrency, "max-tokens": plan.max_tokens, "seed": seed,
            "learning-rate": plan.learning_rate, "temperature": plan.temperature, "update": "reload" if arm == NONE else "bridge",
            **({"cotrain": self._warm} if arm == COTRAINED else {}),
            **({"learn-s": plan.learn_s} if arm in (LIVE, COTRAINED) else {}),
        }  # fmt: skip
        command = [
            sys.executable,
            "-m",
            "recipes.grpo",
            *(part for key, value in words.items() for part in (f"--{key}", str(value))),
        ]
        with self._session.console.working(f"{arm}, seed {seed}"), server, (out / "trainer.log").open("ab") as log:
            trainer = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": str(os.cpu_count())})
            try:
                trainer.wait()
            finally:
                trainer.kill()
                trainer.wait()
        rows = self._rows(arm, seed)
        if len(rows) < plan.steps:
            raise RuntimeError(f"{arm}, seed {seed}: {len(rows)} of {plan.steps} steps, see {out / 'trainer.log'}")
        # What a finished run needs no more is half a gigabyte and more.
        (out / "state.pt").unlink(missing_ok=True)
        for row in rows:
            self._session.record.event("step", **row)
            self._session.console.line(f"  {arm}, seed {seed}: {row}")

    def _rows(self, arm: str, seed: int) -> list[dict[str, Any]]:
        path = self._directory / f"{arm}-{seed}" / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [{"arm": arm, "seed": seed, **json.loads(line)} for line in lines]


def compared(rows: Sequence[Mapping[str, Any]], arms: Sequence[str]) -> dict[str, Any]:
    """The arms over all steps of all seeds, and their ratios step by step."""
    by_place = {arm: {(row["seed"], row["step"]): row for row in rows if row["arm"] == arm} for arm in arms}
    found: dict[str, Any] = {arm: _summary(list(by_place[arm].values())) for arm in arms}
    result: dict[str, Any] = {}
    if NONE in arms and LIVE in arms:
        result["rollout_speedup_live_vs_none"] = _speedup(by_place[LIVE], by_place[NONE], "rollout_s")
        result["step_speedup_live_vs_none"] = _speedup(by_place[LIVE], by_place[NONE], "step_s")
    intervals = [found[arm]["reward_interval"] for arm in arms]
    result |= {
        "rewards_overlap": max(low for low, _ in intervals) <= min(high for _, high in intervals),
        "logprob_kl": max(found[arm]["kl"] for arm in arms),
        "arms": found,
        "verdict": verdict(by_place, arms),
    }
    return result


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rewards = [row["reward"] for row in rows]
    mean = fmean(rewards)
    half = Z_95 * stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else math.inf
    lengths = [row["accepted_length"] for row in rows if row["accepted_length"] is not None]
    return {
        "accepted_length": round(fmean(lengths), 4) if lengths else None,
        "accepted_length_spread": round(stdev(lengths), 4) if len(lengths) > 1 else None,
        "rollout_s": round(fmean(row["rollout_s"] for row in rows), 2),
        "rollout_tokens_per_s": round(sum(row["tokens"] for row in rows) / sum(row["rollout_s"] for row in rows), 2),
        "learn_s": round(fmean(row["learn_s"] for row in rows), 2),
        "train_s": round(fmean(row["train_s"] for row in rows), 2),
        "sync_s": round(fmean(row["sync_s"] for row in rows), 2),
        "step_s": round(fmean(row["step_s"] for row in rows), 2),
        "reward": round(mean, 4),
        "reward_interval": [round(mean - half, 4), round(mean + half, 4)],
        "kl": float(f"{fmean(row['kl'] for row in rows):.3g}"),
    }


def _speedup(arm: Mapping[Any, Mapping[str, Any]], base: Mapping[Any, Mapping[str, Any]], seconds: str) -> float:
    """Geometric mean over the steps that both did, per token: answers are sampled, so their lengths differ."""
    logs = [
        math.log((base[place][seconds] / base[place]["tokens"]) / (arm[place][seconds] / arm[place]["tokens"]))
        for place in arm.keys() & base.keys()
    ]
    return round(math.exp(fmean(logs)), 4)


def verdict(by_place: Mapping[str, Mapping[Any, Mapping[str, Any]]], arms: Sequence[str]) -> str:
    """In words, whether a live draft was worth it, also when it was not."""
    if FROZEN not in arms or LIVE not in arms:
        return "no verdict: it takes the arms frozen and live"
    pairs = [
        (by_place[LIVE][place]["accepted_length"], by_place[FROZEN][place]["accepted_length"])
        for place in by_place[LIVE].keys() & by_place[FROZEN].keys()
    ]
    gains = [live - frozen for live, frozen in pairs if live is not None and frozen is not None]
    if len(gains) < 2:
        return "no verdict: too few steps drafted"
    mean, half = fmean(gains), Z_95 * stdev(gains) / math.sqrt(len(gains))
    speed = _speedup(by_place[LIVE], by_place[FROZEN], "rollout_s")
    about = (
        f"accepted length {mean:+.2f} (95% interval {mean - half:+.2f} to {mean + half:+.2f}), rollouts {speed:.2f} times as fast"
    )
    if mean - half > 0:
        return f"the live draft was better than the frozen one: {about}"
    if mean + half < 0:
        return f"the live draft was worse than the frozen one: {about}"
    return f"frozen was enough: {about}"


def lines_of(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A table of the arms."""
    names = ("accepted_length", "rollout_s", "rollout_tokens_per_s", "learn_s", "train_s", "sync_s", "step_s", "reward", "kl")
    lines = ["".join(["arm".ljust(11), *(name.rjust(max(12, len(name) + 2)) for name in names)])]
    for arm, one in found.items():
        cells = ("-" if one[name] is None else f"{one[name]:.6g}" for name in names)
        lines.append("".join([arm.ljust(11), *(c.rjust(max(12, len(n) + 2)) for c, n in zip(cells, names, strict=True))]))
    return lines


def chart(rows: Sequence[Mapping[str, Any]], arms: Sequence[str], path: Path, *, title: str) -> None:
    """Accepted length, rollout speed, step time and reward by step: the mean of the seeds, and their spread."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def speed(row: Mapping[str, Any]) -> float:
        return row["tokens"] / row["rollout_s"]

    panels = (
        ("accepted length (tokens per step)", lambda row: row["accepted_length"]),
        ("rollouts (tokens per second)", speed),
        ("step (s)", lambda row: row["step_s"]),
        ("reward", lambda row: row["reward"]),
    )
    figure, axes_of = pyplot.subplots(2, 2, figsize=(11, 7.5), dpi=120, layout="constrained")
    for axes, (label, read) in zip(axes_of.flat, panels, strict=True):
        for arm in arms:
            mine = [row for row in rows if row["arm"] == arm and read(row) is not None]
            steps = sorted({row["step"] for row in mine})
            by_step = [[read(row) for row in mine if row["step"] == step] for step in steps]
            if steps:
                axes.plot(steps, [fmean(values) for values in by_step], "o-", color=COLOURS[arm], label=arm)
                axes.fill_between(steps, [min(v) for v in by_step], [max(v) for v in by_step], color=COLOURS[arm], alpha=0.12)
        axes.set_ylabel(label)
        axes.set_xlabel("RL step")
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    # The first panel has no line of an arm that does not draft.
    axes_of.flat[1].legend(fontsize=9)
    figure.suptitle(f"{title}; bands: least and most of the seeds", fontsize=12)
    figure.savefig(path)
    pyplot.close(figure)


def parser() -> argparse.ArgumentParser:
    """The benchmark's options."""
    made = played.parser("rl_loop", __doc__)
    made.add_argument("--arms", default="none,frozen,live", metavar="A,B", help=f"of {', '.join(ARMS)} (default %(default)s)")
    made.add_argument("--seeds", type=int, default=3, metavar="N", help="(default %(default)s)")
    made.add_argument("--steps", type=int, default=4, metavar="N", help="per seed (default %(default)s)")
    made.add_argument("--groups", type=int, default=4, metavar="N", help="problems per step (default %(default)s)")
    made.add_argument("--samples", type=int, default=4, metavar="N", help="answers per problem (default %(default)s)")
    made.add_argument("--answers-at-once", type=int, default=1, metavar="N", help="(default %(default)s)")
    made.add_argument("--answer-tokens", type=int, default=64, metavar="N", help="longest answer (default %(default)s)")
    made.add_argument("--learning-rate", type=float, default=1e-5, metavar="R", help="of the policy (default %(default)s)")
    made.add_argument(
        "--learn-seconds", type=float, default=4.0, metavar="S",
        help="the live draft learns for so long in each step, before the training step (default %(default)s)",
    )  # fmt: skip
    made.add_argument("--task", default="basic_arithmetic", choices=tuple(TASKS), help="(default %(default)s)")
    made.add_argument(
        "--warm-minutes", type=float, default=4.0, metavar="M", help="learning of the draft before all arms (default 4)"
    )
    made.add_argument("--resume", type=Path, metavar="RUN", help="directory of an earlier call, to go on from what is done there")
    rhythm_arguments(made)
    made.set_defaults(temperature=TEMPERATURE)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code: 0, 1 after an error, 130 after Ctrl-C or SIGTERM."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options_parser = parser()
    options = options_parser.parse_args(arguments)
    arms = tuple(dict.fromkeys(options.arms.split(",")))
    if unknown := [arm for arm in arms if arm not in ARMS]:
        options_parser.error(f"unknown arms {', '.join(unknown)}, known: {', '.join(ARMS)}")
    if min(options.seeds, options.steps, options.groups, options.answers_at_once, options.answer_tokens) < 1 or options.samples < 2:
        options_parser.error("--seeds, --steps, --groups, --answers-at-once and --answer-tokens must be at least 1, --samples 2")
    if min(options.warm_minutes, options.temperature) <= 0 or options.learn_seconds < 0:
        options_parser.error("--warm-minutes and --temperature must be above 0, --learn-seconds not negative")
    try:
        kind, rhythm = known_type(options.draft), rhythm_of(options)
    except ValueError as error:
        options_parser.error(str(error))
    plan = Plan(
        arms=arms, seeds=options.seeds, steps=options.steps, groups=options.groups, samples=options.samples,
        concurrency=options.answers_at_once, max_tokens=options.answer_tokens, task=options.task,
        warm_minutes=options.warm_minutes, learning_rate=options.learning_rate,
        temperature=options.temperature, learn_s=options.learn_seconds,
    )  # fmt: skip

    def prompts() -> TaskPrompts:
        own = (problems(plan.task, seed) for seed in range(plan.seeds))
        count = plan.steps * plan.groups
        return TaskPrompts(plan.task, {normalised(one.question) for stream in own for one in itertools.islice(stream, count)})

    def make(session: Session, interrupts: Interrupts) -> RlLoopBenchmark:
        directory = options.resume or session.record.directory
        return RlLoopBenchmark(session=session, interrupts=interrupts, plan=plan, directory=directory)

    return played.play(
        "rl_loop", options, arguments, title="RL loop", kind=kind, rhythm=rhythm, prompts=prompts, make=make, config=vars(plan)
    )


if __name__ == "__main__":
    sys.exit(main())
