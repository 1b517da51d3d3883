"""The server's receiver process by itself, with an engine behind it that serves whatever was verified, at once."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from trainer_bridge.carriers.sending import TORCH_DTYPES, bytes_of
from trainer_bridge.digest import tensor_digest
from vllm_specdraft.demo.session import SessionError
from vllm_specdraft.sync_process import Pipe

START_S = 60.0
_STOP_S = 10.0


class ReceiverProcess:
    """``vllm_specdraft.sync_process`` as the server starts it. Use as a context."""

    def __init__(self, target: Path, draft: Path, *, log_path: Path) -> None:
        """`target`, `draft`: directories that say what is taken. `log_path`: where it writes what it has to say."""
        self._settings = {
            "target": str(target), "draft": str(draft), "bind": "tcp://127.0.0.1:0", "keys": None, "insecure": False,
            "job": "benchmark", "policy_version": 0, "draft_version": 0,
        }  # fmt: skip
        self._log_path = log_path
        self._heard = threading.Event()
        self._failure: str | None = None
        self.endpoint = ""
        """Where trainers connect."""
        self.manifest: dict[str, Any] = {}
        """Of the newest update that was committed."""

    def __enter__(self) -> ReceiverProcess:
        """Raises `SessionError` when it does not start."""
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm_specdraft.sync_process", json.dumps(self._settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._pipe = Pipe(self._process.stdout, self._process.stdin)  # type: ignore[arg-type]
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        if not self._heard.wait(START_S) or not self.endpoint:
            self.__exit__(None, None, None)
            raise SessionError(f"the receiver did not start: {self._failure or 'no word from it'} (log: {self._log_path})")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        # It ends when its input ends, as it does when a server is gone.
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_S)
        self._thread.join(_STOP_S)

    def _listen(self) -> None:
        while (message := self._pipe.read()) is not None:
            if "ready" in message:
                self.endpoint = message["ready"]
                self._heard.set()
            elif "failed" in message:
                self._failure = message["failed"]
            elif message.get("op") == "commit":
                self.manifest = message["manifest"]
                versions = {"policy_version": self.manifest["version"], "draft_version": 0}
                self._pipe.write({"id": message["id"], "answer": {**versions, "report": {}}, **versions})
            else:
                self._pipe.write({"id": message["id"], "answer": {"taken": False, "reason": "no engine"}})
        self._heard.set()

    def check(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Compare the committed bytes with these weights, cast as they travelled. Raises `SessionError` for any difference."""
        entries = {entry["name"]: entry for entry in self.manifest["target"]}
        if wrong := sorted(entries.keys() ^ weights.keys()):
            raise SessionError(f"{len(wrong)} tensors were committed and not sent, or the other way round: {', '.join(wrong[:3])}")
        memory = np.memmap(self.manifest["path"], np.uint8, "r")
        for name, tensor in weights.items():
            entry = entries[name]
            sent = bytes_of(tensor.to(TORCH_DTYPES[entry["dtype"]]).contiguous())
            staged = memory[entry["offset"] : entry["offset"] + sent.size]
            shape, itemsize = tuple(entry["shape"]), TORCH_DTYPES[entry["dtype"]].itemsize
            if {tensor_digest(data, shape, itemsize).hex() for data in (sent, staged)} != {entry["digest"]}:
                raise SessionError(f"the bytes of {name} are not those that were sent")
