"""A trainer that nothing happens to: it brings the engine under test the other version, and tries again where one may."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.sync.faults_trainer import COMMITTED, COMMITTING, FINISHED, STAGING, VERIFIED
from benchmarks.sync.subject import NoAnswerError, Subject
from trainer_bridge import connect
from trainer_bridge.errors import BridgeError, UpdateError
from trainer_bridge.publisher import Bridge
from vllm_specdraft.demo.session import SessionError

JOB = "faults"
"""Of all trainers here: one that comes after a dead one takes over from it."""
RETRY_S = 60.0
_PAUSE_S = 0.1


class Healthy:
    """Updates of a subject. `failed` is told of every one that should have succeeded, and returns False."""

    def __init__(self, subject: Subject, failed: Callable[[str, Exception], bool]) -> None:
        self._subject, self._failed = subject, failed

    def connect(self, carrier: str) -> Bridge:
        """Raises `BridgeError`."""
        return connect(self._subject.url, job=JOB, carrier=carrier, transfer_timeout_s=60, commit_timeout_s=60)

    def bring(self, bridge: Bridge, *, midway: Callable[[], None] = lambda: None) -> tuple[int, dict[str, float]]:
        """One update to the other version, target and draft together. Raises `BridgeError`.

        Args:
            midway: called when half of the target's tensors were given.

        Returns:
            The version, and when it came to each state (`time.monotonic`).
        """
        subject, times = self._subject, dict[str, float]()
        served = bridge.policy_version
        if served not in subject.stands_for:
            raise UpdateError(f"the engine says it serves version {served}, which nobody sent")
        version, which = subject.next(served)
        variant = subject.variants[which]

        def target() -> Iterator[tuple[str, torch.Tensor]]:
            for number, entry in enumerate(variant.weights.items()):
                if number == len(variant.weights) // 2:
                    midway()
                yield entry

        bridge.on_state = lambda state: times.update({state.value: time.monotonic()})
        with bridge.update(version=version) as update:
            update.target(target())
            update.draft(variant.draft_weights.items())
            times[FINISHED] = time.monotonic()
        return version, times

    def arrived(self, version: int) -> bool:
        """Whether the engine serves this version, whole. Raises `NoAnswerError`."""
        seen = self._subject.look()
        return seen.version == version and self._subject.is_whole(seen)

    def bring_new(self, carrier: str) -> bool:
        """Whether a new trainer's update is committed at once, and arrives whole.

        A refusal because the engine is about to commit is an answer and not a failure: then it is tried again.
        """
        ends = time.monotonic() + RETRY_S
        while True:
            try:
                with self.connect(carrier) as bridge:
                    version, _ = self.bring(bridge)
                return self.arrived(version) or self._failed(
                    "the next update", RuntimeError(f"version {version} is not served whole")
                )
            except (BridgeError, NoAnswerError, OSError) as error:
                if "try again when it is done" not in str(error) or time.monotonic() > ends:
                    return self._failed("the next update", error)
                time.sleep(_PAUSE_S)

    def survives(self, kill: Callable[[], None], carrier: str, restart: Callable[[], None]) -> bool:
        """Kill something in the middle of an update, then do nothing but update again until one succeeds, and arrives whole."""
        bridge = self.connect(carrier)
        try:
            try:
                self.bring(bridge, midway=kill)
            except (BridgeError, OSError):
                pass
            else:
                return self._failed("an update", RuntimeError("it was committed by an engine that was killed in its middle"))
            restart()
            ends = time.monotonic() + RETRY_S
            while True:
                try:
                    if bridge.members[0].endpoint != self._subject.endpoint:
                        # Another server, at another address: a trainer is told of it, as of any engine that joins.
                        bridge.close()
                        bridge = self.connect(carrier)
                    version, _ = self.bring(bridge)
                    return self.arrived(version)
                except (BridgeError, NoAnswerError, OSError) as error:
                    if time.monotonic() > ends:
                        return self._failed("an update after a kill", error)
                    time.sleep(_PAUSE_S)
        finally:
            bridge.close()

    def typical(self, carrier: str) -> dict[str, float]:
        """How long an undisturbed update is in the states that last, in seconds. Raises `SessionError` when it does not arrive."""
        times: dict[str, float] = {}
        for _ in range(2):
            # The second counts: the first one makes what later ones find.
            with self.connect(carrier) as bridge:
                version, times = self.bring(bridge)
            if not self.arrived(version):
                raise SessionError(f"an undisturbed update over {carrier} did not arrive whole")
        spans = {STAGING: (STAGING, FINISHED), FINISHED: (FINISHED, VERIFIED), COMMITTING: (VERIFIED, COMMITTED)}
        return {moment: times[end] - times[begin] for moment, (begin, end) in spans.items()}
