"""Memory of the simulated card that kernels write and read: which is reachable from where, what it costs the host, where it lies."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from tests.support import sim_cuda
from vcuda import sim

MIB = 2**20
# fill(pointer, bytes) and wrong(pointer, bytes) → words that are not what fill left there; both by kernels, 64 KiB apart.
TOUCH = sim_cuda.TOUCH


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> sim.Machine:
    cards = [sim.SimCard(memory_bytes=8192 * MIB, context_bytes=64 * MIB)] * 2
    return sim.Machine.create(tmp_path_factory.mktemp("sim") / "machine", cards)


def run(machine: sim.Machine, code: str, **more: str) -> Any:
    return sim_cuda.run(machine, TOUCH + "\n" + textwrap.dedent(code), **more)


def test_what_kernels_write_they_and_copies_find_and_the_host_backs_only_what_was_touched(
    machine: sim.Machine,
) -> None:
    wrong, spoilt, word, host = run(
        machine,
        """
        context(); size = 7 << 30; pointer = int(ok(cu.cuMemAlloc(size)))
        fill(pointer, size, step=2 << 20); found = wrong(pointer, size, step=2 << 20)
        ok(cu.cuMemsetD8(pointer + (4 << 20), 9, 8)); spoilt = wrong(pointer, size, step=2 << 20)
        back = bytearray(8); ok(cu.cuMemcpyDtoH(back, pointer + (2 << 20), 8))
        # getrusage(2) would tell the largest of the process that this one was made from.
        host = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
        answer([found, spoilt, int.from_bytes(back, "little"), host])
        """,
    )
    assert (wrong, spoilt, word) == (0, 1, 7 + 2 * MIB) and host * 1024 < 500 * MIB


def test_kernels_reach_every_kind_of_memory_of_their_card(machine: sim.Machine) -> None:
    kinds = run(
        machine,
        """
        context(); stream = ok(cu.cuStreamCreate(1)); size = 4 << 20; kinds = {}
        def tried(kind, pointer): fill(int(pointer), size); kinds[kind] = wrong(int(pointer), size)
        tried("plain", ok(cu.cuMemAlloc(size))); tried("pool", ok(cu.cuMemAllocAsync(size, stream)))
        tried("managed", ok(cu.cuMemAllocManaged(size, 1)))
        tried("host", ok(cu.cuMemHostGetDevicePointer(ok(cu.cuMemHostAlloc(size, 2)), 0)))
        ptx = b".version 8.0\\n.target sm_80\\n.address_size 64\\n.visible .global .align 8 .b8 plain[%d];\\n" % size
        ptx += b".visible .global .attribute(.managed) .align 8 .b8 shared[%d];\\n" % size
        module = ok(cu.cuModuleLoadData(ptx + b"\\0")); tried("module", ok(cu.cuModuleGetGlobal(module, b"plain"))[0])
        library = ok(cu.cuLibraryLoadData(ptx + b"\\0", None, None, 0, None, None, 0))
        tried("library", ok(cu.cuLibraryGetGlobal(library, b"plain"))[0])
        tried("library's managed", ok(cu.cuLibraryGetManaged(library, b"shared"))[0])
        tried("library's module", ok(cu.cuModuleGetGlobal(ok(cu.cuLibraryGetModule(library)), b"plain"))[0])
        prop = cu.CUmemAllocationProp(); prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE; prop.location.id = 0
        address = ok(cu.cuMemAddressReserve(size, 0, 0, 0)); access = cu.CUmemAccessDesc(); access.location = prop.location
        for at in (0, size // 2): ok(cu.cuMemMap(int(address) + at, size // 2, 0, ok(cu.cuMemCreate(size // 2, prop, 0)), 0))
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE; ok(cu.cuMemSetAccess(address, size, [access], 1))
        tried("two mappings side by side", address)
        ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        node = ok(cu.cuMemAllocAsync(size, stream)); captured_fill(int(node), size, stream); graph = ok(cu.cuStreamEndCapture(stream))
        ok(cu.cuGraphLaunch(ok(cu.cuGraphInstantiate(graph, 0)), stream)); kinds["graph"] = wrong(int(node), size)
        answer(kinds)
        """,
    )
    assert len(kinds) == 10 and {*kinds.values()} == {0}, kinds


@pytest.mark.parametrize(
    "pointer",
    [
        "4096",
        "int(ok(cu.cuMemAlloc(1 << 20))) + (1 << 20) - 64",
        "freed()",
        "elsewhere()",
        "unmapped()",
    ],
)
def test_memory_that_the_card_does_not_reach_is_an_illegal_address_for_good(machine: sim.Machine, pointer: str) -> None:
    assert run(
        machine,
        f"""
        context()
        def freed():
            found = int(ok(cu.cuMemAlloc(4 << 20))); ok(cu.cuMemFree(found)); return found
        def elsewhere():
            home = ok(cu.cuCtxGetCurrent()); created(1); found = int(ok(cu.cuMemAlloc(4 << 20)))
            ok(cu.cuCtxSetCurrent(home)); return found
        def unmapped(): return int(ok(cu.cuMemAddressReserve(4 << 20, 0, 0, 0)))
        at = {pointer}; ok(cu.cuCtxSynchronize()); fill(at, 4096, 64)
        answer([int(cu.cuCtxSynchronize()[0]), int(cu.cuMemAlloc(1)[0])])
        """,
    ) == [700, 700]


def test_a_library_costs_each_context_that_uses_it_its_own_code_and_variables(machine: sim.Machine) -> None:
    assert run(
        machine,
        """
        context(); size = 100 << 20; start = used()
        def held(): return round((used() - start) / 2**20)
        ptx = b".version 8.0\\n.target sm_80\\n.address_size 64\\n.visible .global .align 8 .b8 data[%d];\\n" % size
        library = ok(cu.cuLibraryLoadData(ptx + b"\\0", None, None, 0, None, None, 0)); steps = [held()]
        one = int(ok(cu.cuLibraryGetGlobal(library, b"data"))[0]); steps.append(held())
        again = int(ok(cu.cuLibraryGetGlobal(library, b"data"))[0]); assert one == again
        made = created(0); steps.append(held())
        two = int(ok(cu.cuLibraryGetGlobal(library, b"data"))[0]); steps.append(held())
        ok(cu.cuCtxDestroy(made)); steps.append(held()); ok(cu.cuLibraryUnload(library)); steps.append(held())
        answer([steps, one != two])
        """,
    ) == [[0, 100, 164, 264, 100, 0], True]


def test_managed_memory_lies_where_its_pool_prefers_and_moves_by_prefetch_and_by_use(
    machine: sim.Machine,
) -> None:
    assert run(
        machine,
        """
        context(); stream = ok(cu.cuStreamCreate(1)); start = used(); Location = cu.CUmemLocationType
        def held(): return (used() - start) >> 20
        def pool(where):
            props = cu.CUmemPoolProps(); props.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_MANAGED
            props.location.type = where; props.location.id = 0
            return ok(cu.cuMemPoolCreate(props))
        steps = []
        for where in (Location.CU_MEM_LOCATION_TYPE_DEVICE, Location.CU_MEM_LOCATION_TYPE_NONE, Location.CU_MEM_LOCATION_TYPE_HOST):
            pointer = ok(cu.cuMemAllocFromPoolAsync(64 << 20, pool(where), stream)); steps.append(held())
        fill(int(pointer), 64 << 20); steps += [held(), wrong(int(pointer), 64 << 20)]
        host = cu.CUmemLocation(); host.type = Location.CU_MEM_LOCATION_TYPE_HOST
        ok(cu.cuMemPrefetchAsync(pointer, 64 << 20, host, 0, stream)); steps.append(held())
        ok(cu.cuMemFreeAsync(pointer, stream)); ok(cu.cuStreamSynchronize(stream))
        props = cu.CUmemPoolProps(); props.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        props.location.type = Location.CU_MEM_LOCATION_TYPE_HOST
        ok(cu.cuMemAllocFromPoolAsync(64 << 20, ok(cu.cuMemPoolCreate(props)), stream)); steps.append(held())
        answer(steps)
        """,
    ) == [64, 64, 64, 128, 0, 64, 64]


def test_memory_of_a_sparse_array_is_let_go_with_the_arrays_context(machine: sim.Machine) -> None:
    assert run(
        machine,
        """
        first = context(); second = created(0)
        shape = cu.CUDA_ARRAY3D_DESCRIPTOR(); shape.Width = shape.Height = 2048; shape.NumChannels = 4
        shape.Format = cu.CUarray_format.CU_AD_FORMAT_FLOAT; shape.Flags = 0x40
        array = ok(cu.cuArray3DCreate(shape)); ok(cu.cuCtxSetCurrent(first)); start = used()
        prop = cu.CUmemAllocationProp(); prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        tile = cu.CUarrayMapInfo(); tile.resourceType = cu.CUresourcetype.CU_RESOURCE_TYPE_ARRAY; tile.resource.array = array
        tile.memOperationType = cu.CUmemOperationType.CU_MEM_OPERATION_TYPE_MAP
        tile.memHandleType = cu.CUmemHandleType.CU_MEM_HANDLE_TYPE_GENERIC; handle = ok(cu.cuMemCreate(64 << 20, prop, 0))
        tile.memHandle.memHandle = handle; tile.deviceBitMask = 1
        ok(cu.cuMemMapArrayAsync([tile], 1, 0)); ok(cu.cuMemRelease(handle)); held = used() - start
        ok(cu.cuCtxDestroy(second)); answer([held >> 20, (used() - start) >> 20])
        """,
    ) == [64, -64]
