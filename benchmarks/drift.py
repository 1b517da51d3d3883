"""What a live draft is worth when the policy moves: it is fine-tuned hard, to another style, while it is served, and the accepted
length of a frozen and of a live draft is followed after each move.

``python -m benchmarks.drift --json`` prints progress on standard error and one JSON object as the last line of standard output.
Both servers get each policy in one update. *frozen* is the live arm's draft as it was after the common warm-up. Prompts that are
measured are disjoint from all that was learned from.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks import played
from benchmarks.learning import learn
from trainer_bridge import connect
from trainer_bridge.adapters.hf import hf_weights
from vllm_specdraft.demo import table
from vllm_specdraft.demo.client import Client, Sampling, gather_or_cancel
from vllm_specdraft.demo.interrupts import Interrupts
from vllm_specdraft.demo.prompts import PromptSource
from vllm_specdraft.demo.rhythm import accepted_length
from vllm_specdraft.demo.run import known_type, rhythm_arguments, rhythm_of, settings
from vllm_specdraft.demo.session import Session

LIVE, FROZEN = "live", "frozen"
MEASURED_PROMPTS, MEASURED_TOKENS = 8, 96
EXAMPLES, BATCH, EPOCHS = 48, 8, 3
LEARNING_RATE = 1e-4
RECOVERED = 0.9
"""Share of the accepted length before the move."""
MOVES: dict[str, Callable[[str], str]] = {
    "capitals": str.upper,
    "lines": lambda text: "\n".join(f"* {line.strip().lower()}" for line in text.replace(". ", ".\n").splitlines() if line.strip()),
}
"""Styles that the policy is moved to, as what becomes of its own answers."""


@dataclass(kw_only=True)
class Followed:
    """One move: accepted lengths by arm, at the same moments."""

    name: str
    before: dict[str, float]
    idle_s: list[float] = field(default_factory=list)
    accepted: dict[str, list[float]] = field(default_factory=lambda: {LIVE: [], FROZEN: []})
    policy_loss: tuple[float, float] = (0.0, 0.0)

    @property
    def gain(self) -> float:
        """Live over frozen, minus 1, at the end."""
        return self.accepted[LIVE][-1] / self.accepted[FROZEN][-1] - 1

    @property
    def recovery_s(self) -> float | None:
        """Idle seconds until the live draft was nearly as good as before; None when it was not."""
        enough = RECOVERED * self.before[LIVE]
        return next((at for at, value in zip(self.idle_s, self.accepted[LIVE], strict=True) if value >= enough), None)


class DriftBenchmark:
    """Warm-up, then the moves."""

    def __init__(self, *, session: Session, interrupts: Interrupts, warm_minutes: float, rounds: int, moves: Sequence[str]) -> None:
        self._session, self._interrupts = session, interrupts
        self._warm_s, self._rounds, self._moves = 60 * warm_minutes, rounds, tuple(moves)
        self._learning_s = 0.0
        self.followed: list[Followed] = []
        self.result: dict[str, Any] = {}

    def play(self, target: Path | None) -> None:
        """Fill `result`."""
        session = self._session
        target = session.prepare(target)
        session.record.add(target=str(target), settings=settings())
        live = session.start_live(target, name=LIVE)
        session.console.line(table.round_header())
        self._interrupts.run(self._warm_up(live))
        frozen = session.start_live(target, draft=session.live_draft, name=FROZEN)
        self._interrupts.run(self._follow(target, {LIVE: live, FROZEN: frozen}))
        record = session.record
        self.result = {
            "live_gain_over_frozen": round(fmean(one.gain for one in self.followed), 4),
            "recovery_s": None
            if any(one.recovery_s is None for one in self.followed)
            else round(fmean(one.recovery_s or 0.0 for one in self.followed), 1),
            "moves": [{**asdict(one), "gain": round(one.gain, 4), "recovery_s": one.recovery_s} for one in self.followed],
            "warm_minutes": self._warm_s / 60,
            "machine": record.machine_line,
            "commit": record.commit or "unknown",
        }
        record.add(results=self.result)
        chart(self.followed, record.directory / "drift.png", title=f"The policy moves: accepted length, {record.machine_line}")

    async def _warm_up(self, live: Client) -> None:
        async with live:
            await learn(self._session, live, budget_s=self._warm_s, cap_s=2 * self._warm_s)
            await self._session.freeze(live)

    async def _follow(self, target: Path, clients: dict[str, Client]) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        session = self._session
        policy = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(target)
        async with clients[LIVE], clients[FROZEN]:
            await clients[FROZEN].train("pause")
            questions = [prompt.question for prompt in session.prompts.take(EXAMPLES)]
            own = await gather_or_cancel([clients[FROZEN].chat(text, Sampling(max_tokens=MEASURED_TOKENS)) for text in questions])
            examples = list(zip(questions, [answer.text for answer in own], strict=True))
            for name in self._moves:
                one = Followed(name=name, before=await self._measure(clients))
                session.console.line(f"{name}: before the move {_rounded(one.before)}")
                losses = await asyncio.to_thread(fine_tune, policy, tokenizer, [(q, MOVES[name](a)) for q, a in examples])
                one.policy_loss = (losses[0], losses[-1])
                await asyncio.to_thread(push, policy, [client.url for client in clients.values()])
                self._learning_s = (await clients[LIVE].status(fresh=True))["learning"]["seconds"]
                await self._note(one, clients)
                for index in range(self._rounds):
                    await clients[LIVE].train("resume")
                    await session.play_burst(clients[LIVE], index=index + 1)
                    await session.play_pause(clients[LIVE])
                    await clients[LIVE].train("pause")
                    await self._note(one, clients)
                self.followed.append(one)

    async def _note(self, one: Followed, clients: dict[str, Client]) -> None:
        """One more point of both curves."""
        status = await clients[LIVE].status(fresh=True)
        one.idle_s.append(round(status["learning"]["seconds"] - self._learning_s, 1))
        found = await self._measure(clients)
        for arm, value in found.items():
            one.accepted[arm].append(value)
        self._session.record.event("drift", move=one.name, idle_s=one.idle_s[-1], **found)
        self._session.console.line(f"{one.name}: after {one.idle_s[-1]:.0f} s of learning {_rounded(found)}")

    async def _measure(self, clients: dict[str, Client]) -> dict[str, float]:
        """Accepted length of each arm on the held-out prompts, greedy; nothing is tapped of them.

        One at a time: the larger the batch, the fewer tokens are drafted.
        """
        found = {}
        for arm, client in clients.items():
            await client.taps(False)
            before = await client.status(fresh=True)
            for prompt in self._session.prompts.evaluation:
                await client.chat(prompt.question, Sampling(max_tokens=MEASURED_TOKENS))
            found[arm] = accepted_length(before, await client.status(fresh=True)) or 1.0
            await client.taps(True)
        return found


def fine_tune(policy: Any, tokenizer: Any, examples: Sequence[tuple[str, str]]) -> list[float]:
    """Some epochs of supervised training on the answers' tokens; the loss of each step, in nats per token."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses = []
    for epoch in range(EPOCHS):
        order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(epoch)).tolist()
        for start in range(0, len(order), BATCH):
            batch = [_tokens_of(tokenizer, *examples[index]) for index in order[start : start + BATCH]]
            tokens, total = sum(len(tail) for _, tail in batch), 0.0
            # One example at a time: the activations of all of them would be many times the policy.
            for head, tail in batch:
                with torch.autocast("cpu", torch.bfloat16):
                    logits = policy(input_ids=torch.tensor([head + tail])).logits[0, len(head) - 1 : -1]
                loss = torch.nn.functional.cross_entropy(logits.float(), torch.tensor(tail), reduction="sum") / tokens
                loss.backward()
                total += float(loss.detach())
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(total)
    return losses


def _tokens_of(tokenizer: Any, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Token ids of the prompt and of the answer, its end included."""
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False)
    head, tail = (tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, answer + tokenizer.eos_token))
    return head, tail


def push(policy: Any, urls: Sequence[str]) -> None:
    """The policy to all servers, without a draft."""
    with connect(list(urls)) as bridge, bridge.update(version=bridge.policy_version + 1) as update:
        update.target(hf_weights(policy))


def chart(followed: Sequence[Followed], path: Path, *, title: str) -> None:
    """Accepted length of both arms over the live draft's learning time, a panel for each move."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(followed), figsize=(6 * len(followed), 4.5), dpi=120, sharey=True, squeeze=False)
    for axes, one in zip(panels[0], followed, strict=True):
        for arm, colour in ((LIVE, "#0b6fb8"), (FROZEN, "#e08214")):
            axes.plot(one.idle_s, one.accepted[arm], "o-", color=colour, label=arm)
        axes.axhline(one.before[LIVE], color="#0b6fb8", linestyle=":", label="live, before the move")
        axes.axhline(1.0, color="#6b6b6b", linestyle="--", label="none")
        axes.set_title(f"moved to: {one.name}", loc="left", fontsize=11)
        axes.set_xlabel("learning since the move (s)")
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("accepted length (tokens per step)")
    panels[0][0].legend(fontsize=9, loc="upper left")
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _rounded(found: dict[str, float]) -> dict[str, float]:
    return {arm: round(value, 3) for arm, value in found.items()}


def parser() -> argparse.ArgumentParser:
    """The benchmark's options."""
    made = played.parser("drift", __doc__)
    made.add_argument("--warm-minutes", type=float, default=4.0, metavar="M", help="learning before the first move (default 4)")
    made.add_argument("--rounds", type=int, default=4, metavar="N", help="bursts and pauses after each move (default 4)")
    made.add_argument("--moves", default=",".join(MOVES), metavar="A,B", help="styles, in order (default %(default)s)")
    rhythm_arguments(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code: 0, 1 after an error, 130 after Ctrl-C or SIGTERM."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options_parser = parser()
    options = options_parser.parse_args(arguments)
    moves = options.moves.split(",")
    if unknown := [name for name in moves if name not in MOVES]:
        options_parser.error(f"unknown moves {', '.join(unknown)}, known: {', '.join(MOVES)}")
    if options.warm_minutes <= 0 or options.rounds < 1:
        options_parser.error("--warm-minutes must be above 0 and --rounds at least 1")
    try:
        kind, rhythm = known_type(options.draft), rhythm_of(options)
    except ValueError as error:
        options_parser.error(str(error))

    def make(session: Session, interrupts: Interrupts) -> DriftBenchmark:
        return DriftBenchmark(
            session=session, interrupts=interrupts, warm_minutes=options.warm_minutes, rounds=options.rounds, moves=moves
        )

    return played.play(
        "drift", options, arguments, title="Drift", kind=kind, rhythm=rhythm, make=make,
        prompts=lambda: PromptSource(evaluation=MEASURED_PROMPTS, seed=options.seed),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
