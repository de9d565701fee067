"""What the simulated driver tells of a pointer: whose memory it is, how much, of which kind; and host memory from pinning to release."""

from __future__ import annotations

import pytest

from tests.support import sim_cuda
from vcuda import sim

MIB = 2**20
ASK = """
    A = cu.CUpointer_attribute
    def ask(pointer, what):
        said = cu.cuPointerGetAttribute(getattr(A, "CU_POINTER_ATTRIBUTE_" + what), pointer)
        return int(said[1]) if not int(said[0]) else int(said[0]) * -1
    made = context()
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> sim.Machine:
    return sim.Machine.create(tmp_path_factory.mktemp("pointers") / "machine")


def test_a_pointer_into_an_allocation_is_told_by_its_block(machine: sim.Machine) -> None:
    got = sim_cuda.run(
        machine,
        ASK
        + """
    first, second = (int(ok(cu.cuMemAlloc(3 << 20))) for _ in range(2))
    answer([ask(first + 4096, "RANGE_START_ADDR") == first, ask(first + 4096, "RANGE_SIZE"), ask(first, "MEMORY_TYPE"),
            ask(first, "IS_MANAGED"), ask(first, "DEVICE_ORDINAL"), ask(first, "HOST_POINTER"),
            ask(first, "BUFFER_ID") == ask(first + 1, "BUFFER_ID") != ask(second, "BUFFER_ID"),
            ask(first, "CONTEXT") == int(made), ask(first + 64, "DEVICE_POINTER") == first + 64])
    """,
    )
    assert got == [True, 3 * MIB, 2, 0, 0, -1, True, True, True]


def test_what_is_no_pointer_of_ours_is_refused_alone_and_empty_in_a_list(machine: sim.Machine) -> None:
    """The single question fails; the list answers with zeros and with no device, as the real driver does."""
    got = sim_cuda.run(
        machine,
        ASK
        + """
    here = int(ok(cu.cuMemAlloc(4096)))
    names = [A.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, A.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, A.CU_POINTER_ATTRIBUTE_RANGE_SIZE]
    lists = [[int(each) for each in ok(cu.cuPointerGetAttributes(len(names), names, pointer))] for pointer in (here, 4096)]
    ok(cu.cuMemFree(here))
    answer([ask(4096, "MEMORY_TYPE"), *lists, ask(here, "MEMORY_TYPE")])
    """,
    )
    assert got == [-1, [2, 0, 4096], [0, 2**32 - 2, 0], -1]  # cuda-bindings show the ordinal without its sign


def test_host_memory_is_known_from_pinning_to_release(machine: sim.Machine) -> None:
    got = sim_cuda.run(
        machine,
        ASK
        + """
    before = used()
    host = int(ok(cu.cuMemHostAlloc(1 << 20, 4)))
    own = ctypes.create_string_buffer(8192)
    ok(cu.cuMemHostRegister(ctypes.addressof(own), 8192, 1))
    twice = int(cu.cuMemHostRegister(ctypes.addressof(own) + 4096, 100, 0)[0])
    known = [ask(host, "MEMORY_TYPE"), ask(host, "HOST_POINTER") == host, int(ok(cu.cuMemHostGetFlags(host))),
             int(ok(cu.cuMemHostGetDevicePointer(host + 8, 0))) == host + 8, ask(ctypes.addressof(own), "MEMORY_TYPE")]
    wrong = [int(cu.cuMemHostUnregister(host)[0]), int(cu.cuMemFreeHost(ctypes.addressof(own))[0])]
    ok(cu.cuMemHostUnregister(ctypes.addressof(own))); ok(cu.cuMemFreeHost(host))
    gone = [int(cu.cuMemHostUnregister(ctypes.addressof(own))[0]), int(cu.cuMemFreeHost(host)[0]), ask(host, "MEMORY_TYPE")]
    answer([twice, known, wrong, gone, used() - before])
    """,
    )
    registered, not_registered = 712, 713
    assert got == [registered, [1, True, 4 | 2, True, 1], [not_registered, 1], [not_registered, 1, -1], 0]


def test_advice_is_for_managed_memory_within_its_bounds(machine: sim.Machine) -> None:
    got = sim_cuda.run(
        machine,
        ASK
        + """
    managed, plain = int(ok(cu.cuMemAllocManaged(2 << 20, 1))), int(ok(cu.cuMemAlloc(1 << 20)))
    advice, place = cu.CUmem_advise.CU_MEM_ADVISE_SET_READ_MOSTLY, cu.CUmemLocation()
    place.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    said = [[int(cu.cuMemAdvise(pointer, count, advice, place)[0]), int(cu.cuMemPrefetchAsync(pointer, count, place, 0, 0)[0])]
            for pointer, count in ((managed, 2 << 20), (managed, (2 << 20) + 1), (plain, 4096), (managed, 0))]
    R = cu.CUmem_range_attribute
    ranges = [int(ok(cu.cuMemRangeGetAttribute(4, each, managed, 4096))) for each in (
        R.CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, R.CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION)]
    not_managed = int(cu.cuMemRangeGetAttribute(4, R.CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, plain, 4096)[0])
    answer([said, ranges, not_managed, ask(managed, "IS_MANAGED"), ask(managed, "HOST_POINTER") == managed])
    """,
    )
    assert got == [[[0, 0], [1, 1], [1, 1], [1, 1]], [0, -2], 1, 1, True]
