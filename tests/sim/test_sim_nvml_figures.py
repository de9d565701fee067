"""Figures of the simulated board, through plain C calls: every function of it answers, the old names too, and refuses nonsense."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import simulated
from vcuda import sim

INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND, NO_PERMISSION = 2, 3, 6, 4

BEGIN = """
import ctypes as C, os
nvml = C.CDLL("libnvidia-ml.so.1")
uint, u64 = C.c_uint, C.c_uint64
assert nvml.nvmlInit() == 0
cards = []
for index in range(2):
    card = C.c_void_p()
    assert nvml.nvmlDeviceGetHandleByIndex(index, C.byref(card)) == 0
    cards.append(card)
card = cards[0]
def asked(name, *arguments, kind=uint, of=None):
    value = kind(77)
    result = getattr(nvml, name)(of or card, *arguments, C.byref(value))
    return value.value if result == 0 else -result
def call(name, *arguments):
    return getattr(nvml, name)(*arguments)
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> sim.Machine:
    cards = [sim.SimCard(links={1: "NV4"}), sim.SimCard(), sim.SimCard(mig=["3g"])]
    return sim.Machine.create(tmp_path_factory.mktemp("figures") / "machine", cards)


def ask(machine: sim.Machine, code: str) -> Any:
    return simulated.nvml(machine, BEGIN + code)


def test_power_clocks_and_board_are_those_of_the_model(machine: sim.Machine) -> None:
    got = ask(
        machine,
        """
least, most = uint(), uint()
assert call("nvmlDeviceGetPowerManagementLimitConstraints", card, C.byref(least), C.byref(most)) == 0
limit = asked("nvmlDeviceGetPowerManagementDefaultLimit")
power = [limit == most.value == asked("nvmlDeviceGetEnforcedPowerLimit"), least.value * 4 == limit, asked("nvmlDeviceGetPowerManagementMode"),
         asked("nvmlDeviceGetTotalEnergyConsumption", kind=u64) >= 0]
heat = [asked("nvmlDeviceGetTemperatureThreshold", which) for which in range(4)] + [asked("nvmlDeviceGetTemperatureThreshold", 99)]
clocks = [asked(name, 1) == asked("nvmlDeviceGetClockInfo", 1) > 0 for name in ("nvmlDeviceGetMaxCustomerBoostClock",
          "nvmlDeviceGetApplicationsClock", "nvmlDeviceGetDefaultApplicationsClock", "nvmlDeviceGetMaxClockInfo")]
clocks += [asked("nvmlDeviceGetClock", 2, 0) > 0, asked("nvmlDeviceGetClock", 2, 9), asked("nvmlDeviceGetClockInfo", 99)]
states = [asked("nvmlDeviceGetPowerState"), asked("nvmlDeviceGetCurrentClocksEventReasons", kind=u64),
          asked("nvmlDeviceGetSupportedClocksEventReasons", kind=u64) == asked("nvmlDeviceGetSupportedClocksThrottleReasons", kind=u64)]
board = [asked("nvmlDeviceGetMemoryBusWidth") > 0, asked("nvmlDeviceGetNumGpuCores"), asked("nvmlDeviceGetBusType"), asked("nvmlDeviceGetNumFans"),
         asked("nvmlDeviceGetPcieSpeed"), asked("nvmlDeviceGetPcieLinkMaxSpeed"), asked("nvmlDeviceGetDefaultEccMode")]
violation, errors = (u64 * 2)(7, 7), (u64 * 4)(7, 7, 7, 7)
assert call("nvmlDeviceGetViolationStatus", card, 0, violation) == 0 and call("nvmlDeviceGetDetailedEccErrors", card, 0, 0, errors) == 0
wrong = [call("nvmlDeviceGetViolationStatus", card, 0, None), call("nvmlDeviceGetDetailedEccErrors", card, 5, 0, errors),
         call("nvmlDeviceGetPowerManagementLimitConstraints", card, None, None), call("nvmlDeviceGetNumGpuCores", card, None)]
answer([power, heat, clocks, states, board, [violation[0] > 0, violation[1], list(errors)], wrong])
""",
    )
    assert got == [
        [True, True, 1, True],
        [92, 89, 95, 85, -NOT_SUPPORTED],
        [True] * 5 + [-INVALID_ARGUMENT] * 2,
        [0, 1, True],
        [True, 108 * 64, 2, 0, 16000, 16000, 1],
        [True, 0, [0] * 4],
        [INVALID_ARGUMENT] * 4,
    ]


def test_links_boards_and_processors_are_told(machine: sim.Machine) -> None:
    got = ask(
        machine,
        """
links = [asked("nvmlDeviceGetNvLinkVersion", 0), asked("nvmlDeviceGetNvLinkCapability", 0, 0), asked("nvmlDeviceGetNvLinkCapability", 0, 4),
         asked("nvmlDeviceGetNvLinkErrorCounter", 0, 0, kind=u64), asked("nvmlDeviceGetNvLinkRemoteDeviceType", 0),
         asked("nvmlDeviceGetNvLinkVersion", 99), asked("nvmlDeviceGetNvLinkCapability", 0, 9)]
pci, again = (C.c_ubyte * 68)(), (C.c_ubyte * 68)()
peers = [call("nvmlDeviceGetNvLinkRemotePciInfo", card, 0, pci), call("nvmlDeviceGetPciInfo", cards[1], again), bytes(pci)[:16] == bytes(again)[:16],
         call("nvmlDeviceGetPciInfo_v2", card, pci), bytes(pci)[:16] == bytes(again)[:16]]
same = C.c_int(7)
board = [call("nvmlDeviceOnSameBoard", *cards, C.byref(same)), same.value, call("nvmlDeviceOnSameBoard", *cards, None)]
affinity = (C.c_ulong * 16)()
assert call("nvmlDeviceGetCpuAffinity", card, 16, affinity) == 0
processors = sum(bin(word).count("1") for word in affinity)
affinities = [processors == os.cpu_count(), call("nvmlDeviceGetCpuAffinityWithinScope", card, 16, affinity, 1),
              call("nvmlDeviceGetCpuAffinityWithinScope", card, 16, affinity, 5), call("nvmlDeviceGetCpuAffinity", card, 0, affinity)]
class Field(C.Structure):
    _fields_ = [("id", uint), ("scope", uint), ("stamp", C.c_longlong), ("latency", C.c_longlong), ("type", uint), ("result", C.c_int),
                ("value", u64)]
fields = (Field * 5)(Field(91), Field(164, 0), Field(165, 0), Field(83), Field(9999))
assert call("nvmlDeviceGetFieldValues", card, 5, fields) == 0
values = [[each.result, each.value > 0] for each in fields]
answer([links, peers, board, affinities, values, call("nvmlDeviceClearFieldValues", card, 1, fields),
        call("nvmlDeviceGetFieldValues", card, 0, fields)])
""",
    )
    links, peers, board, affinities, values, cleared, none = got
    assert links == [4, 1, 0, 0, 0, -INVALID_ARGUMENT, -INVALID_ARGUMENT]
    assert peers == [0, 0, True, 0, False]
    assert board == [0, 0, INVALID_ARGUMENT]
    assert affinities == [True, 0, INVALID_ARGUMENT, INVALID_ARGUMENT]
    assert values[0] == values[1] == values[2] == [0, True]
    assert values[4] == [NOT_SUPPORTED, False]
    assert (cleared, none) == (NO_PERMISSION, INVALID_ARGUMENT)


def test_the_system_tells_of_processes_and_of_what_it_has_none_of(machine: sim.Machine) -> None:
    got = ask(
        machine,
        """
name = C.create_string_buffer(256)
own = [call("nvmlSystemGetProcessName", os.getpid(), name, 256), name.value.decode() in open("/proc/self/cmdline").read()]
own += [call("nvmlSystemGetProcessName", os.getpid(), name, 4), len(name.value), call("nvmlSystemGetProcessName", 1 << 30, name, 256),
        call("nvmlSystemGetProcessName", os.getpid(), None, 0)]
nothing = []
for function, more in (("nvmlUnitGetCount", ()), ("nvmlSystemGetHicVersion", (None,)), ("nvmlGetExcludedDeviceCount", ())):
    count = uint(7)
    nothing += [call(function, C.byref(count), *more), count.value, call(function, None, *more)]
count = uint(7)
accounts = [call("nvmlDeviceGetAccountingPids", card, C.byref(count), None), count.value,
            call("nvmlDeviceGetAccountingStats", card, 1, C.create_string_buffer(64)), call("nvmlDeviceGetAccountingPids", card, None, None)]
old = uint(0)
names = [call("nvmlDeviceGetCount", C.byref(old)), old.value]
bus = C.create_string_buffer(68)
call("nvmlDeviceGetPciInfo", card, bus)
found = C.c_void_p()
names += [call("nvmlDeviceGetHandleByPciBusId", bus.raw[:16].split(b"\\0")[0], C.byref(found)), found.value == card.value,
          call("nvmlDeviceGetHandleByPciBusId", b"01:00.0", C.byref(found)), call("nvmlDeviceGetHandleByPciBusId", b"nonsense", C.byref(found))]
nvml.nvmlShutdown()
late = [call("nvmlUnitGetCount", C.byref(count)), call("nvmlSystemGetProcessName", 1, name, 256)]
answer([own, nothing, accounts, names, late])
""",
    )
    own, nothing, accounts, names, late = got
    assert own[:2] == [0, True] and own[2:4] == [0, 3] and own[4:] == [NOT_FOUND, INVALID_ARGUMENT]
    assert nothing == [0, 0, INVALID_ARGUMENT] * 3
    assert accounts == [0, 0, NOT_FOUND, INVALID_ARGUMENT]
    assert names[:2] == [0, 3] and names[2:4] == [0, True] and names[4] == 0 and names[5] != 0
    assert late == [1, 1]


def test_processes_and_samples_are_listed_in_every_form(machine: sim.Machine) -> None:
    with simulated.tenant(machine, memory_bytes=64 << 20, busy=True) as pid:
        got = ask(
            machine,
            """
class Detail(C.Structure):
    _fields_ = [("pid", uint), ("memory", u64), ("gpu", uint), ("compute", uint), ("protected", u64)]
class Details(C.Structure):
    _fields_ = [("version", uint), ("mode", uint), ("count", uint), ("entries", C.POINTER(Detail))]
class Busy(C.Structure):
    _fields_ = [("stamp", u64), ("pid", uint), ("figures", uint * 6)]
class Busies(C.Structure):
    _fields_ = [("version", uint), ("count", uint), ("since", u64), ("entries", C.POINTER(Busy))]
version = lambda kind: C.sizeof(kind) | 1 << 24
details, room = (Detail * 4)(), (Busy * 4)()
lists = []
for mode in (0, 1, 2, 9):
    wanted = Details(version(Details), mode, 4, details)
    lists.append([call("nvmlDeviceGetRunningProcessDetailList", card, C.byref(wanted)), wanted.count])
wanted = Details(version(Details), 0, 0, None)
lists += [call("nvmlDeviceGetRunningProcessDetailList", card, C.byref(Details(1, 0, 0, None))), details[0].pid, details[0].memory >> 20]
busy = Busies(version(Busies), 4, 0, room)
use = [call("nvmlDeviceGetProcessesUtilizationInfo", card, C.byref(busy)), busy.count, room[0].pid,
       call("nvmlDeviceGetProcessesUtilizationInfo", card, C.byref(Busies(version(Busies), 4, 1 << 62, room))),
       call("nvmlDeviceGetProcessesUtilizationInfo", card, C.byref(Busies(1, 0, 0, None)))]
count = uint(4)
none = [call("nvmlDeviceGetProcessUtilization", card, None, C.byref(count), u64(1 << 62)), count.value]
class Sample(C.Structure):
    _fields_ = [("stamp", u64), ("value", u64)]
kinds = []
for kind in (0, 1, 2, 5, 6, 3):
    samples, number, value_type = (Sample * 200)(), uint(200), uint(9)
    kinds.append([call("nvmlDeviceGetSamples", card, kind, u64(0), C.byref(value_type), C.byref(number), samples), samples[0].value & 0xffffffff])
answer([lists, use, none, kinds, asked("nvmlDeviceGetClockInfo", 1), asked("nvmlDeviceGetClockInfo", 2)])
""",
        )
    lists, use, none, kinds, sm, memory = got
    assert lists == [[0, 1], [0, 0], [0, 0], [INVALID_ARGUMENT, 4], 25, pid, 128]
    assert use == [0, 1, pid, NOT_FOUND, 25]
    assert none == [NOT_FOUND, 0]
    assert [result for result, _ in kinds] == [0] * 5 + [NOT_SUPPORTED]
    assert [value for _, value in kinds[3:5]] == [sm, memory]
    assert kinds[0][1] > 1000  # milliwatts


@pytest.mark.parametrize("kind", ["Graphics", "MPSCompute"])
@pytest.mark.parametrize("version", ["", "_v2", "_v3"])
def test_no_process_draws_or_shares_by_mps(machine: sim.Machine, kind: str, version: str) -> None:
    function = f"nvmlDeviceGet{kind}RunningProcesses{version}"
    got = ask(
        machine,
        f"count = uint(7)\nanswer([call({function!r}, card, C.byref(count), None), count.value, call({function!r}, card, None, None)])",
    )
    assert got == [0, 0, INVALID_ARGUMENT]
