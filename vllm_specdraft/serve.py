"""``specdraft serve``: turn one short command into a well-set vLLM server with the plugin, and become it.

Everything that can be wrong is looked at first: an engine takes most of a minute to say so. Imports neither torch nor vLLM: the
settings must be in the environment before either is loaded.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from trainer_bridge.config import check_address
from vllm_specdraft import cpu, embedded, engine_options, failures, preflight, security
from vllm_specdraft import target as targets
from vllm_specdraft.config import ENVIRONMENT, LEARN_DTYPES, EngineConfig, SettingsError
from vllm_specdraft.console import Console
from vllm_specdraft.engine_options import EngineOptions

PLUGIN = "specdraft"
NAMED_ELSEWHERE = {"--model": "name the target right after `serve`"}
"""Options of vLLM that would not do what they say, with the plugin and without."""
REFUSED = {
    "--speculative-config": "the draft is ours: use --draft and --num-speculative-tokens",
    "-sc": "the draft is ours: use --draft and --num-speculative-tokens",
    "--worker-extension-cls": "the plugin is one",
    "--pipeline-parallel-size": "tensor parallelism only so far",
    "-pp": "tensor parallelism only so far",
    "--data-parallel-size": "tensor parallelism only so far",
    "-dp": "tensor parallelism only so far",
    "--nnodes": "one machine so far",
    "--no-enforce-eager": "a compiled draft would keep the weights it was compiled with",
    "--async-scheduling": "the taps read sampled tokens after each step",
    "--headless": "the routes are in the API server",
    "--grpc": "the routes are in the HTTP server",
    "--api-server-count": "one API server publishes the drafts",
    "-asc": "one API server publishes the drafts",
}
"""Options of vLLM that contradict the plugin, and why."""
REFUSED_GOVERNED = {"--scheduler-cls": "the governor is in the scheduler: add --no-governor"}
LARGEST_BATCH = 1 << 20
SCHEDULER = "vllm_specdraft.governor.scheduler.GovernedScheduler"
WORKER_EXTENSION = "vllm_specdraft.worker.SpecdraftWorker"
KV_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"


@dataclass(frozen=True, kw_only=True)
class Command:
    """A server process: what to run and with which environment, and lines for the user."""

    target: str
    argv: list[str]
    environment: dict[str, str]
    notes: list[str]
    warnings: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Our own options; everything else goes to vLLM as it is. TARGET is taken off before: among options of another
    parser, argparse cannot tell a positional from an option's value."""
    parser.add_argument(
        "--draft", default="auto", metavar="DIR|TYPE|auto",
        help="draft checkpoint, or a draft type (eagle3, dflash): a new one of it, kept in the cache; auto: of the better type",
    )  # fmt: skip
    parser.add_argument(
        "--num-speculative-tokens", type=int, metavar="K", help="draft tokens per step (default: what pays best for its type)"
    )
    parser.add_argument(
        "--speculate-up-to",
        type=int,
        metavar="N",
        help="largest batch that is drafted for (default: no limit); with --no-governor twice as many get one token, "
        "more none (CPU default: 4; 0: no limit)",
    )
    parser.add_argument(
        "--no-governor", action="store_true", help="draft --num-speculative-tokens in every step, whether it pays or not"
    )
    parser.add_argument("--no-learn", action="store_true", help="serve and tap, but do not train the draft")
    parser.add_argument("--no-auto-publish", action="store_true", help="train, but swap only when asked over HTTP")
    parser.add_argument("--slice-ms", type=float, default=100.0, help="longest slice of training, in ms (default: 100)")
    parser.add_argument("--replay-mb", type=float, default=1024.0, help="bound of the replay buffer, in MB (default: 1024)")
    parser.add_argument(
        "--learn-dtype", choices=LEARN_DTYPES, default="auto",
        help="dtype of the factors of training's matrix products (default: auto, bfloat16 where the processor multiplies in it)",
    )  # fmt: skip
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak learning rate of the draft (default: 1e-3)")
    parser.add_argument("--kv-gib", type=int, help="KV cache of the CPU engine, in GiB (default: by free memory)")
    parser.add_argument("--state-dir", type=Path, help="directory of the status file (default: a new temporary one)")
    parser.add_argument(
        "--checkpoint-dir", type=Path, help="keep what is learned there, across restarts (default: it ends with the server)"
    )
    parser.add_argument(
        "--checkpoint-seconds", type=float, default=60.0, metavar="S", help="time between two of them while learning (default: 60)"
    )
    parser.add_argument(
        "--min-policy-version",
        type=int,
        default=0,
        metavar="N",
        help="no answers before this policy version is served: for an engine that (re)joins a run (default: 0, none is waited for)",
    )
    parser.add_argument(
        "--sync-bind", default="tcp://127.0.0.1:0", metavar="ADDR", help="where trainers bring weights (default: a free local port)"
    )
    parser.add_argument("--sync-keys", type=Path, metavar="DIR", help="CURVE keys of that address (`specdraft keys DIR`)")
    parser.add_argument("--no-sync", action="store_true", help="take no weights from anybody")
    parser.add_argument(
        "--keep-previous", action="store_true", help="keep the weights before the last update in memory, for `specdraft rollback`"
    )
    parser.add_argument("--plain", action="store_true", help="the stock engine with the same settings: no plugin, no draft")
    parser.add_argument(
        "--insecure", action="store_true", help="allow a --host that other machines reach without an --api-key (default: refused)"
    )


def prepare(args: argparse.Namespace, extra: Sequence[str], *, own: Sequence[str], console: Console) -> Command:
    """Check everything that can be checked before an engine runs, make what is missing, and build the command.

    Args:
        args: our options, and `target` (None: the embedded model).
        extra: options for vLLM.
        own: names of our options, for what may have been meant by an unknown one.

    Raises `SettingsError` or `BridgeError` in words for the user. The quick checks come first.
    """
    options = engine_options.read(extra)
    check_ranges(args)
    for refused in (NAMED_ELSEWHERE, {} if args.plain else REFUSED, {} if args.plain or args.no_governor else REFUSED_GOVERNED):
        _refuse_contradictions(options, refused)
    engine_options.refuse_unknown(options, own)
    warning = security.refuse_open_bind(
        host=options.host, uds=options.uds, keys=security.keys_of(options.api_keys, os.environ), insecure=args.insecure
    )
    if not args.no_sync and not args.plain:
        _check_sync(args)
    if options.uds:
        preflight.check_unix_socket(options.uds)
    else:
        preflight.check_port(options.host, options.port)
    for name in ("state_dir", "checkpoint_dir"):
        if (directory := getattr(args, name)) is not None:
            preflight.check_writable(f"--{name.replace('_', '-')}", directory)

    directory = args.target or _default_target(console)
    # A plain server may be given the name of a model that vLLM fetches itself.
    target = None if args.plain and not directory.exists() and not directory.is_absolute() else targets.read(directory)
    draft, draft_parameters = None, 0
    if not args.plain and target is not None:
        draft = _draft_for(target, args, console)
        draft_parameters = _check_fit(draft, target, args, console)
    command = build(directory, args, options, draft, os.environ)
    if _on_cpu() and target is not None:
        kv_gib = int(command.environment.get(KV_VARIABLE) or os.environ[KV_VARIABLE])
        need = preflight.MemoryNeed(
            target=preflight.weights_bytes(target.parameters, options.dtype),
            draft=preflight.draft_bytes(draft_parameters, learns=not args.no_learn),
            kv_cache=kv_gib * preflight.GIB * options.tensor_parallel_size,
            # And the rows of running requests beside it.
            replay=0 if args.plain else int(1.25 * args.replay_mb * 1e6),
        )
        preflight.check_memory(need, preflight.available_bytes())
    if warning is not None:
        command.warnings.append(warning)
    return command


def _check_sync(args: argparse.Namespace) -> None:
    """Say now what the receiver of weights would say when the engine is up."""
    host, port = check_address(args.sync_bind, keys=args.sync_keys, insecure=args.insecure, option="--sync-bind")
    if port:
        preflight.check_port("" if host == "*" else host, port, option="--sync-bind")
    if args.sync_keys is not None:
        from trainer_bridge.security import check_server_keys

        check_server_keys(args.sync_keys)


def check_ranges(args: argparse.Namespace) -> None:
    """Raise `SettingsError` for one of our options that is out of range."""
    for name in ("num_speculative_tokens", "slice_ms", "replay_mb", "learning_rate", "kv_gib", "checkpoint_seconds"):
        value = getattr(args, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise SettingsError(f"--{name.replace('_', '-')} is {value}, must be above 0")
    if args.speculate_up_to is not None and args.speculate_up_to < 0:
        raise SettingsError(f"--speculate-up-to is {args.speculate_up_to}, must be a batch size, or 0 for no limit")
    if args.min_policy_version < 0:
        raise SettingsError(f"--min-policy-version is {args.min_policy_version}, must be a version, or 0 to wait for none")
    space = os.environ.get(KV_VARIABLE)
    if space is not None and args.kv_gib is None and (not space.isdecimal() or int(space) < 1):
        raise SettingsError(f"{KV_VARIABLE} is {space!r} in the environment, needs a whole number of GiB; or use --kv-gib")


def _default_target(console: Console) -> Path:
    if embedded.is_converted():
        return embedded.ensure()
    with console.working(f"converting the default model, {embedded.NAME}, once"):
        return embedded.ensure()


def _draft_for(target: targets.Target, args: argparse.Namespace, console: Console) -> Path:
    """The draft to begin with: what an earlier server kept, the one named, or one made now."""
    from trainer_bridge.draft import registry
    from vllm_specdraft import drafts, learner_state

    targets.check_shapes(target)
    if args.checkpoint_dir is not None and (kept := learner_state.served_draft(args.checkpoint_dir)) is not None:
        if args.draft != "auto":
            console.line(f"--draft {args.draft} is not used: {kept} was served last; another --checkpoint-dir would start from it")
        return kept
    kind = drafts.DEFAULT_TYPE if args.draft == "auto" else args.draft
    if kind not in registry.names():
        return Path(args.draft)
    with console.working(f"the first draft of {target.directory.name} (made once)"):
        return drafts.auto(target.directory, kind=kind)


def _check_fit(draft: Path, target: targets.Target, args: argparse.Namespace, console: Console) -> int:
    """The draft's number of parameters, when it and what was learned before fit this target; says what that was."""
    from trainer_bridge.draft import checkpoint
    from vllm_specdraft import fit, learner_state

    parameters = fit.check(draft, target.config)
    if args.checkpoint_dir is not None:
        saved = learner_state.read(args.checkpoint_dir, learner_state.identity_of(checkpoint.read_config(draft)))
        if saved is not None:
            steps, seconds = saved.progress["steps"], saved.progress["seconds"]
            console.line(
                f"going on from {args.checkpoint_dir}: draft {saved.draft_version}, {steps} steps, {seconds:.0f} s learned"
            )
    return parameters


def build(
    target: Path, args: argparse.Namespace, options: EngineOptions, draft: Path | None, environ: Mapping[str, str]
) -> Command:
    """The server command for our options, vLLM's options, and a draft directory (None with ``--plain``)."""
    words = ["--model", str(target), *options.words]
    on_cpu = _on_cpu()

    def default(name: str, *values: str) -> None:
        if name not in options.names:
            words.extend([name, *values])

    default("--host", engine_options.LOOPBACK)
    environment: dict[str, str] = {}
    notes: list[str] = []
    if on_cpu:
        settings = cpu.choose(environ, kv_gib=args.kv_gib, ranks=options.tensor_parallel_size)
        environment |= settings.environment
        notes += [f"  {name:28} {value}" for name, value in settings.notes.items()]
        default("--dtype", "float32")
        if "--no-enforce-eager" not in options.names:
            default("--enforce-eager")
    if args.plain:
        wanted = environ["VLLM_PLUGINS"].split(",") if "VLLM_PLUGINS" in environ else sorted(_plugin_names())
        environment["VLLM_PLUGINS"] = ",".join(name for name in wanted if name != PLUGIN)
        return Command(target=str(target), argv=_entry(words), environment=environment, notes=notes)
    assert draft is not None
    from trainer_bridge.draft import registry

    governed = not args.no_governor
    limit = args.speculate_up_to if args.speculate_up_to is not None else (4 if on_cpu and not governed else 0)
    kind = registry.of_config(json.loads((draft / "config.json").read_text()))
    tokens = args.num_speculative_tokens or kind.default_tokens
    speculative = _speculative_config(draft, kind.engine_method, tokens=tokens, limit=limit, governed=governed)
    words += ["--speculative-config", json.dumps(speculative), "--worker-extension-cls", WORKER_EXTENSION]
    if governed:
        words += ["--scheduler-cls", SCHEDULER]
    # Last, and so outermost: it sees every request first.
    words += ["--middleware", security.GUARD]
    environment |= _plugin_environment(args, draft, environ, tokens=tokens, limit=limit)
    notes += [
        f"  {'draft':28} {draft} ({kind.name}, {tokens} tokens a step)",
        f"  {'speculation':28} {_speculation(limit, governed=governed)}",
        f"  {'learning':28} {'off' if args.no_learn else f'in idle windows, slices of at most {args.slice_ms:g} ms'}",
        f"  {'access':28} {_access(options, environ)}",
    ]
    return Command(target=str(target), argv=_entry(words), environment=environment, notes=notes)


def _speculation(limit: int, *, governed: bool) -> str:
    if governed:
        return f"where it is measured to pay{f', batches up to {limit}' if limit else ''}"
    return f"batches up to {limit} in full, up to {2 * limit} one token" if limit else "always"


def _plugin_environment(
    args: argparse.Namespace, draft: Path, environ: Mapping[str, str], *, tokens: int, limit: int
) -> dict[str, str]:
    """What makes vLLM's processes load and configure the plugin."""
    state_dir = args.state_dir or new_state_dir()
    state_dir.mkdir(parents=True, exist_ok=True)
    failures.forget(state_dir)
    engine = EngineConfig(
        draft_dir=str(draft),
        state_dir=str(state_dir),
        num_speculative_tokens=tokens,
        governor=not args.no_governor,
        speculate_up_to=limit,
        learn=not args.no_learn,
        auto_publish=not args.no_auto_publish,
        slice_ms=args.slice_ms,
        replay_bytes=int(args.replay_mb * 1e6),
        learn_dtype=args.learn_dtype,
        learning_rate=args.learning_rate,
        checkpoint_dir=str(args.checkpoint_dir.absolute()) if args.checkpoint_dir is not None else None,
        checkpoint_interval_s=args.checkpoint_seconds,
        min_policy_version=args.min_policy_version,
        sync_bind=None if args.no_sync else args.sync_bind,
        sync_keys=str(args.sync_keys.absolute()) if args.sync_keys is not None else None,
        sync_insecure=args.insecure,
        keep_previous=args.keep_previous,
    )
    wanted = environ.get("VLLM_PLUGINS", "").split(",") if "VLLM_PLUGINS" in environ else sorted(_plugin_names())
    return {
        ENVIRONMENT: engine.to_json(),
        # The other runner has other classes and states: our taps would tap nothing there.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        # vLLM loads HTTP plugins only when they are named; naming ours must not switch the others off.
        "VLLM_PLUGINS": ",".join(dict.fromkeys([*filter(None, wanted), PLUGIN])),
    }


def _access(options: EngineOptions, environ: Mapping[str, str]) -> str:
    place = options.uds or f"{options.host or 'all interfaces'}, port {options.port}"
    keys = security.keys_of(options.api_keys, environ)
    return f"{place}; {'what changes something needs the API key' if keys else 'no API key'}"


def _refuse_contradictions(options: EngineOptions, refused: Mapping[str, str]) -> None:
    """Raise `SettingsError` for the first option of vLLM that is among the `refused`, on the command line or in a file."""
    for name in sorted(options.names & refused.keys()):
        plain = ", or serve with --plain" if refused is REFUSED else ""
        raise SettingsError(f"{name} does not go with specdraft ({refused[name]}); leave it out{plain}")


def _speculative_config(draft: Path, method: str, *, tokens: int, limit: int, governed: bool) -> dict[str, object]:
    """vLLM's speculative config for a draft checkpoint; `limit`: largest batch drafted for in full, 0 for all."""
    config: dict[str, object] = {
        "method": method,
        "model": str(draft),
        "num_speculative_tokens": tokens,
        # Else a cached prompt's last block is computed once more than without a draft; a CPU's block is 128 tokens, all of most
        # prompts. It is for one entry of the draft's KV cache, at the block's end, that was made from the token which came next
        # then: the same one for answers to one prompt, and for others a guess that may be a little worse.
        "disable_eagle_block_drop": True,
    }
    if governed:
        # Any schedule: the governor takes its place.
        config["num_speculative_tokens_per_batch_size"] = [[1, LARGEST_BATCH, tokens]]
    elif limit:
        # Verifying k + 1 rows per request is nearly free while the weights' way through memory is the bound, and is paid in
        # full when arithmetic is: on a CPU from some tens of rows on.
        schedule = [[1, limit, tokens], [limit + 1, 2 * limit, 1], [2 * limit + 1, LARGEST_BATCH, 0]]
        config["num_speculative_tokens_per_batch_size"] = schedule
    return config


def new_state_dir() -> Path:
    """A directory for this process's status; those of processes that are gone are swept."""
    root = Path(tempfile.gettempdir())
    for old in root.glob("specdraft-state-*"):
        owner = old.name.removeprefix("specdraft-state-").partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"specdraft-state-{os.getpid()}-"))


def become(command: Command) -> None:
    """Replace this process by the server."""
    os.execve(command.argv[0], command.argv, {**os.environ, **command.environment})


def _entry(options: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "vllm_specdraft.serve_entry", *options]


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
