"""A server under everything at once, for a long time: mixed load, aborts, swaps, rollbacks, refused requests, learning.

``python -m benchmarks.soak --json --minutes N`` prints progress on standard error and one JSON object as the last line of
standard output: errors, whether greedy answers stayed those of the stock engine, and the growth of resident memory after warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import costs, played
from vllm_specdraft.demo.client import MODEL, Client, RequestError, Sampling, gather_or_cancel
from vllm_specdraft.demo.compare import LIVE, Difference, first_difference, is_tie
from vllm_specdraft.demo.interrupts import Interrupts
from vllm_specdraft.demo.prompts import Prompt, PromptSource
from vllm_specdraft.demo.rhythm import RhythmConfig
from vllm_specdraft.demo.run import settings
from vllm_specdraft.demo.session import Session
from vllm_specdraft.drafts import DEFAULT_TYPE

REFERENCES = 8
MAX_TOKENS = 64
REPLAY_MB = 128
"""Small, so that it is full, and evicts, after the warm-up."""
WARM_SHARE = 0.5
"""Share of the time after which memory must be flat."""
WINDOW_SHARE = 0.1
SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}


@dataclass(kw_only=True)
class Tally:
    """What happened so far."""

    done: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    """Greedy answers that were not the stock engine's, not yet judged."""
    memory: list[tuple[float, int]] = field(default_factory=list)
    """Seconds since start, resident bytes."""

    def growth(self, seconds: float) -> int | None:
        """Median of the last window minus that of the first one after warm-up, in bytes; None without readings."""
        width = WINDOW_SHARE * seconds
        start, end = WARM_SHARE * seconds, seconds - width
        first = [rss for at, rss in self.memory if start <= at < start + width]
        last = [rss for at, rss in self.memory if at >= end]
        return round(median(last) - median(first)) if first and last else None


class Soak:
    """The activities, and the loop that draws them."""

    def __init__(self, *, session: Session, interrupts: Interrupts, minutes: float, seed: int) -> None:
        self._session, self._interrupts = session, interrupts
        self._seconds = 60 * minutes
        self._draw = random.Random(seed)
        self._tally = Tally()
        self._reference: list[tuple[int, ...]] = []
        self._names: list[str] = []
        self.result: dict[str, Any] = {}

    def play(self, target: Path | None) -> None:
        """Fill `result`."""
        session = self._session
        target = session.prepare(target)
        session.record.add(target=str(target), settings=settings())
        none = session.start_none(target)
        self._interrupts.run(self._references(none))
        session.close()
        live = session.start_live(target)
        self._interrupts.run(self._load(live))
        session.close()
        identical = not self._tally.differences or self._interrupts.run(self._all_tie(session.start_none(target)))
        self.result = {
            "errors": len(self._tally.errors),
            "greedy_identical": identical,
            "rss_growth_bytes": self._tally.growth(self._seconds),
        }
        session.record.add(results=self.result, done=dict(self._tally.done), errors=self._tally.errors)

    @property
    def _prompts(self) -> Sequence[Prompt]:
        return self._session.prompts.evaluation

    async def _references(self, client: Client) -> None:
        async with client:
            answers = [await client.chat(prompt.question, Sampling(max_tokens=MAX_TOKENS)) for prompt in self._prompts]
        self._reference = [answer.token_ids for answer in answers]

    async def _all_tie(self, client: Client) -> bool:
        """Whether the stock engine finds the two tokens of every difference to tie within rounding."""
        ties = True
        async with client:
            for difference in self._tally.differences:
                tie = None not in (difference.none_token, difference.arm_token)
                tie = tie and is_tie(difference, await client.next_token_logprobs(difference.context_ids))
                self._session.console.line(
                    f"{difference.prompt} differs at token {difference.position}: {'a tie' if tie else 'NO TIE'}"
                )
                ties = ties and tie
        return ties

    async def _load(self, client: Client) -> None:
        activities = [
            (self._burst, 6), (self._greedy, 4), (self._options, 3), (self._abort, 2), (self._long_prompt, 1),
            (self._publish, 3), (self._rollback, 1), (self._first_draft, 1), (self._refused, 1), (self._toggle_taps, 1),
            (self._swaps, 3), (self._rest, 6),
        ]  # fmt: skip
        choices, weights = zip(*activities, strict=True)
        self._names = [choice.__name__.removeprefix("_") for choice in choices]
        async with client:
            self._client = client
            prompts, progress = self._session.prompts, self._session.console.progress
            await costs.fill_kv_cache(client, prompts, tokens=costs.KV_TOKENS_PER_GIB, progress=progress)
            began, shown = time.monotonic(), 0.0
            while (elapsed := time.monotonic() - began) < self._seconds:
                activity = self._draw.choices(choices, weights)[0]
                name = activity.__name__.removeprefix("_")
                try:
                    await activity()
                    self._tally.done[name] += 1
                except RequestError as error:
                    self._error(f"{name}: {error}")
                self._tally.memory.append((elapsed, self._session.rss_bytes()))
                if elapsed - shown > 30:
                    shown = elapsed
                    await self._show(elapsed)
            await self._closing_checks()

    def _error(self, text: str) -> None:
        self._tally.errors.append(text)
        self._session.console.line(f"ERROR {text}")

    async def _show(self, elapsed: float) -> None:
        status = await self._client.status()
        learning = status["learning"]
        waiting = learning["waiting_for"] or ""
        if learning["skipped_steps"] or waiting.startswith("learning stopped"):
            self._error(f"the learner: {waiting or 'runs'}, {learning['skipped_steps']} steps skipped")
        self._session.record.event("soak", elapsed_s=elapsed, rss_bytes=self._tally.memory[-1][1], done=dict(self._tally.done))
        self._session.console.line(
            f"{elapsed:6.0f} s  {sum(self._tally.done.values())} activities, draft {status['draft_version']}, "
            f"{status['learning']['steps']} steps, {status['replay']['bytes'] / 1e6:.0f} MB of samples, "
            f"resident {self._tally.memory[-1][1] / 1e6:.0f} MB, {len(self._tally.errors)} errors"
        )

    async def _closing_checks(self) -> None:
        await self._greedy()
        status = await self._client.status(fresh=True)
        if missing := [name for name in self._names if not self._tally.done[name]]:
            self._session.console.line(f"too short to have tried: {', '.join(missing)}")
        if not status["learning"]["steps"]:
            self._error(f"nothing was learned: {status['learning']['waiting_for']}")
        if not all(publish["target_untouched"] for publish in status["publishes"]):
            self._error("a swap touched the target")
        self._session.console.line(
            f"done: {dict(self._tally.done)}; swaps: {status['draft_version']}; samples dropped: {status['replay']['dropped']}"
        )

    # -- activities ------------------------------------------------------------------------------------------------------

    async def _burst(self) -> None:
        """Sampled answers to new prompts, more of them at once than are drafted for in full, siblings among them."""
        prompts = self._session.prompts.take(self._draw.randint(1, 10))
        sampling = Sampling(max_tokens=self._draw.randint(2, 96), temperature=1.0)
        work = [self._client.chat(prompt.question, sampling) for prompt in (*prompts, prompts[0])]
        await gather_or_cancel(work)

    async def _greedy(self) -> None:
        """Reference prompts, alone or at once, while whatever goes on; their tokens must be the stock engine's."""
        chosen = self._draw.sample(range(REFERENCES), self._draw.choice([1, 1, 3, REFERENCES]))
        sampling = Sampling(max_tokens=MAX_TOKENS)
        answers = await gather_or_cancel([self._client.chat(self._prompts[i].question, sampling) for i in chosen])
        for index, answer in zip(chosen, answers, strict=True):
            wanted, got = self._reference[index], answer.token_ids
            if (place := first_difference(wanted, got)) is not None:
                self._tally.differences.append(
                    Difference(
                        arm=LIVE,
                        prompt=self._prompts[index].name,
                        position=place,
                        context_ids=answer.prompt_ids + wanted[:place],
                        none_token=wanted[place] if place < len(wanted) else None,
                        arm_token=got[place] if place < len(got) else None,
                    )
                )

    async def _options(self) -> None:
        """Requests that touch every part of sampling, all at once."""
        variants: list[dict[str, Any]] = [
            {"logprobs": True, "top_logprobs": 3, "temperature": 0.7, "seed": 3},
            {"n": 3, "temperature": 1.0, "top_p": 0.9},
            {"stop": ["."], "temperature": 0.5, "top_k": 20},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}, "temperature": 0.0},
            {"repetition_penalty": 1.2, "presence_penalty": 0.5, "temperature": 0.8, "min_tokens": 10},
            {"max_tokens": 1},
        ]
        prompts = self._session.prompts.take(len(variants))
        common = {"model": MODEL, "max_tokens": 48}
        bodies = [
            {**common, "messages": [{"role": "user", "content": prompt.question}], **variant}
            for prompt, variant in zip(prompts, variants, strict=True)
        ]
        await gather_or_cancel([self._client.call("POST", "/v1/chat/completions", body) for body in bodies])

    async def _abort(self) -> None:
        """Clients that go away in the middle of an answer."""
        prompts = self._session.prompts.take(self._draw.randint(1, 4))
        tasks = [
            asyncio.ensure_future(self._client.chat(prompt.question, Sampling(max_tokens=400, ignore_end=True)))
            for prompt in prompts
        ]
        await asyncio.sleep(self._draw.uniform(0.05, 2.0))
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            # Cancelled is what was wanted; an answer that was there before is as good.
            if isinstance(ended, RequestError):
                raise ended

    async def _long_prompt(self) -> None:
        """A prompt that is prefilled in several steps, asked twice: the second time from the prefix cache."""
        question = " ".join(prompt.question for prompt in self._session.prompts.take(30))
        for _ in range(2):
            await self._client.chat(question, Sampling(max_tokens=16, temperature=1.0, seed=1))

    async def _publish(self) -> None:
        """The draft in training, as it is, in the middle of answers."""
        await self._while_answering(self._client.call("POST", "/specdraft/publish", {}))

    async def _rollback(self) -> None:
        """Back to the draft before; a refusal is right when there is none."""
        try:
            await self._while_answering(self._client.call("POST", "/specdraft/rollback", {}))
        except RequestError as error:
            if "no draft to go back to" not in str(error):
                raise

    async def _first_draft(self) -> None:
        """The draft of the start, from its checkpoint."""
        await self._while_answering(self._client.publish(self._session.first_draft))

    async def _swaps(self) -> None:
        """Several swaps in a row, idle."""
        for _ in range(3):
            await self._client.publish(self._session.first_draft)
            await self._client.call("POST", "/specdraft/publish", {})

    async def _while_answering(self, swap: Any) -> None:
        prompts = self._session.prompts.take(2)
        answers = [self._client.chat(prompt.question, Sampling(max_tokens=48, temperature=1.0)) for prompt in prompts]

        async def later() -> Any:
            await asyncio.sleep(0.3)
            return await swap

        await gather_or_cancel([*answers, later()])

    async def _refused(self) -> None:
        """What must be refused, and must change nothing."""
        bad = [
            ("/specdraft/publish", {"draft": "/nowhere"}), ("/specdraft/train", {"action": "sleep"}), ("/specdraft/save", {}),
            ("/v1/chat/completions", {"model": MODEL, "messages": "none"}),
            ("/v1/chat/completions", {"model": "other", "messages": []}),
        ]  # fmt: skip
        for path, body in bad:
            try:
                await self._client.call("POST", path, body)
            except RequestError as error:
                if not any(f"failed with {code}" in str(error) for code in (400, 404, 409, 422)):
                    raise
            else:
                self._error(f"{path} took {body}")

    async def _toggle_taps(self) -> None:
        await self._client.taps(False)
        await self._burst()
        await self._client.taps(True)

    async def _rest(self) -> None:
        """A window for the learner."""
        await asyncio.sleep(self._draw.uniform(1.0, 6.0))


def parser() -> argparse.ArgumentParser:
    """The benchmark's options."""
    made = played.parser("soak", __doc__)
    made.add_argument("--minutes", type=float, default=20.0, metavar="N", help="length of the load (default 20)")
    made.add_argument("--target", type=Path, metavar="DIR", help="Hugging Face directory (default: the embedded model)")
    made.add_argument("--seed", type=int, default=0, help="of the order of activities and the prompts (default 0)")
    made.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="where runs go (default: runs/)")
    made.add_argument("--kv-gib", type=int, default=1, metavar="N", help="KV cache in GiB (default 1)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak; returns the exit code: 0, 1 after an error of the run itself, 130 after Ctrl-C or SIGTERM."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options_parser = parser()
    options = options_parser.parse_args(arguments)
    if not options.minutes > 0:
        options_parser.error("--minutes must be above 0")

    def make(session: Session, interrupts: Interrupts) -> Soak:
        return Soak(session=session, interrupts=interrupts, minutes=options.minutes, seed=options.seed)

    def server_options(run: Path) -> tuple[str, ...]:
        return "--replay-mb", str(REPLAY_MB), "--checkpoint-dir", str(run / "checkpoint"), "--checkpoint-seconds", "30"

    return played.play(
        "soak", options, arguments, title=f"Soak, {options.minutes:g} minutes", kind=DEFAULT_TYPE, rhythm=RhythmConfig(),
        prompts=lambda: PromptSource(evaluation=REFERENCES, seed=options.seed), make=make, server_options=server_options,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
