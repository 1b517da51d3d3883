"""Co-training: the policy is left alone, every layout trains the same draft, and what taps and the draft cost.

``python -m benchmarks.cotrain --json`` prints progress on standard error and one JSON object as the last line of standard output.
Correctness comes first, in fp64 and in schedules of megatron-core and torch; costs are of a pipeline of two processes with one
thread each, in interleaved rounds.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import ProcessException

from benchmarks.cotraining import correct, costs
from benchmarks.ranks import on_ranks
from vllm_specdraft.console import Console
from vllm_specdraft.demo.record import RunRecord
from vllm_specdraft.demo.run import EXIT_FAILED, EXIT_INTERRUPTED, one_line


def _costs(rounds: int, say: Any) -> dict[str, Any]:
    ranks = on_ranks(functools.partial(costs.steps, rounds), 2)
    for arm in ranks[0]["seconds"]:
        medians = [statistics.median(each[0] for each in one["seconds"][arm]) for one in ranks]
        whole = max(statistics.median(each[1] for each in one["seconds"][arm]) for one in ranks)
        say(f"step, {arm:14}: {whole:.3f} s; stages {', '.join(f'{each:.3f}' for each in medians)}")
    ways = on_ranks(functools.partial(costs.transports, 10 * rounds), 2)
    seconds = {way: costs.median_seconds(ways, way) for way in ways[0]}
    say(f"one microbatch's taps: channel {1e3 * seconds['channel']:.2f} ms, staged {1e3 * seconds['staged']:.2f} ms")
    return {
        "tap_step_ratio": round(costs.ratio(ranks, "taps", whole=0), 4),
        "tap_vs_host_staged": round(seconds["staged"] / seconds["channel"], 3),
        "ring_bytes": costs.ring_bytes(ranks),
        "draft_overhead": {
            "at_once": round(costs.ratio(ranks, "draft at once", whole=1) - 1, 4),
            "deferred": round(costs.ratio(ranks, "draft deferred", whole=1) - 1, 4),
        },
    }


def measure(options: argparse.Namespace, say: Any) -> dict[str, Any]:
    """All results."""
    schedules = correct.schedules(say)
    off = correct.layouts(say)
    return {
        "policy_grad_bitwise": all(schedules.values()),
        "schedules": schedules,
        "layouts_equal": off <= correct.LARGEST_DIFFERENCE,
        **_costs(options.rounds, say),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code: 0, 1 after an error, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cotrain", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON (default: the same, indented)")
    parser.add_argument("--rounds", type=int, default=12, metavar="N", help="interleaved rounds of the costs (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="where runs go (default %(default)s/)")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    console = Console(sys.stderr)
    try:
        config = {"rounds": options.rounds}
        record = RunRecord(options.out, command=["python", "-m", "benchmarks.cotrain", *arguments], config=config)
        console.line(f"Co-training, {record.machine_line}")
        result = measure(options, console.line)
        record.add(results=result)
        record.finish("complete")
    except KeyboardInterrupt:
        console.line("stopped")
        return EXIT_INTERRUPTED
    except (ImportError, OSError, RuntimeError, ValueError, ProcessException) as error:
        console.line(f"error: {one_line(error)}")
        return EXIT_FAILED
    print(json.dumps(result, indent=None if options.json else 1), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
