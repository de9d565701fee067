"""`vcuda doctor`: what on this machine keeps a run from its share, and what to do about it."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vcuda import sim
from vcuda.cli import machine
from vcuda.driver.layout import SHIMS, SHIMS_FOLDER
from vcuda.driver.root import HostRoot
from vcuda.printable import printable
from vcuda.runs import run, view
from vcuda.runs.driver import Driver
from vcuda.runs.errors import RunError
from vcuda.runs.ledger import LOCK_NAME, Ledger
from vcuda.runs.run import Machine
from vcuda.spec.inventory import Card
from vcuda.spec.units import format_bytes

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

OK, WARN, FAIL = "ok", "warn", "FAIL"
_MODULE = re.compile(r"Kernel Module\s+(?:for \S+\s+)?([0-9]+(?:\.[0-9]+)+)")
_FILE = re.compile(r"\.so\.([0-9]+\.[0-9.]+)$")  # the driver's version is in its libraries' names
_NODES = ("nvidiactl", "nvidia-uvm")
_LOCK_PATIENCE_SECONDS = 2.0  # a run that books holds the lock for milliseconds


class Check(NamedTuple):
    """One line: what was looked at, how it is, and if it isn't well, the way out."""

    what: str
    verdict: str
    text: str


def add_parser(commands: Commands) -> None:
    """`vcuda doctor`."""
    parser = commands.add_parser(
        "doctor",
        help="look at this machine: what keeps runs from their shares, and what to do",
        description="Look at the driver, its device nodes, the ledger and its runs. Ends with 1 if something fails. "
        "On a node of a cluster: kubectl exec ds/gpu-manager -- gpu-manager doctor.",
    )
    machine.add_options(parser)
    parser.add_argument("--json", action="store_true", help="write JSON instead of lines")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    checks = list(_all(options))
    if options.json:
        print(json.dumps([check._asdict() for check in checks], indent=2))
    else:
        width = max(len(check.what) for check in checks)
        print("\n".join(f"{check.verdict:<4} {check.what:<{width}}  {printable(check.text)}" for check in checks))
    return int(any(check.verdict == FAIL for check in checks))


def _all(options: argparse.Namespace) -> Iterator[Check]:
    name = machine.own_run()
    if name and options.sim is None and (simulated := os.environ.get("VCUDA_SIM_DIR")):
        options.sim, options.ledger = Path(simulated), options.ledger or Path(os.environ[run.LEDGER])
    try:
        chosen = machine.chosen(options)
    except (RunError, sim.SimError) as error:
        yield Check("machine", FAIL, str(error))
        return
    if name:
        yield Check(
            "run", OK, f"this is inside the run {name}: its libraries are looked at, `vcuda show` shows the share"
        )
    yield from _installation()
    yield from _driver(chosen, os.environ)
    yield from _ledger(chosen.ledger)
    yield from _host(chosen.root)


def _installation() -> Iterator[Check]:
    missing = [name for name in SHIMS if not (SHIMS_FOLDER / name).is_file()]
    if missing:
        command = "install vcuda-gpu-manager again, or run `python -m vcuda._build` in a checkout"
        yield Check("our libraries", FAIL, f"{' and '.join(missing)} are not in {SHIMS_FOLDER}; {command}")
    else:
        yield Check("our libraries", OK, str(SHIMS_FOLDER))


def _driver(chosen: Machine, environment: Mapping[str, str]) -> Iterator[Check]:
    try:
        found = chosen.find_driver(dict(environment))
    except RunError as error:
        yield Check("driver", FAIL, str(error))
        return
    yield Check("libcuda", OK, f"{found.cuda}, without a share")
    yield from versions(found, chosen.root)
    try:
        cards = chosen.cards(found)
    except RunError as error:
        yield Check("cards", FAIL, str(error))
        return
    if not cards:
        yield Check("cards", FAIL, "the driver has none; does nvidia-smi list them?")
    for index, card in enumerate(cards):
        told = f"{card.uuid}  {card.model}, {format_bytes(card.memory_bytes)}"
        yield Check(f"card {index}", OK, told) if card.healthy else Check(f"card {index}", FAIL, f"{told}: {card.why}")
    yield from nodes(chosen.root, cards)


def versions(found: Driver, root: HostRoot) -> Iterator[Check]:
    """Whether the libraries and the kernel's module are of one version."""
    cuda, nvml = (match[1] if (match := _FILE.search(path.name)) else "" for path in (found.cuda, found.nvml))
    if cuda != nvml:
        yield Check("driver", FAIL, f"{found.cuda} and {found.nvml} are not of one version; install the driver anew")
    try:
        told = _MODULE.search((root.path / "proc/driver/nvidia/version").read_text())
    except OSError:
        told = None
    if told is None:
        yield Check(
            "kernel module", WARN, f"{root.path / 'proc/driver/nvidia/version'} does not say its version; is it loaded?"
        )
    elif cuda and told[1] != cuda:
        way = "the driver was updated beside a loaded module: reboot, or unload and load it"
        yield Check("kernel module", FAIL, f"it is {told[1]}, the libraries are {cuda}; {way}")
    else:
        yield Check("kernel module", OK, told[1])


def nodes(root: HostRoot, cards: tuple[Card, ...]) -> Iterator[Check]:
    """The device nodes that a CUDA process opens, by this user."""
    whole = (f"nvidia{card.minor}" for card in cards if not card.uuid.startswith("MIG"))
    for name in (*_NODES, *whole):
        path = root.path / "dev" / name
        try:
            status = path.stat()
        except OSError as error:
            yield Check(f"/dev/{name}", FAIL, f"{error.strerror}; as root: `nvidia-modprobe -u -c=0`")
            continue
        if not stat.S_ISCHR(status.st_mode) and root.is_host:
            yield Check(
                f"/dev/{name}", FAIL, "it is no character device; remove it, then as root: `nvidia-modprobe -u -c=0`"
            )
        elif not os.access(path, os.R_OK | os.W_OK):
            yield Check(f"/dev/{name}", FAIL, f"you may not open it ({stat.filemode(status.st_mode)}); join its group")
        else:
            yield Check(f"/dev/{name}", OK, "you may open it")


def _ledger(folder: Path) -> Iterator[Check]:
    try:
        ledger = Ledger.existing(folder, machine.say)
    except RunError as error:
        yield Check("ledger", FAIL, str(error))
        return
    if ledger is None:
        place = next(parent for parent in folder.parents if parent.exists())
        can = os.access(place, os.W_OK | os.X_OK)
        text = (
            f"{folder}: none yet, the first run makes it" if can else f"{place} can't be written: give another --ledger"
        )
        yield Check("ledger", OK if can else FAIL, text)
        return
    try:
        if (folder / LOCK_NAME).exists():  # the first run makes it
            with ledger.locked(_LOCK_PATIENCE_SECONDS):
                pass
        runs = view.look(ledger, 0.0)
    except RunError as error:
        yield Check("ledger", FAIL, str(error))
        return
    finally:
        ledger.close()
    yield Check("ledger", OK, f"{folder}, {len(runs)} runs")
    for each in runs:
        if any(share.usage is None for share in each.shares):
            text = (
                "what it uses can't be read (another user's files, or they are gone); its share is booked all the same"
            )
            yield Check(f"run {each.booking.pid}", WARN, text)


def _host(root: HostRoot) -> Iterator[Check]:
    version = "v2" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "v1 or mixed"
    yield Check("control groups", OK, version)
    engines = [name for name in ("docker", "podman") if shutil.which(name)]
    yield Check("containers", OK, f"{', '.join(engines) or 'no docker, no podman'}; `vcuda run --container` uses them")
    if not root.is_host:
        yield Check("cards' kind", OK, f"simulated, in {root.path.parent}")
