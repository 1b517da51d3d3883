"""Where a step's time goes: target, sampling, drafting and what lies around them, for none and each draft type; and what it costs
by the number of drafted tokens, which with the acceptance by place says how many are worth it.

``python -m benchmarks.step_time --json`` prints progress and tables on standard error and one JSON object as the last line of
standard output. Engines are offline ones in processes of their own, with the settings that ``specdraft serve`` chooses; all answers
are greedy and have one length. Accepted lengths are those of the drafts that were given; new ones accept nearly nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.steps.probe import PARTS
from vllm_specdraft import cpu
from vllm_specdraft.config import ENVIRONMENT, EngineConfig
from vllm_specdraft.console import Console
from vllm_specdraft.demo.run import EXIT_FAILED

TYPES = ("eagle3", "dflash")
WIDTHS = (1, 2, 3, 5, 7)
BATCHES = (1, 4)
_ENGINE_S = 300.0


class StepTimes:
    """Runs one engine after the other."""

    def __init__(self, target: Path, drafts: dict[str, Path], *, state: Path, console: Console) -> None:
        self._target, self._drafts, self._state, self._console = target, drafts, state, console

    def measure(self, kind: str | None, tokens: int, batches: Sequence[int]) -> dict[str, Any]:
        """Per batch size parts in ms and accepted length. Raises `RuntimeError` with the engine's last words."""
        draft = self._drafts[kind] if kind else None
        environment = {**os.environ, **cpu.choose(os.environ, kv_gib=1).environment, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        environment.update(VLLM_USE_V2_MODEL_RUNNER="0", VLLM_PLUGINS="specdraft" if draft else "", VLLM_LOGGING_LEVEL="ERROR")
        if draft is not None:
            config = EngineConfig(draft_dir=str(draft), state_dir=str(self._state), learn=False, num_speculative_tokens=tokens)
            environment[ENVIRONMENT] = config.to_json()
        request = {
            "target": str(self._target), "draft": str(draft) if draft else None, "method": kind, "tokens": tokens,
            "batches": list(batches),
        }  # fmt: skip
        with self._console.working(f"{kind or 'none'}, {tokens} drafted tokens" if kind else "none"):
            result = subprocess.run(
                [sys.executable, "-m", "benchmarks.steps.engine", json.dumps(request)],
                env=environment, capture_output=True, text=True, timeout=_ENGINE_S,
            )  # fmt: skip
        if result.returncode:
            raise RuntimeError(f"the engine failed: {result.stderr[-2000:]}")
        return json.loads(result.stdout.splitlines()[-1])


def table(columns: dict[str, dict[str, float]]) -> list[str]:
    """Milliseconds by part, one column per arm."""
    lines = ["".join([f"{'ms per step':20}", *(f"{name:>12}" for name in columns)])]
    for part in (*PARTS, "step"):
        lines.append("".join([f"{part:20}", *(f"{column.get(part, float('nan')):12.2f}" for column in columns.values())]))
    return lines


def parser() -> argparse.ArgumentParser:
    """The benchmark's options."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.step_time", description=(__doc__ or "").split("\n\n")[0])
    made.add_argument("--json", action="store_true", help="one line of JSON (default: the same, indented)")
    made.add_argument("--target", type=Path, metavar="DIR", help="Hugging Face model directory (default: the embedded model)")
    made.add_argument(
        "--drafts", nargs="+", default=[], metavar="TYPE=DIR", help="drafts that learned (default: new ones of each type)"
    )
    made.add_argument(
        "--widths", type=lambda text: tuple(int(part) for part in text.split(",")), default=WIDTHS, metavar="K,K",
        help="numbers of drafted tokens (default: " + ",".join(map(str, WIDTHS)) + ")",
    )  # fmt: skip
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    from trainer_bridge.draft import registry
    from vllm_specdraft import drafts, embedded

    options_parser = parser()
    options = options_parser.parse_args(argv)
    given = {}
    for word in options.drafts:
        kind, equals, directory = word.partition("=")
        if not equals or kind not in TYPES or not Path(directory).is_dir():
            options_parser.error(f"--drafts {word}: needs TYPE=DIR, one of {', '.join(TYPES)} and a draft's directory")
        given[kind] = Path(directory)
    console = Console(sys.stderr)
    target = options.target or embedded.ensure()
    with tempfile.TemporaryDirectory() as scratch:
        for kind in TYPES:
            if kind not in given:
                given[kind] = drafts.init(target, Path(scratch) / kind, kind=kind)
        times = StepTimes(target, given, state=Path(scratch), console=console)
        try:
            none = times.measure(None, 0, BATCHES)
            found: dict[str, dict[int, dict[str, Any]]] = {
                kind: {tokens: times.measure(kind, tokens, BATCHES) for tokens in options.widths} for kind in TYPES
            }
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            console.line(f"error: {error}")
            return EXIT_FAILED
    for batch in map(str, BATCHES):
        columns = {"none": none[batch]["parts"]}
        for kind in TYPES:
            tokens = registry.by_name(kind).default_tokens
            if tokens in found[kind]:
                columns[f"{kind} k={tokens}"] = found[kind][tokens][batch]["parts"]
        console.line(f"batch {batch}:")
        for line in table(columns):
            console.line("  " + line)
    result: dict[str, Any] = {"none": {batch: none[batch]["parts"] for batch in none}}
    for kind in TYPES:
        result[kind] = {}
        for tokens, by_batch in found[kind].items():
            for batch, values in by_batch.items():
                values["speed_vs_none"] = values["accepted_length"] * none[batch]["parts"]["step"] / values["parts"]["step"]
            console.line(
                f"{kind}, {tokens} tokens: "
                + "; ".join(
                    f"batch {batch}: {values['parts']['step']:.1f} ms a step, accepted {values['accepted_length']:.2f}, "
                    f"{values['speed_vs_none']:.2f} times none"
                    for batch, values in by_batch.items()
                )
            )
            result[kind][str(tokens)] = by_batch
    print(json.dumps(_rounded(result), indent=None if options.json else 1), flush=True)
    return 0


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
