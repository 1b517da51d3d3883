"""The server process itself: vLLM's own API server, with one clear last line where it ends before its time.

The ``vllm`` command cannot be used: it asks for the metadata of a distribution named ``vllm``, which CPU builds do not have.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing.process
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn

from vllm_specdraft import failures
from vllm_specdraft.config import EngineConfig

_TRACKER_S = 5.0
_STOPPING = (signal.SIGINT, signal.SIGTERM)


class StoppedError(SystemExit):
    """A signal ended the start; the code is the one that shells give."""


def main() -> int:
    """Run the server; the exit code."""
    for number in _STOPPING:
        # An exception would not do while modules are imported: what raises it may be wrapped (by ``__set_name__``) or dropped.
        signal.signal(number, _stop_at_once)
    try:
        _check_options(sys.argv[1:])
        from vllm.entrypoints.launchers.api_server import entry

        _signals_end_the_start(entry)
        _children_leave_ctrl_c_to_us()
        entry.main()
    except (KeyboardInterrupt, StoppedError) as stop:
        code = stop.code if isinstance(stop, StoppedError) and isinstance(stop.code, int) else 128 + signal.SIGINT
        _end("stopped", code)
    except Exception as error:  # noqa: BLE001 - whatever ended the server is told in one line, and in full where it may be a fault
        cause = _noted()
        if (cause is None and not isinstance(error, (ValueError, OSError))) or os.environ.get("VLLM_LOGGING_LEVEL") == "DEBUG":
            traceback.print_exc()
        _end(f"the server did not start: {cause or failures.in_one_line(error)}", 1)
    if (cause := _noted()) is not None:
        _end(f"the engine died: {cause}", 1)
    return 0


def _signals_end_the_start(entry: Any) -> None:
    """Let Ctrl-C and SIGTERM end a server that still starts, the first time they come.

    Why: vLLM 0.32 turns SIGTERM into a KeyboardInterrupt, which one of its own context managers (`zmq_socket_ctx`) drops: it then
    waits ten minutes for an engine. And asyncio gives the first Ctrl-C to a task that does not listen while it waits.
    Remove when: `zmq_socket_ctx` lets KeyboardInterrupt through.
    """
    original = entry.run_server_worker

    @functools.wraps(original)
    async def run_server_worker(*args: Any, **kwargs: Any) -> None:
        for number in _STOPPING:
            # Once the server listens, vLLM puts its own graceful handlers in place of these.
            signal.signal(number, _stop)
        await original(*args, **kwargs)

    entry.run_server_worker = run_server_worker


def _stop_at_once(number: int, _: object) -> NoReturn:
    """End where nothing has been started yet that would have to be ended first."""
    _end("stopped", 128 + number)


def _stop(number: int, _: object) -> NoReturn:
    raise StoppedError(128 + number)


def _children_leave_ctrl_c_to_us() -> None:
    """Start child processes with SIGINT blocked.

    Why: a terminal sends Ctrl-C to the engine and its worker, too. While they import they answer with tracebacks, and later they
    end before the server has asked them to. The server ends them itself, by SIGTERM.
    Remove when: vLLM shields its processes from the terminal.
    """
    original = multiprocessing.process.BaseProcess.start

    @functools.wraps(original)
    def start(self: multiprocessing.process.BaseProcess) -> None:
        # Started inside, the tracker would unblock the signal again before the child begins.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            original(self)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    multiprocessing.process.BaseProcess.start = start  # type: ignore[method-assign]


def _check_options(words: Sequence[str]) -> None:
    """End with one line for an option or a stray word that vLLM's own parser does not take as it stands."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_specdraft import parsing

    cli_env_setup()

    class Strict(FlexibleArgumentParser):
        """vLLM's parser with our manners."""

        def error(self, message: str) -> NoReturn:
            known = [option for action in self._actions for option in action.option_strings]
            name = message.removeprefix("unrecognized arguments: ").partition(" ")[0].partition("=")[0]
            hint = parsing.nearest(name, known) if name.startswith("-") else ""
            sys.stderr.write(f"specdraft: {message}{hint}\n")
            sys.exit(2)

    parser: Any = make_arg_parser(Strict(allow_abbrev=False))
    args = parser.parse_args(list(words))
    if args.model_tag is not None:
        parser.error(f"unexpected argument {args.model_tag!r}: the target comes right after `serve`")


def _noted() -> str | None:
    config = EngineConfig.from_environment()
    return failures.first(Path(config.state_dir)) if config is not None else None


def _end(text: str, code: int) -> NoReturn:
    """End with a last line, after everything else that ends with this process has said its own."""
    atexit._run_exitfuncs()
    # It reports what killed children left behind, when it sees the end of them and of us; a child that hangs must not hold us.
    tracker = threading.Thread(target=resource_tracker._resource_tracker._stop, daemon=True)  # type: ignore[attr-defined]
    tracker.start()
    tracker.join(_TRACKER_S)
    sys.stdout.flush()
    sys.stderr.write(f"specdraft: {text}\n")
    sys.stderr.flush()
    # Not sys.exit: extension modules count their leaks aloud when the interpreter ends.
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
