"""`vcuda run`: the command line's words become a request."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from vcuda.cli import machine
from vcuda.runs import container, engine, run
from vcuda.runs.card_choice import RunRequest
from vcuda.runs.errors import RunError
from vcuda.spec import request, units
from vcuda.spec.errors import InvalidRequest, Reason

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Run COMMAND with a share of a card: a hard memory limit and a share of the card's time for its whole process tree.
Needs no root. The share is booked for as long as any process of the tree lives; what would exceed 100 cores or the
card's memory is refused with who holds what."""
_EPILOG = """\
exit status: that of COMMAND, 128+N if signal N ended it; 2: bad usage; 125: the share is refused or can't be set up;
126, 127: COMMAND can't be executed or is not found.

  vcuda run --core 30 --memory 4GiB -- python train.py
  vcuda run --core 30 --core-limit 100 --memory 4GiB --device 1 -- python train.py   # may use idle time
  vcuda run --core 100 -- python train.py                                            # a whole card"""
_ENGINES = frozenset({"docker", "podman", "nerdctl", "docker-compose", "podman-compose"})
_UNIT = re.compile("[KMGT]i?B?|B", re.IGNORECASE)
_SIZES = ("--memory", "--oversell")
_WITH_VALUE = (
    "--core",
    "--memory",
    "--oversell",
    "--core-limit",
    "--device",
    "--injection",
    "--ledger",
    "--container",
    "--cdi",
    "--cdi-folder",
)


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "run",
        help="run a command with a share of a card",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="vcuda run --core N --memory SIZE [--oversell SIZE] [--core-limit N] [--device UUID|INDEX]... "
        "[--injection shim|preload] [--container docker|podman] [--cdi NAME] [--report] [--sim[=DIR]] "
        "-- COMMAND [ARG...]",
    )
    parser.add_argument(
        "--core",
        metavar="N",
        required=True,
        help="hundredths of a card: 1 to 99, or whole cards as 100, 200, ...",
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help='limit on each card, e.g. "4GiB"; may be left out for whole cards'
    )
    parser.add_argument(
        "--oversell",
        metavar="SIZE",
        help="hold up to SIZE in all: what exceeds --memory becomes managed memory, which may lie on the host and be "
        "slow",
    )
    parser.add_argument("--core-limit", metavar="N", help="use idle time up to this (default: hard limit at --core)")
    parser.add_argument(
        "--device",
        metavar="UUID|INDEX",
        action="append",
        default=[],
        help="this card, or the start of its UUID; repeated: a share of each (default: the fullest that fits)",
    )
    parser.add_argument(
        "--injection",
        choices=run.INJECTIONS,
        default=run.SHIM,
        help="how the command gets our library: in place of libcuda.so.1 on LD_LIBRARY_PATH, or by LD_PRELOAD, for "
        "commands that set their own library path (default: shim)",
    )
    parser.add_argument(
        "--container",
        choices=engine.NAMES,
        help="COMMAND is what stands behind `docker run` or `podman run`: the container gets the share, for as long as "
        "it lives",
    )
    parser.add_argument(
        "--cdi",
        metavar="NAME",
        help=f"any container started with --device {container.CDI_KIND}=NAME gets the share, while COMMAND or one of "
        "them lives",
    )
    parser.add_argument(
        "--cdi-folder",
        metavar="DIR",
        type=Path,
        default=container.CDI_FOLDER,
        help=f"where your engine reads CDI devices (default: {container.CDI_FOLDER})",
    )
    parser.add_argument(
        "--report", action="store_true", help="say at the end on stderr: peak memory, GPU time, time waited, refusals"
    )
    machine.add_options(parser)
    parser.add_argument("command", metavar="COMMAND", nargs=argparse.REMAINDER, help="what to run, with its arguments")
    parser.set_defaults(run=_run, fail=parser.error)


def prepare(words: list[str]) -> list[str]:
    """Write a lone `--sim` among our own options as `--sim=`: argparse would take the next word for its value.

    Raises InvalidRequest for a size in two words.
    """
    position = 1
    while position < len(words) and words[position].startswith("--") and words[position] != "--":
        if words[position] == "--sim":
            words[position] = "--sim="
        option, equals, value = words[position].partition("=")
        position += 1
        if option in _WITH_VALUE and not equals:
            value = "".join(words[position : position + 1])
            if option in _SIZES and value[:1] == "-" and value[1:2].isdigit():  # argparse would see an option
                words[position - 1 : position + 1] = [f"{option}={value}"]
            else:
                position += 1
        if option in _SIZES:
            _check_unit_is_no_command(option, value, words[position:])
    return words


def wish(
    core: str, memory: str | None, core_limit: str | None, devices: list[str], oversell: str | None = None
) -> RunRequest:
    """Raises InvalidRequest that names the option."""
    cores = units.parse_count(core, "--core")
    request.check_cores(cores, f"--core is {cores}")
    whole = cores >= units.CORES_PER_CARD
    cards = cores // units.CORES_PER_CARD if whole else 1
    cores_per_card = units.CORES_PER_CARD if whole else cores
    memory_bytes = None if memory is None else _size(memory, "--memory")
    if memory_bytes is None and not whole:
        raise InvalidRequest(Reason.INCOMPLETE_REQUEST, "a share needs --memory too, for instance --memory 4GiB")
    if memory_bytes == 0:
        raise InvalidRequest(Reason.INVALID_MEMORY, "--memory is 0; ask for instance 4GiB")
    limit = cores_per_card if core_limit is None else units.parse_count(core_limit, "--core-limit")
    if not cores_per_card <= limit <= units.CORES_PER_CARD:
        raise InvalidRequest(
            Reason.INVALID_CORES,
            f"--core-limit is {limit}; it must be from --core ({cores_per_card}) to {units.CORES_PER_CARD}",
        )
    if whole and devices and len(devices) != cards:
        raise InvalidRequest(
            Reason.INVALID_CORES,
            f"--core {cores} asks for {cards} whole cards, --device names {len(devices)}",
        )
    oversell_bytes = 0 if oversell is None else _size(oversell, "--oversell")
    if oversell is not None and (memory_bytes is None or oversell_bytes < memory_bytes):
        raise InvalidRequest(
            Reason.INVALID_MEMORY,
            f"--oversell is {oversell:.40}, what the run may hold in all: it needs --memory, and at least as much",
        )
    return RunRequest(cores_per_card, limit, memory_bytes, cards, tuple(devices), oversell_bytes)


def _size(text: str, option: str) -> int:
    """A number alone would be bytes, which nobody means: pods count in blocks, nvidia-smi in MiB."""
    if text.strip().replace(".", "", 1).isdigit() and units.parse_bytes(text, option):
        raise InvalidRequest(
            Reason.INVALID_MEMORY,
            f"{option} {text:.40} has no unit; write {text:.40}GiB or {text:.40}MiB (or {text:.40}B: bytes)",
        )
    return units.parse_bytes(text, option)


def _check_unit_is_no_command(option: str, value: str, following: list[str]) -> None:
    """`--memory 4 GiB -- train` would run `GiB`, and options that stand behind it would be its words."""
    for word in following[:1]:
        if value.isdigit() and _UNIT.fullmatch(word):
            told = f"{option} {value:.40} {word} are two words; write {option} {value:.40}{word}"
            raise InvalidRequest(Reason.INVALID_MEMORY, told)


def unlimited(command: list[str]) -> str:
    """Why a share would limit nothing of what a command starts; "" if it would."""
    name = Path(command[0]).name
    if name not in _ENGINES or not {"run", "create", "start", "exec", "compose", "up"} & set(command[1:]):
        return ""
    return (
        f"{name} gives its containers a library path and files of their own: this share limits nothing in them; "
        "write `vcuda run --container docker|podman ... --` and what follows `run`, or --cdi NAME and "
        f"--device {container.CDI_KIND}=NAME (docs/vcuda-run.md)"
    )


def _run(options: argparse.Namespace) -> int:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        options.fail("no COMMAND; write it after --")
    wanted = wish(options.core, options.memory, options.core_limit, options.device, options.oversell)
    chosen = machine.chosen(options)
    contained = _contained(options, command)
    if contained is None and (why := unlimited(command)):
        machine.say(why)
    return run.run(
        wanted,
        command,
        chosen,
        dict(os.environ),
        machine.say,
        options.injection,
        reports=options.report,
        contained=contained,
    )


def _contained(options: argparse.Namespace, command: list[str]) -> run.Contained | None:
    """Raises RunError for words that would make another container than is meant."""
    if options.container is None and options.cdi is None:
        return None
    if options.injection != run.SHIM:
        raise RunError("--injection=preload is for programs of this machine; a container's shim is where it looks")
    if options.cdi is not None:
        container.check_device_name(options.cdi)
    if options.container is not None:
        if command[0] in ("run", "create", "start", options.container):
            raise RunError(f"write only what stands behind `{options.container} run`, without {command[0]!r}")
        if any(word.split("=")[0] == "--cidfile" for word in command):
            raise RunError("--cidfile is what we find the container by; leave it out")
    return run.Contained(options.container or "", options.cdi or "", options.cdi_folder)
