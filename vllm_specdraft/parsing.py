"""Command-line parsing that answers a slip with one line."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, not in a page of usage; exit code 2. Guesses nothing from a beginning of a name."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"specdraft: {message}; see `{self.prog} --help`\n")

    def refuse(self, words: Iterable[str]) -> NoReturn:
        """End with the first of the `words` that this parser does not know, and the nearest one that it does."""
        word = next(iter(words))
        if not word.startswith("-"):
            self.error(f"unexpected argument {word!r}")
        name = word.partition("=")[0]
        self.error(f"unknown option {name}{nearest(name, self.option_strings())}")

    def option_strings(self) -> list[str]:
        """All options of this parser."""
        return [option for action in self._actions for option in action.option_strings]


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean X?`` for the known name like this one, or nothing."""
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.7)
    return f"; did you mean {found[0]}?" if found else ""
