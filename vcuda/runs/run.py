"""From a request to a running command: find driver and cards, book, lay out, start."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vcuda.driver.root import HostRoot
from vcuda.region import RegionError, read_limits, update
from vcuda.runs import card_choice, cards, container, driver, group, launcher, layout, processes, report
from vcuda.runs.arbitration import Arbitration
from vcuda.runs.booking import Booking
from vcuda.runs.card_choice import RunRequest
from vcuda.runs.container import Mount
from vcuda.runs.context_costs import ContextCosts
from vcuda.runs.driver import Driver
from vcuda.runs.engine import Containers, Engine
from vcuda.runs.errors import RunError
from vcuda.runs.ledger import PRIVATE_NAME, Ledger
from vcuda.runs.supervisor import Task
from vcuda.spec.inventory import Card
from vcuda.spec.units import format_bytes

SHIM, PRELOAD = INJECTIONS = ("shim", "preload")  # how our library comes before the driver's
MARK = "VCUDA_RUN"  # in the environment of a run's processes: the name of its booking
LEDGER = "VCUDA_LEDGER"  # … and the folder that it is booked in


@dataclass(frozen=True)
class Contained:
    """That the share is for containers.

    Those which `engine` (docker, podman) starts with the words of the command, and any that is given the CDI device.
    """

    engine: str = ""
    device: str = ""
    device_folder: Path = container.CDI_FOLDER


@dataclass(frozen=True)
class Machine:
    """Where the driver and the ledger are; `environment`: what this driver's clients need beside the library path.

    `driver` None: the machine's own, looked for as the dynamic linker does.
    """

    ledger: Path
    driver: Driver | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    root: HostRoot = field(default_factory=lambda: HostRoot(Path("/")))  # with the cards' device nodes
    container: tuple[Sequence[Mount], Mapping[str, str]] = ((), {})  # what this driver's clients need in a container
    elsewhere: Sequence[Path] = ()  # where libraries may lie if the ledger's file system is mounted noexec

    def find_driver(self, environment: Mapping[str, str]) -> Driver:
        return self.driver or driver.find(_split(environment.get("LD_LIBRARY_PATH", "")))

    def cards(self, found: Driver) -> tuple[Card, ...]:
        """All cards, from NVML.

        Puts the driver's variables into this process's own environment: NVML reads them there.
        """
        os.environ.update(self.environment)
        return cards.discover(found.nvml)


def run(
    request: RunRequest,
    command: Sequence[str],
    machine: Machine,
    environment: Mapping[str, str],
    say: Callable[[str], None],
    injection: str = SHIM,
    *,
    reports: bool = False,
    contained: Contained | None = None,
) -> int:
    """Book the request, run the command with `environment` under it, and return its exit status.

    `injection`: SHIM puts our libraries in front of LD_LIBRARY_PATH, PRELOAD one in front of LD_PRELOAD.
    `reports`: say at the end what it used. `contained`: the share is its containers', not the command's.

    Raises RunError (nothing booked, nothing started) or CommandError (the command can't be executed).
    """
    if MARK in environment:
        raise RunError(f"this shell is inside the run {environment[MARK]:.40} already; a share can't be divided again")
    found = machine.find_driver(environment)
    available = machine.cards(found)
    ledger = Ledger.open(machine.ledger, say)
    shown = [contained.engine, "run", *command] if contained is not None and contained.engine else command
    entry, lock = book(ledger, request, shown, available, machine, contained=contained is not None)
    folder = Path(entry.folder)
    description: Path | None = None
    containers: Containers | None = None
    limited: Path | None = None
    try:
        region = ledger.region_folder(entry.name)
        tell_context_costs(ledger, entry, found, machine)
        check_room_for_context(region)
        if contained is not None:
            here = ledger.path(entry.name)
            setup = container.set_up(entry, region.resolve(), found, machine.root, machine.container)
            containers = Containers(here)
            if contained.engine:
                containers.engine = Engine(contained.engine, here / PRIVATE_NAME / "container", environment)
                command = [contained.engine, "run", *containers.engine.arguments(), *setup.arguments(), *command]
            if contained.device:
                description = container.describe(contained.device, setup, here, contained.device_folder)
        elif injection == PRELOAD:
            libraries = layout.lay_out_preload(folder, region)
        else:
            libraries = layout.lay_out(folder, region, found)
    except RunError:
        ledger.remove(entry.name, entry.folder)
        raise
    if contained is None:
        held = processes.inheritable_copy(lock)
        os.close(lock)
        visible = ",".join(share.uuid for share in entry.shares)
        if environment.get("CUDA_VISIBLE_DEVICES", visible) != visible:
            say(f"CUDA_VISIBLE_DEVICES is replaced by the share's card: {visible}; --device chooses another one")
        limited = group.make(entry.name, entry.shares, found.nvml)
        environment = _environment(environment, machine, libraries, entry.name, visible, injection)
    else:
        held = lock  # not for the engine, which leaves processes behind that last as long as the machine

    def finish() -> None:
        if description is not None:
            description.unlink(missing_ok=True)
        ledger.remove(entry.name, entry.folder)
        if limited is not None:
            group.remove(limited)

    task = Task(
        command=command,
        environment=environment,
        mask=(),
        held=frozenset({held, ledger.descriptor}),
        duty=Arbitration(ledger, entry.user_id, say),
        finish=finish,
        control_group=limited,
        containers=containers,
        report=(lambda: report.lines(entry, region)) if reports else tuple,
    )
    return launcher.run(task, say)


def tell_context_costs(ledger: Ledger, entry: Booking, found: Driver, machine: Machine) -> None:
    """Into the limits of a run that has not begun.

    Without it each of its cards is measured in the run's first process.
    """
    costs = ContextCosts(ledger.folder)
    costs.learn(found, [share.uuid for share in entry.shares if not share.whole], dict(machine.environment))
    folder = ledger.region_folder(entry.name)
    with contextlib.suppress(RegionError, OSError):  # the supervisor tries it again
        update(folder, costs.fill(read_limits(folder)))


def check_room_for_context(folder: Path) -> None:
    """Raises RunError for a share that no context fits into: its program would fail at its first call of CUDA."""
    for card in read_limits(folder):
        if not card.whole and card.memory_bytes <= card.context_bytes:
            raise RunError(
                f"--memory {format_bytes(card.memory_bytes)} is too little: a CUDA context alone takes "
                f"{format_bytes(card.context_bytes)} of card {card.uuid}, and nothing would be left"
            )


def book(
    ledger: Ledger,
    request: RunRequest,
    command: Sequence[str],
    available: Sequence[Card],
    machine: Machine,
    *,
    contained: bool = False,
) -> tuple[Booking, int]:
    """Find room and book it, in one step under the ledger's lock; return the booking and its descriptor."""
    elsewhere = layout.other_folder(machine.ledger, machine.elsewhere)
    try:
        with ledger.locked():
            ledger.purge()
            before = ledger.bookings()
            chosen = card_choice.choose(card_choice.rooms(available, before), request)
            wanted = Booking(
                name="",
                user_id=os.geteuid(),
                pid=os.getpid(),
                since=time.time(),
                command=shlex.join(command),
                folder=str(elsewhere or ""),
                shares=tuple(room.share(request) for room in chosen),
            )
            entry, lock = ledger.add(wanted, card_choice.limits(wanted, before), contained=contained)
            # Another program may have removed the lock's file under us: what is written decides.
            chosen_uuids = {share.uuid for share in entry.shares}
            overbooked = [
                room
                for room in card_choice.rooms(available, ledger.bookings())
                if room.card.uuid in chosen_uuids and (room.free_cores < 0 or room.free_bytes < 0)
            ]
            if overbooked:
                os.close(lock)
                ledger.remove(entry.name, "")
                raise RunError("another run booked the same share at this moment; try again")
            return entry, lock
    except RunError:
        if elsewhere is not None:
            elsewhere.rmdir()
        raise


def _split(library_path: str) -> list[str]:
    return library_path.split(":") if library_path else []


def _environment(
    environment: Mapping[str, str],
    machine: Machine,
    libraries: Path,
    name: str,
    visible: str,
    injection: str,
) -> dict[str, str]:
    added = dict(machine.environment)
    paths = [added.pop("LD_LIBRARY_PATH", ""), environment.get("LD_LIBRARY_PATH", "")]
    if injection == PRELOAD:
        added["LD_PRELOAD"] = " ".join(word for word in (str(libraries), environment.get("LD_PRELOAD", "")) if word)
    else:
        paths.insert(0, str(libraries))
        added["TRITON_LIBCUDA_PATH"] = str(libraries)  # Triton asks ldconfig instead of the linker
    if any(paths):
        added["LD_LIBRARY_PATH"] = ":".join(path for path in paths if path)
    return {**environment, **added, "CUDA_VISIBLE_DEVICES": visible, MARK: name, LEDGER: str(machine.ledger.absolute())}
