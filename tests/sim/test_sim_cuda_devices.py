"""What the simulated CUDA driver tells of its cards and contexts: names, buses, peers, limits and settings."""

from __future__ import annotations

import pytest

from tests.support import sim_cuda
from vcuda import sim

GIB = 2**30


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> sim.Machine:
    cards = [sim.SimCard(memory_bytes=8 * GIB), sim.SimCard(model="Tesla T4")]
    return sim.Machine.create(tmp_path_factory.mktemp("devices") / "machine", cards)


def test_cards_are_those_of_the_machine_and_are_found_by_their_bus(machine: sim.Machine) -> None:
    got = sim_cuda.run(
        machine,
        """
        import uuid
        ok(cu.cuInit(0))
        rows = []
        for index in range(int(ok(cu.cuDeviceGetCount()))):
            card = ok(cu.cuDeviceGet(index))
            bus = ok(cu.cuDeviceGetPCIBusId(64, card)).split(b"\\0")[0]
            rows.append([ok(cu.cuDeviceGetName(100, card)).split(b"\\0")[0].decode(), int(ok(cu.cuDeviceTotalMem(card))),
                         "GPU-" + str(uuid.UUID(bytes=bytes(ok(cu.cuDeviceGetUuid(card)).bytes))),
                         int(ok(cu.cuDeviceGetByPCIBusId(bus))) == index])
        answer([rows, int(cu.cuDeviceGet(2)[0]), int(cu.cuDeviceGetByPCIBusId(b"0000:ff:00.0")[0])])
        """,
    )
    invalid_device = 101
    assert got[0] == [[card.name, card.memory_bytes, card.uuid, True] for card in machine.cards]
    assert got[1] == invalid_device and got[2] != 0


def test_the_attributes_agree_with_the_older_questions(machine: sim.Machine) -> None:
    got = sim_cuda.run(
        machine,
        """
        ok(cu.cuInit(0))
        A = cu.CUdevice_attribute
        rows = []
        for index in (0, 1):
            card = ok(cu.cuDeviceGet(index))
            ask = lambda name: int(ok(cu.cuDeviceGetAttribute(getattr(A, "CU_DEVICE_ATTRIBUTE_" + name), card)))
            old = ok(cu.cuDeviceGetProperties(card))
            rows.append([[ask("COMPUTE_CAPABILITY_MAJOR"), ask("COMPUTE_CAPABILITY_MINOR")],
                         [int(each) for each in ok(cu.cuDeviceComputeCapability(card))],
                         old.maxThreadsPerBlock == ask("MAX_THREADS_PER_BLOCK"), old.SIMDWidth == ask("WARP_SIZE"),
                         old.clockRate == ask("CLOCK_RATE"), ask("MULTIPROCESSOR_COUNT") > 0])
        answer([rows, int(cu.cuDeviceGetAttribute(A.CU_DEVICE_ATTRIBUTE_WARP_SIZE, 7)[0])])
        """,
    )
    rows, invalid = got
    for row, card in zip(rows, machine.cards, strict=True):
        capability = list(card.model.compute_capability)
        assert row == [capability, capability, True, True, True, True]
    assert invalid == 101


def test_peers_are_enabled_once_and_disabled_once(machine: sim.Machine) -> None:
    got = sim_cuda.run(
        machine,
        """
        context(0)
        other = ok(cu.cuDevicePrimaryCtxRetain(1))
        said = [int(ok(cu.cuDeviceCanAccessPeer(0, 0))), int(ok(cu.cuDeviceCanAccessPeer(0, 1)))]
        codes = [int(call(*arguments)[0]) for call, *arguments in (
            (cu.cuCtxEnablePeerAccess, other, 0), (cu.cuCtxEnablePeerAccess, other, 0), (cu.cuCtxEnablePeerAccess, other, 1),
            (cu.cuCtxDisablePeerAccess, other), (cu.cuCtxDisablePeerAccess, other))]
        answer([said, codes])
        """,
    )
    can_itself, can = got[0]
    assert can_itself == 0
    enabled, not_enabled, unsupported = 704, 705, 217
    if can:
        assert got[1] == [0, enabled, 1, 0, not_enabled]
    else:
        assert got[1][0] == unsupported


def test_a_contexts_settings_are_kept_and_wrong_ones_refused(machine: sim.Machine) -> None:
    got = sim_cuda.run(
        machine,
        """
        made = context()
        stack, fifo = cu.CUlimit.CU_LIMIT_STACK_SIZE, cu.CUlimit.CU_LIMIT_PRINTF_FIFO_SIZE
        ok(cu.cuCtxSetLimit(stack, 4096)); ok(cu.cuCtxSetLimit(fifo, 2 << 20))
        limits = [int(ok(cu.cuCtxGetLimit(each))) for each in (stack, fifo)]
        prefer = cu.CUfunc_cache.CU_FUNC_CACHE_PREFER_L1
        ok(cu.cuCtxSetCacheConfig(prefer))
        least, greatest = (int(each) for each in ok(cu.cuCtxGetStreamPriorityRange()))
        ids = [int(ok(cu.cuCtxGetId(each))) for each in (made, ok(cu.cuDevicePrimaryCtxRetain(1)))]
        ok(cu.cuCtxSetCurrent(0))
        none = int(cu.cuCtxGetDevice()[0])
        answer([limits, least > greatest, ids[0] != ids[1], int(ok(cu.cuCtxGetApiVersion(made))) > 0, none])
        """,
    )
    invalid_context = 201
    assert got == [[4096, 2 << 20], True, True, True, invalid_context]
