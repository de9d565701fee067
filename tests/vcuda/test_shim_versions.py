"""Calls that the simulated driver's version does not have: those of before CUDA 3.2 and newer ones are limited like all others."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support import same
from tests.support import share as shares
from tests.support.share import LIB, MIB, Share
from vcuda import region
from vcuda._build import native
from vcuda.sim import Machine, SimCard

LIMIT = 256 * MIB


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    simulated = LIB / "sim" / f"libcuda.so.{native.SIM_DRIVER_VERSION}"
    by_path, made = folder / "by_path.so", folder / "libcuda-old.so.1"
    build = ["gcc", "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(
        [*build, "-x", "c", "/dev/null", f"-Wl,-soname,{simulated}", "-o", str(by_path)],
        check=True,
        timeout=60,
    )
    source = str(Path(__file__).with_name("old_calls_driver.c"))
    subprocess.run(
        [
            *build,
            f'-DSIMULATED="{simulated}"',
            source,
            "-Wl,--no-as-needed",
            str(by_path),
            "-ldl",
            "-o",
            str(made),
        ],
        check=True,
        timeout=60,
    )
    return made


@pytest.fixture
def share(driver: Path, tmp_path: Path) -> Share:
    machine = Machine.create(tmp_path / "machine", [SimCard()])
    nvml = LIB / "sim" / f"libnvidia-ml.so.{native.SIM_DRIVER_VERSION}"
    share = shares.lay_out(tmp_path / "share", driver, nvml, machine)
    share.region_directory.mkdir()
    region.create(share.region_directory, [shares.limit(machine, memory_bytes=LIMIT)])
    return share


OLD = """
context = begin()
at_start = info()
Flat, Solid = uint * 4, uint * 6
def taken(name, kind, *arguments):
    value = kind()
    return call(name, ref(value), *arguments), value
pitch = uint()
take, give = {
    "plain": (lambda: taken("cuMemAlloc", uint, 10 * MIB), "cuMemFree"),
    "small": (lambda: taken("cuMemAlloc", uint, MIB + 1), "cuMemFree"),
    "pitched": (lambda: taken("cuMemAllocPitch", uint, ref(pitch), 1000, 10240, 4), "cuMemFree"),
    "array": (lambda: taken("cuArrayCreate", P, Flat(1000, 2000, 0x20, 1)), "cuArrayDestroy"),
    "array of planes": (lambda: taken("cuArray3DCreate", P, Solid(500, 400, 10, 0x20, 1, 0)), "cuArrayDestroy"),
}[sys.argv[1]]
"""


@pytest.mark.parametrize("allocator", ["plain", "small", "pitched", "array", "array of planes"])
def test_an_old_call_fills_the_share_and_no_more_and_gives_back(share: Share, allocator: str) -> None:
    rounds, all_back, wrong = share.run(
        same.PRELUDE
        + OLD
        + """
rounds = []
for _ in range(2):
    held = []
    while len(held) < 60:
        result, one = take()
        if result:
            break
        held.append(one)
    rounds.append([result, len(held), info()[0] // MIB < 32])
    for one in held:
        ok(give, one)
    ok("cuCtxSynchronize_v2", context)
wrong = [call("cuMemAlloc", ref(uint()), 0), call("cuArrayCreate", ref(P()), None), call("cuArray3DCreate", ref(P()), None),
         call("cuArrayCreate", None, Flat(0, 0, 0, 0)), call("cuMemFree", 60), call("cuMemAllocPitch", ref(uint()), ref(pitch), 0, 0, 4)]
answer([rounds, info() == at_start, wrong])
""",
        allocator,
    )
    few = 60 if allocator == "small" else 10
    assert rounds[0] == rounds[1] and rounds[0][1] >= few
    assert rounds[0][0] == 0 if allocator == "small" else rounds[0][0] == 2
    assert all_back and wrong == [1] * 6
    assert share.machine is not None
    assert share.usage().cards[0].memory_peak_bytes <= LIMIT


def test_the_newest_context_call_is_charged_and_refused_beyond_the_limit(share: Share) -> None:
    made, refused, left, failed, none_left = share.run(
        same.PRELUDE
        + """
ok("cuInit", 0)
contexts = [made("cuCtxCreate_v4", None, 0, 0) for _ in range(3)]
failed = call("cuCtxCreate_v4", ref(P()), ref(P()), 0, 0)  # the driver's own error
left = info()[0] // MIB
held = fill(8 * MIB)[1]
answer([len(contexts), call("cuCtxCreate_v4", ref(P()), None, 0, 0), left, failed, info()[0] // MIB])
"""
    )
    assert (made, refused, left, failed, none_left) == (3, 2, 64, 1, 0)


@pytest.mark.parametrize("bound", ["memory", "address"])
def test_memory_bound_for_a_device_is_charged_until_it_is_unbound(share: Share, bound: str) -> None:
    steps = share.run(
        same.PRELUDE
        + """
class Multicast(C.Structure):
    _fields_ = [("devices", uint), ("size", size), ("types", u64), ("flags", u64)]
context = begin()
start, steps = info()[0], []
def step():
    steps.append((start - info()[0]) // MIB)
memory = made("cuMemCreate", size(20 * MIB), ref(Properties(1, 0, Location(1, 0))), u64(0), kind=u64)
group = made("cuMulticastCreate", ref(Multicast(1, 40 * MIB, 0, 0)), kind=u64)
address = made("cuMemAddressReserve", size(20 * MIB), size(0), u64(0), u64(0), kind=u64)
ok("cuMemMap", address, size(20 * MIB), size(0), memory, u64(0)); step()
name, middle = ("cuMulticastBindMem_v2", (memory, size(0))) if sys.argv[1] == "memory" else ("cuMulticastBindAddr_v2", (address,))
assert call(name, group, 5, size(0), *middle, size(20 * MIB), u64(0)) == 101; step()
ok(name, group, 0, size(0), *middle, size(20 * MIB), u64(0))
ok("cuMemUnmap", address, size(20 * MIB)); ok("cuMemRelease", memory); step()
ok("cuMulticastUnbind", group, 0, size(0), size(20 * MIB)); step()
answer(steps)
""",
        bound,
    )
    assert steps == [20, 20, 20, 0]


def test_a_version_that_is_newer_than_the_shim_works_and_is_told_and_counted(share: Share) -> None:
    code = (
        same.PRELUDE
        + """
ok("cuInit", 0)
found, status = P(), C.c_int()
hooked = C.cast(cu.cuMemAllocAsync_ptsz, P).value
ok("cuGetProcAddress_v2_ptsz", b"cuMemAllocAsync", ref(found), 12000, u64(0), ref(status))
known = found.value == hooked
ok("cuGetProcAddress_v2_ptsz", b"cuMemAlloc", ref(found), 99000, u64(0), ref(status))
answer([known, C.CFUNCTYPE(C.c_int)(found.value)()])
"""
    )
    said = "vcuda: this driver has a version of cuMemAlloc that is newer than this build of vcuda: it is not limited\n"
    assert share.run(code, errors=said) == [True, 0]
    assert share.usage().cards[0].unknown_symbols == 1


@pytest.mark.parametrize("name", ["cuMemGetInfo", "cuMemGetInfo_v2"])
def test_a_driver_that_answers_with_one_pointer_tells_the_shares_figure(share: Share, name: str) -> None:
    free, total, both = share.run(
        same.PRELUDE
        + """
name = sys.argv[1]
begin()
kind = size if name.endswith("_v2") else uint
free, total, both = kind(), kind(), [kind(), kind()]
ok(name, ref(free), None); ok(name, None, ref(total)); ok(name, ref(both[0]), ref(both[1]))
ok(name, None, None)
answer([free.value, total.value, [each.value for each in both]])
""",
        name,
    )
    assert total == LIMIT
    assert [free, total] == both
