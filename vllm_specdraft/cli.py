"""The ``specdraft`` command."""

from __future__ import annotations

import argparse
import http.client
import json
import logging
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from trainer_bridge.errors import BridgeError
from vllm_specdraft import embedded, serve
from vllm_specdraft.config import SettingsError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["demo"]:
        # The demo has a parser of its own, with its own --help.
        from vllm_specdraft.demo.run import main as demo

        return demo(arguments[1:])
    parser = _parser()
    target = None
    if arguments[:1] == ["serve"] and len(arguments) > 1 and not arguments[1].startswith("-"):
        target = Path(arguments.pop(1))
    args, extra = parser.parse_known_args(arguments)
    args.target = getattr(args, "target", target)
    if extra and args.run is not _serve:
        parser.error(f"unknown arguments: {' '.join(extra)}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        return args.run(args, extra)
    except (BridgeError, SettingsError, embedded.ModelError, OSError) as error:
        print(f"specdraft: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specdraft", description="A vLLM rollout server that keeps its draft model fresh.", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    model = commands.add_parser("model", help="convert the embedded default model, once", allow_abbrev=False)
    model.add_argument("--force", action="store_true", help="convert again")
    model.set_defaults(run=_model)

    draft = commands.add_parser("draft", help="make or describe draft checkpoints", allow_abbrev=False)
    actions = draft.add_subparsers(required=True, metavar="ACTION")
    init = actions.add_parser("init", help="a new draft for a target", allow_abbrev=False)
    init.add_argument("target", type=Path, metavar="TARGET", help="Hugging Face directory of a Llama-like model")
    init.add_argument("out", type=Path, metavar="OUT", help="directory to write")
    init.add_argument("--type", default="eagle3", help="draft type (default: eagle3)")
    init.add_argument("--draft-vocab-size", type=int, default=4096, help="tokens the draft can propose (default: 4096)")
    init.add_argument("--tap-layers", type=_layers, metavar="L,L,L", help="layers to tap (default: low, middle, high)")
    init.add_argument(
        "--text", type=Path, action="append", default=[], metavar="FILE", help="text like the traffic's; may be repeated"
    )
    init.add_argument("--seed", type=int, default=0)
    init.add_argument("--no-measure", action="store_true", help="do not measure the gain of the warm start (saves half a minute)")
    init.set_defaults(run=_draft_init)
    info = actions.add_parser("info", help="what a draft checkpoint is", allow_abbrev=False)
    info.add_argument("directory", type=Path, metavar="DIR")
    info.set_defaults(run=_draft_info)

    server = commands.add_parser(
        "serve",
        help="serve a target with a draft that learns",
        usage="specdraft serve [TARGET] [options] [options of vllm serve]",
        description="Serve TARGET (a Hugging Face directory; by default the embedded model) over the OpenAI API on 127.0.0.1.",
        allow_abbrev=False,
    )
    serve.add_arguments(server)
    server.set_defaults(run=_serve)

    status = commands.add_parser("status", help="status of a running server", allow_abbrev=False)
    status.add_argument("url", metavar="URL", help="e.g. http://127.0.0.1:8000")
    status.add_argument("--json", action="store_true", help="the whole status as JSON")
    status.set_defaults(run=_status)

    commands.add_parser("demo", help="watch a draft learn; `specdraft demo --help`", add_help=False)
    return parser


def _layers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layers like 2,15,27") from None


def _model(args: argparse.Namespace, extra: Sequence[str]) -> int:
    directory = embedded.ensure(force=args.force)
    digest = embedded.verify(directory)
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
    target = args.target or embedded.ensure()
    draft = None
    if not args.plain:
        from vllm_specdraft import drafts

        draft = drafts.auto(target) if args.draft == "auto" else Path(args.draft)
        drafts.info(draft)
    command = serve.build(target, args, extra, draft, os.environ)
    print(f"specdraft: serving {target}", *command.notes, sep="\n", flush=True)
    serve.become(command)
    return 0


def _status(args: argparse.Namespace, extra: Sequence[str]) -> int:
    url = f"{args.url.rstrip('/')}/specdraft/status"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        raise SettingsError(f"{url} answered {error.code}: is this a specdraft server?") from None
    except (OSError, http.client.HTTPException) as error:
        raise SettingsError(f"no answer from {url}: {getattr(error, 'reason', error)}") from None
    except ValueError as error:
        # No URL at all, or an answer that is not JSON.
        raise SettingsError(f"no status at {url} ({error}): needs the address of a specdraft server, http://HOST:PORT") from None
    if not isinstance(found, dict) or "draft_version" not in found:
        raise SettingsError(f"no status at {url}: is this a specdraft server?")
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    learning, replay = found["learning"], found["replay"]
    length = found["accepted_length"]
    lines = {
        "policy": f"v{found['policy_version']}",
        "draft": f"v{found['draft_version']} ({found['draft_type']}, {found['draft_digest'][:12]})",
        "accepted length": "-" if length is None else f"{length:.2f} tokens per step",
        "window": found["idle_state"] + (" (learning paused)" if learning["paused"] else ""),
        "learned": f"{learning['seconds']:.1f} s, {learning['tokens']} tokens, {learning['steps']} steps",
        "held out": f"served {learning['held_out_served']}, in training {learning['held_out_candidate']}",
        "replay": f"{replay['samples']} + {replay['held_out_samples']} held out, {replay['bytes'] / 1e6:.0f} MB",
        "publishes": str(len(found["publishes"])),
        "last error": found["last_error"] or "none",
    }
    for key, value in lines.items():
        print(f"{key:16} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
