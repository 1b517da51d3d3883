"""The ``specdraft`` command."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from trainer_bridge.errors import BridgeError
from vllm_specdraft import embedded, serve, status_view
from vllm_specdraft import target as targets
from vllm_specdraft.config import SettingsError
from vllm_specdraft.console import Console
from vllm_specdraft.drafts import DEFAULT_DRAFT_VOCAB, DEFAULT_TYPE
from vllm_specdraft.parsing import Parser
from vllm_specdraft.security import KEY_VARIABLE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["demo"]:
        # The demo has a parser of its own, with its own --help.
        from vllm_specdraft.demo.run import main as demo

        return demo(arguments[1:])
    target = None
    if arguments[:1] == ["serve"] and len(arguments) > 1 and not arguments[1].startswith("-"):
        target = Path(arguments.pop(1))
    args, extra = _parser().parse_known_args(arguments)
    args.target = getattr(args, "target", target)
    if extra and args.run is not _serve:
        args.parser.refuse(extra)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        with _terminable():
            return args.run(args, extra)
    except BrokenPipeError:
        # Whoever read the output has gone; there is nobody to tell. Python would try to write once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (BridgeError, SettingsError, embedded.ModelError, OSError) as error:
        print(f"specdraft: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        return 128 + (signal.SIGTERM if stop.args else signal.SIGINT)


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end a command the way Ctrl-C does: half-written files are removed on the way out."""

    def stop(*_: object) -> NoReturn:
        raise KeyboardInterrupt("terminated")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="specdraft", description="A vLLM rollout server that keeps its draft model fresh.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    model = commands.add_parser("model", help="convert the embedded default model, once")
    model.add_argument("--force", action="store_true", help="convert again")
    model.set_defaults(run=_model, parser=model)

    draft = commands.add_parser("draft", help="make or describe draft checkpoints")
    actions = draft.add_subparsers(required=True, metavar="ACTION")
    init = actions.add_parser("init", help="a new draft for a target")
    init.add_argument("target", type=Path, metavar="TARGET", help="Hugging Face directory of a Llama-like model")
    init.add_argument("out", type=Path, metavar="OUT", help="directory to write")
    init.add_argument("--type", default=DEFAULT_TYPE, help="draft type: eagle3 or dflash (default: %(default)s)")
    init.add_argument(
        "--draft-vocab-size", type=int, default=DEFAULT_DRAFT_VOCAB, help="tokens the draft can propose (default: %(default)s)"
    )
    init.add_argument("--tap-layers", type=_layers, metavar="L,L,L", help="layers to tap (default: low, middle, high)")
    init.add_argument(
        "--text", type=Path, action="append", default=[], metavar="FILE", help="text like the traffic's; may be repeated"
    )
    init.add_argument("--seed", type=int, default=0)
    init.add_argument("--no-measure", action="store_true", help="do not measure the gain of the warm start (saves half a minute)")
    init.set_defaults(run=_draft_init, parser=init)
    info = actions.add_parser("info", help="what a draft checkpoint is")
    info.add_argument("directory", type=Path, metavar="DIR")
    info.set_defaults(run=_draft_info, parser=info)

    server = commands.add_parser(
        "serve",
        help="serve a target with a draft that learns",
        usage="specdraft serve [TARGET] [options] [options of vllm serve]",
        description="Serve TARGET (a Hugging Face directory; by default the embedded model) over the OpenAI API on 127.0.0.1.",
    )
    serve.add_arguments(server)
    server.set_defaults(run=_serve, parser=server)

    status = commands.add_parser("status", help="status of a running server")
    status.add_argument("url", metavar="URL", help="e.g. http://127.0.0.1:8000")
    status.add_argument("--json", action="store_true", help="the whole status as JSON")
    status.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=2.0,
        metavar="SECONDS",
        help="look again and again until Ctrl-C (default: every 2 s)",
    )
    status.set_defaults(run=_status, parser=status)

    rollback = commands.add_parser("rollback", help="bring back what a running server served before")
    rollback.add_argument("url", metavar="URL", help="e.g. http://127.0.0.1:8000")
    rollback.add_argument("--draft", action="store_true", help="the draft alone (default: target and draft before the last update)")
    rollback.add_argument("--api-key", default=os.environ.get(KEY_VARIABLE), metavar="KEY", help=f"default: {KEY_VARIABLE}")
    rollback.set_defaults(run=_rollback, parser=rollback)

    keys = commands.add_parser("keys", help="make CURVE keys for weight sync between machines")
    keys.add_argument("directory", type=Path, metavar="DIR")
    keys.set_defaults(run=_keys, parser=keys)

    commands.add_parser("demo", help="watch a draft learn; `specdraft demo --help`", add_help=False)
    return parser


def _layers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layers like 2,15,27") from None


def _model(args: argparse.Namespace, extra: Sequence[str]) -> int:
    console = Console()
    if args.force or not embedded.is_converted():
        with console.working(f"converting {embedded.NAME} (once; about a minute)"):
            directory = embedded.ensure(force=args.force)
    else:
        directory = embedded.ensure()
    with console.working("checking its weights"):
        digest = embedded.verify(directory)
    with console.working("asking it for 12 + 30"):
        answer = embedded.generate_check(directory)
    print(f"{directory}\n  weights SHA-256 {digest}\n  asked for 12 + 30 it says: {answer}")
    return 0


def _draft_init(args: argparse.Namespace, extra: Sequence[str]) -> int:
    from vllm_specdraft import drafts

    texts = []
    for file in args.text:
        try:
            texts.append(file.read_text())
        except OSError as error:
            raise SettingsError(f"--text {file}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise SettingsError(f"--text {file} is no text: {error}") from None
    targets.check_shapes(targets.read(args.target))
    with Console().working(f"making a draft for {args.target}"):
        drafts.init(
            args.target,
            args.out,
            kind=args.type,
            draft_vocab_size=args.draft_vocab_size,
            tap_layers=args.tap_layers,
            texts=texts,
            seed=args.seed,
        )
    _print_info(drafts.info(args.out))
    if not args.no_measure:
        gain = drafts.warm_start_gain(args.target, args.out)
        print(
            f"warm start against a random one, both after {gain.steps} steps on {gain.tokens} tokens the target just generated, "
            f"on held-out answers:\n  loss {gain.warm_loss:.2f} (random {gain.random_loss:.2f}), "
            f"accepted length {gain.warm_accepted_length:.3f} (random {gain.random_accepted_length:.3f})"
        )
    return 0


def _draft_info(args: argparse.Namespace, extra: Sequence[str]) -> int:
    from vllm_specdraft import drafts

    _print_info(drafts.info(args.directory))
    return 0


def _print_info(info: dict) -> None:
    for key, value in info.items():
        print(f"{key:16} {value}")


def _serve(args: argparse.Namespace, extra: Sequence[str]) -> int:
    command = serve.prepare(args, extra, own=args.parser.option_strings(), console=Console())
    for warning in command.warnings:
        print(f"specdraft: {warning}", file=sys.stderr)
    print(f"specdraft: serving {command.target}", *command.notes, "starting vLLM ...", sep="\n", flush=True)
    serve.become(command)
    return 0


def _status(args: argparse.Namespace, extra: Sequence[str]) -> int:
    url = status_view.url_of(args.url)
    if args.watch is not None:
        if not 0 < args.watch < float("inf"):
            raise SettingsError(f"--watch {args.watch:g}: needs seconds above 0 between two looks")
        try:
            status_view.watch(url, every_s=args.watch, console=Console(), as_json=args.json)
        except KeyboardInterrupt:
            # The one way to end it.
            return 0
    try:
        found = status_view.fetch(url)
    except status_view.NoStatusError as error:
        raise SettingsError(str(error)) from None
    print(json.dumps(found, indent=1) if args.json else "\n".join(status_view.lines_of(found)))
    return 0


def _rollback(args: argparse.Namespace, extra: Sequence[str]) -> int:
    url = status_view.url_of(args.url).removesuffix("status") + "rollback"
    record = status_view.post(url, {} if args.draft else {"policy": True}, key=args.api_key)
    print(f"{record['origin']}: policy {record['policy_version']} and draft {record['draft_version']} serve")
    return 0


def _keys(args: argparse.Namespace, extra: Sequence[str]) -> int:
    from trainer_bridge import security

    for path in security.make_keys(args.directory):
        print(path)
    print(
        "the server needs server.key_secret and clients/ (specdraft serve --sync-keys DIR); "
        "a trainer's machine needs server.key and trainer.key_secret (connect(..., keys=DIR))"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
