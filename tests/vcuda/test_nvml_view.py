"""What NVML says inside a share about processes, utilization and parts of a card: the share's own, nothing of the neighbours."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import share as shares
from tests.support import simulated
from tests.support.share import MIB, Share
from vcuda import _native, region
from vcuda._build import native
from vcuda.sim import Machine, SimCard

LIMIT = 512 * MIB
NOT_FOUND, INSUFFICIENT_SIZE, NOT_SUPPORTED, VERSION_MISMATCH = 6, 7, 3, 25

# Begins every client here: NVML by its C names, structures as <nvml.h> has them.
NVML = """
nvml = C.CDLL("libnvidia-ml.so.1")
assert nvml.nvmlInit_v2() == 0
device = C.c_void_p()
assert nvml.nvmlDeviceGetHandleByIndex_v2(0, C.byref(device)) == 0
class Rates(C.Structure):
    _fields_ = [("gpu", C.c_uint), ("memory", C.c_uint)]
class Sample(C.Structure):
    _fields_ = [("pid", C.c_uint), ("stamp", u64), ("sm", C.c_uint), ("mem", C.c_uint), ("enc", C.c_uint), ("dec", C.c_uint)]
class Info(C.Structure):
    _fields_ = [("stamp", u64), ("pid", C.c_uint), *((name, C.c_uint) for name in ("sm", "mem", "enc", "dec", "jpg", "ofa"))]
class Infos(C.Structure):
    _fields_ = [("version", C.c_uint), ("count", C.c_uint), ("last", u64), ("entries", C.POINTER(Info))]
class Detail(C.Structure):
    _fields_ = [("pid", C.c_uint), ("bytes", u64), ("gi", C.c_uint), ("ci", C.c_uint), ("protected", u64)]
class Details(C.Structure):
    _fields_ = [("version", C.c_uint), ("mode", C.c_uint), ("count", C.c_uint), ("entries", C.POINTER(Detail))]
def version(kind, number=1):
    return C.sizeof(kind) | number << 24
def rates():
    found = Rates()
    return nvml.nvmlDeviceGetUtilizationRates(device, C.byref(found)), found.gpu, found.memory
def per_process(last=0):
    count, samples = C.c_uint(128), (Sample * 128)()
    result = nvml.nvmlDeviceGetProcessUtilization(device, samples, C.byref(count), u64(last))
    return result, [[samples[i].pid, samples[i].sm] for i in range(count.value)] if result == 0 else count.value
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine.create(tmp_path / "machine", [SimCard(), SimCard()])


@pytest.fixture
def share(machine: Machine, tmp_path: Path) -> Share:
    return shares.simulated(tmp_path / "share", machine, [shares.limit(machine, 0, LIMIT)])


def ask(share: Share, code: str, *arguments: str) -> Any:
    return share.run(NVML + textwrap.dedent(code), *arguments)


@contextlib.contextmanager
def tenant(share: Share, count: int = 50 * MIB, code: str = "") -> Iterator[subprocess.Popen[str]]:
    process = share.start(f"begin(); assert alloc({count})[0] == 0; answer('ready')\n{code}\nsys.stdin.read()")
    assert process.stdout and process.stdout.readline() == '"ready"\n'
    try:
        yield process
    finally:
        if code:  # which may go on for ever
            process.kill()
        shares.end(process)


# Charges the first slot and the card with a constant fraction of the time, as the gate would.
CHARGE = """
import mmap, struct, sys, time
path, card, slot, rate = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
file = open(path, "r+b")
memory = mmap.mmap(file.fileno(), 0)
print("ready", flush=True)
began = time.monotonic_ns()
while True:
    busy = int((time.monotonic_ns() - began) * rate)
    struct.pack_into("<Q", memory, card, busy)
    struct.pack_into("<Q", memory, slot, busy)
    time.sleep(0.002)
"""


@contextlib.contextmanager
def charged(share: Share, rate: float) -> Iterator[None]:
    ffi = _native.ffi
    card = ffi.offsetof("struct vc_usage", "cards", 0, "gpu_ns")
    slot = ffi.offsetof("struct vc_usage", "slots", 0, "cards", 0, "gpu_ns")
    path = share.region_directory / "usage"
    process = subprocess.Popen(
        [sys.executable, "-c", CHARGE, str(path), str(card), str(slot), str(rate)], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout and process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.kill()
        process.communicate(timeout=60)


def test_utilization_is_the_own_gpu_time_relative_to_the_share(share: Share) -> None:
    """A quarter of the card's time is half of what a share of 50 cores may use."""
    with tenant(share) as mine, charged(share, 0.25):
        found = ask(
            share,
            """
            first = rates()
            time.sleep(1.5)
            second, count, kind = rates(), C.c_uint(0), C.c_uint()
            assert nvml.nvmlDeviceGetSamples(device, 1, u64(0), C.byref(kind), C.byref(count), None) == 0
            room, samples = count.value, (u64 * 2 * 4)()
            count = C.c_uint(4)
            result = nvml.nvmlDeviceGetSamples(device, 1, u64(0), C.byref(kind), C.byref(count), samples)
            time.sleep(0.5)
            answer([first, second, [room, result, count.value, kind.value, samples[0][1]], per_process()])
            """,
        )
    assert found[0][0] == 0 and found[0][1] > 0  # the first question already has a window
    assert found[1][0] == 0 and 40 <= found[1][1] <= 60
    assert found[2] == [1, 0, 1, 1, found[1][1]]
    result, processes = found[3]
    assert result == 0 and [row[0] for row in processes] == [mine.pid]
    assert 30 <= processes[0][1] <= 70


def test_a_busy_neighbour_is_not_seen(share: Share, machine: Machine) -> None:
    with simulated.tenant(machine, memory_bytes=64 * MIB, busy=True):
        seen_by_the_driver = simulated.nvml(
            machine,
            """
            import time
            nvmlInit()
            device = nvmlDeviceGetHandleByIndex(0)
            rates = 0
            while rates == 0:
                rates = nvmlDeviceGetUtilizationRates(device).gpu
            answer(rates)
            """,
        )
        with tenant(share) as mine:
            found = ask(share, "answer([rates(), per_process()])")
    assert seen_by_the_driver > 0
    assert found == [[0, 0, 0], [0, [[mine.pid, 0]]]]


def test_a_share_that_has_the_card_for_itself_shows_the_drivers_figures(machine: Machine, tmp_path: Path) -> None:
    limit = shares.limit(machine, 0, LIMIT, cores=50, core_limit=100)
    share = shares.simulated(tmp_path / "alone", machine, [limit])
    busy = "while True: call('cuMemsetD8_v2', u64(0), 0, size(0)), time.sleep(0.01)"
    with simulated.tenant(machine, memory_bytes=64 * MIB, busy=True), tenant(share, code=busy) as mine:
        found = ask(
            share,
            """
            rate = (0, 0)
            while rate[1] == 0:
                rate = rates()
            answer([rate, per_process()])
            """,
        )
    # Ungated, so nothing is charged: the card's own figure is the tenant's (the second load stands for its own kernels).
    assert found[0][0] == 0 and found[0][1] > 0
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    if namespace == 0xEFFFFFFC:
        pids = [row[0] for row in found[1][1]] if found[1][0] == 0 else []
        assert pids in ([], [mine.pid])
    else:
        assert found[1][0] == 0 and [row[0] for row in found[1][1]] == [mine.pid]
        assert found[1][1][0][1] > 0


def test_lists_of_processes_keep_nvmls_protocol(share: Share, machine: Machine) -> None:
    with simulated.tenant(machine, memory_bytes=64 * MIB), tenant(share) as mine:
        found = ask(
            share,
            """
            def infos(count, number=1, room=True):
                entries = (Info * 128)()
                listed = Infos(version(Infos, number), count, 0, entries if room else None)
                result = nvml.nvmlDeviceGetProcessesUtilizationInfo(device, C.byref(listed))
                return [result, listed.count, entries[0].pid]
            def details(mode, count, number=1, room=True):
                entries = (Detail * 128)()
                listed = Details(version(Details, number), mode, count, entries if room else None)
                result = nvml.nvmlDeviceGetRunningProcessDetailList(device, C.byref(listed))
                return [result, listed.count, entries[0].pid, entries[0].bytes, entries[0].gi]
            now = int(time.time() * 1e6) + 10**9
            count = C.c_uint(0)
            answer([
                [infos(128), infos(0, room=False), infos(128, number=2)],
                [details(0, 128), details(3, 128), details(1, 128), details(0, 0, room=False), details(0, 128, number=2), details(9, 128)],
                [per_process(now), nvml.nvmlDeviceGetProcessUtilization(device, None, C.byref(count), u64(0)), count.value],
            ])
            """,
        )
    pid, none = mine.pid, 0xFFFFFFFF
    assert found[0] == [[0, 1, pid], [INSUFFICIENT_SIZE, 1, 0], [VERSION_MISMATCH, 128, 0]]
    row = [0, 1, pid, 114 * MIB, none]
    assert found[1][:2] == [row, row]
    assert found[1][2] == [0, 0, 0, 0, 0]
    assert [answer[:2] for answer in found[1][3:]] == [
        [INSUFFICIENT_SIZE, 1],
        [VERSION_MISMATCH, 128],
        [2, 128],
    ]
    assert found[2] == [[NOT_FOUND, 0], INSUFFICIENT_SIZE, 1]


def test_what_others_map_through_the_bus_is_not_told(share: Share, machine: Machine) -> None:
    code = """
    class Window(C.Structure):
        _fields_ = [("total", u64), ("free", u64), ("used", u64)]
    window = Window()
    assert nvml.nvmlDeviceGetBAR1MemoryInfo(device, C.byref(window)) == 0
    answer([window.total, window.free, window.used])
    """
    total, free, used = ask(share, code)
    assert (total, free, used) == (64 << 30, 64 << 30, 0)  # the driver says that 1 MiB is in use: not by us
    with tenant(share):
        assert ask(share, code) == [64 << 30, (64 << 30) - MIB, MIB]


def test_instances_of_other_tenants_are_not_reached_through_the_parent(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path / "machine", [SimCard(mig=["3g", "3g"]), SimCard()])
    mine = machine.cards[0].mig[1]
    limit = region.CardLimit(mine.uuid, 0, LIMIT, 50, 50)
    share = shares.simulated(tmp_path / "share", machine, [limit])
    found = ask(
        share,
        """
        count, seen = C.c_uint(), []
        nvml.nvmlDeviceGetCount_v2(C.byref(count))
        for index in range(3):
            instance, uuid = C.c_void_p(), C.create_string_buffer(96)
            result = nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, index, C.byref(instance))
            if result == 0:
                nvml.nvmlDeviceGetUUID(instance, uuid, 96)
                class Attributes(C.Structure):
                    _fields_ = [("others", C.c_uint * 8), ("memory_mb", u64)]
                attributes = Attributes()
                assert nvml.nvmlDeviceGetAttributes_v2(instance, C.byref(attributes)) == 0
                rates_there = Rates()
                seen.append([uuid.value.decode(), attributes.memory_mb, nvml.nvmlDeviceGetUtilizationRates(instance, C.byref(rates_there))])
            else:
                seen.append(result)
        answer([count.value, seen])
        """,
    )
    assert found == [1, [NOT_FOUND, [mine.uuid, LIMIT // MIB, NOT_SUPPORTED], 6]]


def test_neighbours_in_the_topology_are_the_shares_cards_only(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path / "machine", [SimCard(), SimCard(), SimCard()])
    cards = [shares.limit(machine, index, LIMIT) for index in (0, 2)]
    share = shares.simulated(tmp_path / "share", machine, cards)
    found = ask(
        share,
        """
        by_level = []
        for level in (0, 10, 20, 30, 40, 50):
            count, near = C.c_uint(8), (C.c_void_p * 8)()
            result = nvml.nvmlDeviceGetTopologyNearestGpus(device, level, C.byref(count), near)
            uuids = []
            for handle in near[:count.value]:
                uuid = C.create_string_buffer(96)
                nvml.nvmlDeviceGetUUID(C.c_void_p(handle), uuid, 96)
                uuids.append(uuid.value.decode())
            by_level.append([result, uuids])
        answer(by_level)
        """,
    )
    listed = [uuid for result, uuids in found if result == 0 for uuid in uuids]
    assert listed and set(listed) == {machine.cards[2].uuid}


@pytest.mark.parametrize("kind", ["total", "properties"])
def test_cuda_and_nvml_tell_one_total(share: Share, kind: str) -> None:
    code = {
        "total": "found = size(); ok('cuDeviceTotalMem_v2', C.byref(found), 0); answer([found.value, info()[1]])",
        "properties": """
class Memory(C.Structure):
    _fields_ = [("total", u64), ("free", u64), ("used", u64)]
memory = Memory()
assert nvml.nvmlDeviceGetMemoryInfo(device, C.byref(memory)) == 0
answer([memory.total, info()[1]])""",
    }[kind]
    assert share.run(NVML + "begin()\n" + code) == [LIMIT, LIMIT]


# A driver whose card others use: it keeps accounts, has video sessions and a second card, and calls itself through its PLT.
CROWDED = """
#include <stdio.h>
typedef struct device *device_t;
typedef struct { unsigned gpu, memory; } rates_t;
typedef struct { unsigned gpu, memory; unsigned long long most, time, start; unsigned running, reserved[5]; } stats_t;
static const char *const uuids[] = {"%s", "GPU-another"};
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *device) { *device = (device_t)(index + 1L); return 0; }
int nvmlDeviceGetUUID(device_t device, char *uuid, unsigned length)
{ snprintf(uuid, length, "%%s", uuids[(long)device - 1]); return 0; }
int nvmlDeviceGetUtilizationRates(device_t device, rates_t *rates) { *rates = (rates_t){90, 60}; return 0; }
int nvmlRatesSeenInside(device_t device, rates_t *rates) { return nvmlDeviceGetUtilizationRates(device, rates); }
int nvmlDeviceGetAccountingMode(device_t device, unsigned *mode) { *mode = 1; return 0; }
int nvmlDeviceGetAccountingPids(device_t device, unsigned *count, unsigned *pids)
{ if (*count >= 2) pids[0] = 77, pids[1] = 88; *count = 2; return 0; }
int nvmlDeviceGetAccountingStats(device_t device, unsigned pid, stats_t *stats) { *stats = (stats_t){50, 40, 1}; return 0; }
int nvmlDeviceGetEncoderSessions(device_t device, unsigned *count, void *sessions) { *count = 3; return sessions ? 0 : 7; }
int nvmlSystemGetTopologyGpuSet(unsigned cpu, unsigned *count, device_t *devices)
{ if (devices) devices[0] = (device_t)1L, devices[1] = (device_t)2L; *count = 2; return 0; }
"""


def test_accounts_and_sessions_of_neighbours_are_not_told_and_the_drivers_own_calls_are_not_translated(
    machine: Machine, tmp_path: Path
) -> None:
    source, library = tmp_path / "crowded.c", tmp_path / "crowded.so"
    source.write_text(CROWDED % machine.cards[0].uuid)
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=60)
    cuda = shares.LIB / "sim" / f"libcuda.so.{native.SIM_DRIVER_VERSION}"
    share = shares.lay_out(tmp_path / "share", cuda, library, machine)
    share.region_directory.mkdir()
    region.create(share.region_directory, [shares.limit(machine, 0, LIMIT)])
    with tenant(share) as mine:
        found = ask(
            share,
            """
            class Stats(C.Structure):
                _fields_ = [("gpu", C.c_uint), ("memory", C.c_uint), ("most", u64), ("time", u64), ("start", u64), ("more", C.c_uint * 6)]
            def stats(pid):
                told = Stats()
                result = nvml.nvmlDeviceGetAccountingStats(device, pid, C.byref(told))
                return [result, told.gpu, told.memory, told.most, told.more[0]]
            inside, count, pids = Rates(), C.c_uint(8), (C.c_uint * 8)()
            nvml.nvmlRatesSeenInside(device, C.byref(inside))
            accounts = [nvml.nvmlDeviceGetAccountingPids(device, C.byref(count), pids), list(pids[:count.value])]
            sessions = C.c_uint(8)
            assert nvml.nvmlDeviceGetEncoderSessions(device, C.byref(sessions), (u64 * 64)()) == 0
            cards, near = C.c_uint(8), (C.c_void_p * 8)()
            assert nvml.nvmlSystemGetTopologyGpuSet(0, C.byref(cards), near) == 0
            answer([rates(), [inside.gpu, inside.memory], accounts, stats(int(sys.argv[1])), stats(77), sessions.value, near[:cards.value]])
            """,
            str(mine.pid),
        )
    unknown = (1 << 32) - 1
    assert found[:3] == [[0, 0, 0], [90, 60], [0, [mine.pid]]]
    assert found[3] == [0, 0, unknown, (1 << 64) - 1, 1]
    assert found[4][0] == NOT_FOUND
    assert found[5:] == [0, [1]]
