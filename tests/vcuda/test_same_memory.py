"""A share changes nothing about what memory tells of itself: pools, mapped and managed memory, pointers, the card's attributes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import same
from tests.support import share as shares
from tests.support.share import MIB, Share
from vcuda.sim import Machine, SimCard


@pytest.fixture
def share(tmp_path: Path) -> Share:
    machine = Machine.create(tmp_path / "machine", [SimCard()])
    return shares.simulated(tmp_path / "share", machine, [shares.limit(machine, memory_bytes=512 * MIB)])


POOLS = """
context = begin()
start = info()[0]
def taken():
    return (start - info()[0]) // MIB
def pool(most=0):
    return made("cuMemPoolCreate", ref(PoolProperties(1, 0, Location(1, 0), None, most)))
def attribute(pool, number, kind=u64):
    value = kind(99)
    ok("cuMemPoolGetAttribute", pool, number, ref(value))
    return value.value
def sync():
    ok("cuStreamSynchronize", None)
"""


@pytest.mark.parametrize("suffix", ["", "_ptsz"])
def test_a_pool_keeps_what_it_is_told_to_and_gives_the_rest_back(share: Share, suffix: str) -> None:
    got = same.answers(
        share,
        f"""
suffix = {suffix!r}
"""
        + POOLS
        + """
pointer = u64()
ok("cuMemAllocAsync" + suffix, ref(pointer), size(1), None); ok("cuMemFreeAsync" + suffix, pointer, None); sync()
start = info()[0]  # a thread's own stream is charged a chunk at its first use
mine = pool()
ok("cuMemPoolSetAttribute", mine, 4, ref(u64(1 << 40)))
ok("cuMemAllocFromPoolAsync" + suffix, ref(pointer), size(40 * MIB), mine, None)
ok("cuMemFreeAsync" + suffix, pointer, None); sync()
steps = [taken(), attribute(mine, 4) == 1 << 40, attribute(mine, 6) // MIB, attribute(mine, 8) // MIB]
ok("cuMemPoolTrimTo", mine, size(32 * MIB)); steps.append(taken())
for number in (6, 8):
    ok("cuMemPoolSetAttribute", mine, number, ref(u64(0)))
steps += [attribute(mine, 6) // MIB, attribute(mine, 8)]
ok("cuMemPoolTrimTo", mine, size(0)); steps.append(taken())
ok("cuMemAllocFromPoolAsync" + suffix, ref(pointer), size(10 * MIB), mine, None); sync(); steps.append(taken())
ok("cuMemPoolDestroy", mine); steps.append(taken())
ok("cuMemFreeAsync" + suffix, pointer, None); sync(); steps.append(taken())
answer([steps, call("cuMemPoolDestroy", mine), call("cuMemPoolTrimTo", mine, size(0)),
        call("cuMemAllocFromPoolAsync" + suffix, ref(pointer), size(1), mine, None)])
""",
    )
    assert got == [[64, True, 64, 40, 32, 32, 0, 0, 32, 10, 0], 1, 1, 1]


def test_a_cards_pool_can_be_exchanged_and_asked_who_has_access(share: Share) -> None:
    got = same.answers(
        share,
        POOLS
        + """
mine, small, default, found = pool(), pool(2 * MIB), made("cuDeviceGetDefaultMemPool", 0), P()
ok("cuDeviceSetMemPool", 0, mine)
ok("cuDeviceGetMemPool", ref(found), 0)
pointer = alloc(10 * MIB, "cuMemAllocAsync", None)[1]
seen = [found.value == mine.value, attribute(mine, 7) // MIB, attribute(default, 7)]
kind, of = C.c_int(), P()
ok("cuPointerGetAttribute", ref(of), 17, pointer)
seen.append(of.value == mine.value)
ok("cuMemFreeAsync", pointer, None); sync()
ok("cuMemPoolDestroy", mine)
ok("cuDeviceGetMemPool", ref(found), 0)
seen += [found.value == default.value, call("cuMemAllocFromPoolAsync", ref(pointer), size(4 * MIB), small, None)]
ok("cuMemPoolSetAttribute", small, 1, ref(C.c_int(0)))
seen += [attribute(small, 1, C.c_int), attribute(small, 2, C.c_int)]
flags = C.c_int(9)
ok("cuMemPoolGetAccess", ref(flags), small, ref(Location(1, 0)))
seen += [flags.value, call("cuMemPoolSetAccess", small, None, size(0))]
none = alloc(0, "cuMemAllocAsync", None)
wrong = [call("cuMemPoolDestroy", default), call("cuMemPoolGetAttribute", small, 99, ref(u64())), call("cuMemPoolGetAttribute", small, 1, None),
         call("cuMemPoolSetAttribute", small, 6, ref(u64(5))), call("cuMemPoolSetAttribute", small, 4, None),
         call("cuMemPoolGetAccess", None, small, None), call("cuMemPoolSetAccess", small, None, size(1)),
         call("cuDeviceSetMemPool", 0, None), call("cuDeviceGetMemPool", None, 0), call("cuMemPoolCreate", None, None),
         call("cuMemAllocAsync", None, size(1), None)]
answer([seen, [none[0], none[1].value], wrong, call("cuMemPoolCreate", ref(found), ref(PoolProperties(1, 0, Location(2, 0))))])
""",
    )
    assert got == [[True, 10, 0, True, True, 2, 0, 1, 3, 0], [0, 0], [1] * 11, 0]


def test_memory_of_graphs_is_asked_and_its_marks_are_reset(share: Share) -> None:
    got = same.answers(
        share,
        POOLS
        + """
graph = made("cuGraphCreate", 0)
node, parameters = P(), NodeAlloc(PoolProperties(1, 0, Location(1, 0)), None, 0, 10 * MIB, 0)
ok("cuGraphAddMemAllocNode", ref(node), graph, None, size(0), ref(parameters))
made("cuGraphAddMemFreeNode", graph, (P * 1)(node), size(1), u64(parameters.pointer))
executable = made("cuGraphInstantiateWithFlags", graph, u64(0))
ok("cuGraphLaunch", executable, None); sync()
def marks():
    value = u64()
    found = []
    for number in range(4):
        ok("cuDeviceGetGraphMemAttribute", 0, number, ref(value))
        found.append(value.value // MIB)
    return found
seen = [marks()]
ok("cuDeviceSetGraphMemAttribute", 0, 1, ref(u64(0)))
seen.append(marks())
ok("cuGraphExecDestroy", executable)
ok("cuDeviceGraphMemTrim", 0)
ok("cuDeviceSetGraphMemAttribute", 0, 3, ref(u64(0)))
seen.append(marks())
wrong = [call("cuDeviceSetGraphMemAttribute", 0, 1, ref(u64(7))), call("cuDeviceSetGraphMemAttribute", 0, 0, ref(u64(0))),
         call("cuDeviceSetGraphMemAttribute", 0, 1, None), call("cuDeviceGetGraphMemAttribute", 0, 9, ref(u64())),
         call("cuDeviceGraphMemTrim", 99)]
answer([seen, wrong, taken()])
""",
    )
    assert got == [[[0, 10, 32, 32], [0, 0, 32, 32], [0, 0, 0, 0]], [1, 1, 1, 1, 101], 0]


def test_mapped_memory_tells_its_properties_and_access(share: Share) -> None:
    got = same.answers(
        share,
        """
context = begin()
wanted = Properties(1, 0, Location(1, 0))
step, found = size(), Properties()
ok("cuMemGetAllocationGranularity", ref(step), ref(wanted), 0)
handle = made("cuMemCreate", size(4 * MIB), ref(wanted), u64(0), kind=u64)
ok("cuMemGetAllocationPropertiesFromHandle", ref(found), handle)
address = made("cuMemAddressReserve", size(8 * MIB), size(0), u64(0), u64(0), kind=u64)
ok("cuMemMap", address, size(4 * MIB), size(0), handle, u64(0))
class Access(C.Structure):
    _fields_ = [("location", Location), ("flags", C.c_int)]
flags, steps = u64(9), []
for access in (0, 1, 3):
    ok("cuMemSetAccess", address, size(4 * MIB), ref(Access(Location(1, 0), access)), size(1))
    ok("cuMemGetAccess", ref(flags), ref(Location(1, 0)), address)
    steps.append(flags.value)
busy = call("cuMemAddressFree", address, size(8 * MIB))
wrong = [call("cuMemGetAllocationGranularity", None, ref(wanted), 0), call("cuMemGetAllocationGranularity", ref(step), ref(wanted), 2),
         call("cuMemGetAllocationPropertiesFromHandle", None, handle), call("cuMemGetAllocationPropertiesFromHandle", ref(found), u64(12345)),
         call("cuMemGetAccess", ref(flags), ref(Location(1, 0)), u64(4096)), call("cuMemGetAccess", None, None, address),
         call("cuMemMap", u64(0), size(4 * MIB), size(0), handle, u64(0)), call("cuMemUnmap", address, size(0)),
         call("cuMemSetAccess", address, size(4 * MIB), None, size(1)), call("cuMemAddressReserve", None, size(MIB), size(0), u64(0), u64(0)),
         call("cuMemCreate", None, size(2 * MIB), ref(wanted), u64(0)), call("cuMemRetainAllocationHandle", None, P(address.value))]
ok("cuMemUnmap", address, size(4 * MIB)); ok("cuMemRelease", handle); ok("cuMemAddressFree", address, size(8 * MIB))
class Multicast(C.Structure):
    _fields_ = [("devices", uint), ("size", size), ("types", u64), ("flags", u64)]
group = made("cuMulticastCreate", ref(Multicast(1, 4 * MIB, 0, 0)), kind=u64)
ok("cuMulticastGetGranularity", ref(step), ref(Multicast(1, 4 * MIB, 0, 0)), 0)
groups = [step.value // MIB, call("cuMulticastAddDevice", group, 0), call("cuMulticastAddDevice", group, 99),
          call("cuMulticastGetGranularity", None, None, 0)]
answer([step.value // MIB, found.location.type, steps, busy, wrong, groups])
""",
    )
    assert got == [2, 1, [0, 1, 3], 1, [1] * 12, [2, 0, 101, 1]]


def test_pointers_are_asked_for_everything(share: Share) -> None:
    got = same.answers(
        share,
        """
context = begin()
plain, managed = alloc(MIB)[1], made("cuMemAllocManaged", size(MIB), 1, kind=u64)
def asked(pointer, number, kind=C.c_int):
    value = kind(77)
    result = call("cuPointerGetAttribute", ref(value), number, pointer)
    return value.value if result == 0 else -result
sync_on = C.c_int(1)
seen = [asked(plain, 6), asked(plain, 10), asked(plain, 13), asked(plain, 14, u64), asked(plain, 15), asked(plain, 16),
        asked(plain, 3, u64) == plain.value, asked(managed, 4, u64) == managed.value, asked(plain, 4, u64), asked(plain, 99),
        asked(plain, 7, u64) == asked(plain, 20, u64), asked(plain, 12, size), asked(u64(plain.value + 5), 11, u64) == plain.value]
setting = [call("cuPointerSetAttribute", ref(sync_on), 6, plain), call("cuPointerSetAttribute", ref(sync_on), 7, plain),
           call("cuPointerSetAttribute", None, 6, plain), call("cuPointerGetAttribute", None, 6, plain)]
where, who, unknown = C.c_int(7), (C.c_int * 2)(7, 7), C.c_int(7)
data, bytes_, numbers = (P * 3)(*(C.addressof(each) for each in (where, who, unknown))), (size * 3)(4, 8, 4), (C.c_int * 3)(2, 3, 1)
ok("cuMemRangeGetAttributes", data, bytes_, numbers, size(3), managed, size(MIB))
ranges = [where.value, list(who), unknown.value, call("cuMemRangeGetAttributes", None, None, None, size(0), managed, size(1)),
          call("cuMemRangeGetAttributes", data, bytes_, (C.c_int * 3)(2, 3, 99), size(3), managed, size(MIB)),
          call("cuMemRangeGetAttribute", ref(where), size(4), 2, plain, size(MIB))]
advice = [call("cuMemAdvise", managed, size(MIB), 1, 0), call("cuMemAdvise", managed, size(MIB), 9, 0), call("cuMemAdvise", plain, size(MIB), 1, 0)]
prefetch = [call("cuMemPrefetchAsync" + suffix, managed, size(MIB), device, None) for suffix in ("", "_ptsz") for device in (0, -1, 99)]
host = made("cuMemAllocHost_v2", size(4096))
old = made("cuMemAllocHost", uint(4096))
flags = uint(9)
ok("cuMemHostGetFlags", ref(flags), host)
hosts = [flags.value, call("cuMemFreeHost", host), call("cuMemFreeHost", old), bool(call("cuMemFreeHost", host)),
         call("cuMemAllocHost_v2", None, size(1)), call("cuMemAllocManaged", None, size(1), 1), call("cuMemAllocManaged", ref(u64()), size(1), 9)]
page = (C.c_ubyte * 8192)()
registered = [call("cuMemHostRegister", page, size(8192), 0), call("cuMemHostRegister", page, size(8192), 0), call("cuMemHostUnregister", page),
              call("cuMemHostUnregister", page)]
answer([seen, setting, ranges, advice, prefetch, hosts, registered])
""",
    )
    assert got == [
        [0, 1, 1, 0, 0, 3, True, True, -1, -1, True, MIB, True],
        [0, 1, 1, 1],
        [-2, [-2, -2], 0, 1, 801, 1],
        [0, 1, 1],
        [0, 0, 101] * 2,
        [2, 0, 0, True, 1, 1, 1],
        [0, 712, 0, 713],
    ]


def test_the_card_is_asked_for_everything(share: Share) -> None:
    got = same.answers(
        share,
        """
context = begin()
first, second = (C.c_ubyte * 16)(), (C.c_ubyte * 16)()
ok("cuDeviceGetUuid", first, 0); ok("cuDeviceGetUuid_v2", second, 0)
def attribute(number):
    value = C.c_int(-7)
    ok("cuDeviceGetAttribute", ref(value), number, 0)
    return value.value
bus = C.create_string_buffer(32)
ok("cuDeviceGetPCIBusId", bus, 32, 0)
place = bus.value.decode().lower()
at = [place == f"{attribute(50):04x}:{attribute(33):02x}:{attribute(34):02x}.0", attribute(120), attribute(131)]
found = C.c_int(-7)
ok("cuDeviceGetByPCIBusId", ref(found), place.split(":", 1)[1].encode())  # without its domain
supported = C.c_int(7)
ok("cuDeviceGetExecAffinitySupport", ref(supported), 0, 0)
wrong = [call("cuDeviceGetUuid", None, 0), call("cuDeviceGetAttribute", None, 1, 0), call("cuDeviceGetName", None, 0, 0),
         call("cuDeviceGetExecAffinitySupport", ref(supported), 5, 0), call("cuDeviceGetByPCIBusId", ref(found), None),
         call("cuDeviceGetByPCIBusId", ref(found), b"nonsense"), call("cuDeviceGetPCIBusId", None, 0, 0), call("cuDeviceTotalMem_v2", None, 0),
         call("cuDeviceTotalMem", None, 0), call("cuMemGetInfo", None, None), call("cuDeviceGet", None, 0), call("cuDeviceGetCount", None)]
luid = call("cuDeviceGetLuid", C.create_string_buffer(8), ref(uint()), 0)
answer([bytes(first) == bytes(second), at, found.value, supported.value, wrong, luid])
""",
    )
    assert got[:4] == [True, [True, 0, 0], 0, 0]
    assert got[5] == 801
    assert [bool(result) for result in got[4]] == [True] * 12


def test_the_oldest_calls_tell_the_share_in_32_bits(share: Share) -> None:
    free, total, device_total = share.run(
        same.PRELUDE
        + """
context = begin()
free, total, device_total = uint(), uint(), uint()
ok("cuMemGetInfo", ref(free), ref(total))
ok("cuDeviceTotalMem", ref(device_total), 0)
answer([each.value for each in (free, total, device_total)])
"""
    )
    assert (free, total, device_total) == (448 * MIB, 512 * MIB, 512 * MIB)
