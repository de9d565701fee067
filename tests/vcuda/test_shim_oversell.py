"""Oversell: beyond the physical share plain allocations become managed memory, up to the quota and never silently."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import share as shares
from tests.support.share import MIB, Share
from vcuda import region
from vcuda.sim import Machine, SimCard

PHYSICAL, QUOTA = 200 * MIB, 400 * MIB
SAID = (
    "vcuda: the share is oversold and its physical part is full: from here on memory may lie on the host, and be slow\n"
)

# What the driver says of a pointer: CU_POINTER_ATTRIBUTE_IS_MANAGED 8, MEMORY_TYPE 2, DEVICE_ORDINAL 9.
ATTRIBUTES = """
def attribute(number, pointer):
    value = C.c_int(-1)
    ok("cuPointerGetAttribute", C.byref(value), number, pointer)
    return value.value
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine.create(tmp_path / "machine", [SimCard(memory_bytes=2048 * MIB)])


@pytest.fixture
def share(machine: Machine, tmp_path: Path) -> Share:
    limit = shares.limit(machine, memory_bytes=QUOTA, physical_bytes=PHYSICAL)
    return shares.simulated(tmp_path / "share", machine, [limit])


def test_plain_memory_beyond_the_physical_share_is_managed_up_to_the_quota(share: Share) -> None:
    process = share.start(
        ATTRIBUTES
        + """
begin()
before = info()
held = fill(10 * MIB)[1]
kinds = [attribute(8, pointer) for pointer in held]
types = {attribute(2, pointer) for pointer in held}
ok("cuMemsetD8_v2", held[-1], 7, size(4096))
data = C.create_string_buffer(4096)
ok("cuMemcpyDtoH_v2", data, held[-1], size(4096))
answer([before, kinds, sorted(types), data.raw == b"\\7" * 4096, info()[0]])
sys.stdin.readline()
for pointer in held:
    ok("cuMemFree_v2", pointer)
answer([info() == before, attribute(8, alloc(10 * MIB)[1])])
"""
    )
    assert process.stdin and process.stdout
    line = process.stdout.readline()
    assert line, process.communicate(timeout=60)[1]
    before, kinds, types, same, left = json.loads(line)
    card = share.usage().cards[0]
    output, said = process.communicate("\n", timeout=60)
    plain = (PHYSICAL - 64 * MIB) // (10 * MIB)
    assert before == [QUOTA - 64 * MIB, QUOTA]
    assert kinds == [0] * plain + [1] * ((QUOTA - 64 * MIB) // (10 * MIB) - plain)
    assert (types, same) == ([2], True)  # CU_MEMORYTYPE_DEVICE, as an application expects
    assert left == (QUOTA - 64 * MIB) % (10 * MIB)
    assert card.oversold_bytes == card.managed_bytes == kinds.count(1) * 10 * MIB
    assert card.oversold_allocations == kinds.count(1)
    assert card.memory_peak_bytes <= QUOTA
    assert json.loads(output) == [True, 0]  # what was freed is physical again
    assert shares.beside_refusals(said) == SAID


@pytest.mark.parametrize(
    "take",
    [
        'alloc(100 * MIB, "cuMemAllocAsync", None)[0]',
        'call("cuMemCreate", C.byref(u64()), size(100 * MIB), C.byref(Properties(1, 0, Location(1, 0))), u64(0))',
        'call("cuCtxCreate_v2", C.byref(C.c_void_p()), 0, 0)',
    ],
)
def test_what_cannot_be_managed_is_refused_beyond_the_physical_share(share: Share, take: str) -> None:
    """Pools, physical handles and contexts must be on the card."""
    results = share.run(
        f"begin(); full = alloc(100 * MIB)[0]; before = info(); answer([full, {take}, info() == before])"
    )
    assert results == [0, 2, True]


def test_pitched_and_small_memory_and_the_tenants_own_managed_memory(share: Share) -> None:
    results = share.run(
        ATTRIBUTES
        + """
begin()
own = alloc(100 * MIB, "cuMemAllocManaged", 1)
assert own[0] == 0 and alloc(136 * MIB)[0] == 0  # managed memory takes nothing of the physical share
pointer, pitch = u64(), size()
pitched = [call("cuMemAllocPitch_v2", C.byref(pointer), C.byref(pitch), size(1000), size(1024), element) for element in (4, 8)]
row = pitch.value
small = [alloc(1000) for _ in range(10)]
answer([pitched, row, attribute(8, pointer), [attribute(8, p) for r, p in small], info()[0] // MIB,
        alloc(200 * MIB, "cuMemAllocManaged", 1)[0]])
""",
        errors=SAID,
    )
    # Twice 1 MiB of rows and 10 small ones: the simulated driver gives each managed block a chunk of its own.
    assert results == [[0, 0], 1024, 1, [1] * 10, 400 - 64 - 100 - 136 - 4 - 20, 2]


def test_two_processes_that_race_never_pin_more_than_the_physical_share(share: Share) -> None:
    code = (
        ATTRIBUTES
        + """
begin()
answer("ready")
for line in sys.stdin:
    held = fill(2 * MIB)[1]
    answer([attribute(8, pointer) for pointer in held])
    sys.stdin.readline()
    for pointer in held:
        ok("cuMemFree_v2", pointer)
    answer("freed")
"""
    )
    processes = [share.start(code) for _ in range(2)]
    for process in processes:
        assert process.stdout and process.stdout.readline() == '"ready"\n'

    def both() -> list[str]:
        for process in processes:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
        return [process.stdout.readline() for process in processes if process.stdout]

    for _ in range(5):
        kinds = [kind for line in both() for kind in json.loads(line)]
        assert len(kinds) == (QUOTA - 128 * MIB) // (2 * MIB)
        assert (PHYSICAL - 128 * MIB) // (2 * MIB) - 2 <= kinds.count(0) <= (PHYSICAL - 128 * MIB) // (2 * MIB)
        assert both() == ['"freed"\n'] * 2
    for process in processes:
        process.communicate(timeout=60)
    assert share.usage().cards[0].memory_peak_bytes <= QUOTA


def test_a_share_that_is_not_oversold_never_gets_managed_memory(machine: Machine, tmp_path: Path) -> None:
    share = shares.simulated(tmp_path / "plain", machine, [shares.limit(machine, memory_bytes=PHYSICAL)])
    share.run("begin(); answer(fill(10 * MIB)[0])")
    assert share.usage().cards[0].oversold_allocations == 0


def test_a_region_says_what_is_wrong_with_its_physical_part(tmp_path: Path) -> None:
    for physical in (0, QUOTA + 1):
        with pytest.raises(region.RegionError, match="physical bytes of"):
            region.create(tmp_path, [region.CardLimit("GPU-1", 0, QUOTA, 50, 50, physical_bytes=physical)])
    region.create(tmp_path, [region.CardLimit("GPU-1", 0, QUOTA, 50, 50, physical_bytes=PHYSICAL)])
    assert region.read_limits(tmp_path)[0].physical_bytes == PHYSICAL
    region.update(tmp_path, [region.CardLimit("GPU-1", 0, QUOTA, 50, 50)])
    assert region.read_limits(tmp_path)[0].physical_bytes is None
