"""Which machine a command is about: this one, or a simulated one; the only place here that reads the environment."""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
import sys
import tempfile
from pathlib import Path

from vcuda import sim
from vcuda.driver.layout import CUDA, NVML
from vcuda.driver.root import HostRoot
from vcuda.printable import printable
from vcuda.runs import ledger, run
from vcuda.runs.container import Mount
from vcuda.runs.driver import Driver
from vcuda.runs.errors import RunError
from vcuda.runs.run import Machine


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which driver and which ledger a command means."""
    parser.add_argument(
        "--sim",
        metavar="DIR",
        help="use the simulated machine in DIR (written --sim=DIR); --sim alone: one of your own, made if need be",
    )
    parser.add_argument(
        "--ledger",
        metavar="DIR",
        type=Path,
        help=f"where runs are booked; all users must share it (default: {ledger.default_folder()})",
    )


def add_all(parser: argparse.ArgumentParser) -> None:
    """For commands that show runs."""
    parser.add_argument("--all", action="store_true", help="inside a run: show the other runs, too")


def own_run() -> str:
    """The name of the run that this process is part of, or ""."""
    return os.environ.get(run.MARK, "")


def say(message: str) -> None:
    """A note to the user; never on stdout, which belongs to the command."""
    print(f"vcuda: {printable(message)}", file=sys.stderr)


def chosen(options: argparse.Namespace) -> Machine:
    """Raises RunError or SimError."""
    temporary = Path(tempfile.gettempdir())
    elsewhere = [temporary]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        elsewhere.append(Path(runtime))
    with contextlib.suppress(RuntimeError):
        elsewhere.append(Path.home())
    if options.sim is None:
        own = os.environ.get(run.LEDGER) if own_run() else None
        return Machine(options.ledger or (Path(own) if own else ledger.default_folder()), elsewhere=elsewhere)
    simulated = sim.Machine(options.sim) if options.sim else _own_simulated(temporary / f"vcuda-sim-{os.geteuid()}")
    libraries = simulated.library_folder
    return Machine(
        options.ledger or simulated.directory / "ledger",
        driver=Driver((libraries / CUDA).resolve(), (libraries / NVML).resolve()),
        environment=simulated.environment(),
        root=HostRoot(simulated.root, str(simulated.root)),
        container=(
            [Mount(str(each.host_path), each.container_path, each.read_only) for each in simulated.container_mounts()],
            simulated.container_environment(),
        ),
        elsewhere=elsewhere,
    )


def _own_simulated(folder: Path) -> sim.Machine:
    """The user's own simulated machine; two commands may make it at once."""
    if not folder.exists():
        try:
            made = sim.Machine.create(folder)
        except sim.SimError:
            return sim.Machine(folder)
        say(f"made the simulated machine {folder} ({len(made.cards)} x {made.cards[0].name}); `vcuda sim` changes it")
        return made
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise RunError(f"{folder} is not yours; name a simulated machine with --sim=DIR")
    return sim.Machine(folder)
