"""A container that damages its own account: judged by the simulated card's books, it gets no byte more, nor does its neighbour get less."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support import share as shares
from tests.support.share import MIB
from vcuda.sim import Machine, SimCard

LIMIT = 1024 * MIB
CARD = 8192 * MIB

# Takes all it can, does the deed, takes again; says how much it holds and waits to be told to do it once more or to end.
TENANT = """
import shutil, struct
folder, deed = sys.argv[1:]
path = folder + "/usage"
SLOTS, SLOT, CARDS, SLOT_CARDS, CARD = 128 + 16 * 256, 2176, 16, 128, 128

def put(offset, data):
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return
    os.pwrite(descriptor, data, offset)
    os.close(descriptor)

def claimed():
    with open(path, "rb") as file:
        data = file.read()
    return [i for i in range(128) if struct.unpack_from("=I", data, SLOTS + i * SLOT)[0]]

def own():
    with open(path, "rb") as file:
        data = file.read()
    return [i for i in range(128) if struct.unpack_from("=Ii", data, SLOTS + i * SLOT) == (1, os.getpid())]

def damage():
    if deed == "lower the high water":
        put(64, bytes(4))
    elif deed == "zero the ledger of all":
        for slot in claimed():
            put(SLOTS + slot * SLOT + SLOT_CARDS, bytes(CARDS * CARD))
    elif deed == "zero the own slot":
        for slot in own():
            put(SLOTS + slot * SLOT, bytes(SLOT))
    elif deed == "zero all slots":
        put(64, bytes(SLOTS - 64 + 128 * SLOT))
    elif deed == "truncate":
        os.chmod(path, 0o600)
        os.truncate(path, 0)
    elif deed == "cut and grow again":  # the pages come back empty; the header is put back so that nobody notices
        with open(path, "rb") as file:
            header = file.read(64)
        size = os.path.getsize(path)
        os.truncate(path, 0)
        os.truncate(path, size)
        put(0, header)
    elif deed == "rename":
        os.rename(path, path + str(os.getpid()))
    elif deed == "replace by a copy":
        with open(path, "rb") as file:
            header, size = file.read(64), os.path.getsize(path)
        with open(path + ".new", "wb") as file:
            file.write(header + bytes(size - 64))
        os.rename(path + ".new", path)
    elif deed == "replace by a fifo":
        os.unlink(path)
        os.mkfifo(path)
    elif deed == "unlink":
        os.unlink(path)

context = C.c_void_p()
ok("cuInit", 0)
result = call("cuCtxCreate_v2", C.byref(context), 0, 0)
held = 0
while True:
    for _ in range(3 if result == 0 else 0):
        for piece in (64, 16, 2):
            held += piece * len(fill(piece * MIB)[1])
        if deed not in ("truncate",):  # it would end itself by SIGBUS
            try:
                damage()
            except FileNotFoundError:
                pass
    answer([result, held])
    if not sys.stdin.readline():
        break
    if deed == "truncate" and os.path.exists(path) and os.path.getsize(path):
        damage()
"""

NEIGHBOUR = """
begin()
held = 0
for piece in (64, 16, 2):
    held += piece * len(fill(piece * MIB)[1])
answer(held)
sys.stdin.readline()
"""

DEEDS = (
    "lower the high water", "zero the ledger of all", "zero the own slot", "zero all slots", "truncate",
    "cut and grow again", "rename", "replace by a copy", "replace by a fifo", "unlink",
)  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine.create(tmp_path / "machine", [SimCard(memory_bytes=CARD)])


def lines(process: subprocess.Popen[str]) -> object:
    assert process.stdout and process.stderr
    line = process.stdout.readline()
    return json.loads(line) if line else None


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    try:
        process.stdin.write("again\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it has ended itself


def end(processes: list[subprocess.Popen[str]]) -> list[str]:
    said = []
    for process in processes:
        try:
            said.append(process.communicate(timeout=60)[1])
        except (BrokenPipeError, ValueError):
            process.wait(60)
        finally:
            process.kill()
    return said


@pytest.mark.parametrize("deed", DEEDS)
def test_no_byte_over_the_limit_whatever_a_container_does_to_its_account(
    deed: str, machine: Machine, tmp_path: Path
) -> None:
    """Five processes one after another, each of which fills what it can, damages the account, fills again; then all once more."""
    liar = shares.simulated(tmp_path / "liar", machine, [shares.limit(machine, memory_bytes=LIMIT)])
    good = shares.simulated(tmp_path / "good", machine, [shares.limit(machine, memory_bytes=CARD - LIMIT)])
    started: list[subprocess.Popen[str]] = []
    most = 0
    try:
        for _ in range(5):
            process = liar.start(TENANT, str(liar.region_directory), deed)
            started.append(process)
            lines(process)
            most = max(most, machine.report().cards[0].used_bytes)
            if deed == "truncate":
                tell(process)
                lines(process)
        for process in started:
            tell(process)
            lines(process)
            most = max(most, machine.report().cards[0].used_bytes)
        neighbour = good.start(NEIGHBOUR)
        started.append(neighbour)
        got = lines(neighbour)
    finally:
        end(started)
    print(f"{deed}: the container held at most {most >> 20} MiB of its {LIMIT >> 20}, its neighbour {got} MiB")
    assert most <= LIMIT
    assert got == (CARD - LIMIT) // MIB - 64  # less its context
