"""What the benchmarks that play a run on servers share: the first option, the record, the session, and the line at the end."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from vllm_specdraft.console import Console
from vllm_specdraft.demo.interrupts import Interrupts
from vllm_specdraft.demo.record import RunRecord
from vllm_specdraft.demo.rhythm import RhythmConfig
from vllm_specdraft.demo.run import EXIT_FAILED, guarded, one_line
from vllm_specdraft.demo.session import Session


class Played(Protocol):
    """A benchmark."""

    result: dict[str, Any]

    def play(self, target: Path | None) -> None:
        """Fill `result`."""


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Of ``python -m benchmarks.NAME``, which says of itself what its module's first paragraph says."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=(doc or "").split("\n\n")[0])
    made.add_argument("--json", action="store_true", help="one line of JSON (default: the same, indented)")
    return made


def play(
    name: str,
    options: argparse.Namespace,
    arguments: Sequence[str],
    *,
    title: str,
    kind: str,
    rhythm: RhythmConfig,
    prompts: Callable[[], Any],
    make: Callable[[Session, Interrupts], Played],
    config: Mapping[str, Any] | None = None,
    governor: bool = False,
    environment: Mapping[str, str] | None = None,
    server_options: Callable[[Path], Sequence[str]] = lambda run: (),
) -> int:
    """Run it and print its result; returns the exit code: 0, 1 after an error, 130 after Ctrl-C or SIGTERM.

    Args:
        options: with those of `rhythm_arguments`.
        arguments: as they were given, for the record.
        kind: draft type of the first draft.
        prompts: made when a missing package can be told of.
        config: for the record; by default the options.
        governor, environment: see `Session`.
        server_options: of the specdraft server, by the run's directory.
    """
    console = Console(sys.stderr)
    if config is None:
        config = {key: value for key, value in vars(options).items() if isinstance(value, int | float | str)}
    with Interrupts() as interrupts:
        try:
            source = prompts()
            command = ["python", "-m", f"benchmarks.{name}", *arguments]
            record = RunRecord(options.out, command=command, config={**config, "rhythm": asdict(rhythm)})
        except (ImportError, OSError) as error:
            console.line(f"error: {one_line(error)}")
            return EXIT_FAILED
        session = Session(
            record=record, console=console, prompts=source, rhythm=rhythm, kv_gib=options.kv_gib, kind=kind, governor=governor,
            environment=environment, options=server_options(record.directory),
        )  # fmt: skip
        benchmark = make(session, interrupts)
        code = guarded(session, interrupts, lambda: benchmark.play(options.target), title=f"{title}, {record.machine_line}")
    if code == 0:
        print(json.dumps(benchmark.result, indent=None if options.json else 1), flush=True)
    return code
