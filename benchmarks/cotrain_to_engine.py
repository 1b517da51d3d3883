"""A draft that learns beside the policy, end to end: an engine answers, a trainer learns from its answers, the engine gets both.

``python -m benchmarks.cotrain_to_engine --json`` prints progress on standard error and one JSON object as the last line of standard
output. Everything is real. A specdraft server with a new draft and no learning of its own answers training prompts at temperature
1. Two pipeline ranks train megatron-core's model of the same checkpoint (a policy gradient, 1F1B) and, on the last one, the draft
beside it, and push both in one update. Before and after, held-out prompts are answered greedily; after, also by a stock engine that
starts from the checkpoint which the trainer saved: its tokens have to be the same.

Needs megatron-core (``pip install --no-deps megatron-core``).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cotraining.engine_rank import STAGES, Order, Stepped
from benchmarks.cotraining.engine_rollouts import Rollout, reward_of
from benchmarks.cotraining.engine_trainer import Trained, Trainer
from benchmarks.sync.servers import Servers
from vllm_specdraft.console import Console
from vllm_specdraft.demo import table
from vllm_specdraft.demo.arms import Arms
from vllm_specdraft.demo.client import Client, Sampling, gather_or_cancel
from vllm_specdraft.demo.compare import B1, FIRST, LIVE, NONE, Measurement
from vllm_specdraft.demo.interrupts import Interrupts
from vllm_specdraft.demo.prompts import Prompt, PromptSource
from vllm_specdraft.demo.record import RunRecord
from vllm_specdraft.demo.rhythm import RhythmConfig
from vllm_specdraft.demo.run import EXIT_FAILED, guarded, one_line, settings
from vllm_specdraft.demo.session import Session, SessionError, identities

SEED = 40_000
"""Of the first rollout; the others count on."""


def accepted_length_of(measured: Sequence[Measurement]) -> float:
    """Tokens per target step of a request, bonus included."""
    steps = sum(item.draft_steps or 0 for item in measured)
    return 1.0 + sum(item.accepted_tokens or 0 for item in measured) / steps if steps else 1.0


class CotrainBenchmark:
    """The steps of the benchmark, in order, on one session."""

    def __init__(self, *, session: Session, servers: Servers, interrupts: Interrupts, options: argparse.Namespace) -> None:
        self._session, self._servers, self._interrupts, self._options = session, servers, interrupts, options
        self._greedy = Sampling(max_tokens=options.answer_tokens)
        self._seconds: dict[str, float] = {}
        self.result: dict[str, Any] = {}

    def play(self, target: Path | None) -> None:
        """Fill `result`."""
        session, run = self._session, self._interrupts.run
        target = session.prepare(target)
        session.record.add(target=str(target), settings=settings())
        live = session.start_live(target)
        self._mark("start")
        before = run(self._before(live))
        self._mark("before")
        rollouts = run(self._rollouts(live))
        self._mark("rollouts")
        trained = self._train(target, rollouts)
        self._mark("trainer")
        versions, after, frozen = run(self._after(live))
        self._mark("after")
        none = session.start_none(self._checkpoint)
        identical = run(self._compare(live, none))
        self._mark("comparison")
        self._report(trained, rollouts, before=before, after=after, frozen=frozen, versions=versions, identical=identical)

    @property
    def _checkpoint(self) -> Path:
        """Where the trainer saves the policy."""
        return self._session.record.directory / "policy"

    async def _before(self, live: Client) -> float:
        async with live:
            arms = Arms(clients={FIRST: live})
            return accepted_length_of(await self._answers(arms, FIRST, "before"))

    async def _answers(self, arms: Arms, arm: str, phase: str) -> list[Measurement]:
        """Held-out prompts, one at a time, greedy."""
        session, measured = self._session, list[Measurement]()
        prompts = session.prompts.evaluation[: self._options.evaluation]
        for pair, prompt in enumerate(prompts):
            session.console.progress(f"       {phase}: answer {pair + 1} of {len(prompts)}")
            measured.append(await arms.measure(arm, pair, [prompt], self._greedy))
        session.console.clear()
        session.record.event("answers", phase=phase, accepted_length=accepted_length_of(measured))
        session.console.line(f"{phase}: accepted length {accepted_length_of(measured):.3f} on {len(prompts)} held-out prompts")
        return measured

    async def _rollouts(self, live: Client) -> list[Rollout]:
        session, options = self._session, self._options
        slots, found = asyncio.Semaphore(options.concurrency), list[Rollout]()
        prompts = [prompt for prompt in session.prompts.take(options.prompts) for _ in range(options.samples)]

        async def one(index: int, prompt: Prompt) -> None:
            async with slots:
                sampling = Sampling(max_tokens=options.max_tokens, temperature=options.temperature, seed=SEED + index)
                answer = await live.chat(prompt.question, sampling)
            tokens = len(answer.token_ids)
            reward = reward_of(answer.text, prompt.answer, tokens=tokens, max_tokens=options.max_tokens)
            found.append(Rollout(prompt=prompt.name, prompt_ids=answer.prompt_ids, token_ids=answer.token_ids, reward=reward))
            session.console.progress(f"       {len(found)} of {len(prompts)} rollouts")

        async with live:
            await gather_or_cancel([one(index, prompt) for index, prompt in enumerate(prompts)])
        session.console.clear()
        tokens = sum(len(rollout.token_ids) for rollout in found)
        right = sum(rollout.reward >= 1.0 for rollout in found)
        session.console.line(f"{len(found)} rollouts of {tokens} tokens at temperature {options.temperature:g}, {right} right")
        return found

    def _train(self, target: Path, rollouts: list[Rollout]) -> Trained:
        session, options = self._session, self._options
        order = Order(
            engine=self._servers.live.url, version=1, target=target, draft=session.first_draft, out=self._checkpoint,
            # In the order in which they were asked for, whichever came back first.
            rollouts=sorted(rollouts, key=lambda rollout: (rollout.prompt, rollout.token_ids)),
            documents=options.documents, microbatches=options.microbatches, epochs=options.epochs,
            learning_rate=options.learning_rate, draft_learning_rate=options.draft_learning_rate,
            warmup_steps=options.warmup_steps, seed=options.seed,
        )  # fmt: skip

        def on_step(step: Stepped) -> None:
            if not self._servers.live.alive:
                raise SessionError(f"the server ended while its policy was trained (log: {session.server_log})")
            session.record.event("step", **vars(step))
            session.console.line(
                f"step {step.step:3} of {step.of}: draft loss {step.draft_loss:6.3f}, policy loss {step.loss:+.5f}, answers "
                f"{step.answer_nll:.3f} nats a token, {step.seconds:.1f} s ({step.draft_seconds:.1f} s for the draft)"
            )

        session.console.line(f"a trainer of {STAGES} pipeline ranks starts")
        with Trainer(order) as trainer:
            trained = trainer.train(on_step)
        session.record.event("trained", seconds=trained.seconds, sent_bytes=trained.sent_bytes)
        seconds = ", ".join(f"{name} {value:.1f}" for name, value in trained.seconds.items())
        session.console.line(f"the trainer's seconds: {seconds}; {trained.sent_bytes / 1e6:.0f} MB sent")
        return trained

    async def _after(self, live: Client) -> tuple[dict[str, int], float, float | None]:
        """What is served, its accepted length, and that of the draft which never learned with the new policy."""
        async with live:
            status = await live.status(fresh=True)
            versions = {"policy": status["policy_version"], "draft": status["draft_version"]}
            await live.save(self._session.live_draft)
            after = accepted_length_of(await self._answers(Arms(clients={LIVE: live}), LIVE, "after"))
            if self._options.skip_frozen:
                return versions, after, None
            arms = Arms(clients={FIRST: live}, drafts={FIRST: self._session.first_draft})
            frozen = accepted_length_of(await self._answers(arms, FIRST, "first draft, new policy"))
            await live.publish(self._session.live_draft)
            return versions, after, frozen

    async def _compare(self, live: Client, none: Client) -> bool:
        """Whether greedy tokens with the trained draft are those of the stock engine on the saved checkpoint, ties aside."""
        session = self._session
        async with live, none:
            arms = Arms(clients={NONE: none, LIVE: live})
            await arms.warm_up(session.prompts.evaluation[-1], self._greedy)
            groups = [[prompt] for prompt in session.prompts.evaluation[: self._options.evaluation]]
            measured = await session.compare(arms, groups, lambda pair: self._greedy, phase=B1)
            verdicts = await session.judge(arms, measured)
        summaries = session.summarise(measured, phase=B1, arms=arms.names)
        for line in table.comparison_lines(summaries, identities(measured, verdicts)):
            session.console.line("  " + line)
        for verdict in verdicts:
            session.console.line(f"  {verdict}")
        return all(verdict.tie for verdict in verdicts)

    def _mark(self, part: str) -> None:
        """A part is over."""
        self._seconds[part] = round(self._session.record.elapsed_s - sum(self._seconds.values()), 1)

    def _report(
        self, trained: Trained, rollouts: list[Rollout], *, before: float, after: float, frozen: float | None,
        versions: dict[str, int], identical: bool,
    ) -> None:  # fmt: skip
        record = self._session.record
        self.result = {
            "accepted_length_before": round(before, 4),
            "accepted_length_after": round(after, 4),
            "accepted_length_frozen": None if frozen is None else round(frozen, 4),
            "accepted_length_rises": after > before,
            "greedy_identical": identical,
            "round_trip_identity": trained.round_trip_identity,
            "policy_changed": trained.policy_changed,
            "embedding_copies_equal": trained.embeddings_equal,
            "draft_loss_first": round(trained.steps[0].draft_loss, 4),
            "draft_loss_last": round(trained.steps[-1].draft_loss, 4),
            "steps": len(trained.steps),
            "rollouts": len(rollouts),
            "draft_labels_per_s": round(trained.labels_per_s, 1),
            "pushed_versions": versions,
            "seconds": self._seconds,
            "trainer_seconds": {name: round(value, 1) for name, value in trained.seconds.items()},
            "machine": record.machine_line,
            "commit": record.commit or "unknown",
        }
        record.add(results=self.result)


def parser() -> argparse.ArgumentParser:
    """The benchmark's options."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.cotrain_to_engine", description=(__doc__ or "").split("\n\n")[0].replace("\n", " ")
    )

    def number(name: str, kind: type, default: float, text: str, metavar: str = "N") -> None:
        made.add_argument(name, type=kind, default=default, metavar=metavar, help=f"{text} (default %(default)s)")

    made.add_argument("--json", action="store_true", help="one line of JSON (default: the same, indented)")
    number("--prompts", int, 32, "training prompts")
    number("--samples", int, 2, "answers to each, whose mean reward is the baseline")
    number("--max-tokens", int, 160, "longest rollout")
    number("--temperature", float, 1.0, "of rollouts", "T")
    number("--concurrency", int, 24, "rollouts at once")
    number("--epochs", int, 3, "times that the trainer sees each rollout")
    number("--documents", int, 1, "rollouts of a microbatch")
    number("--microbatches", int, 4, "microbatches of a step")
    number("--learning-rate", float, 1e-6, "of the policy", "R")
    number("--draft-learning-rate", float, 1e-3, "peak of the draft's", "R")
    number("--warmup-steps", int, 5, "of the draft's learning rate")
    number("--evaluation", int, 6, "held-out prompts")
    number("--answer-tokens", int, 128, "longest answer to those")
    number("--seed", int, 0, "of prompts and steps")
    number("--kv-gib", int, 1, "KV cache of each server, in GiB")
    made.add_argument("--skip-frozen", action="store_true", help="do not measure the first draft with the new policy")
    made.add_argument("--target", type=Path, metavar="DIR", help="Hugging Face directory in fp32 (default: the embedded model)")
    made.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="where runs go (default %(default)s/)")
    return made


def refusal(options: argparse.Namespace) -> str | None:
    """What is wrong with the options."""
    of_data, of_engine = ("prompts", "epochs", "documents", "microbatches"), ("concurrency", "evaluation", "kv_gib")
    counts = (*of_data, *of_engine, "max_tokens", "answer_tokens")
    if min(getattr(options, name) for name in counts) < 1 or options.samples < 2:
        return "counts must be at least 1, --samples at least 2"
    if min(options.learning_rate, options.draft_learning_rate, options.temperature) <= 0:
        return "learning rates and --temperature must be above 0"
    if options.prompts * options.samples % (options.documents * options.microbatches):
        return "--prompts times --samples must be a multiple of --documents times --microbatches: every step is a whole one"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code: 0, 1 after an error, 130 after Ctrl-C or SIGTERM."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options_parser = parser()
    options = options_parser.parse_args(arguments)
    if reason := refusal(options):
        options_parser.error(reason)
    console = Console(sys.stderr)
    with Interrupts() as interrupts:
        try:
            if importlib.util.find_spec("megatron") is None:
                raise ImportError("megatron-core is missing: pip install --no-deps megatron-core")
            # One more for the warm-up.
            prompts = PromptSource(evaluation=options.evaluation + 1, seed=options.seed)
            config = {key: value for key, value in vars(options).items() if key not in ("json", "out", "target")}
            record = RunRecord(options.out, command=["python", "-m", "benchmarks.cotrain_to_engine", *arguments], config=config)
        except (ImportError, OSError) as error:
            console.line(f"error: {one_line(error)}")
            return EXIT_FAILED
        servers = Servers()
        session = Session(
            record=record, console=console, prompts=prompts, rhythm=RhythmConfig(), kv_gib=options.kv_gib,
            options=("--no-learn", "--no-auto-publish", "--replay-mb", "64"), make_server=servers,
        )  # fmt: skip
        benchmark = CotrainBenchmark(session=session, servers=servers, interrupts=interrupts, options=options)
        title = f"A draft beside its policy, {record.machine_line}"
        code = guarded(session, interrupts, lambda: benchmark.play(options.target), title=title)
    if code == 0:
        print(json.dumps(benchmark.result, indent=None if options.json else 1), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
