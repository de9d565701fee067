"""NVML inside a share by every name of a call, and with the arguments that a careless client gives: the driver's own answers, no crash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import share as shares
from tests.support.share import MIB, PRELUDE, SECONDS, Share
from vcuda.sim import Machine, SimCard

NOT_FOUND, INVALID_ARGUMENT, NOT_SUPPORTED, MISSING = 6, 2, 3, 13

BEGIN = """
import ctypes as C, os
nvml = C.CDLL("libnvidia-ml.so.1")
uint, u64 = C.c_uint, C.c_uint64
assert nvml.nvmlInit_v2() == 0
card = C.c_void_p()
assert nvml.nvmlDeviceGetHandleByIndex_v2(0, C.byref(card)) == 0
def call(name, *arguments):
    return getattr(nvml, name)(*arguments)
"""


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Share:
    """The second card of three; the third is in parts."""
    folder: Path = tmp_path_factory.mktemp("nvml")
    machine = Machine.create(folder / "machine", [SimCard(), SimCard(), SimCard(mig=["3g"])])
    return shares.simulated(folder / "share", machine, [shares.limit(machine, 1, 512 * MIB)])


def ask(share: Share, code: str, *arguments: str) -> Any:
    return share.run(BEGIN + code, *arguments)


def test_the_old_names_show_the_same_cards(share: Share) -> None:
    got = ask(
        share,
        """
count, found = uint(7), C.c_void_p()
seen = [call("nvmlDeviceGetCount", C.byref(count)), count.value]
seen += [call("nvmlDeviceGetHandleByIndex", 0, C.byref(found)), found.value == card.value, call("nvmlDeviceGetHandleByIndex", 1, C.byref(found))]
buses = []
for name in ("nvmlDeviceGetHandleByPciBusId", "nvmlDeviceGetHandleByPciBusId_v2"):
    for bus in sys.argv[1:3]:
        found = C.c_void_p(5)
        buses.append([call(name, bus.encode(), C.byref(found)), found.value == card.value, found.value is None])
serials = [call("nvmlDeviceGetHandleBySerial", sys.argv[index].encode(), C.byref(found)) for index in (3, 4)]
answer([seen, buses, serials])
""",
        *places_and_serials(share),
    )
    assert got[0] == [0, 1, 0, True, INVALID_ARGUMENT]
    assert got[1] == [[0, True, False], [NOT_FOUND, False, True]] * 2
    assert got[2] == [0, NOT_FOUND]


def places_and_serials(share: Share) -> list[str]:
    """Of the share's card and of a neighbour's, as the driver itself tells them."""
    assert share.machine is not None
    found: list[str] = share.run(
        """
from pynvml import *
nvmlInit()
cards = [nvmlDeviceGetHandleByIndex(index) for index in (1, 0)]
answer([*(nvmlDeviceGetPciInfo(card).busId for card in cards), *(nvmlDeviceGetSerial(card) for card in cards)])
""",
        LD_LIBRARY_PATH=share.machine.environment()["LD_LIBRARY_PATH"],
    )
    return found


def test_nowhere_to_put_the_answer_is_an_error_and_no_crash(share: Share) -> None:
    got = ask(
        share,
        """
count = uint(4)
answer([call("nvmlDeviceGetIndex", card, None), call("nvmlDeviceGetCount", None), call("nvmlDeviceGetCount_v2", None),
        call("nvmlDeviceGetHandleByIndex_v2", 0, None), call("nvmlDeviceGetHandleByUUID", None, C.byref(card)),
        call("nvmlDeviceGetTopologyNearestGpus", card, 10, None, None), call("nvmlSystemGetTopologyGpuSet", 0, None, None),
        call("nvmlDeviceGetMemoryInfo", card, None), call("nvmlDeviceGetUtilizationRates", card, None),
        call("nvmlDeviceGetComputeRunningProcesses_v3", card, None, None), call("nvmlDeviceGetRunningProcessDetailList", card, None),
        call("nvmlDeviceGetProcessUtilization", card, None, None, u64(0)), call("nvmlDeviceGetProcessesUtilizationInfo", card, None),
        call("nvmlDeviceGetSamples", card, 1, u64(0), None, None, None), call("nvmlDeviceGetAccountingPids", card, None, None),
        call("nvmlDeviceGetAccountingStats", card, 1, None)])
""",
    )
    assert got[6] in (INVALID_ARGUMENT, NOT_SUPPORTED)
    assert got[:6] + got[7:] == [INVALID_ARGUMENT] * 15


def test_what_the_driver_does_not_have_is_answered_by_it(share: Share) -> None:
    got = ask(
        share,
        """
count, room = uint(4), (C.c_void_p * 4)()
class Attributes(C.Structure):
    _fields_ = [("words", uint * 9), ("memory", u64)]
def asked(name, *arguments):
    try:
        return call(name, *arguments)
    except AttributeError:
        return "no such name"
answer([asked("nvmlUnitGetDevices", None, C.byref(count), room), asked("nvmlDeviceGetHandleByUUIDV", None, C.byref(card)),
        asked("nvmlDeviceGetAttributes", card, C.byref(Attributes())), asked("nvmlDeviceGetAttributes_v2", card, C.byref(Attributes()))])
""",
    )
    assert got[1] == "no such name", "the simulated driver is of before it"
    assert all(result in (INVALID_ARGUMENT, NOT_SUPPORTED, MISSING, "no such name") for result in got), got


def test_a_process_in_a_pid_namespace_below_is_listed_by_its_pid_here(share: Share) -> None:
    unshare = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may make no PID namespace")
    tenant = subprocess.Popen(
        [*unshare, sys.executable, "-c", PRELUDE + "begin(1)\nanswer(os.getpid())\nsys.stdin.read()"],
        env=share.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert tenant.stdout and tenant.stdout.readline() == "1\n"
        children = Path(f"/proc/{tenant.pid}/task/{tenant.pid}/children").read_text().split()
        pids = share.run("""
from pynvml import *
nvmlInit()
answer([process.pid for process in nvmlDeviceGetComputeRunningProcesses(nvmlDeviceGetHandleByIndex(0))])
""")
        assert [str(pid) for pid in pids] == children
    finally:
        tenant.communicate("", timeout=SECONDS)
