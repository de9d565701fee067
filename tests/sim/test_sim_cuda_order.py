"""Stream order of the simulated card's memory: frees that wait for their stream, reuse, pools that outlive their end."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support import sim_cuda
from vcuda import sim

MIB = 2**20
CONTEXT = 64 * MIB
# Ahead of what a test says: a stream that a kernel of 0.4 s keeps busy, the pool's attributes, the card's books in MiB.
BUSY = """
context(); stream = ok(cu.cuStreamCreate(1)); slow = kernel("spin_400ms"); start = used()
default = ok(cu.cuDeviceGetDefaultMemPool(0)); Attribute = cu.CUmemPool_attribute
def told(name, pool=default): return int(ok(cu.cuMemPoolGetAttribute(pool, getattr(Attribute, "CU_MEMPOOL_ATTR_" + name))))
def held(): return round((used() - start) / 2**20)
def own(device=0):
    props = cu.CUmemPoolProps(); props.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    props.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE; props.location.id = device
    return ok(cu.cuMemPoolCreate(props))
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> sim.Machine:
    cards = [sim.SimCard(memory_bytes=1024 * MIB, context_bytes=CONTEXT)] * 2
    return sim.Machine.create(tmp_path_factory.mktemp("sim") / "machine", cards)


def run(machine: sim.Machine, code: str, **more: str) -> Any:
    return sim_cuda.run(machine, BUSY + "\n" + textwrap.dedent(code), **more)


def test_plain_memory_freed_in_a_stream_is_the_cards_until_the_stream_gets_there(
    machine: sim.Machine,
) -> None:
    assert run(
        machine,
        """
        pointer = ok(cu.cuMemAlloc(600 << 20)); launch(slow, stream); ok(cu.cuMemFreeAsync(pointer, stream))
        steps = [held(), int(cu.cuMemAlloc(600 << 20)[0]), int(cu.cuMemFreeAsync(pointer, stream)[0])]
        unknown = int(cu.cuPointerGetAttribute(cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer)[0])
        ok(cu.cuStreamSynchronize(stream)); answer([*steps, unknown, held(), int(cu.cuMemAlloc(600 << 20)[0])])
        """,
    ) == [600, 2, 1, 1, 0, 0]


def test_a_pool_gets_back_what_is_freed_when_the_stream_gets_there(machine: sim.Machine) -> None:
    assert run(
        machine,
        """
        pointer = ok(cu.cuMemAllocAsync(64 << 20, stream)); launch(slow, stream); ok(cu.cuMemFreeAsync(pointer, stream))
        ok(cu.cuMemPoolTrimTo(default, 0)); steps = [told("USED_MEM_CURRENT") >> 20, held()]
        ok(cu.cuStreamSynchronize(stream)); steps += [told("USED_MEM_CURRENT"), held(), told("USED_MEM_HIGH") >> 20]
        ok(cu.cuMemPoolSetAttribute(default, Attribute.CU_MEMPOOL_ATTR_USED_MEM_HIGH, cu.cuuint64_t(0)))
        answer([*steps, told("USED_MEM_HIGH"), told("RESERVED_MEM_CURRENT"), told("RESERVED_MEM_HIGH") >> 20])
        """,
    ) == [64, 64, 0, 0, 64, 0, 0, 64]


def test_freed_memory_serves_its_own_stream_at_once_another_one_after_an_event_or_when_nothing_else_is_left(
    machine: sim.Machine,
) -> None:
    assert run(
        machine,
        """
        other = ok(cu.cuStreamCreate(1)); third = ok(cu.cuStreamCreate(1)); event = ok(cu.cuEventCreate(0)); steps = []
        first = ok(cu.cuMemAllocAsync(320 << 20, stream)); launch(slow, stream); ok(cu.cuMemFreeAsync(first, stream))
        again = ok(cu.cuMemAllocAsync(320 << 20, stream)); steps.append(held())
        ok(cu.cuMemFreeAsync(again, stream)); ok(cu.cuEventRecord(event, stream)); ok(cu.cuStreamWaitEvent(other, event, 0))
        followed = ok(cu.cuMemAllocAsync(320 << 20, other)); steps.append(held())
        ok(cu.cuMemFreeAsync(followed, other))
        unordered = ok(cu.cuMemAllocAsync(320 << 20, third)); steps.append(held())
        last = ok(cu.cuMemAllocAsync(320 << 20, third)); steps.append(held())
        idle = int(cu.cuStreamQuery(third)[0]); refused = int(cu.cuMemAllocAsync(321 << 20, third)[0])
        ok(cu.cuCtxSynchronize()); answer([*steps, idle, refused, held()])
        """,
    ) == [320, 320, 640, 640, 600, 2, 640]


def test_a_destroyed_pool_stays_until_its_last_allocation_and_its_last_free_are_done(
    machine: sim.Machine,
) -> None:
    assert run(
        machine,
        """
        one, two = own(), own()
        kept = ok(cu.cuMemAllocFromPoolAsync(320 << 20, one, stream)); gone = ok(cu.cuMemAllocFromPoolAsync(320 << 20, two, stream))
        launch(slow, stream); ok(cu.cuMemFreeAsync(gone, stream)); ok(cu.cuMemPoolDestroy(one)); ok(cu.cuMemPoolDestroy(two))
        steps = [held(), int(cu.cuMemPoolTrimTo(one, 0)[0]), int(cu.cuMemAllocFromPoolAsync(1, two, stream)[0])]
        ok(cu.cuStreamSynchronize(stream)); steps.append(held())
        ok(cu.cuMemFree(kept)); answer([*steps, held()])
        """,
    ) == [640, 1, 1, 320, 0]


def test_freeing_what_came_from_a_pool_waits_for_nothing(machine: sim.Machine) -> None:
    assert run(
        machine,
        """
        pointer = ok(cu.cuMemAllocAsync(64 << 20, stream)); launch(slow, stream); ok(cu.cuMemFree(pointer))
        answer([int(cu.cuStreamQuery(stream)[0]), told("USED_MEM_CURRENT")])
        """,
    ) == [600, 0]


def test_memory_of_pools_outlives_a_destroyed_context_and_ends_with_a_reset(machine: sim.Machine) -> None:
    """cuda.h: cuCtxDestroy does not destroy what cuMemAllocAsync gave; a reset takes all and releases nothing."""
    assert run(
        machine,
        """
        made = created(0); lane = ok(cu.cuStreamCreate(1))
        pooled = ok(cu.cuMemAllocAsync(128 << 20, lane)); plain = ok(cu.cuMemAlloc(64 << 20)); mine = own()
        ok(cu.cuMemAllocFromPoolAsync(64 << 20, mine, lane)); ok(cu.cuCtxDestroy(made)); steps = [held()]
        primary = ok(cu.cuDevicePrimaryCtxRetain(0)); ok(cu.cuMemAlloc(32 << 20))
        ok(cu.cuDevicePrimaryCtxReset(0))
        steps += [held(), int(cu.cuMemFree(pooled)[0]), int(cu.cuMemAllocFromPoolAsync(1, mine, 0)[0]), told("RESERVED_MEM_CURRENT")]
        steps.append(int(cu.cuMemAlloc(1 << 20)[0])) # the context is there, and empty
        again = ok(cu.cuDevicePrimaryCtxRetain(0)); assert int(again) == int(primary)
        state = []
        for _ in range(4): state.append([int(cu.cuDevicePrimaryCtxRelease(0)[0]), ok(cu.cuDevicePrimaryCtxGetState(0))[1]])
        answer([*steps, state])
        """,
    ) == [192, 0, 1, 1, 0, 0, [[0, 1], [0, 1], [0, 0], [201, 0]]]


def test_allocations_lie_on_the_card_of_their_pool_whatever_context_is_current(machine: sim.Machine) -> None:
    run(
        machine,
        """
        there = own(1); far = ok(cu.cuMemAllocFromPoolAsync(96 << 20, there, stream))
        other = ok(cu.cuDevicePrimaryCtxRetain(1)); ok(cu.cuCtxSetCurrent(other)); lane = ok(cu.cuStreamCreate(1))
        ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
        ok(cu.cuMemAllocAsync(32 << 20, lane))
        ordinal = ok(cu.cuPointerGetAttribute(cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, far))
        assert ordinal == 1 and held() == 0, (ordinal, held())
        ok(cu.cuCtxSetCurrent(other)); assert used() >> 20 == 64 + 96 + 32, used() >> 20
        """,
    )


def test_graph_memory_is_in_use_until_its_free_is_reached_and_of_the_card_that_its_node_names(
    machine: sim.Machine,
) -> None:
    assert run(
        machine,
        """
        graph = ok(cu.cuGraphCreate(0)); nodes = []
        for card in (0, 1):
            params = cu.CUDA_MEM_ALLOC_NODE_PARAMS(); params.bytesize = 100 << 20
            params.poolProps.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            params.poolProps.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE; params.poolProps.location.id = card
            node = ok(cu.cuGraphAddMemAllocNode(graph, nodes[-1:] or None, len(nodes[-1:]), params))
            nodes.append(node); pointer = params.dptr
        exec = ok(cu.cuGraphInstantiate(graph, 0)); ok(cu.cuGraphLaunch(exec, stream))
        GraphMem = cu.CUgraphMem_attribute
        def told(card): return int(ok(cu.cuDeviceGetGraphMemAttribute(card, GraphMem.CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT))) >> 20
        steps = [told(0), told(1), held() >= 100, int(cu.cuGraphLaunch(exec, stream)[0])]
        launch(slow, stream); ok(cu.cuMemFreeAsync(pointer, stream)); steps.append(told(1))
        ok(cu.cuDeviceGraphMemTrim(1)); steps.append(told(1))
        ok(cu.cuStreamSynchronize(stream)); ok(cu.cuDeviceGraphMemTrim(1)); steps.append(told(1))
        answer([*steps, int(cu.cuMemFree(pointer)[0])])
        """,
    ) == [100, 100, True, 1, 100, 100, 0, 1]


def test_a_ragged_pool_grows_by_no_formula_fragments_and_is_the_same_for_the_same_seed(
    tmp_path: Path,
) -> None:
    machine = sim.Machine.create(
        tmp_path / "machine",
        [sim.SimCard(memory_bytes=4096 * MIB, context_bytes=CONTEXT, knobs={"pools": "ragged", "pool_seed": 5})],
    )
    code = """
        grown = []; small = []; pool = own()
        for _ in range(12):
            before = told("RESERVED_MEM_CURRENT", pool)
            small.append(ok(cu.cuMemAllocFromPoolAsync(1 << 20, pool, stream)))
            ok(cu.cuMemAllocFromPoolAsync(40 << 20, pool, stream))
            grown.append((told("RESERVED_MEM_CURRENT", pool) - before) >> 20)
        ok(cu.cuMemPoolDestroy(pool)); thin = []
        for _ in range(8):
            tiny = own(); thin.append(ok(cu.cuMemAllocFromPoolAsync(1, tiny, stream))); ok(cu.cuMemPoolDestroy(tiny))
        ok(cu.cuCtxSynchronize()); answer([grown, held()])
        """
    grown, held = run(machine, code)
    assert len({*grown}) > 3 and any(more % 32 for more in grown)
    assert held - sum(grown) > 8 * 4, "a pool with one byte in use keeps its whole segment"
    assert run(machine, code) == [grown, held]
    other = sim.Machine.create(
        tmp_path / "other",
        [sim.SimCard(memory_bytes=4096 * MIB, context_bytes=CONTEXT, knobs={"pools": "ragged:5"})],
    )
    assert run(other, code) == [grown, held]
    even = run(machine, code, VCUDA_SIM_POOLS="even")
    assert [more % 32 for more in even[0]] == [0] * 12
    assert run(machine, code, VCUDA_SIM_POOLS="ragged:6") != [grown, held]


def test_destroying_a_graph_frees_nothing_that_it_has_allocated(machine: sim.Machine) -> None:
    """The programming guide: graph destruction does not free live graph memory; a free of the pointer does."""
    assert run(
        machine,
        """
        ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        pointer = ok(cu.cuMemAllocAsync(100 << 20, stream)); graph = ok(cu.cuStreamEndCapture(stream))
        exec = ok(cu.cuGraphInstantiate(graph, 0)); ok(cu.cuGraphLaunch(exec, stream)); launch(slow, stream)
        ok(cu.cuGraphExecDestroy(exec)); ok(cu.cuGraphDestroy(graph)); ok(cu.cuDeviceGraphMemTrim(0)); steps = [held() >= 100]
        ok(cu.cuMemFreeAsync(pointer, stream)); ok(cu.cuDeviceGraphMemTrim(0)); steps.append(held() >= 100)
        ok(cu.cuStreamSynchronize(stream)); ok(cu.cuDeviceGraphMemTrim(0))
        answer([*steps, held(), int(cu.cuMemFree(pointer)[0])])
        """,
    ) == [True, True, 0, 1]


def test_a_reset_ends_what_another_contexts_stream_has_yet_to_free(machine: sim.Machine) -> None:
    assert run(
        machine,
        """
        created(0); lane = ok(cu.cuStreamCreate(1)); pool = own()
        freed = [ok(cu.cuMemAllocFromPoolAsync(32 << 20, which, lane)) for which in (pool, default)]
        function = kernel("spin_300ms"); launch(function, lane)
        for pointer in freed: ok(cu.cuMemFreeAsync(pointer, lane))
        ok(cu.cuDevicePrimaryCtxReset(0)); reserved = told("RESERVED_MEM_CURRENT"); ok(cu.cuStreamSynchronize(lane))
        for _ in range(50): ok(cu.cuMemAllocAsync(1 << 20, lane))
        answer([reserved, int(cu.cuMemFree(freed[0])[0])])
        """,
    ) == [0, 1]


def test_sizes_that_no_card_has_and_pointers_that_are_not_ours_are_refused(machine: sim.Machine) -> None:
    assert run(
        machine,
        """
        text = b".version 8.0\\n.target sm_80\\n.address_size 64\\n.visible .global .align 8 .b8 data[4194304];\\n\\0"
        module = ok(cu.cuModuleLoadData(text)); variable, _ = ok(cu.cuModuleGetGlobal(module, b"data"))
        most = 2**64 - 1
        answer([int(cu.cuMemAlloc(most)[0]), int(cu.cuMemAlloc(2**63)[0]), int(cu.cuMemAllocManaged(most, 1)[0]), int(cu.cuMemAllocPitch(most, 2, 4)[0]),
                int(cu.cuMemAllocPitch(2**40, 2**40, 4)[0]), int(cu.cuMemAllocAsync(most, stream)[0]), int(cu.cuMemFree(variable)[0]),
                int(cu.cuMemFreeAsync(variable, stream)[0]), held() - 4])
        """,
    ) == [2, 2, 2, 2, 2, 2, 1, 1, 0]


def test_a_managed_pool_has_reserved_what_is_allocated_from_it_however_it_is_trimmed(
    machine: sim.Machine,
) -> None:
    assert run(
        machine,
        """
        props = cu.CUmemPoolProps(); props.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_MANAGED
        props.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE; props.location.id = 0
        pool = ok(cu.cuMemPoolCreate(props)); steps = []
        def step(): ok(cu.cuMemPoolTrimTo(pool, 0)); ok(cu.cuCtxSynchronize()); steps.append(told("RESERVED_MEM_CURRENT", pool) / 2**20)
        pointer = ok(cu.cuMemAllocFromPoolAsync(5 << 20, pool, stream)); step()
        ok(cu.cuMemFreeAsync(pointer, stream)); step()
        answer(steps)
        """,
    ) == [6, 0]
