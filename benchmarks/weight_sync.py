"""What weight sync costs: until an update is verified, against plain ways to move the same bytes; and what the engine feels of it.

``python -m benchmarks.weight_sync --json`` prints progress on standard error and one JSON object as the last line of standard
output. Correctness comes first: what arrived is compared with what was sent, by digest, in every turn; greedy tokens after an
update must be those that the same weights gave before. Ratios are those of the model that fares worse, the default one or a
synthetic one of 2 GB; a table on standard error has both.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.sync import transports
from benchmarks.sync.peers import BroadcastPeer, PlainPipe
from benchmarks.sync.servers import Servers
from benchmarks.sync.stalls import EngineCosts
from benchmarks.sync.trainer import Trainer
from benchmarks.sync.transports import ModelResult, Transports
from benchmarks.sync.weights import nbytes_of, read, synthetic, write_shell
from trainer_bridge.config import BridgeConfig
from vllm_specdraft.console import Console
from vllm_specdraft.demo.interrupts import Interrupts
from vllm_specdraft.demo.prompts import PromptSource
from vllm_specdraft.demo.record import RunRecord
from vllm_specdraft.demo.rhythm import RhythmConfig
from vllm_specdraft.demo.run import EXIT_FAILED, guarded, one_line, settings
from vllm_specdraft.demo.session import Session

KEYS = (
    "shm_vs_memcpy", "tcp_vs_raw_zmq", "speedup_vs_checkpoint", "speedup_vs_gloo_broadcast", "stall_ms", "stall_steps",
    "delta_bytes_ratio_1pct", "delta_bytes_ratio_3pct", "memory_growth_100_updates_bytes",
)  # fmt: skip
"""Of the result; those of a part that was left out are null."""
MEMORY_UPDATES = 100
OTHER_STALLS = 3
"""Updates in the middle of an answer of each way that is only reported beside."""
PROMPTS = 3
"""Two whose answers are compared, one that is streamed."""


class WeightSyncBenchmark:
    """The transport part, then the engine part."""

    def __init__(self, *, session: Session, servers: Servers, interrupts: Interrupts, options: argparse.Namespace) -> None:
        self._session, self._servers, self._interrupts, self._options = session, servers, interrupts, options
        self.result: dict[str, Any] = {}

    def play(self, target: Path | None) -> None:
        """Fill `result`."""
        session, options = self._session, self._options
        target = session.prepare(target)
        session.record.add(target=str(target), settings=settings())
        found: dict[str, Any] = self._transports(target)
        if not options.skip_engine:
            # What the transport part held is not the engine's to go without.
            gc.collect()
            found |= self._engine(target)
        self.result = {key: found.get(key) for key in KEYS}
        session.record.add(results=self.result)

    def _transports(self, target: Path) -> dict[str, float]:
        session, options = self._session, self._options
        results: list[ModelResult] = []
        with PlainPipe() as pipe, BroadcastPeer() as broadcast, tempfile.TemporaryDirectory() as shell:
            measured = Transports(
                directory=session.record.directory, console=session.console, rounds=options.rounds,
                bucket_bytes=int(options.bucket_mb * 2**20), pipe=pipe, broadcast=broadcast,
            )  # fmt: skip
            for model in ("target", "synthetic"):
                directory, draft = target, session.first_draft
                if model == "target":
                    weights = read(target, draft)
                else:
                    with session.console.working(f"{options.synthetic_mb} MB of random weights"):
                        weights = synthetic(int(options.synthetic_mb * 1e6))
                    directory = write_shell(Path(shell) / model, weights)
                if any(str(tensor.dtype) != "torch.float32" for tensor in weights.values()):
                    raise ValueError(f"{target} holds other weights than fp32: name a --target in fp32, or convert it")
                session.console.line(f"{model}: {nbytes_of(weights) / 1e6:.0f} MB in {len(weights)} tensors")
                results.append(measured.measure(model, weights, target=directory, draft=draft))
                session.record.event("transport", ratios=results[-1].ratios(), **asdict(results[-1]))
                del weights
        lines = transports.table(results)
        session.record.add(transports=lines)
        for line in ("seconds (median, range) until the bytes were there and checked, and ratios:", *lines):
            session.console.line(line)
        return {key: round(value, 4) for key, value in transports.worst(results).items()}

    def _engine(self, target: Path) -> dict[str, Any]:
        session, servers, options = self._session, self._servers, self._options
        live, plain = session.start_live(target), session.start_none(target)
        costs = EngineCosts(
            session=session, servers=servers, stalls=options.stalls, others=min(OTHER_STALLS, options.stalls),
            updates=options.memory_updates,
        )  # fmt: skip
        with Trainer(servers.live.url, target=target, draft=session.first_draft) as trainer:
            found = self._interrupts.run(costs.measure(live, plain, trainer, target))
        if options.memory_updates != MEMORY_UPDATES:
            session.console.line(f"memory grew over {options.memory_updates} updates, not {MEMORY_UPDATES}")
        return found


def parser() -> argparse.ArgumentParser:
    """The benchmark's options."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.weight_sync", description=(__doc__ or "").split("\n\n")[0])
    made.add_argument("--json", action="store_true", help="one line of JSON (default: the same, indented)")
    made.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="interleaved rounds of the transports (default %(default)s)"
    )
    made.add_argument("--synthetic-mb", type=float, default=2000.0, metavar="M", help="size of the synthetic model (default 2000)")
    made.add_argument(
        "--bucket-mb", type=float, default=BridgeConfig().bucket_bytes / 2**20, metavar="M",
        help="buckets of the bridge and frames of plain ZeroMQ, in MiB (default %(default)g)",
    )  # fmt: skip
    made.add_argument("--stalls", type=int, default=5, metavar="N", help="updates in the middle of an answer (default %(default)s)")
    made.add_argument(
        "--memory-updates", type=int, default=MEMORY_UPDATES, metavar="N", help="updates between two readings (default %(default)s)"
    )
    made.add_argument("--skip-engine", action="store_true", help="transports only; the engine's results are null")
    made.add_argument("--target", type=Path, metavar="DIR", help="Hugging Face directory in fp32 (default: the embedded model)")
    made.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="where runs go (default %(default)s/)")
    made.add_argument("--kv-gib", type=int, default=1, metavar="N", help="KV cache of each server, in GiB (default 1)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code: 0, 1 after an error, 130 after Ctrl-C or SIGTERM."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options_parser = parser()
    options = options_parser.parse_args(arguments)
    if min(options.rounds, options.stalls, options.memory_updates) < 1 or min(options.synthetic_mb, options.bucket_mb) <= 0:
        options_parser.error("--rounds, --stalls and --memory-updates must be at least 1, sizes above 0")
    console = Console(sys.stderr)
    with Interrupts() as interrupts:
        try:
            prompts = PromptSource(evaluation=PROMPTS)
            config = {key: value for key, value in vars(options).items() if key not in ("json", "out", "target")}
            record = RunRecord(options.out, command=["python", "-m", "benchmarks.weight_sync", *arguments], config=config)
        except (ImportError, OSError) as error:
            console.line(f"error: {one_line(error)}")
            return EXIT_FAILED
        # vLLM's development mode has the route that reloads weights.
        servers = Servers(plain_environment={"VLLM_SERVER_DEV_MODE": "1"})
        session = Session(
            record=record, console=console, prompts=prompts, rhythm=RhythmConfig(), kv_gib=options.kv_gib,
            options=("--no-auto-publish",), make_server=servers,
        )  # fmt: skip
        benchmark = WeightSyncBenchmark(session=session, servers=servers, interrupts=interrupts, options=options)
        title = f"Weight sync, {record.machine_line}"
        code = guarded(session, interrupts, lambda: benchmark.play(options.target), title=title)
    if code == 0:
        print(json.dumps(benchmark.result, indent=None if options.json else 1), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
