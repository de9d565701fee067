"""Unmodified monitoring programs inside a share: what each one shows, beside a neighbour on the same card.

`python -m tests.support.clients` runs all of them and prints the matrix of docs/clients.md.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support import genuine
from tests.support import share as shares
from tests.support.share import MIB, Share
from vcuda.sim import Machine, SimCard

LIMIT_MIB, USED_MIB = 512, 164  # what the clients must show
SECONDS = 60


@dataclass(frozen=True)
class Scene:
    """A share of the second of three cards, with a process of its own and a neighbour's on that card."""

    share: Share
    machine: Machine
    mine: int
    neighbour: int

    def run(self, *command: object) -> str:
        """What the program prints. Raises AssertionError if it fails."""
        result = subprocess.run(
            [str(word) for word in command],
            env=self.share.environment(TERM="xterm", COLUMNS="200"),
            cwd=os.sep,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout


@contextlib.contextmanager
def scene(folder: Path) -> Iterator[Scene]:
    """Begin the share, its process and the neighbour; end them afterwards."""
    machine = Machine.create(folder / "machine", [SimCard(), SimCard(), SimCard()])
    card = shares.limit(machine, 1, LIMIT_MIB * MIB)
    share = shares.simulated(folder / "share", machine, [card])
    other = shares.simulated(folder / "other", machine, [shares.limit(machine, 1, 4 * LIMIT_MIB * MIB)])
    running = []
    try:
        for place, size in ((share, 100), (other, 800)):
            code = f"begin(1); assert alloc({size} * MIB)[0] == 0; answer('ready'); sys.stdin.read()"
            process = place.start(code)
            running.append(process)
            assert process.stdout and process.stdout.readline() == '"ready"\n'
        yield Scene(share, machine, running[0].pid, running[1].pid)
    finally:
        for process in running:
            shares.end(process)


def nvidia_smi(view: Scene, series: str) -> str:
    """The default view, -L, a query and -q; returns the version."""
    program = genuine.nvidia_smi(series)
    cards, table, everything = view.run(program, "-L"), view.run(program), view.run(program, "-q")
    query = view.run(
        program,
        "--query-gpu=index,uuid,memory.total,memory.used,memory.free",
        "--format=csv,noheader,nounits",
    )
    assert cards.count("GPU ") == 1 and view.machine.cards[1].uuid in cards, cards
    assert re.search(rf"\b{USED_MIB}MiB / +{LIMIT_MIB}MiB", table), table
    left = LIMIT_MIB - USED_MIB
    assert query == f"0, {view.machine.cards[1].uuid}, {LIMIT_MIB}, {USED_MIB}, {left}\n", query
    assert re.search(r"Attached GPUs +: 1\n", everything), everything
    assert re.search(rf"Total +: {LIMIT_MIB} MiB\n", everything), everything
    assert not re.search(r"Unknown Error|Function Not Found", everything), everything
    for words in (table, everything):
        assert str(view.neighbour) not in re.findall(r"\b\d+\b", words)
    version: str = re.findall(r"NVIDIA-SMI(?: version +:)? +([\d.]+)", table)[0]
    return version


def nvidia_ml_py(view: Scene) -> str:
    """Memory and processes; returns the version."""
    code = (
        "from pynvml import *; nvmlInit(); d = nvmlDeviceGetHandleByIndex(0); m = nvmlDeviceGetMemoryInfo(d); "
        "print(nvmlDeviceGetCount(), m.total >> 20, m.used >> 20, [(p.pid, p.usedGpuMemory >> 20) for p in "
        "nvmlDeviceGetComputeRunningProcesses(d)])"
    )
    said = view.run(sys.executable, "-c", code)
    assert said.startswith(f"1 {LIMIT_MIB} {USED_MIB} [({view.mine}, "), said
    assert said.count("(") == 1, said
    return importlib.metadata.version("nvidia-ml-py")


def gpustat(view: Scene) -> str:
    said = view.run(sys.executable, "-m", "gpustat", "--no-color", "--show-pid")
    assert re.search(rf"\[0\].* {USED_MIB} / +{LIMIT_MIB} MB", said), said
    assert "[1]" not in said and re.findall(r"/(\d+)\(", said) == [str(view.mine)], said
    return importlib.metadata.version("gpustat")


def nvitop(view: Scene) -> str:
    said = view.run(sys.executable, "-m", "nvitop", "--once", "--no-unicode")
    assert re.search(rf"\b{USED_MIB}(?:\.0+)?MiB / {LIMIT_MIB}(?:\.0+)?MiB", said), said
    assert re.search(rf"\b{view.mine} C ", said) and str(view.neighbour) not in said, said
    return importlib.metadata.version("nvitop")


def nvtop(view: Scene) -> str:
    """Its screen, on a terminal of its own."""
    program = genuine.nvtop()
    version = view.run(program, "--version").split()[-1]
    screen = _screen(view, [str(program)], lambda words: str(view.mine) in words)
    assert re.search(rf"\b{USED_MIB}\.000Mi/{LIMIT_MIB}\.000Mi", screen), screen
    assert str(view.mine) in screen and str(view.neighbour) not in screen, screen
    return version


def _screen(view: Scene, command: Sequence[str], done: Callable[[str], bool]) -> str:
    """What the program writes to its terminal, without the terminal's commands, until `done` says that this is enough."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(command[0], list(command), view.share.environment(TERM="xterm", HOME="/nonexistent"))
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    written, deadline = b"", time.monotonic() + SECONDS
    try:
        while time.monotonic() < deadline:
            if select.select([terminal], [], [], 1.0)[0]:
                try:
                    written += os.read(terminal, 65536)
                except OSError:
                    break
            text: str = re.sub(r"\x1b(\[[0-9;?]*[A-Za-z]|\([A-Z0-9]|[=>])", "", written.decode(errors="replace"))
            if done(text):
                return text
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(terminal)
    raise AssertionError(text)


@dataclass(frozen=True)
class Client:
    """A program, what is checked of it, and the check, which returns its version."""

    name: str
    checked: str
    check: Callable[[Scene], str]


CLIENTS = (
    Client("nvidia-smi 535", "`-L`, default view, `--query-gpu`, `-q`", lambda view: nvidia_smi(view, "535")),
    Client("nvidia-smi 550", "`-L`, default view, `--query-gpu`, `-q`", lambda view: nvidia_smi(view, "550")),
    Client("nvidia-ml-py", "cards, memory, processes", nvidia_ml_py),
    Client("nvitop", "`--once`: cards, memory, processes", nvitop),
    Client("gpustat", "cards, memory, processes", gpustat),
    Client("nvtop", "its screen: memory, processes", nvtop),
)


def matrix(view: Scene) -> str:
    lines = ["| client | version | checked | result |", "|---|---|---|---|"]
    for client in CLIENTS:
        try:
            version, result = client.check(view), "the share"
        except genuine.Unavailable as reason:
            version, result = "-", f"not run: {reason}"
        except AssertionError as error:
            version, result = "-", f"wrong: {' '.join(str(error).split())[:200]}"
        lines.append(f"| {client.name} | {version} | {client.checked} | {result} |")
    return "\n".join(lines)


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="vcuda-clients-"))
    try:
        with scene(folder) as view:
            print(matrix(view))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
