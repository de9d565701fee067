"""`vcuda completion SHELL`: what a shell needs to complete our commands and options, made from the parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class _Level(NamedTuple):
    """What may follow some words: commands and options, each with what it is for."""

    words: str
    commands: dict[str, str]
    options: dict[str, str]


def add_parser(commands: Any, whole: Callable[[], argparse.ArgumentParser]) -> None:
    """`whole`: makes the parser of all commands."""
    made = commands.add_parser(
        "completion",
        help="a shell's completion",
        description="Print it: `source <(vcuda completion bash)` in ~/.bashrc, `source <(vcuda completion zsh)` after "
        "compinit in ~/.zshrc, or `vcuda completion fish > ~/.config/fish/completions/vcuda.fish`.",
    )
    made.add_argument("shell", choices=tuple(_SHELLS), metavar="SHELL", help="bash, zsh or fish")
    made.set_defaults(run=lambda options: _print(options.shell, whole()))


def _print(shell: str, parser: argparse.ArgumentParser) -> int:
    print(_SHELLS[shell](list(_levels(parser, ""))), end="")
    return 0


def _levels(parser: argparse.ArgumentParser, words: str) -> Iterator[_Level]:
    commands: dict[str, str] = {}
    options: dict[str, str] = {}
    below: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = action.choices
            commands = {choice.dest: choice.help or "" for choice in action._choices_actions}
        elif isinstance(action.choices, tuple) and not action.option_strings:
            commands |= dict.fromkeys(action.choices, "")
        for name in action.option_strings:
            if name.startswith("--") and action.help is not argparse.SUPPRESS:
                options[name] = action.help or ""
    yield _Level(words, commands, options)
    for name, one in below.items():
        yield from _levels(one, f"{words} {name}".strip())


def _cases(levels: list[_Level]) -> str:
    return "\n".join(
        f'    "{level.words}") known="{" ".join([*level.commands, *level.options])}" ;;' for level in levels
    )


_BASH = """# vcuda: completion for bash
_vcuda() {
  local at said="" known="" word="${COMP_WORDS[COMP_CWORD]}"
  COMPREPLY=()
  for ((at = 1; at < COMP_CWORD; at++)); do
    case "${COMP_WORDS[at]}" in
      --) if declare -F _command_offset >/dev/null; then _command_offset $((at + 1)); else
            mapfile -t COMPREPLY < <(compgen -c -f -- "$word"); fi; return ;;
      -*) ;;
      *) case "${said:+$said }${COMP_WORDS[at]}" in @paths@) said="${said:+$said }${COMP_WORDS[at]}" ;; esac ;;
    esac
  done
  case "$said" in
@cases@
  esac
  mapfile -t COMPREPLY < <(compgen -W "$known" -- "$word")
  if [ "${#COMPREPLY[@]}" -eq 0 ]; then compopt -o default; fi
}
complete -F _vcuda vcuda
"""

_ZSH = """# vcuda: completion for zsh
_vcuda() {
  local at said="" known="" word
  for ((at = 2; at < CURRENT; at++)); do
    word="${words[at]}"
    case "$word" in
      --) shift at words; ((CURRENT -= at)); _normal; return ;;
      -*) ;;
      *) case "${said:+$said }$word" in @paths@) said="${said:+$said }$word" ;; esac ;;
    esac
  done
  case "$said" in
@cases@
  esac
  compadd -- ${=known} || _files
}
compdef _vcuda vcuda
"""


def _scripted(text: str) -> Callable[[list[_Level]], str]:
    def made(levels: list[_Level]) -> str:
        paths = "|".join(f'"{level.words}"' for level in levels if level.words)
        return text.replace("@paths@", paths).replace("@cases@", _cases(levels))

    return made


def _fish(levels: list[_Level]) -> str:
    lines = ["# vcuda: completion for fish"]
    for level in levels:
        seen = [f"__fish_seen_subcommand_from {word}" for word in level.words.split()]
        if level.commands and level.words.count(" ") == 0:
            seen.append(f"not __fish_seen_subcommand_from {' '.join(level.commands)}")
        condition = "; and ".join(seen) or "true"
        for name, text in (level.commands | level.options).items():
            word = f"-l {name[2:]}" if name.startswith("--") else f"-f -a {name}"
            lines.append(f"complete -c vcuda -n {_quoted(condition)} {word} -d {_quoted(_short(text))}")
    return "\n".join(lines) + "\n"


def _short(text: str) -> str:
    return text.replace("%%", "%").split(";")[0].split("(")[0].strip()


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


_SHELLS: dict[str, Callable[[list[_Level]], str]] = {"bash": _scripted(_BASH), "zsh": _scripted(_ZSH), "fish": _fish}
