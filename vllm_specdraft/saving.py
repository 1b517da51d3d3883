"""When the learner's state and the served draft are written, and what is still to be written."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_bridge.errors import BridgeError
from vllm_specdraft.config import EngineConfig
from vllm_specdraft.learner import Learner
from vllm_specdraft.learner_state import Checkpointer
from vllm_specdraft.slots import DraftSlots

logger = logging.getLogger(__name__)

CLOSE_S = 4.0
"""Longest that the end of the process waits for its last checkpoint, in seconds."""


class Saving:
    """Starts checkpoints when they are due. Without a directory it does nothing."""

    def __init__(self, config: EngineConfig, draft_config: Mapping[str, Any], learner: Learner, slots: DraftSlots) -> None:
        self._learner, self._slots = learner, slots
        self.served_unsaved = False
        """Whether another draft serves than the one that was written last."""
        self._saved_steps = learner.progress.steps
        self.checkpointer: Checkpointer | None = None
        if config.checkpoint_dir is not None:
            directory = Path(config.checkpoint_dir)
            self.checkpointer = Checkpointer(directory, interval_s=config.checkpoint_interval_s, draft_config=dict(draft_config))

    def start_if_due(self) -> None:
        """Start a checkpoint when another draft serves since the last one, or its interval is over and something was learned."""
        checkpointer = self.checkpointer
        if checkpointer is None or checkpointer.busy:
            return
        learned = self._learner.progress.steps != self._saved_steps
        failed = checkpointer.error is not None
        if checkpointer.due if failed else self.served_unsaved or (learned and checkpointer.due):
            # What a failed one did not write is still to be written.
            self.served_unsaved |= failed
            self._start(checkpointer)

    def close(self) -> None:
        """The process ends: save what was learned since the last checkpoint."""
        checkpointer = self.checkpointer
        if checkpointer is None or (self._learner.progress.steps == self._saved_steps and not self.served_unsaved):
            return
        try:
            checkpointer.wait(CLOSE_S)
            if checkpointer.busy:
                raise TimeoutError(f"an earlier one was not done in {CLOSE_S:g} s")
            self.served_unsaved |= checkpointer.error is not None
            self._start(checkpointer)
            checkpointer.wait(CLOSE_S)
        except Exception:
            logger.exception("the last checkpoint was not written")

    def now(self) -> None:
        """Write both, and wait for it. Raises `BridgeError` when that is not possible."""
        if self.checkpointer is None:
            raise BridgeError("there is no directory for checkpoints: start the server with --checkpoint-dir")
        self.checkpointer.wait()
        if not self.checkpointer.busy:
            self.served_unsaved = True
            self._start(self.checkpointer)
            self.checkpointer.wait()
        if self.checkpointer.busy:
            raise BridgeError("the checkpoint is still being written: the status says when it is done")
        if self.checkpointer.error is not None:
            raise BridgeError(self.checkpointer.error)

    def _start(self, checkpointer: Checkpointer) -> None:
        slot = self._slots.served
        saved = self._learner.export(draft_version=slot.version, served_digest=slot.digest, rollbacks=self._slots.rollbacks)
        # The served draft's tensors are written by nobody: they need no copy.
        checkpointer.start(saved, slot.state if self.served_unsaved else None)
        self.served_unsaved, self._saved_steps = False, self._learner.progress.steps
