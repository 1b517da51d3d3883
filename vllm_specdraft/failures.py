"""Why an engine died: noted by the process that knows, told by the one that the user looks at.

The engine and its worker are processes of their own, and their logs interleave. Each would note the same death in its own words;
the first one noted is the cause. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import logging
from pathlib import Path

NAME = "failure.txt"
DEATHS = ("WorkerProc failed", "EngineCore failed", "EngineCore encountered a fatal error")
"""How vLLM's log begins to tell of a process that ends."""


def watch(state_dir: Path) -> None:
    """Note in `state_dir` when this process logs its own death; harmless when called again."""
    logger = logging.getLogger("vllm")
    if not any(isinstance(handler, _Recorder) for handler in logger.handlers):
        logger.addHandler(_Recorder(state_dir / NAME))


def forget(state_dir: Path) -> None:
    """Remove what an earlier server noted."""
    (state_dir / NAME).unlink(missing_ok=True)


def first(state_dir: Path) -> str | None:
    """What was noted first, in one line, or None."""
    try:
        return (state_dir / NAME).read_text().strip() or None
    except OSError:
        return None


def in_one_line(error: BaseException) -> str:
    """Type and message of an error; of a long message the beginning."""
    text = " ".join(str(error).split())
    text = text if len(text) <= 500 else text[:500] + " ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class _Recorder(logging.Handler):
    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        if not str(record.msg).startswith(DEATHS) or not record.exc_info or record.exc_info[1] is None:
            return
        try:
            # Exclusive: the process that died of the cause comes first, those that died of its death later.
            with self._path.open("x") as file:
                file.write(in_one_line(record.exc_info[1]) + "\n")
        except OSError:
            # Noted already, or nowhere to note it: the log has it in any case.
            pass
