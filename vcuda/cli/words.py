"""The parser of the command line: an unknown word is named with the nearest known one, under its command's usage."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from vcuda.quoted import quoted

LONGEST_INTERVAL_S = 60.0
_CHOICE = re.compile(r"invalid choice: '(?P<word>[^']*)' \(choose from (?P<known>.*)\)", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """Everything that argparse says, and "did you mean"; its subcommands' parsers are of the same kind."""

    _words: Sequence[str] = ()

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]  # typeshed overloads it
        self._words = sys.argv[1:] if args is None else list(args)
        found, rest = super().parse_known_args(self._words, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}{self._meant(rest[0])}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        if (typo := self._unknown_option()) is not None:
            message = f"there is no option {typo}{self._meant(typo)}"
        elif choice := _CHOICE.search(message):
            message += _nearest(choice["word"], re.findall(r"'([^']*)'", choice["known"]))
        super().error(message)

    def _unknown_option(self) -> str | None:
        """The first word before COMMAND that looks like an option and is none: often why another one is missing."""
        words = iter(self._words)
        for word in words:
            if not word.startswith("--") or word == "--":
                return None
            name, equals, _ = word.partition("=")
            action = self._option_string_actions.get(name)
            if action is None:
                return name
            if action.nargs is None and not equals:
                next(words, None)
        return None

    def _meant(self, word: str) -> str:
        return _nearest(word.partition("=")[0], [name for name in self._option_string_actions if name.startswith("--")])


def _nearest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def interval(text: str) -> float:
    """Seconds to measure for."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= LONGEST_INTERVAL_S:
        raise argparse.ArgumentTypeError(f"{quoted(text, 40)} is no time; write seconds, 0 to {LONGEST_INTERVAL_S:.0f}")
    return seconds
