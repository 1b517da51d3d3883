"""Updates that are killed in the middle: is the engine alive, is it at one version, does the next update succeed, is anything left?

``python -m benchmarks.faults --json --kills N`` prints progress on standard error and one JSON object as the last line of standard
output. A trainer is killed with SIGKILL in every state of an update in turn, over every carrier; then the receiver and the server;
then a client sends frames that are cut, doubled, swapped or late. An engine is at one version when its greedy answers are, token
for token, those of the stock engine started on a checkpoint of the version that it says it serves.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.sync import frames
from benchmarks.sync.faults_trainer import CARRIERS, COMMITTED, COMMITTING, MOMENTS, Order
from benchmarks.sync.healthy import JOB, RETRY_S, Healthy
from benchmarks.sync.servers import Servers
from benchmarks.sync.subject import NoAnswerError, Seen, Subject, Variant, chosen, reference
from benchmarks.sync.trainer import A, B
from benchmarks.sync.weights import perturbed, prompt_ids, read, read_draft, save_like
from vllm_specdraft.console import Console
from vllm_specdraft.demo.interrupts import Interrupts
from vllm_specdraft.demo.prompts import PromptSource
from vllm_specdraft.demo.record import RunRecord
from vllm_specdraft.demo.rhythm import RhythmConfig
from vllm_specdraft.demo.run import EXIT_FAILED, guarded, one_line, settings
from vllm_specdraft.demo.session import Session, SessionError

PROMPTS, CANDIDATES = 3, 10
"""Prompts whose answers are compared, and those among which they are found."""
RECEIVER_KILLS = 3
MAY_COMMIT = frozenset({COMMITTING, COMMITTED})
"""Moments from which on the engine may serve the update of a trainer that died."""
_ROOT = Path(__file__).resolve().parents[1]
_TRAINER_S, _STOPPED_S = 180.0, 15.0


def plan_of_kills(kills: int) -> list[tuple[str, str]]:
    """Moment and carrier of every kill: each moment as often as any other, and over 18 of them every pair once.

    >>> plan_of_kills(8)[5:]
    [('COMMITTED', 'zmq'), ('OFFERED', 'tcp'), ('STAGING', 'zmq')]
    """
    moments, carriers = len(MOMENTS), len(CARRIERS)
    return [(MOMENTS[i % moments], CARRIERS[(i + i // moments) % carriers]) for i in range(kills)]


class FaultsBenchmark:
    """References, then kills of trainers, of the receiver and of the server, then frames."""

    def __init__(
        self, *, session: Session, servers: Servers, kills: int, seed: int, temporary: Path, stock_temporary: Path
    ) -> None:
        """`temporary`, `stock_temporary`: empty folders, for the temporary files of all processes, and of stock servers."""
        self._session, self._servers = session, servers
        self._temporary, self._stock_temporary = temporary, stock_temporary
        self._kills = kills
        self._draw = random.Random(seed)
        self._state = f"faults-{secrets.token_hex(4)}"
        self._counts: Counter[str] = Counter()
        self._typical: dict[str, dict[str, float]] = {}
        self.result: dict[str, Any] = {}

    def play(self, target: Path | None) -> None:
        """Fill `result`."""
        session = self._session
        self._target = target = session.prepare(target)
        session.record.add(target=str(target), settings=settings())
        scratch = Path(tempfile.mkdtemp(prefix="weights-", dir=session.record.directory))
        try:
            self._subject = self._make_subject(target, scratch.resolve())
            self._healthy = Healthy(self._subject, self._failed)
            self._play()
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _play(self) -> None:
        session = self._session
        # The server that is killed comes first: the one after it has to clean up what it left.
        server_recovered = self._kill_server()
        self._measure_typical()
        for number, (moment, carrier) in enumerate(plan_of_kills(self._kills)):
            self._kill_trainer(number, moment, carrier)
        recovered = server_recovered + sum(self._kill_receiver(CARRIERS[i % len(CARRIERS)]) for i in range(RECEIVER_KILLS))
        played = self._play_frames()
        session.close()
        left = self._leftovers()
        self.result = {
            **{key: self._counts[key] for key in ("kills", "engine_alive", "version_consistent", "next_update_succeeded")},
            "leftovers": len(left),
            "engine_kills": 1 + RECEIVER_KILLS,
            "engine_kills_recovered": recovered,
            "frames": played,
        }
        session.record.add(results=self.result, leftovers=left)

    # -- what the answers must be ----------------------------------------------------------------------------------------

    def _make_subject(self, target: Path, scratch: Path) -> Subject:
        session = self._session
        draft = session.first_draft.resolve()
        with session.console.working("a second version of target and draft"):
            target_b = save_like(target, perturbed(read(target, draft)), scratch / "target")
            draft_b = save_like(draft, perturbed(read_draft(draft)), scratch / "draft")
        prompts = prompt_ids(target, session.prompts.evaluation)
        found = {}
        for which, directory in ((A, target), (B, target_b)):
            session.start_none(directory)
            found[which] = reference(self._servers.plain.url, prompts)
            session.close()
        picked = chosen(found, PROMPTS)
        variants = {A: Variant.of(target.resolve(), draft), B: Variant.of(target_b, draft_b)}
        answers = {which: [found[which][index][0] for index in picked] for which in found}
        return Subject(variants, [prompts[index] for index in picked], answers)

    def _restart(self) -> None:
        self._session.close()
        self._servers.environment["TMPDIR"] = str(self._temporary)
        self._start()

    def _start(self) -> None:
        """A server under test on the launch checkpoint. Raises `SessionError` when it does not even answer rightly undisturbed."""
        self._servers.state_dir = self._session.record.directory / self._state
        self._session.start_live(self._target)
        self._subject.server = self._servers.live
        ends = time.monotonic() + RETRY_S
        while self._subject.status()["sync"]["endpoint"] is None:
            if time.monotonic() > ends:
                raise SessionError(f"the server's receiver did not start (log: {self._session.server_log})")
            time.sleep(0.2)
        self._subject.attach(self._servers.live)
        if not self._subject.is_whole(self._subject.look()):
            raise SessionError("before any update the server's greedy answers are not the stock engine's")

    # -- trainers --------------------------------------------------------------------------------------------------------

    def _failed(self, what: str, error: Exception) -> bool:
        self._session.console.line(f"FAULT {what}: {one_line(error)}")
        self._session.record.event("fault", what=what, error=str(error))
        return False

    def _measure_typical(self) -> None:
        self._typical = {carrier: self._healthy.typical(carrier) for carrier in CARRIERS}
        self._session.record.add(typical_s=self._typical)
        for carrier, spans in self._typical.items():
            listed = ", ".join(f"{moment} {span:.3f} s" for moment, span in spans.items())
            self._session.console.line(f"an undisturbed update over {carrier}: {listed}")

    def _kill_trainer(self, number: int, moment: str, carrier: str) -> None:
        subject = self._subject
        self._session.console.progress(f"kill {number + 1} of {self._kills}: {moment} over {carrier}")
        before = subject.status()["policy_version"]
        version, which = subject.next(before)
        variant = subject.variants[which]
        delay_s = self._draw.uniform(0.0, self._typical[carrier].get(moment, 0.0))
        order = Order(
            engine=subject.url, job=JOB, target=str(variant.target), draft=str(variant.draft), version=version,
            carrier=carrier, moment=moment, delay_s=delay_s,
        )  # fmt: skip
        if (update := self._run_trainer(order)) is None:
            return
        alive = subject.alive()
        consistent, served = self._consistent(before, moment, update)
        succeeded = self._healthy.bring_new(carrier)
        found = {"kills": True, "engine_alive": alive, "version_consistent": consistent, "next_update_succeeded": succeeded}
        self._counts.update({key: int(value) for key, value in found.items()})
        self._session.record.event("kill", moment=moment, carrier=carrier, delay_s=delay_s, before=before, served=served, **found)
        wrong = [key for key, value in found.items() if not value]
        self._session.console.line(
            f"kill {number + 1:3}: {moment:10} over {carrier:4} {delay_s:6.3f} s, version {before} -> {served}"
            + (f"  WRONG: {', '.join(wrong)}" if wrong else "")
        )
        if not alive:
            # The other kills are for an engine that lives.
            self._restart()

    def _run_trainer(self, order: Order) -> str | None:
        """Run a trainer until it has killed itself; its update's id. None when it ended otherwise, which is no kill."""
        log_path = self._session.record.directory / "trainers.log"
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.sync.faults_trainer", order.to_json()],
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=_ROOT,
                env={**os.environ, "TMPDIR": str(self._temporary)},
            )
        try:
            said, _ = process.communicate(timeout=_TRAINER_S)
        except subprocess.TimeoutExpired:
            said = b""
        finally:
            process.kill()
            process.wait()
        if process.returncode != -signal.SIGKILL or not said:
            self._failed("a trainer", RuntimeError(f"it ended with {process.returncode} instead of its kill (log: {log_path})"))
            return None
        return json.loads(said.splitlines()[0])["update"]

    def _consistent(self, before: int, moment: str, update: str) -> tuple[bool, int | None]:
        """Whether the engine is at v, or at v+1 by this update where that can be, whole; and the version that it serves."""
        try:
            seen = self._subject.look()
        except NoAnswerError as error:
            return self._failed("the version", error), None
        moved = seen.version == before + 1 and seen.names(update) and moment in MAY_COMMIT
        stayed = seen.version == before and moment != COMMITTED
        return (moved or stayed) and self._subject.is_whole(seen), seen.version

    # -- the engine's side -----------------------------------------------------------------------------------------------

    def _kill_receiver(self, carrier: str) -> bool:
        """Kill the receiver in the middle of an update; whether the same trainer's next one arrives."""

        def kill() -> None:
            self._subject.receiver().kill()

        recovered = self._healthy.survives(kill, carrier, lambda: None)
        self._session.console.line(f"the receiver killed in the middle of an update over {carrier}: {_word(recovered)}")
        if recovered:
            self._subject.note_processes()
        return recovered

    def _kill_server(self) -> bool:
        """Kill a server, all of it, in the middle of an update, and start it again; whether the same trainer's next one arrives."""
        # Stock vLLM leaves its own sockets behind a -9: they are not counted, what is in shared memory is.
        self._servers.environment["TMPDIR"] = str(_made(self._temporary.with_name(self._temporary.name + "-killed")))
        self._start()

        def kill() -> None:
            pid = self._servers.live.pid
            assert pid is not None
            family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            os.killpg(pid, signal.SIGKILL)
            psutil.wait_procs(family, timeout=_STOPPED_S)

        recovered = self._healthy.survives(kill, CARRIERS[0], self._restart)
        self._session.console.line(f"the server killed in the middle of an update, and started again: {_word(recovered)}")
        return recovered

    # -- frames ----------------------------------------------------------------------------------------------------------

    def _play_frames(self) -> dict[str, dict[str, int]]:
        subject = self._subject
        played = {fault: {"sent": 0, "served_whole_versions": 0} for fault in frames.FAULTS}
        for fault in frames.FAULTS:
            for variant in range(frames.VARIANTS):
                before = subject.status()["policy_version"]
                version, which = subject.next(before)
                sent = subject.variants[which]
                models = {0: sent.weights, 1: sent.draft_weights}
                place = self._draw.randrange(1 << 20)
                update, state = frames.play(
                    subject.endpoint, models, fault=fault, variant=variant, version=version, place=place
                )  # fmt: skip
                seen = subject.look()
                whole = self._is_played_out(seen, before, update, state)
                played[fault]["sent"] += 1
                played[fault]["served_whole_versions"] += whole
                self._session.record.event("frame", fault=fault, variant=variant, state=state, version=seen.version, whole=whole)
                self._session.console.line(
                    f"{fault} frame, {variant + 1}: {state}, version {before} -> {seen.version}" + ("" if whole else "  WRONG")
                )
        if not self._healthy.bring_new(CARRIERS[0]):
            self._session.console.line("FAULT after the frames the next update did not succeed")
            played = {fault: {**counts, "served_whole_versions": 0} for fault, counts in played.items()}
        return played

    def _is_played_out(self, seen: Seen, before: int, update: str, state: str) -> bool:
        committed = seen.version == before + 1 and seen.names(update) and state == "COMMITTED"
        return (committed or (seen.version == before and state == "ABORTED")) and self._subject.is_whole(seen)

    # -- what is left ----------------------------------------------------------------------------------------------------

    def _leftovers(self) -> list[str]:
        ends = time.monotonic() + _STOPPED_S
        while (left := self._all_leftovers()) and time.monotonic() < ends:
            # What was killed a moment ago is still being taken down.
            time.sleep(0.5)
        for what in left:
            self._session.console.line(f"left behind: {what}")
        return left

    def _all_leftovers(self) -> list[str]:
        """Of temporary files those count that the stock engine, stopped in the same way, does not leave behind likewise."""
        stock = {_kind_of(path) for path in self._stock_temporary.iterdir()}
        files = [f"temporary file {path.name}" for path in self._temporary.iterdir() if _kind_of(path) not in stock]
        return self._subject.leftovers(self._state) + files


def _made(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    return directory


def _kind_of(path: Path) -> str:
    """A file's name without what is drawn at random: sockets of vLLM are named by a UUID."""
    return re.sub("[0-9a-f-]{8,}", "*", path.name)


def _word(recovered: bool) -> str:
    return "the next update succeeded" if recovered else "NO UPDATE SUCCEEDED AFTER IT"


def parser() -> argparse.ArgumentParser:
    """The benchmark's options."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=(__doc__ or "").split("\n\n")[0])
    made.add_argument("--json", action="store_true", help="one line of JSON (default: the same, indented)")
    made.add_argument("--kills", type=int, default=50, metavar="N", help="trainers that are killed (default %(default)s)")
    made.add_argument("--target", type=Path, metavar="DIR", help="Hugging Face directory (default: the embedded model)")
    made.add_argument("--seed", type=int, default=0, help="of the moments within a state (default 0)")
    made.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="where runs go (default %(default)s/)")
    made.add_argument("--kv-gib", type=int, default=1, metavar="N", help="KV cache of each server, in GiB (default 1)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code: 0, 1 after an error of the run itself, 130 after Ctrl-C or SIGTERM."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options_parser = parser()
    options = options_parser.parse_args(arguments)
    if options.kills < 1:
        options_parser.error("--kills must be at least 1")
    console = Console(sys.stderr)
    with Interrupts() as interrupts, tempfile.TemporaryDirectory(prefix="sdf-", ignore_cleanup_errors=True) as temporary:
        try:
            prompts = PromptSource(evaluation=CANDIDATES, seed=options.seed)
            config = {"kills": options.kills, "seed": options.seed, "kv_gib": options.kv_gib}
            record = RunRecord(options.out, command=["python", "-m", "benchmarks.faults", *arguments], config=config)
        except (ImportError, OSError) as error:
            console.line(f"error: {one_line(error)}")
            return EXIT_FAILED
        # Short names: sockets lie there, whose paths are bounded.
        folders = {name: _made(Path(temporary) / name) for name in ("live", "plain")}
        servers = Servers(environment={"TMPDIR": str(folders["live"])}, plain_environment={"TMPDIR": str(folders["plain"])})
        session = Session(
            record=record, console=console, prompts=prompts, rhythm=RhythmConfig(), kv_gib=options.kv_gib,
            options=("--no-learn", "--no-auto-publish", "--replay-mb", "64"), make_server=servers,
        )  # fmt: skip
        benchmark = FaultsBenchmark(
            session=session, servers=servers, kills=options.kills, seed=options.seed, temporary=folders["live"],
            stock_temporary=folders["plain"],
        )  # fmt: skip
        title = f"{options.kills} kills, {record.machine_line}"
        code = guarded(session, interrupts, lambda: benchmark.play(options.target), title=title)
    if code == 0:
        print(json.dumps(benchmark.result, indent=None if options.json else 1), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
