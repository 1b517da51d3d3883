"""``specdraft demo``: the rollout side of an RL run, a draft that learns in its pauses, and the arms compared."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_specdraft.console import Console
from vllm_specdraft.demo import table
from vllm_specdraft.demo.client import Client, RequestError, Sampling
from vllm_specdraft.demo.compare import B1, NONE, ArmSummary, Measurement
from vllm_specdraft.demo.interrupts import Interrupted, Interrupts
from vllm_specdraft.demo.prompts import PromptSource
from vllm_specdraft.demo.record import RunRecord
from vllm_specdraft.demo.rhythm import RhythmConfig
from vllm_specdraft.demo.session import KV_GIB, Session, SessionError, identities
from vllm_specdraft.drafts import DEFAULT_TYPE

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
# Guesses for the time still needed at the end, until this run's own times are known.
_START_GUESS_S, _PAIR_GUESS_S = 55.0, 24.0
_SPARE_S = 20.0


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """What the demo does, beside the rhythm of its rounds."""

    rounds: int = 6
    """Bursts; a pause lies between each two of them."""
    pairs: int = 8
    """Held-out prompts in the comparison."""
    compare_max_tokens: int = 128
    """Longest answer in the comparison."""
    minutes: float = 18.0
    """Budget: rounds, then pairs, are left out when the rest would take longer."""
    seed: int = 0
    """Seed of the prompts."""

    def __post_init__(self) -> None:
        for name in ("rounds", "pairs", "compare_max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1 is needed")
        if self.minutes <= 0:
            raise ValueError(f"minutes={self.minutes}: the budget must be positive")


def round_fits(*, elapsed_s: float, round_s: float, closing_s: float, budget_s: float) -> bool:
    """Whether one more round leaves time for the closing comparison."""
    return elapsed_s + round_s + closing_s <= budget_s


class Demo:
    """The steps of the demo, in order, on one session."""

    def __init__(self, *, session: Session, config: DemoConfig, interrupts: Interrupts) -> None:
        self._session = session
        self._config = config
        self._interrupts = interrupts
        self._budget_s = 60.0 * config.minutes
        self._start_s = _START_GUESS_S

    def play(self, target: Path | None) -> None:
        """Everything from the model to the last table."""
        session, say = self._session, self._session.console.line
        target = session.prepare(target)
        session.record.add(target=str(target), settings=settings())
        before_s = session.record.elapsed_s
        live = session.start_live(target)
        self._start_s = session.record.elapsed_s - before_s
        say()
        shape = session.rhythm
        say(f"{shape.rollouts} rollouts a round, {shape.concurrency} at once; {shape.validation} answers one at a time;")
        say(f"then {shape.pause_s:.0f} s of pause, the trainer's time, in which the draft learns")
        say(table.round_header())
        self._interrupts.run(self._rounds(live))
        say()
        none = session.start_none(target)
        self._interrupts.run(self._comparison(live, none))

    async def _rounds(self, client: Client) -> None:
        session, config = self._session, self._config
        round_s = 0.0
        async with client:
            for index in range(1, config.rounds + 1):
                began_s = session.record.elapsed_s
                await session.play_burst(client, index=index)
                burst_s = session.record.elapsed_s - began_s
                # One more round is a pause and another burst.
                round_s = session.rhythm.pause_s + burst_s
                if index == config.rounds:
                    break
                if not self._fits(round_s, burst_s):
                    session.console.line(f"       no time for round {index + 1} within {config.minutes:.0f} minutes")
                    break
                await session.play_pause(client)
            status = await session.freeze(client)
        if status["draft_version"] == 0:
            session.console.line("       no draft was better on held-out samples yet: live is still the first draft")

    def _fits(self, round_s: float, burst_s: float) -> bool:
        closing_s = self._start_s + burst_s + _PAIR_GUESS_S * self._config.pairs + _SPARE_S
        elapsed_s = self._session.record.elapsed_s
        return round_fits(elapsed_s=elapsed_s, round_s=round_s, closing_s=closing_s, budget_s=self._budget_s)

    async def _comparison(self, live: Client, none: Client) -> None:
        session, config = self._session, self._config
        prompts = session.prompts.evaluation
        sampling = Sampling(max_tokens=config.compare_max_tokens)
        async with live, none:
            arms = session.arms(live, none)
            await arms.warm_up(prompts[-1], sampling)
            began_s = session.record.elapsed_s

            def more(pair: int) -> bool:
                pair_s = (session.record.elapsed_s - began_s) / pair if pair else 0.0
                return pair == 0 or session.record.elapsed_s + pair_s + _SPARE_S <= self._budget_s

            groups = [[prompt] for prompt in prompts[: config.pairs]]
            measured = await session.compare(arms, groups, lambda pair: sampling, phase=B1, more=more)
            verdicts = await session.judge(arms, measured)
            summaries = session.summarise(measured, phase=B1)
            self._print_comparison(summaries, measured, identities(measured, verdicts))
            for verdict in verdicts:
                session.console.line(f"  {verdict}")
            await self._reference_burst(none)

    async def _reference_burst(self, none: Client) -> None:
        session = self._session
        if session.record.elapsed_s + session.rounds[-1].wall_s > self._budget_s:
            session.console.line("no time left for the stock engine's own burst: the chart has no reference line")
            return
        reference = await session.play_none_burst(none, session.prompts.take(session.rhythm.prompts))
        last = session.rounds[-1].tokens_per_s
        verdict = "slower than none" if last < reference.tokens_per_s else "faster than none"
        session.console.line(
            f"{session.rhythm.concurrency} at once, sampled: {last:.1f} tok/s in the last round, "
            f"none {reference.tokens_per_s:.1f} ({verdict}; not interleaved)"
        )

    def _print_comparison(self, summaries: Sequence[ArmSummary], measured: Sequence[Measurement], identity: dict[str, str]) -> None:
        session = self._session
        pairs = sum(item.arm == NONE for item in measured)
        session.console.line()
        session.console.line(f"{pairs} held-out prompts, one at a time, greedy:")
        for line in table.comparison_lines(summaries, identity):
            session.console.line(line)
        session.console.line(table.legend())
        session.record.add(
            results={
                "comparison": [asdict(summary) for summary in summaries],
                "pairs": pairs,
                "tokens": identity,
            }
        )


def settings() -> dict:
    """The servers' CPU settings, for run.json."""
    from vllm_specdraft import launch

    return launch.settings_summary()


def expected_errors() -> tuple[type[Exception], ...]:
    """What may go wrong without a bug of ours: shown as one line."""
    from trainer_bridge.errors import BridgeError
    from vllm_specdraft import launch

    return (launch.LaunchError, RequestError, SessionError, BridgeError, ValueError, ImportError, OSError)


def guarded(session: Session, interrupts: Interrupts, play: Callable[[], None], *, title: str) -> int:
    """Run `play`; whatever happens, stop the servers, draw the chart and write how it ended. Returns the exit code."""
    console, record = session.console, session.record
    code, state = 0, "complete"
    try:
        play()
    except Interrupted:
        code, state = EXIT_INTERRUPTED, "interrupted"
        console.line("interrupted: stopping the servers")
    except expected_errors() as error:
        code, state = EXIT_FAILED, "failed"
        record.add(error=str(error))
        console.line(f"error: {one_line(error)}")
    finally:
        with interrupts.held():
            session.close()
            record.add(rounds=[{**asdict(item), "tokens_per_s": item.tokens_per_s} for item in session.rounds])
            record.finish("failed" if sys.exc_info()[0] else state)
    with interrupts.held():
        draw_chart(session, title=title)
    return code


def one_line(error: Exception) -> str:
    """The first line of an error's text and, where a log's end follows it, the last line there that names an error."""
    first, *rest = str(error).splitlines() or [type(error).__name__]
    causes = [line.strip() for line in rest if "Error" in line]
    return f"{first.rstrip(':')}: {causes[-1]}" if causes else first.rstrip(":")


def draw_chart(session: Session, *, title: str) -> None:
    """Draw what there is and say where everything lies."""
    from vllm_specdraft.demo import chart

    directory, console = session.record.directory, session.console
    try:
        drawn = chart.draw(session.record.events, directory / "chart.png", title=title)
    except ImportError as error:
        drawn = False
        console.line(str(error))
    console.line(f"run.json, metrics.jsonl{', chart.png' if drawn else ''} and the logs are in {directory}")


def rhythm_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that the demo and the benchmark share."""
    shape = RhythmConfig()
    parser.add_argument(
        "--kv-gib", type=int, default=KV_GIB, metavar="G", help="KV cache of each server, in GiB (default %(default)s)"
    )
    parser.add_argument("--rollouts-per-round", type=int, default=shape.rollouts, metavar="N", help="(default %(default)s)")
    parser.add_argument("--concurrency", type=int, default=shape.concurrency, metavar="N", help="at once (default %(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=shape.max_tokens, metavar="N", help="longest rollout (default %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=shape.temperature,
        metavar="T",
        help="of sampled rollouts (default %(default)s)",
    )
    parser.add_argument(
        "--pause-seconds", type=float, default=shape.pause_s, metavar="S", help="the trainer's time (default %(default)s)"
    )
    parser.add_argument(
        "--draft", default=DEFAULT_TYPE, metavar="TYPE", help="draft type that learns: eagle3 or dflash (default %(default)s)"
    )
    parser.add_argument("--target", type=Path, metavar="DIR", help="Hugging Face model directory (default: the embedded model)")
    parser.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="where runs go (default %(default)s/)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default %(default)s)")


def known_type(name: str) -> str:
    """A draft type's name. Raises `ValueError` with the nearest one for a name that is none."""
    from trainer_bridge.draft import registry
    from trainer_bridge.errors import ConfigError

    try:
        return registry.by_name(name).name
    except ConfigError as error:
        raise ValueError(str(error)) from None


def rhythm_of(options: argparse.Namespace) -> RhythmConfig:
    """The rhythm that the options ask for. Raises `ValueError`."""
    return RhythmConfig(
        rollouts=options.rollouts_per_round,
        concurrency=options.concurrency,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        pause_s=options.pause_seconds,
    )


def parser() -> argparse.ArgumentParser:
    """The demo's options."""
    defaults = DemoConfig()
    made = argparse.ArgumentParser(
        prog="specdraft demo",
        description="A vLLM server plays the rollout side of an RL run and learns its own draft in the pauses. "
        "At the end: the stock engine, the first draft and the live draft on the same held-out prompts.",
    )
    made.add_argument("--rounds", type=int, default=defaults.rounds, metavar="N", help="bursts (default %(default)s)")
    made.add_argument("--pairs", type=int, default=defaults.pairs, metavar="N", help="held-out prompts (default %(default)s)")
    made.add_argument(
        "--minutes",
        type=float,
        default=defaults.minutes,
        metavar="M",
        help="leave rounds out beyond M (default %(default)s)",
    )
    rhythm_arguments(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code: 0, 1 after an error, 130 after Ctrl-C or SIGTERM."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options_parser = parser()
    options = options_parser.parse_args(arguments)
    try:
        known_type(options.draft)
        config = DemoConfig(rounds=options.rounds, pairs=options.pairs, minutes=options.minutes, seed=options.seed)
        rhythm = rhythm_of(options)
    except ValueError as error:
        options_parser.error(str(error))
    console = Console()
    with Interrupts() as interrupts:
        try:
            # One prompt more than there are pairs: the warm-up must not be a timed prompt.
            prompts = PromptSource(evaluation=config.pairs + 1, seed=config.seed)
            record = RunRecord(
                options.out,
                command=["specdraft", "demo", *arguments],
                config={**asdict(config), "rhythm": asdict(rhythm), "kv_gib": options.kv_gib, "draft": options.draft},
            )
        except (ImportError, OSError) as error:
            console.line(f"error: {one_line(error)}")
            return EXIT_FAILED
        session = Session(
            record=record, console=console, prompts=prompts, rhythm=rhythm, kv_gib=options.kv_gib, kind=options.draft
        )  # fmt: skip
        demo = Demo(session=session, config=config, interrupts=interrupts)
        title = f"A draft learned between rollouts, {record.machine_line}"
        return guarded(session, interrupts, lambda: demo.play(options.target), title=title)
