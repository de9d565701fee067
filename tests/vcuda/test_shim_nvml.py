"""NVML inside a share: its memory, its processes, its cards; never another's, and nothing of the card may be changed."""

from __future__ import annotations

import json
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support import share as shares
from tests.support.share import MIB, Share
from vcuda import region
from vcuda._build import native
from vcuda.sim import Machine, SimCard

LIMIT = 512 * MIB


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine.create(tmp_path / "machine", [SimCard(), SimCard(), SimCard()])


@pytest.fixture
def share(machine: Machine, tmp_path: Path) -> Share:
    """The second card of three."""
    return shares.simulated(tmp_path / "share", machine, [shares.limit(machine, 1, LIMIT)])


def ask(share: Share, code: str) -> Any:
    return share.run("from pynvml import *\nnvmlInit()\n" + textwrap.dedent(code))


def tenant(share: Share, count: int) -> subprocess.Popen[str]:
    device = 1 if share.region_directory.exists() else 0
    process = share.start(f"begin({device}); assert alloc({count})[0] == 0; answer('ready'); sys.stdin.read()")
    assert process.stdout and process.stdout.readline() == '"ready"\n'
    return process


def test_memory_is_the_limit_and_the_containers_own_use(share: Share, machine: Machine, tmp_path: Path) -> None:
    neighbour = tenant(shares.simulated(tmp_path / "other", machine, [shares.limit(machine, 1, 2 * LIMIT)]), 800 * MIB)
    mine = tenant(share, 100 * MIB)
    v1, v2 = ask(
        share,
        """
        device = nvmlDeviceGetHandleByIndex(0)
        old, new = nvmlDeviceGetMemoryInfo(device), nvmlDeviceGetMemoryInfo(device, version=nvmlMemory_v2)
        answer([[old.total, old.used, old.free], [new.total, new.reserved, new.used, new.free, new.version == nvmlMemory_v2]])
        """,
    )
    neighbour.communicate("", timeout=60)
    used = 164 * MIB
    assert v1 == [LIMIT, used, LIMIT - used]
    assert v2 == [LIMIT, 0, used, LIMIT - used, True]
    mine.communicate("", timeout=60)
    assert ask(share, "answer(nvmlDeviceGetMemoryInfo(nvmlDeviceGetHandleByIndex(0)).used)") == 0


def test_only_the_containers_processes_are_listed(share: Share, machine: Machine, tmp_path: Path) -> None:
    other = shares.simulated(tmp_path / "other", machine, [shares.limit(machine, 1, LIMIT)])
    neighbour, mine = tenant(other, 100 * MIB), tenant(share, 50 * MIB)
    lists = ask(
        share,
        """
        import ctypes
        device = nvmlDeviceGetHandleByIndex(0)
        found = []
        for kind in ("Compute", "Graphics", "MPSCompute"):
            for version in ("", "_v2", "_v3"):
                words = 2 if version == "" else 3
                count, buffer = C.c_uint(0), (C.c_uint64 * 3 * 128)()
                function = getattr(C.CDLL("libnvidia-ml.so.1"), f"nvmlDeviceGet{kind}RunningProcesses{version}")
                first = function(device, C.byref(count), None)
                needed, count = count.value, C.c_uint(128)
                second = function(device, C.byref(count), buffer)
                flat = list((C.c_uint64 * 384).from_buffer(buffer))
                rows = [flat[i * words : i * words + words] for i in range(count.value)]
                found.append([first, needed, second, [[row[0] & 0xffffffff, row[1]] for row in rows]])
        answer(found)
        """,
    )
    for process in (neighbour, mine):
        process.communicate("", timeout=60)
    assert lists == [[7, 1, 0, [[mine.pid, 114 * MIB]]]] * 3 + [[0, 0, 0, []]] * 6


def test_only_the_shares_cards_are_there_and_counted_from_zero(share: Share, machine: Machine) -> None:
    outcome = ask(
        share,
        """
        def attempt(function, *arguments):
            try:
                return function(*arguments)
            except NVMLError as error:
                return error.value
        device = nvmlDeviceGetHandleByIndex(0)
        answer([
            nvmlDeviceGetCount(),
            nvmlDeviceGetUUID(device),
            nvmlDeviceGetIndex(device),
            nvmlDeviceGetMinorNumber(device),
            attempt(nvmlDeviceGetHandleByIndex, 1),
            [type(attempt(nvmlDeviceGetHandleByUUID, uuid)).__name__ for uuid in json.loads(sys.argv[1])],
            [type(attempt(nvmlDeviceGetHandleByPciBusId, bus)).__name__ for bus in json.loads(sys.argv[2])],
        ])
        """.replace("sys.argv[1]", repr(json.dumps([card.uuid for card in machine.cards]))).replace(
            "sys.argv[2]", repr(json.dumps([card.bus for card in machine.cards]))
        ),
    )
    seen = ["int", "LP_struct_c_nvmlDevice_t", "int"]
    assert outcome == [1, machine.cards[1].uuid, 0, 1, 2, seen, seen]


def test_nvml_that_is_opened_after_a_context_was_made_is_the_shares(share: Share) -> None:
    """Making the first context reads the real NVML, which must not become the application's."""
    assert ask_after_context(share) == [1, LIMIT]


def ask_after_context(share: Share) -> Any:
    return share.run("""
        begin(1)
        from pynvml import *
        nvmlInit()
        answer([nvmlDeviceGetCount(), nvmlDeviceGetMemoryInfo(nvmlDeviceGetHandleByIndex(0)).total])
    """)


def test_setters_are_refused(share: Share) -> None:
    results = ask(
        share,
        """
        device, library = nvmlDeviceGetHandleByIndex(0), C.CDLL("libnvidia-ml.so.1")
        answer([getattr(library, name)(device, 1, 1, 1) for name in (
            "nvmlDeviceSetPersistenceMode", "nvmlDeviceSetComputeMode", "nvmlDeviceSetPowerManagementLimit",
            "nvmlDeviceSetApplicationsClocks", "nvmlDeviceSetMigMode")])
        """,
    )
    assert set(results) <= {4, 13}  # NO_PERMISSION, or a function that this driver does not have
    assert results[0] == 4


def test_without_a_region_nvml_passes_through(machine: Machine, tmp_path: Path) -> None:
    share = shares.simulated(tmp_path / "bare", machine, None)
    code = "from pynvml import *\nnvmlInit()\nanswer(nvmlDeviceGetCount())"
    process = share.start(code)
    output, said = process.communicate(timeout=60)
    assert output == "3\n"
    assert said.count("\n") == 1 and said.startswith("vcuda: no share is configured")


# A library with NVML's names that calls one of its own functions as the genuine one does: through its PLT.
DRIVER = """
#include <stdio.h>
#include <string.h>
typedef struct device *device_t;
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *device) { *device = (device_t)(index + 1L); return 0; }
int nvmlDeviceGetUUID(device_t device, char *uuid, unsigned length) { snprintf(uuid, length, "GPU-%ld", (long)device); return 0; }
int nvmlCountSeenInside(unsigned *count) { return nvmlDeviceGetCount_v2(count); }
"""


def test_calls_that_the_library_makes_to_itself_pass_through(tmp_path: Path) -> None:
    source, library = tmp_path / "driver.c", tmp_path / "driver.so"
    other = shares.LIB / "sim" / f"libcuda.so.{native.SIM_DRIVER_VERSION}"
    source.write_text(DRIVER)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", library, source],
        check=True,
        timeout=60,
    )
    share = shares.lay_out(tmp_path / "share", other, library)
    share.region_directory.mkdir()
    region.create(share.region_directory, [region.CardLimit("GPU-2", 1, MIB, 50, 50)])
    counts = share.run("""
        nvml, counts = C.CDLL("libnvidia-ml.so.1"), []
        for name in ("nvmlDeviceGetCount_v2", "nvmlCountSeenInside"):
            count = C.c_uint()
            getattr(nvml, name)(C.byref(count))
            counts.append(count.value)
        answer(counts)
    """)
    assert counts == [1, 2]
