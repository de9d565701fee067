"""`vcuda sim`: make a simulated machine, look at it, break it, use it from a shell."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vcuda.sim import faults
from vcuda.sim.cards import DEFAULT_MODEL, MODELS, SimCard
from vcuda.sim.errors import SimError
from vcuda.sim.machine import Machine
from vcuda.spec.errors import SpecError
from vcuda.spec.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


# What `inject` takes: name -> how many numbers after the card, and the fault they make.
FAULTS: dict[str, tuple[tuple[str, ...], Callable[..., faults.Fault]]] = {
    "lost": ((), faults.CardLost),
    "recovered": ((), faults.CardRecovered),
    "xid": (("CODE",), faults.Xid),
    "allocation-error": (("COUNT",), faults.AllocationError),
    "slow-call": (("MICROSECONDS",), faults.SlowCall),
    "launch-fault": ((), faults.LaunchFault),
    "clear": ((), faults.Cleared),
}


def add_parser(subparsers: Subparsers) -> None:
    """Add the `sim` command; the parsed arguments have `run`, which takes them and returns the exit status."""
    parser = subparsers.add_parser("sim", help="simulated cards: make, show, break and use a machine without a GPU")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    create = _verb(verbs, "create", _create, "make a machine in a new folder")
    create.add_argument("--cards", type=int, default=1, metavar="N", help="number of cards (1)")
    create.add_argument("--memory", metavar="SIZE", help='memory of each card, for instance "8GiB" (the model\'s own)')
    create.add_argument("--model", default=DEFAULT_MODEL, help=f"one of: {', '.join(MODELS)}; or any other name")
    create.add_argument(
        "--mig", default="", metavar="PROFILES", help='MIG instances of each card, for instance "1g,2g"'
    )
    create.add_argument("--nvidia-smi", metavar="PATH", help="a genuine nvidia-smi to put into the machine")
    _verb(verbs, "show", _show, "what the cards and processes use, as the machine counts it")
    inject = _verb(verbs, "inject", _inject, "make a fault happen now")
    inject.add_argument("card", type=int, help="position of the card")
    usages = ", ".join(" ".join((name, *numbers)) for name, (numbers, _) in FAULTS.items())
    inject.add_argument("fault", choices=FAULTS, metavar="FAULT", help=usages)
    inject.add_argument("numbers", nargs="*", type=int, metavar="NUMBER")
    kernel = _verb(verbs, "kernel", _kernel, "say how long kernels take, from now on")
    kernel.add_argument("pattern", help="shell pattern of the kernel's name")
    kernel.add_argument("ns", type=int, help="nanoseconds of a launch")
    kernel.add_argument("ns_per_block", type=int, nargs="?", default=0, help="and for each block of its grid (0)")
    _verb(verbs, "env", _env, 'print what a shell must set to use the machine: eval "$(vcuda sim env DIR)"')


def _verb(
    verbs: Subparsers, name: str, run: Callable[[argparse.Namespace], None], text: str
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=text, description=text)
    parser.add_argument("directory", type=Path, metavar="DIR", help="the machine's folder")
    parser.set_defaults(run=lambda arguments: _guarded(run, arguments))
    return parser


def _guarded(run: Callable[[argparse.Namespace], None], arguments: argparse.Namespace) -> int:
    """People get one line, not a traceback."""
    try:
        run(arguments)
    except (SimError, SpecError) as error:
        print(f"vcuda sim: {error}", file=sys.stderr)
        return 1
    return 0


def _create(arguments: argparse.Namespace) -> None:
    card = SimCard(
        model=arguments.model,
        memory_bytes=None if arguments.memory is None else parse_bytes(arguments.memory),
        mig=tuple(part for part in arguments.mig.split(",") if part),
    )
    machine = Machine.create(arguments.directory, [card] * max(0, arguments.cards), nvidia_smi=arguments.nvidia_smi)
    for made in machine.cards:
        print(f"card {made.index}: {made.name}, {format_bytes(made.memory_bytes)}, {made.uuid}")
        for part in made.mig:
            print(f"  MIG {part.profile}: {format_bytes(part.memory_bytes)}, {part.uuid}")
    if not machine.character_devices:
        print("device nodes are regular files: making character devices needs root and no real driver on this host")


def _show(arguments: argparse.Namespace) -> None:
    machine = Machine(arguments.directory)
    for card in machine.report().cards:
        state = ", LOST" if card.lost else ""
        xids = f", {card.xid_count} Xids" if card.xid_count else ""
        used, total = format_bytes(card.used_bytes), format_bytes(card.memory_bytes)
        print(f"card {card.index} {card.uuid}: {used} of {total}, busy {card.busy_ns / 1e9:.3f} s{state}{xids}")
        for process in card.processes:
            print(
                f"  pid {process.pid} {process.name}: {format_bytes(process.memory_bytes)}, "
                f"busy {process.busy_ns / 1e9:.3f} s, {process.launches} launches"
            )


def _inject(arguments: argparse.Namespace) -> None:
    wanted, make = FAULTS[arguments.fault]
    if len(arguments.numbers) > len(wanted) or (arguments.fault in ("xid", "slow-call") and not arguments.numbers):
        raise SimError(f"fault {arguments.fault} is followed by {' '.join(wanted) or 'no number'}")
    Machine(arguments.directory).inject(make(arguments.card, *arguments.numbers))


def _kernel(arguments: argparse.Namespace) -> None:
    Machine(arguments.directory).set_kernel_time(arguments.pattern, arguments.ns, arguments.ns_per_block)


def _env(arguments: argparse.Namespace) -> None:
    for name, value in Machine(arguments.directory).environment().items():
        if name == "LD_LIBRARY_PATH":
            print(f'export {name}={shlex.quote(value)}"${{{name}:+:${name}}}"')
        else:
            print(f"export {name}={shlex.quote(value)}")
