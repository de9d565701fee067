"""Memory that processes of a simulated machine hand to each other: its data, who may open what, whose books it is in."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support import sim_cuda, simulated
from vcuda import sim

MIB = 2**20
CONTEXT = 64
# Two processes: the maker's code runs first; `give` hands an object and descriptors to the other one, `then` waits for the
# other's word. `books` says what the card has in MiB: all of it, the maker's, the taker's (0: ended).
BOTH = """
import pickle, socket
me = socket.socket(fileno=int(sys.argv[1]))
def give(value, *descriptors): socket.send_fds(me, [pickle.dumps(value)], list(descriptors))
def then():
    data, descriptors, _, _ = socket.recv_fds(me, 65536, 4)
    return (pickle.loads(data), *descriptors) if descriptors else pickle.loads(data) if data else None
def held(): return round((used() - 64 * 2**20 - 65536) / 2**20)
def pool_props():
    props = cu.CUmemPoolProps(); props.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    props.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE; props.location.id = 0
    props.handleTypes = FD
    return props
def physical_props():
    props = cu.CUmemAllocationProp(); props.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    props.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE; props.location.id = 0
    props.requestedHandleTypes = FD
    return props
FD = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
context()
"""


@pytest.fixture
def machine(tmp_path: Path) -> sim.Machine:
    return sim.Machine.create(tmp_path / "machine", [sim.SimCard(memory_bytes=2048 * MIB)])


class Pair:
    """A maker and a taker with a socket between them; `books()` are the card's in MiB, contexts left out."""

    def __init__(self, machine: sim.Machine, maker: str, taker: str) -> None:
        import socket

        self.machine = machine
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.both = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    sim_cuda.PRELUDE + sim_cuda.TOUCH + BOTH + textwrap.dedent(code),
                    str(end.fileno()),
                ],
                env=simulated.environment(machine),
                pass_fds=[end.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for code, end in zip((maker, taker), ends, strict=True)
        ]
        for end in ends:
            end.close()

    def line(self, which: int) -> Any:
        import json

        stdout = self.both[which].stdout
        assert stdout
        return json.loads(stdout.readline() or "null")

    def go(self, which: int) -> None:
        stdin = self.both[which].stdin
        assert stdin
        stdin.write("\n")
        stdin.flush()

    def end(self, which: int) -> None:
        self.both[which].kill()
        self.both[which].communicate()

    def books(self) -> list[int]:
        card = self.machine.report().cards[0]
        by_pid = {one.pid: (one.memory_bytes - one.context_bytes) // MIB for one in card.processes}
        total = card.used_bytes - sum(process.context_bytes for process in card.processes)
        return [total // MIB, *(by_pid.get(one.pid, 0) for one in self.both)]


def test_ipc_memory_is_one_memory_and_is_held_until_both_have_let_go(machine: sim.Machine) -> None:
    pair = Pair(
        machine,
        """
        small, pointer = int(ok(cu.cuMemAlloc(1000))), int(ok(cu.cuMemAlloc(300 << 20)))
        fill(pointer, 300 << 20); ok(cu.cuMemsetD8(small, 5, 1000))
        handles = [ok(cu.cuIpcGetMemHandle(one)) for one in (pointer, small)]; steps = [int(cu.cuIpcGetMemHandle(4096)[0])]
        stream = ok(cu.cuStreamCreate(1)); pooled = ok(cu.cuMemAllocAsync(1 << 20, stream)); steps.append(int(cu.cuIpcGetMemHandle(pooled)[0]))
        ok(cu.cuMemFree(pooled)); ok(cu.cuMemPoolTrimTo(ok(cu.cuDeviceGetDefaultMemPool(0)), 0))
        steps.append(int(cu.cuIpcOpenMemHandle(handles[0], 1)[0])) # not where it was made
        give([bytes(one.reserved) for one in handles]); then(); steps.append(wrong(pointer, 300 << 20, seed=9))
        answer(steps); sys.stdin.readline(); ok(cu.cuMemFree(pointer)); answer(0); sys.stdin.readline()
        """,
        """
        made = []
        for data in then():
            handle = cu.CUipcMemHandle(); handle.reserved = data; made.append(handle)
        bad = cu.CUipcMemHandle(); bad.reserved = bytes(64)
        pointer = int(ok(cu.cuIpcOpenMemHandle(made[0], 1))); again = int(ok(cu.cuIpcOpenMemHandle(made[0], 1)))
        small = int(ok(cu.cuIpcOpenMemHandle(made[1], 1))); back = bytearray(1000); ok(cu.cuMemcpyDtoH(back, small, 1000))
        found = [wrong(pointer, 300 << 20), pointer == again, back == bytes([5]) * 1000, int(cu.cuIpcOpenMemHandle(bad, 1)[0]), int(cu.cuMemFree(pointer)[0])]
        fill(pointer, 300 << 20, seed=9); ok(cu.cuIpcCloseMemHandle(pointer)); ok(cu.cuIpcCloseMemHandle(small)); give(0)
        answer(found); sys.stdin.readline(); answer([wrong(pointer, 300 << 20, seed=9)])
        ok(cu.cuIpcCloseMemHandle(pointer)); answer(int(cu.cuIpcCloseMemHandle(pointer)[0])); sys.stdin.readline()
        """,
    )
    try:
        assert pair.line(0) == [1, 1, 201, 0]
        assert pair.line(1) == [0, True, True, 400, 1]
        assert pair.books() == [302, 302, 0], "the maker pays"
        pair.go(0)
        assert pair.line(0) == 0
        assert pair.books() == [302, 2, 300], "freed there and open here: it is the card's still"
        pair.go(1)
        assert pair.line(1) == [0] and pair.line(1) == 1
        assert pair.books() == [2, 2, 0]
    finally:
        pair.end(0), pair.end(1)


def test_a_killed_makers_memory_is_the_takers_until_that_ends_too(machine: sim.Machine) -> None:
    pair = Pair(
        machine,
        """
        pointer = int(ok(cu.cuMemAlloc(200 << 20))); plain = ok(cu.cuIpcGetMemHandle(pointer))
        handle = ok(cu.cuMemCreate(100 << 20, physical_props(), 0)); descriptor = ok(cu.cuMemExportToShareableHandle(handle, FD, 0))
        give(bytes(plain.reserved), int(descriptor)); answer(0); sys.stdin.readline()
        """,
        """
        data, descriptor = then(); plain = cu.CUipcMemHandle(); plain.reserved = data
        ok(cu.cuIpcOpenMemHandle(plain, 1)); handle = ok(cu.cuMemImportFromShareableHandle(descriptor, FD)); answer(0); sys.stdin.readline()
        """,
    )
    try:
        assert pair.line(0) == pair.line(1) == 0 and pair.books() == [300, 300, 0]
        pair.end(0)
        assert pair.books() == [300, 0, 300]
        pair.end(1)
        assert pair.books() == [0, 0, 0]
    finally:
        pair.end(0), pair.end(1)


def test_physical_memory_that_its_maker_released_stays_while_a_descriptor_of_it_is_open(
    machine: sim.Machine,
) -> None:
    """As on an H100, driver 580; its maker pays while it lives."""
    pair = Pair(
        machine,
        """
        handle = ok(cu.cuMemCreate(100 << 20, physical_props(), 0)); descriptor = int(ok(cu.cuMemExportToShareableHandle(handle, FD, 0)))
        give(0, descriptor); then(); ok(cu.cuMemRelease(handle)); answer(held()); sys.stdin.readline()
        """,
        """
        _, descriptor = then(); handle = ok(cu.cuMemImportFromShareableHandle(descriptor, FD)); give(0); answer(0); sys.stdin.readline()
        address = ok(cu.cuMemAddressReserve(100 << 20, 0, 0, 0)); ok(cu.cuMemMap(address, 100 << 20, 0, handle, 0)); ok(cu.cuMemRelease(handle)); answer(0)
        sys.stdin.readline(); ok(cu.cuMemUnmap(address, 100 << 20)); answer(0); sys.stdin.readline()
        late = ok(cu.cuMemImportFromShareableHandle(descriptor, FD)); answer(0); sys.stdin.readline()
        """,
    )
    try:
        assert pair.line(1) == 0 and pair.line(0) is not None and pair.books() == [100, 100, 0]
        for _ in ("mapped", "unmapped", "imported from the descriptor alone"):
            pair.go(1)
            assert pair.line(1) == 0 and pair.books() == [100, 100, 0]
        pair.end(0)
        assert pair.books() == [100, 0, 100]
    finally:
        pair.end(0), pair.end(1)


def test_pools_are_exported_imported_and_only_read_by_who_imports(machine: sim.Machine) -> None:
    pair = Pair(
        machine,
        """
        stream = ok(cu.cuStreamCreate(1)); pool = ok(cu.cuMemPoolCreate(pool_props()))
        pointer = int(ok(cu.cuMemAllocFromPoolAsync(64 << 20, pool, stream))); early = int(cu.cuMemPoolExportPointer(pointer)[0])
        default = ok(cu.cuDeviceGetDefaultMemPool(0)); never = int(cu.cuMemPoolExportToShareableHandle(default, FD, 0)[0])
        descriptor = int(ok(cu.cuMemPoolExportToShareableHandle(pool, FD, 0))); fill(pointer, 64 << 20)
        data = ok(cu.cuMemPoolExportPointer(pointer)); give(bytes(data.reserved), descriptor); then()
        ok(cu.cuMemFreeAsync(pointer, stream)); ok(cu.cuStreamSynchronize(stream)); answer([early, never]); sys.stdin.readline()
        """,
        """
        data, descriptor = then(); stream = ok(cu.cuStreamCreate(1)); pool = ok(cu.cuMemPoolImportFromShareableHandle(descriptor, FD, 0))
        share = cu.CUmemPoolPtrExportData(); share.reserved = data; pointer = int(ok(cu.cuMemPoolImportPointer(pool, share)))
        found = [wrong(pointer, 64 << 20), int(cu.cuMemAllocFromPoolAsync(1, pool, stream)[0]), int(cu.cuDeviceSetMemPool(0, pool)[0])]
        answer(found); sys.stdin.readline(); ok(cu.cuMemFreeAsync(pointer, stream)); ok(cu.cuStreamSynchronize(stream)); give(0); answer(0); sys.stdin.readline()
        """,
    )
    try:
        assert pair.line(1) == [0, 1, 1]
        assert pair.books() == [64, 64, 0], "the maker's pool pays"
        pair.go(1)
        assert pair.line(1) == 0 and pair.line(0) == [1, 1] and pair.books() == [0, 0, 0]
    finally:
        pair.end(0), pair.end(1)


def test_external_memory_is_paid_by_who_imports_what_no_client_made(machine: sim.Machine) -> None:
    assert sim_cuda.run(
        machine,
        sim_cuda.TOUCH
        + textwrap.dedent("""
        context(); start = used(); size = 64 << 20; steps = []
        def held(): return round((used() - start) / 2**20)
        vulkan = os.memfd_create("another API's memory"); os.ftruncate(vulkan, size)
        given = cu.CUDA_EXTERNAL_MEMORY_HANDLE_DESC(); given.size = size
        given.type = cu.CUexternalMemoryHandleType.CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD; given.handle.fd = vulkan
        memory = ok(cu.cuImportExternalMemory(given)); steps.append(held())
        part = cu.CUDA_EXTERNAL_MEMORY_BUFFER_DESC(); part.offset = 4 << 20; part.size = 8 << 20
        buffer = int(ok(cu.cuExternalMemoryGetMappedBuffer(memory, part))); fill(buffer, 8 << 20); steps.append(wrong(buffer, 8 << 20))
        part.size = size; steps.append(int(cu.cuExternalMemoryGetMappedBuffer(memory, part)[0]))
        ok(cu.cuDestroyExternalMemory(memory)); steps.append(held()); ok(cu.cuMemFree(buffer)); steps.append(held())
        answer([*steps, int(cu.cuMemFree(buffer)[0]), int(cu.cuDestroyExternalMemory(memory)[0])])
        """),
    ) == [64, 0, 1, 64, 0, 1, 400]
