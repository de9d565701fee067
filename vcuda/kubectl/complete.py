"""The command `kubectl_complete-vcuda`, which kubectl's shell completion runs with the words after `kubectl vcuda`.

It prints one candidate a line and then `:4`, cobra's word for "no file names" (ShellCompDirectiveNoFileComp). It never
says an error: a completion that fails completes nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vcuda.kube.errors import KubeError
from vcuda.kubectl import main as plugin
from vcuda.kubectl.errors import PluginError

_NO_FILES = ":4"
# What the first word after the command names, by the plural of its kind.
_OBJECTS = {"top": "pods", "explain": "pods", "resize": "pods", "nodes": "nodes", "doctor": "nodes"}
_BY_OPTION = {"-n": "namespaces", "--namespace": "namespaces", "--system-namespace": "namespaces", "--node": "nodes"}


def candidates(words: Sequence[str]) -> list[str]:
    """`words`: all that was typed, the last one being completed. Raises KubeError and PluginError."""
    *before, word = words or [""]
    if not before:
        return list(plugin.COMMANDS)
    command = before[0]
    if command not in plugin.COMMANDS:
        return []
    option = before[-1]
    if option in _BY_OPTION:
        return _names(_BY_OPTION[option], before)
    if word.startswith("-"):
        return _options(command)
    taken = _positional(command, before[1:])
    if taken == 0:
        return _names(_OBJECTS[command], before)
    return ["core=", "memory=", "core-limit="] if command == "resize" and taken == 1 else []


def _command_parser(command: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    plugin.COMMANDS[command][0].add_options(made)
    plugin.add_common(made)
    return made


def _options(command: str) -> list[str]:
    return [
        name for action in _command_parser(command)._actions for name in action.option_strings if name.startswith("--")
    ]


def _positional(command: str, words: Sequence[str]) -> int:
    """How many of these words are no options and no options' values."""
    valued = {
        name for action in _command_parser(command)._actions if action.nargs is None for name in action.option_strings
    }
    pairs = zip(words, ["", *words], strict=False)
    return sum(not word.startswith("-") and last not in valued for word, last in pairs)


def _names(kind: str, before: Sequence[str]) -> list[str]:
    made = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    plugin.add_common(made)
    known = list(before)
    if known[-1] in _BY_OPTION:
        known.pop()  # its value is being typed
    options, _ = made.parse_known_args(known)
    cluster = plugin.connect(options)
    return [item["metadata"]["name"] for item in cluster.all(kind, cluster.namespace if kind == "pods" else "")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Always 0."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        found = candidates(words)
    except (KubeError, PluginError, argparse.ArgumentError):
        found = []
    prefix = words[-1] if words else ""
    fit = sorted(name for name in found if name.startswith(prefix) and name.isprintable())
    print("\n".join([*fit, _NO_FILES]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
