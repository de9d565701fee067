"""Memory of the simulated card: accounting, limits, data, pools, virtual memory management, arrays."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.support import sim_cuda
from vcuda import sim

MIB = 2**20
CONTEXT = 64 * MIB


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> sim.Machine:
    """Cards of 1 GiB whose contexts cost 64 MiB; tests leave nothing behind, because their clients end."""
    cards = [sim.SimCard(memory_bytes=1024 * MIB, context_bytes=CONTEXT)] * 2
    return sim.Machine.create(tmp_path_factory.mktemp("sim") / "machine", cards)


def test_memory_is_charged_as_the_driver_does_and_given_back(machine: sim.Machine) -> None:
    steps = sim_cuda.run(
        machine,
        """
        context(); steps = [used()]
        small = [ok(cu.cuMemAlloc(1000)) for _ in range(3)]; steps.append(used())
        large = ok(cu.cuMemAlloc(3 << 20)); steps.append(used())
        for pointer in (*small, large): ok(cu.cuMemFree(pointer))
        answer([*steps, used()])
        """,
    )
    assert steps == [CONTEXT, CONTEXT + 2 * MIB, CONTEXT + 6 * MIB, CONTEXT]


def test_a_card_gives_no_more_than_it_has_and_the_rest_stays_usable(machine: sim.Machine) -> None:
    refused, largest, after = sim_cuda.run(
        machine,
        """
        context()
        refused = int(cu.cuMemAlloc(1 << 30)[0])
        pointers = []
        while not int((got := cu.cuMemAlloc(64 << 20))[0]): pointers.append(got[1])
        full = used()
        ok(cu.cuMemFree(pointers.pop())); ok(cu.cuMemAlloc(64 << 20))
        answer([refused, full, used()])
        """,
    )
    assert refused == 2 and largest == after == 1024 * MIB


def test_more_than_any_card_has_is_refused(machine: sim.Machine) -> None:
    got = sim_cuda.run(
        machine,
        """
        context(); held = ok(cu.cuMemAlloc(4096)); sizes = 2**64 - 1, 2**63, 2**47
        answer([[int(cu.cuMemAlloc(size)[0]), int(cu.cuMemAllocAsync(size, 0)[0])] for size in sizes])
        """,
    )
    assert got == [[2, 2]] * 3


def test_processes_share_the_cards_memory(machine: sim.Machine) -> None:
    holder = sim_cuda.start(machine, "context(); ok(cu.cuMemAlloc(600 << 20)); answer(1); sys.stdin.read()")
    try:
        assert holder.stdout and holder.stdout.readline() == "1\n"
        code = "context(); answer([used(), int(cu.cuMemAlloc(400 << 20)[0])])"
        assert sim_cuda.run(machine, code) == [2 * CONTEXT + 600 * MIB, 2]
    finally:
        holder.kill()
        holder.communicate()
    assert sim_cuda.run(machine, code) == [CONTEXT, 0], "the dead process's memory went with it"


def test_data_survives_copies_sets_and_offsets(machine: sim.Machine) -> None:
    assert sim_cuda.run(
        machine,
        """
        context()
        pointer = ok(cu.cuMemAlloc(1 << 20)); base = int(pointer)
        data = os.urandom(1 << 20); back = bytearray(1 << 20)
        ok(cu.cuMemcpyHtoD(pointer, data, len(data)))
        ok(cu.cuMemsetD32(base + 4096, 0x01020304, 1024))
        ok(cu.cuMemsetD8(base + 65536 + 5, 0, 1 << 19))
        ok(cu.cuMemcpyDtoD(base, base + 900000, 1000))
        ok(cu.cuMemcpyDtoH(back, pointer, len(back)))
        wanted = bytearray(data)
        wanted[4096:8192] = bytes([4, 3, 2, 1]) * 1024
        wanted[65541:65541 + (1 << 19)] = bytes(1 << 19)
        wanted[:1000] = wanted[900000:901000]
        answer([back == wanted, int(cu.cuMemcpyHtoD(base + (1 << 20) - 1, data, 2)[0]), int(cu.cuMemFree(base + 512)[0])])
        """,
    ) == [True, 1, 1]


def test_a_pitched_copy_moves_only_its_rectangle(machine: sim.Machine) -> None:
    assert sim_cuda.run(
        machine,
        """
        context()
        pointer, pitch = ok(cu.cuMemAllocPitch(100, 8, 4))
        ok(cu.cuMemsetD2D8(pointer, pitch, 7, 100, 8))
        source = bytes(range(200)); copy = cu.CUDA_MEMCPY2D()
        copy.srcMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_HOST; copy.srcHost = source; copy.srcPitch = 20
        copy.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE; copy.dstDevice = pointer; copy.dstPitch = pitch
        copy.dstXInBytes = 10; copy.dstY = 2; copy.WidthInBytes = 20; copy.Height = 3
        ok(cu.cuMemcpy2D(copy))
        rows = []
        for row in range(8):
            line = bytearray(100); ok(cu.cuMemcpyDtoH(line, int(pointer) + row * pitch, 100)); rows.append(bytes(line))
        inside = [rows[2 + i] == b"\\7" * 10 + source[20 * i:20 * i + 20] + b"\\7" * 70 for i in range(3)]
        answer([pitch, all(inside), {rows[i] for i in (0, 1, 5, 6, 7)} == {b"\\7" * 100}])
        """,
    ) == [512, True, True]


def test_pools_pay_in_chunks_keep_and_release(machine: sim.Machine) -> None:
    steps = sim_cuda.run(
        machine,
        """
        context(); stream = ok(cu.cuStreamCreate(1)); steps = []
        pool = ok(cu.cuDeviceGetDefaultMemPool(0)); Attribute = cu.CUmemPool_attribute
        def held(): return int(ok(cu.cuMemPoolGetAttribute(pool, Attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)))
        start = used()
        one = ok(cu.cuMemAllocAsync(1000, stream)); steps.append([held(), used() - start])
        two = ok(cu.cuMemAllocAsync(40 << 20, stream)); steps.append([held(), used() - start])
        ok(cu.cuMemFreeAsync(two, stream)); steps.append([held(), used() - start])
        ok(cu.cuStreamSynchronize(stream)); steps.append([held(), used() - start])
        ok(cu.cuMemPoolSetAttribute(pool, Attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, cu.cuuint64_t(1 << 30)))
        ok(cu.cuMemFreeAsync(ok(cu.cuMemAllocAsync(40 << 20, stream)), stream))
        ok(cu.cuStreamSynchronize(stream)); steps.append([held(), used() - start])
        ok(cu.cuMemPoolTrimTo(pool, 0)); steps.append([held(), used() - start])
        answer(steps)
        """,
    )
    assert steps == [[mib * MIB] * 2 for mib in (32, 64, 64, 2, 66, 2)]


def test_a_plain_allocation_takes_back_what_idle_pools_hold(machine: sim.Machine) -> None:
    assert sim_cuda.run(
        machine,
        """
        context(); stream = ok(cu.cuStreamCreate(1))
        pool = ok(cu.cuDeviceGetDefaultMemPool(0))
        ok(cu.cuMemPoolSetAttribute(pool, cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, cu.cuuint64_t(1 << 40)))
        ok(cu.cuMemFreeAsync(ok(cu.cuMemAllocAsync(800 << 20, stream)), stream)); ok(cu.cuStreamSynchronize(stream))
        before = used(); ok(cu.cuMemAlloc(900 << 20)); answer([before >> 20, used() >> 20])
        """,
    ) == [864, 964]


def test_virtual_memory_is_paid_until_neither_handle_nor_mapping_is_left(machine: sim.Machine) -> None:
    steps = sim_cuda.run(
        machine,
        """
        context(); start = used(); steps = []
        prop = cu.CUmemAllocationProp(); prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE; prop.location.id = 0
        size = 4 << 20
        address = ok(cu.cuMemAddressReserve(2 * size, 0, 0, 0)); steps.append(used() - start)
        handle = ok(cu.cuMemCreate(size, prop, 0)); steps.append(used() - start)
        ok(cu.cuMemMap(address, size, 0, handle, 0)); ok(cu.cuMemMap(int(address) + size, size, 0, handle, 0))
        access = cu.CUmemAccessDesc(); access.location = prop.location
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        ok(cu.cuMemSetAccess(address, 2 * size, [access], 1))
        ok(cu.cuMemcpyHtoD(address, b"twice here", 10))
        back = bytearray(10); ok(cu.cuMemcpyDtoH(back, int(address) + size, 10))
        ok(cu.cuMemRelease(handle)); steps.append(used() - start)
        ok(cu.cuMemUnmap(address, size)); steps.append(used() - start)
        ok(cu.cuMemUnmap(int(address) + size, size)); steps.append(used() - start)
        ok(cu.cuMemAddressFree(address, 2 * size))
        answer([steps, back.decode(), int(cu.cuMemCreate(2 << 30, prop, 0)[0]), int(cu.cuMemCreate(1000, prop, 0)[0])])
        """,
    )
    assert steps == [[0, 4 * MIB, 4 * MIB, 4 * MIB, 0], "twice here", 2, 1]


def test_managed_and_array_memory_is_charged(machine: sim.Machine) -> None:
    assert sim_cuda.run(
        machine,
        """
        context(); start = used()
        managed = ok(cu.cuMemAllocManaged(10 << 20, 1)); steps = [used() - start]
        ctypes.memset(int(managed), 65, 4)
        kind = ok(cu.cuPointerGetAttribute(cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED, managed))
        shape = cu.CUDA_ARRAY_DESCRIPTOR(); shape.Width = 1024; shape.Height = 1024; shape.NumChannels = 4
        shape.Format = cu.CUarray_format.CU_AD_FORMAT_FLOAT
        array = ok(cu.cuArrayCreate(shape)); steps.append(used() - start)
        ok(cu.cuArrayDestroy(array)); ok(cu.cuMemFree(managed)); steps.append(used() - start)
        answer([steps, bool(kind)])
        """,
    ) == [[10 * MIB, 26 * MIB, 0], True]


def test_a_hundred_thousand_live_allocations(machine: sim.Machine) -> None:
    live, freed = sim_cuda.run(
        machine,
        """
        import random
        context(); start = used()
        pointers = [int(ok(cu.cuMemAlloc(512))) for _ in range(100_000)]; live = used() - start
        assert len(set(pointers)) == len(pointers)
        random.Random(1).shuffle(pointers)
        for pointer in pointers: ok(cu.cuMemFree(pointer))
        answer([live, used() - start])
        """,
    )
    assert live == -(-100_000 * 512 // (2 * MIB)) * 2 * MIB and freed == 0


def test_pointer_queries_tell_range_owner_and_strangers(machine: sim.Machine, tmp_path: Path) -> None:
    assert sim_cuda.run(
        machine,
        """
        mine = context(1); Attribute = cu.CUpointer_attribute
        pointer = int(ok(cu.cuMemAlloc(5 << 20)))
        base, size = ok(cu.cuMemGetAddressRange(pointer + 12345))
        owner = ok(cu.cuPointerGetAttribute(Attribute.CU_POINTER_ATTRIBUTE_CONTEXT, pointer))
        device = ok(cu.cuPointerGetAttribute(Attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer))
        here = ctypes.create_string_buffer(10)
        stranger = int(cu.cuPointerGetAttribute(Attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, ctypes.addressof(here))[0])
        answer([int(base) == pointer, size, int(owner) == int(mine), device, stranger])
        """,
    ) == [True, 5 * MIB, True, 1, 1]


def test_how_a_devices_own_pool_grows_does_not_depend_on_who_asks_for_which_first(tmp_path: Path) -> None:
    machine = sim.Machine.create(tmp_path / "two", [sim.SimCard(knobs={"pools": "ragged", "pool_seed": 17})] * 2)
    code = """
        context(); asked = {first}
        for device in asked: ok(cu.cuDeviceGetDefaultMemPool(device))
        pool = ok(cu.cuDeviceGetDefaultMemPool(0)); ok(cu.cuMemAllocFromPoolAsync(811539, pool, 0))
        answer(int(ok(cu.cuMemPoolGetAttribute(pool, cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT))))
    """
    grown = [sim_cuda.run(machine, textwrap.dedent(code.format(first=first))) for first in ([], [1], [1, 0], [0, 1])]
    assert len(set(grown)) == 1, grown
