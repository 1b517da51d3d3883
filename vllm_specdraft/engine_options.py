"""vLLM's own options as the user wrote them, on the command line and in ``--config FILE``.

Read here before vLLM is loaded, which takes seconds, and long before its engine, which takes a minute: what is listened on,
which keys there are, and whether an option exists at all. vLLM parses them again; nothing here changes their meaning.
Imports neither torch nor vLLM.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from vllm_specdraft.config import SettingsError
from vllm_specdraft.parsing import nearest

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 8000
_WITH_ALL_OPTIONS = ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py")
"""Files of vLLM whose option strings and dataclass fields are the options it has."""
_WITH_MORE = ("config", "platforms", "utils/argparse_utils.py")
"""Files that may add to them; their other names are let through to vLLM's own parser."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What is needed to know of vLLM's options before it runs."""

    words: tuple[str, ...]
    """The command line for vLLM, with ``--config FILE`` in the one spelling that it reads."""
    names: frozenset[str]
    """Names of all options given, in the config file too, with dashes."""
    host: str
    """What is bound; empty for all interfaces."""
    port: int
    uds: str | None
    """Unix socket that is bound instead of host and port."""
    api_keys: tuple[str, ...]
    """Values of ``--api-key``."""
    dtype: str | None
    tensor_parallel_size: int


def name_of(word: str) -> str:
    """``--max_model_len=5`` to ``--max-model-len``."""
    return word.partition("=")[0].replace("_", "-")


def read(extra: Sequence[str]) -> EngineOptions:
    """Read vLLM's options. Raises `SettingsError` for a value or a config file that it would stumble over later."""
    words = _split_config(extra)
    # The command line is stronger than the file, as in vLLM.
    merged = [_normal(word) for word in (*_config_words(words), *words)]
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host")
    parser.add_argument("--port", default=str(DEFAULT_PORT))
    parser.add_argument("--uds")
    parser.add_argument("--api-key", nargs="+", default=[])
    parser.add_argument("--dtype")
    parser.add_argument("--tensor-parallel-size", "-tp", default="1")
    found, _ = parser.parse_known_args(merged)
    return EngineOptions(
        words=tuple(words),
        names=frozenset(name_of(word) for word in merged if re.match(r"--?[a-zA-Z]", word)),
        host=LOOPBACK if found.host is None else found.host,
        port=_number("--port", found.port, 65535),
        uds=found.uds or None,
        api_keys=tuple(found.api_key),
        dtype=found.dtype,
        tensor_parallel_size=_number("--tensor-parallel-size", found.tensor_parallel_size, 1024),
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def _normal(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _number(name: str, text: str, largest: int) -> int:
    if not text.isdecimal() or not 0 < int(text) <= largest:
        raise SettingsError(f"{name} {text}: needs a number from 1 to {largest}")
    return int(text)


def _split_config(extra: Sequence[str]) -> list[str]:
    """``--config=FILE`` as two words: in one, vLLM takes it and reads nothing."""
    words: list[str] = []
    for word in extra:
        words += word.split("=", 1) if word.startswith("--config=") else [word]
    return words


def _config_words(words: Sequence[str]) -> list[str]:
    """The options of ``--config FILE`` as words of a command line. Raises `SettingsError`."""
    places = [index for index, word in enumerate(words) if word == "--config"]
    if not places:
        return []
    if len(places) > 1:
        raise SettingsError("--config is given twice; vLLM reads one file")
    if places[0] == len(words) - 1:
        raise SettingsError("--config needs a YAML file")
    path = Path(words[places[0] + 1])
    found: list[str] = []
    for key, value in _read_yaml(path).items():
        if isinstance(value, bool):
            found.append(f"--{key}" if value else f"--no-{key}")
        elif isinstance(value, list):
            found += [f"--{key}", *map(str, value)] if value else []
        else:
            found += [f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


def _read_yaml(path: Path) -> dict[object, object]:
    import yaml

    if path.suffix not in (".yaml", ".yml"):
        raise SettingsError(f"--config {path}: vLLM wants a file named *.yaml or *.yml")
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"--config {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise SettingsError(f"--config {path} needs lines like `max-model-len: 2048`, it holds {_kind(content)}")
    return content


def _kind(content: object) -> str:
    return "nothing" if content is None else f"a {type(content).__name__}"


def refuse_unknown(options: EngineOptions, own: Iterable[str]) -> None:
    """Raise `SettingsError`, with the nearest known name, for an option that neither we (`own`) nor vLLM have.

    Known are the names in vLLM's source text: a look at it costs milliseconds, its parser takes seconds to load. A name that is
    there and is no option after all is refused by that parser, a little later.
    """
    root = _root_of_vllm()
    if root is None:
        raise SettingsError(
            "vLLM is not installed in this Python: `make setup` installs its CPU build, `pip install '.[gpu]'` vLLM"
        )
    certain = _names_in([root / name for name in _WITH_ALL_OPTIONS])
    if not {"--host", "--max-model-len", "--api-key"} <= certain or importlib.metadata.entry_points(group="vllm.platform_plugins"):
        # A vLLM of another shape, or a platform that brings options of its own: its parser is the judge.
        return
    possible = certain | _names_in([root / name for name in _WITH_MORE])
    for name in sorted(options.names):
        if not name.startswith("--"):
            continue
        plain = name.partition(".")[0].rstrip("+")
        if plain not in possible and plain.replace("--no-", "--", 1) not in possible:
            raise SettingsError(unknown(name, {*own, *certain}))


def unknown(name: str, known: Iterable[str]) -> str:
    """The message for an option that does not exist."""
    return f"unknown option {name}{nearest(name, known)}"


def _root_of_vllm() -> Path | None:
    """The folder of the installed vLLM; it is not imported."""
    found = importlib.util.find_spec("vllm")
    return Path(found.origin).parent if found is not None and found.origin is not None else None


def _names_in(paths: Iterable[Path]) -> set[str]:
    """Option strings and names of dataclass fields (as options) in Python files and folders of them."""
    names: set[str] = {"--help"}
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.exists() else []:
            text = file.read_text(errors="replace")
            names.update(re.findall(r"""["'](--[a-z][a-z0-9-]*)["']""", text))
            names.update("--" + field.replace("_", "-") for field in re.findall(r"^    ([a-z]\w*) *:", text, re.MULTILINE))
    return names
