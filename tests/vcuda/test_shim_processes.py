"""Several processes of one container: one limit for all, judged by the card's own books; the dead hold nothing."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
import subprocess
import time
from pathlib import Path

import pytest

from tests.support import share as shares
from tests.support.share import MIB, Share
from vcuda import region
from vcuda._native import lib
from vcuda.sim import Machine, SimCard

LIMIT = 512 * MIB
CONTEXT = 64 * MIB


@pytest.fixture
def share(tmp_path: Path) -> Share:
    machine = Machine.create(tmp_path / "machine", [SimCard()])
    return shares.simulated(tmp_path / "share", machine, [shares.limit(machine, memory_bytes=LIMIT)])


def used(share: Share) -> int:
    assert share.machine
    return share.machine.report().cards[0].used_bytes


# Told to go, take and give back in a tight loop, filling the share again and again, until told to stop.
GREEDY = """
import random, threading
begin()
answer("ready")
sys.stdin.readline()
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
held, counts = [], {0: 0, 2: 0}
while not stop.is_set():
    result, pointer = alloc(random.choice((2, 6, 10, 34)) * MIB)
    counts[result] += 1
    if result == 0:
        held.append(pointer)
    else:
        while len(held) > random.randrange(4):
            ok("cuMemFree_v2", held.pop(random.randrange(len(held))))
for pointer in held:
    ok("cuMemFree_v2", pointer)
answer(counts)
"""


def started(share: Share, code: str, **environment: str) -> subprocess.Popen[str]:
    process = share.start(code, **environment)
    assert process.stdout
    if process.stdout.readline() != '"ready"\n':
        pytest.fail(process.communicate(timeout=60)[1])
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.write("\n")
    process.stdin.flush()


def test_two_processes_that_fill_one_share_stay_below_its_limit(share: Share) -> None:
    processes = [started(share, GREEDY) for _ in range(2)]
    for process in processes:
        go(process)
    most, until = 0, time.monotonic() + 3
    while time.monotonic() < until:
        most = max(most, used(share))
    usage = share.usage()
    counts = []
    for process in processes:
        output, errors = process.communicate("", timeout=60)
        assert process.returncode == 0, errors
        counts.append(json.loads(output))
    assert LIMIT - 40 * MIB < most <= LIMIT
    assert usage.cards[0].memory_peak_bytes <= LIMIT
    assert {process.pid for process in usage.processes} == {process.pid for process in processes}
    for count in counts:
        assert count["0"] > 100 and count["2"] > 10, counts
    assert used(share) == 0
    assert share.usage().cards[0].memory_used_bytes == 0


@pytest.mark.parametrize("pids", ["own", "foreign", "none"])
def test_eight_processes_that_begin_at_once_stay_below_the_limit(share: Share, pids: str) -> None:
    """Nobody has said what a context costs: the first of them measures it, also where NVML names other PIDs than theirs."""
    code = """
        answer("ready")
        sys.stdin.readline()
        context = C.c_void_p()
        ok("cuInit", 0)
        made = call("cuCtxCreate_v2", C.byref(context), 0, 0)
        answer([made, len(fill(10 * MIB)[1]) if made == 0 else 0])
        sys.stdin.read()
    """
    processes = [started(share, code, VCUDA_SIM_PIDS=pids) for _ in range(8)]
    for process in processes:
        go(process)
    answers = [json.loads(process.stdout.readline()) for process in processes if process.stdout]
    books, ledger = used(share), share.usage().cards[0].memory_used_bytes
    for process in processes:
        process.communicate("", timeout=60)
    assert books <= ledger <= LIMIT, (books // MIB, ledger // MIB)
    assert {made for made, _ in answers} <= {0, 2} and ledger > LIMIT - CONTEXT
    assert share.usage().cards[0].memory_used_bytes == 0


def test_the_process_for_which_no_slot_is_left_is_refused_memory_and_told_why(share: Share) -> None:
    with (share.region_directory / region.USAGE_NAME).open("r+b") as usage:
        lock = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, lib.VC_USAGE_FILE_BYTES, lib.VC_MAX_SLOTS, 0)
        fcntl.fcntl(usage, fcntl.F_OFD_SETLK, lock)
        process = share.start("""
            context = C.c_void_p()
            ok("cuInit", 0)
            maps = lambda: sum(1 for _ in open("/proc/self/maps"))
            first = call("cuCtxCreate_v2", C.byref(context), 0, 0)
            before = maps()
            for _ in range(200):
                first = max(first, call("cuCtxCreate_v2", C.byref(context), 0, 0))
                time.sleep(0.001)
            answer([first, maps() - before])
        """)
        output, errors = process.communicate(timeout=60)
    assert json.loads(output) == [2, 0]
    assert f"{lib.VC_MAX_SLOTS} processes of this container hold GPU memory already" in errors
    assert share.run("begin(); answer(alloc(MIB)[0])") == 0


def test_a_killed_process_leaves_nothing_booked(share: Share) -> None:
    survivor = started(share, "begin(); answer('ready')\nfor line in sys.stdin: answer(info()[0])")
    assert survivor.stdin and survivor.stdout
    for pause in (0.0, 0.01, 0.05, 0.2):
        victim = started(share, GREEDY)
        go(victim)
        time.sleep(pause)
        victim.send_signal(signal.SIGKILL)
        victim.communicate(timeout=60)
        survivor.stdin.write("\n")
        survivor.stdin.flush()
        assert int(survivor.stdout.readline()) == LIMIT - CONTEXT
    survivor.communicate(timeout=60)
    assert share.usage().cards[0].memory_used_bytes == 0


def test_what_an_idle_pool_gave_back_is_there_for_the_others(share: Share) -> None:
    idle = started(
        share,
        """
        begin()
        held = fill(10 * MIB, "cuMemAllocAsync", None)[1]
        for pointer in held:
            ok("cuMemFreeAsync", pointer, None)
        ok("cuStreamSynchronize", None)
        answer("ready")
        sys.stdin.read()
        """,
    )
    free = share.run("begin(); answer(info()[0])")
    idle.communicate("", timeout=60)
    assert free == LIMIT - 2 * CONTEXT


def test_a_forked_child_has_a_slot_of_its_own(share: Share) -> None:
    """The driver can be initialised in a child if its parent did not; the shim was at work in the parent already."""
    outcome = share.run("""
        found, status = C.c_void_p(), C.c_int()
        ok("cuGetProcAddress_v2", b"cuMemAlloc", C.byref(found), 12000, u64(0), C.byref(status))
        assert found.value == C.cast(cu.cuMemAlloc_v2, C.c_void_p).value
        child = os.fork()
        if child == 0:
            begin()
            os._exit(alloc(100 * MIB)[0])
        status = os.waitpid(child, 0)[1]
        begin()
        answer([status, info()[0]])
    """)
    assert outcome == [0, LIMIT - CONTEXT]
