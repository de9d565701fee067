"""Ways past the memory account that strangers found, each judged by the card's own books while it is tried."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.support import same
from tests.support import share as shares
from tests.support.share import MIB, Share
from vcuda.sim import Machine, SimCard

LIMIT = 1024 * MIB
CONTEXT = 64 * MIB

# What the programs below have in common: pools, graphs, a context for each card.
TOOLS = """
def pool_on(device=0, kind=1, place=1):
    return made("cuMemPoolCreate", ref(PoolProperties(kind, 0, Location(place, device))))
def figure(pool, attribute):
    value = u64()
    ok("cuMemPoolGetAttribute", pool, attribute, ref(value))
    return value.value // MIB
def stream():
    return made("cuStreamCreate", 1)
def finish(stream):
    graph = P()
    ok("cuStreamEndCapture", stream, ref(graph))
    return graph
def captured(stream, body):
    ok("cuStreamBeginCapture_v2", stream, 2)
    body()
    return finish(stream)
def run(graph, stream):
    executable = made("cuGraphInstantiateWithFlags", graph, u64(0))
    return executable, call("cuGraphLaunch", executable, stream)
def spin(stream, name="spin_400ms"):
    ok("cuLaunchKernel", kernel(name), 1, 1, 1, 32, 1, 1, 0, stream, None, None)
def free():
    return info()[0] // MIB
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine.create(tmp_path / "machine", [SimCard(), SimCard()])


@pytest.fixture
def share(machine: Machine, tmp_path: Path) -> Share:
    return shares.simulated(tmp_path / "share", machine, [shares.limit(machine, memory_bytes=LIMIT)])


@pytest.fixture
def both(machine: Machine, tmp_path: Path) -> Share:
    cards = [shares.limit(machine, index, memory_bytes=LIMIT) for index in (0, 1)]
    return shares.simulated(tmp_path / "both", machine, cards)


def run(share: Share, code: str) -> tuple[object, list[int]]:
    """Run a client; return what it answered, and the most MiB that each card held meanwhile, by its own books."""
    assert share.machine
    machine, most, over = share.machine, [0, 0], threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            for index, card in enumerate(machine.report().cards):
                peak = sum(process.peak_bytes for process in card.processes)
                most[index] = max(most[index], card.used_bytes // MIB, peak // MIB)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return share.run(same.PRELUDE + TOOLS + code), most
    finally:
        over.set()
        watcher.join()


def within(share: Share, code: str) -> object:
    """What a client answers that never had more than its limit on any card."""
    answered, most = run(share, code)
    assert max(most) <= LIMIT // MIB, most
    return answered


def test_a_captured_allocation_is_its_graphs_and_never_its_pools(share: Share) -> None:
    answered = within(
        share,
        """
begin()
one = stream()
for _ in range(10):
    pool, pointer = pool_on(), u64()
    graph = captured(one, lambda: ok("cuMemAllocFromPoolAsync", ref(pointer), size(300 * MIB), pool, one))
    executable, result = run(graph, one)
    ok("cuMemPoolDestroy", pool)
    if result == 0:
        ok("cuMemFreeAsync", pointer, one)
        ok("cuStreamSynchronize", one)
    ok("cuGraphExecDestroy", executable); ok("cuGraphDestroy", graph)
ok("cuDeviceGraphMemTrim", 0)
answer(free())
""",
    )
    assert answered == 960 - 2  # its stream


def test_a_capture_that_is_thrown_away_leaves_nothing_charged(share: Share) -> None:
    assert share.run(
        same.PRELUDE
        + TOOLS
        + """
begin()
one = stream()
pointer = u64()
graph = captured(one, lambda: ok("cuMemAllocAsync", ref(pointer), size(600 * MIB), one))
ok("cuGraphDestroy", graph)
answer([free(), alloc(600 * MIB, "cuMemAllocAsync", one)[0]])
"""
    ) == [958, 0]


def test_every_node_of_a_graph_is_charged_on_its_own_card(both: Share) -> None:
    answered = within(
        both,
        """
begin()
results, held = [], []
one = stream()
for _ in range(6):
    graph = made("cuGraphCreate", 0)
    for device in (0, 1):
        node = NodeAlloc(PoolProperties(1, 0, Location(1, device)), None, 0, 300 * MIB)
        made("cuGraphAddMemAllocNode", graph, None, size(0), ref(node))
    results.append(run(graph, one)[1])
answer(results)
""",
    )
    assert answered == [0, 0, 0, 2, 2, 2]


def test_memory_is_charged_on_the_card_of_its_stream_or_pool(both: Share) -> None:
    answered = within(
        both,
        """
first = begin()
second = C.c_void_p()
ok("cuCtxCreate_v2", ref(second), 0, 1)
other = stream()
pool = made("cuDeviceGetDefaultMemPool", 1)
ok("cuCtxSetCurrent", first)
results = []
for _ in range(4):
    results.append(alloc(200 * MIB, "cuMemAllocAsync", other)[0])
for _ in range(4):
    results.append(alloc(200 * MIB, "cuMemAllocFromPoolAsync", pool, None)[0])
left = free()
results.append(alloc(900 * MIB)[0])
ok("cuCtxSetCurrent", second)
results.append(alloc(900 * MIB)[0])
answer([left, results])
""",
    )
    assert answered == [960, [0, 0, 0, 0, 2, 2, 2, 2, 0, 2]]


@pytest.mark.parametrize("kind, place", [(2, 0), (2, 1), (2, 2), (1, 6)])
def test_a_pool_that_may_come_to_any_card_is_charged_on_all(both: Share, kind: int, place: int) -> None:
    answered = within(
        both,
        f"""
begin()
pool = pool_on(0, {kind}, {place})
result, held = fill(100 * MIB, "cuMemAllocFromPoolAsync", pool, None)
left = free()
second = C.c_void_p()
ok("cuCtxCreate_v2", ref(second), 0, 1)
answer([result, len(held), left, free()])
""",
    )
    assert isinstance(answered, list)
    result, count, here, there = answered
    assert result == 2 and 7 <= count <= 9 and here <= 260 and there <= 260


def test_libraries_pay_for_their_variables_before_anybody_has_their_address(share: Share) -> None:
    answered = within(
        share,
        """
begin()
text = b".version 8.0\\n.target sm_80\\n.address_size 64\\n.visible .global .align 4 .b8 big[2][157286400];\\n\\0"
results, held = [], []
for _ in range(6):
    library = P()
    result = call("cuLibraryLoadData", ref(library), text, None, None, 0, None, None, 0)
    if result == 0:
        pointer, count = u64(), size()
        result = call("cuLibraryGetGlobal", ref(pointer), ref(count), library, b"big")
        held.append(library)
    results.append(result)
full = free()
for library in held:
    ok("cuLibraryUnload", library)
answer([results, full, free()])
""",
    )
    assert isinstance(answered, list)
    results, full, empty = answered
    assert results == [0, 0, 0, 2, 2, 2] and full < 70 and empty == 960


def test_a_library_is_charged_in_each_context_that_uses_it(share: Share) -> None:
    answered = within(
        share,
        """
begin()
text = b".version 8.0\\n.target sm_80\\n.address_size 64\\n.visible .global .align 4 .b8 big[209715200];\\n\\0"
library = made("cuLibraryLoadData", text, None, None, 0, None, None, 0)
results = []
for _ in range(5):
    context, pointer, count = P(), u64(), size()
    if call("cuCtxCreate_v2", ref(context), 0, 0):
        break
    results.append(call("cuLibraryGetGlobal", ref(pointer), ref(count), library, b"big"))
answer(results)
""",
    )
    assert answered == [0, 0, 2, 2, 2]


def test_a_library_is_charged_in_the_context_of_the_stream_in_which_its_kernel_is_launched(
    both: Share,
) -> None:
    answered = within(
        both,
        """
first, second = begin(), P()
text = b".version 8.0\\n.target sm_80\\n.address_size 64\\n.visible .global .align 4 .b8 big[314572800];\\n.visible .entry k() { ret; }\\n\\0"
one = stream()
ok("cuCtxCreate_v2", ref(second), 0, 1)
library = made("cuLibraryLoadData", text, None, None, 0, None, None, 0)
kernel = made("cuLibraryGetKernel", library, b"k")
there = free()
result = call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, one, None, None)
ok("cuCtxSetCurrent", first)
here = free()
ok("cuLibraryUnload", library)
after = free()
ok("cuCtxSetCurrent", second)
answer([result, there, here, after, free()])
""",
    )
    assert answered == [0, 659, 657, 958, 960]


def test_a_library_is_charged_in_the_context_for_which_a_function_is_asked(share: Share) -> None:
    answered = within(
        share,
        """
begin()
text = b".version 8.0\\n.target sm_80\\n.address_size 64\\n.visible .global .align 4 .b8 big[209715200];\\n.visible .entry k() { ret; }\\n\\0"
kernel = made("cuLibraryGetKernel", made("cuLibraryLoadData", text, None, None, 0, None, None, 0), b"k")
results = []
for _ in range(5):
    context, function = P(), P()
    if call("cuCtxCreate_v2", ref(context), 0, 0):
        break
    result = call("cuKernelGetFunction", ref(function), kernel)
    results.append([result, call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, None, None, None) if result == 0 else 0])
answer(results)
""",
    )
    assert answered == [[0, 0], [0, 0], [2, 0], [2, 0], [2, 0]]


def test_destroyed_pools_are_charged_what_they_keep(share: Share) -> None:
    answered = within(
        share,
        """
begin()
pointers, results = [], []
for _ in range(700):
    pool = pool_on()
    result, pointer = alloc(1, "cuMemAllocFromPoolAsync", pool, None)
    results.append(result)
    ok("cuMemPoolDestroy", pool)
    if result == 0:
        pointers.append(pointer)
full = free()
for pointer in pointers:
    ok("cuMemFreeAsync", pointer, None)
ok("cuCtxSynchronize")
answer([results.count(0), set(results) == {0, 2}, full, free()])
""",
    )
    assert isinstance(answered, list)
    count, refused, full, empty = answered
    assert 440 < count <= 480 and refused and full <= 64 and empty == 960


def test_a_pool_that_was_destroyed_with_memory_in_use_is_gone_for_the_application(share: Share) -> None:
    assert share.run(
        same.PRELUDE
        + TOOLS
        + """
begin()
pool = pool_on()
ok("cuDeviceSetMemPool", 0, pool)
pointer = alloc(MIB, "cuMemAllocAsync", None)[1]
ok("cuMemPoolDestroy", pool)
current, default = made("cuDeviceGetMemPool", 0), made("cuDeviceGetDefaultMemPool", 0)
again = [alloc(MIB, "cuMemAllocFromPoolAsync", pool, None)[0], call("cuMemPoolDestroy", pool), call("cuMemPoolTrimTo", pool, size(0))]
answer([current.value == default.value, again, call("cuMemFree_v2", pointer)])
"""
    ) == [True, [1, 1, 1], 0]


@pytest.mark.parametrize("model", ["even", "ragged:7"])
@pytest.mark.parametrize("memory", ["plain", "pool"])
def test_memory_that_is_freed_in_a_stream_is_charged_until_the_stream_got_there(
    share: Share, memory: str, model: str
) -> None:
    """A driver may count as in use no more what is still on the card: its pool must not be taken for empty."""
    take = {
        "plain": "alloc(300 * MIB)",
        "pool": 'alloc(300 * MIB, "cuMemAllocFromPoolAsync", pool, one)',
    }[memory]
    answered = within(
        share,
        f"""
os.environ["VCUDA_SIM_POOLS"] = {model!r}
begin()
one, results = stream(), []
spin(one)
for _ in range(8):
    pool = pool_on()
    result, pointer = {take}
    results.append(result)
    if result == 0:
        ok("cuMemFreeAsync", pointer, one)
    ok("cuMemPoolDestroy", pool)
ok("cuStreamSynchronize", one)
answer([results, free()])
""",
    )
    assert isinstance(answered, list)
    assert answered[0].count(0) in (2, 3) and answered[1] >= 957


def test_memory_in_a_sparse_array_ends_with_the_arrays_context_not_with_the_current_one(share: Share) -> None:
    answered = within(
        share,
        """
class Tile(C.Structure):
    _fields_ = [("resource_type", C.c_int), ("resource", P), ("subresource_type", C.c_int), ("padding", C.c_int),
                ("box", uint * 8), ("operation", C.c_int), ("handle_type", C.c_int), ("handle", u64), ("offset", u64),
                ("devices", uint), ("flags", uint), ("reserved", uint * 2)]
class Shape(C.Structure):
    _fields_ = [("width", size), ("height", size), ("depth", size), ("format", C.c_int), ("channels", uint), ("flags", uint)]
owner = begin()
arrays, results = [], []
for _ in range(6):
    array = made("cuArray3DCreate_v2", ref(Shape(16384, 16384, 0, 0x20, 1, 0x40)))
    current = P()
    if call("cuCtxCreate_v2", ref(current), 0, 0):
        results.append("no context")
        break
    handle = u64()
    result = call("cuMemCreate", ref(handle), size(256 * MIB), ref(Properties(1, 0, Location(1, 0))), u64(0))
    results.append(result)
    if result == 0:
        box = (uint * 8)(0, 0, 0, 0, 0, 8192, 8192, 1)
        ok("cuMemMapArrayAsync", (Tile * 1)(Tile(0, array, 0, 0, box, 1, 0, handle, 0, 1, 0)), 1, None)
        ok("cuMemRelease", handle)
    ok("cuCtxDestroy_v2", current)
    ok("cuCtxSetCurrent", owner)
answer([results, free()])
""",
    )
    assert answered == [[0, 0, 0, 2, 2, 2], 192]


def test_a_pool_that_gave_something_back_meanwhile_is_not_taken_for_one_of_small_steps(share: Share) -> None:
    """The driver's steps are learnt from its own figures: what was charged may not have followed the driver down yet."""
    answered = within(
        share,
        """
begin()
one = stream()
pool = made("cuDeviceGetDefaultMemPool", 0)
held = []
for _ in range(12):
    held.append(alloc(30 * MIB, "cuMemAllocAsync", one)[1])
    ok("cuMemFree_v2", alloc(2 * MIB)[1])
for pointer in held:
    ok("cuMemFreeAsync", pointer, one)
ok("cuStreamSynchronize", one)
ok("cuMemPoolTrimTo", pool, size(0))
plain = alloc((free() - 20) * MIB)[0]
answer([plain, alloc(10 * MIB, "cuMemAllocAsync", one)[0]])
""",
    )
    assert answered == [0, 2]


@pytest.mark.parametrize("model", ["", "ragged:7"])
def test_pools_stay_within_the_share_while_other_threads_synchronise(share: Share, model: str) -> None:
    answered = within(
        share,
        f"""
os.environ["VCUDA_SIM_POOLS"] = {model!r} or "smooth"
import random, threading
context = begin()
over = threading.Event()
streams = [stream() for _ in range(4)]
def work(seed):
    chance = random.Random(seed)
    ok("cuCtxSetCurrent", context)
    one, held = streams[seed], []
    for _ in range(400):
        if held and chance.random() < 0.5:
            ok("cuMemFreeAsync", held.pop(chance.randrange(len(held))), one)
        else:
            result, pointer = alloc(chance.randrange(1, 60 * MIB), "cuMemAllocAsync", one)
            if result == 0:
                held.append(pointer)
        if chance.random() < 0.3:
            ok("cuStreamSynchronize", one)
    for pointer in held:
        ok("cuMemFreeAsync", pointer, one)
    ok("cuStreamSynchronize", one)
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
ok("cuCtxSynchronize")
answer(free())
""",
    )
    assert answered == 960 - 4  # four streams


def test_what_a_pool_gave_back_beside_a_call_that_was_refused_is_not_charged(share: Share) -> None:
    answered = within(
        share,
        """
import threading
context, over = begin(), threading.Event()
def refused():
    ok("cuCtxSetCurrent", context)
    while not over.is_set():
        alloc(2000 * MIB, "cuMemAllocAsync", None)
figures = set()
for _ in range(30):
    over.clear()
    threads = [threading.Thread(target=refused) for _ in range(2)]
    [thread.start() for thread in threads]
    for _ in range(10):
        ok("cuMemFreeAsync", alloc(500 * MIB, "cuMemAllocAsync", None)[1], None)
        ok("cuStreamSynchronize", None)
    over.set()
    [thread.join() for thread in threads]
    figures.add(free())
answer(sorted(figures))
""",
    )
    assert answered == [960]


def test_pool_memory_is_what_the_driver_says_after_a_reset(share: Share) -> None:
    answered = within(
        share,
        """
ok("cuInit", 0)
context = made("cuDevicePrimaryCtxRetain", 0)
ok("cuCtxSetCurrent", context)
results = []
for _ in range(6):
    own = pool_on()
    results.append(alloc(400 * MIB, "cuMemAllocAsync", None)[0])
    results.append(alloc(400 * MIB, "cuMemAllocFromPoolAsync", own, None)[0])
    ok("cuDevicePrimaryCtxReset_v2", 0)
ok("cuCtxSetCurrent", context)
answer([sum(results), free()])
""",
    )
    assert answered == [0, 960]


def test_idle_graph_memory_makes_room_for_a_pool(share: Share) -> None:
    assert share.run(
        same.PRELUDE
        + TOOLS
        + """
begin()
one, pointer = stream(), u64()
def body():
    ok("cuMemAllocAsync", ref(pointer), size(600 * MIB), one)
    ok("cuMemFreeAsync", pointer, one)
ok("cuStreamBeginCapture_v2", one, 2); body()
graph = finish(one)
executable, result = run(graph, one)
ok("cuStreamSynchronize", one)
left = free()
answer([result, left < 400, alloc(600 * MIB, "cuMemAllocAsync", one)[0]])
"""
    ) == [0, True, 0]


def test_threads_that_each_make_a_context_pay_for_one_each(share: Share) -> None:
    """Nobody has said what a context costs: it is measured, by one thread at a time."""
    answered = share.run(
        """
import threading
ok("cuInit", 0)
threads = [threading.Thread(target=lambda: call("cuCtxCreate_v2", C.byref(C.c_void_p()), 0, 0)) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
context = C.c_void_p()
ok("cuCtxCreate_v2", C.byref(context), 0, 0)
answer(info()[0] // MIB)
"""
    )
    assert answered == 1024 - 9 * 64


def test_mipmaps_and_small_arrays_cost_what_they_take(share: Share) -> None:
    answered = within(
        share,
        """
class Shape(C.Structure):
    _fields_ = [("width", size), ("height", size), ("depth", size), ("format", C.c_int), ("channels", uint), ("flags", uint)]
begin()
mipmap = made("cuMipmappedArrayCreate", ref(Shape(4096, 4096, 0, 0x20, 1, 0)), 13)
after_mipmap = 960 - free()
ok("cuMipmappedArrayDestroy", mipmap)
arrays = [made("cuArray3DCreate_v2", ref(Shape(100 + number % 100, 150 + number % 90, 0, 0x20, 1, 0))) for number in range(835)]
after_arrays = 960 - free()
for array in arrays:
    ok("cuArrayDestroy", array)
answer([after_mipmap, after_arrays, free()])
""",
    )
    assert isinstance(answered, list)
    mipmap, arrays, empty = answered
    assert 85 <= mipmap <= 88 and arrays <= 220 and empty == 960


def test_calls_that_cannot_succeed_answer_what_the_driver_answers(share: Share) -> None:
    assert same.answers(
        share,
        """
class Shape(C.Structure):
    _fields_ = [("width", size), ("height", size), ("depth", size), ("format", C.c_int), ("channels", uint), ("flags", uint)]
ok("cuInit", 0); context = P(); ok("cuCtxCreate_v2", ref(context), 0, 0)
huge, pointer, pitch = size(1 << 62), u64(), size()
first, second, array = size(), size(), P()
def captured_alloc(bytes):
    stream = made("cuStreamCreate", 0)
    ok("cuStreamBeginCapture_v2", stream, 0)
    result, graph = call("cuMemAlloc_v2", ref(pointer), bytes), P()
    return result, call("cuStreamEndCapture", stream, ref(graph))
answer([
    call("cuMemAlloc_v2", None, huge), call("cuMemAlloc_v2", ref(pointer), size(0)),
    call("cuMemAllocManaged", ref(pointer), huge, 77), call("cuMemAllocManaged", None, huge, 1),
    call("cuMemAllocPitch_v2", ref(pointer), ref(pitch), huge, size(2), 5),
    call("cuMemAllocPitch_v2", ref(pointer), None, huge, size(2), 4),
    call("cuMemAllocAsync", None, huge, None), call("cuMemAllocAsync", ref(pointer), size(0), None),
    call("cuMemCreate", ref(pointer), size((1 << 62) + 1), ref(Properties(1, 0, Location(1, 0))), u64(0)),
    call("cuArray3DCreate_v2", ref(array), ref(Shape(1 << 40, 1 << 20, 0, 0x20, 1, 0))),
    call("cuArray3DCreate_v2", ref(array), ref(Shape(1 << 16, 1 << 16, 0, 0x20, 3, 0))),
    call("cuMipmappedArrayCreate", ref(array), ref(Shape(1 << 16, 1 << 16, 0, 0x20, 1, 0)), 0),
    call("cuCtxSetLimit", 1, size(1 << 46)), call("cuCtxSetLimit", 99, size(1 << 46)),
    call("cuMemGetInfo_v2", ref(first), None), call("cuMemGetInfo_v2", None, ref(second)), call("cuMemGetInfo_v2", None, None),
    *(call(name, ref(pointer), size(1 << 47), *more) for name, more in (
        ("cuMemAlloc_v2", ()), ("cuMemAllocAsync", (None,)), ("cuMemAllocManaged", (1,)))),
    captured_alloc(size(1 << 40)), captured_alloc(size((1 << 64) - 1)),
    call("cuMemFree_v2", u64(12345)), call("cuMemFree_v2", u64(0)), call("cuMemFreeAsync", u64(12345), None),
    call("cuMemRelease", u64(12345)), call("cuMemUnmap", u64(1 << 40), size(1 << 40)), call("cuMemPoolDestroy", None),
])
""",
    )


def test_memory_that_is_freed_twice_or_is_not_ours_changes_no_figure(share: Share) -> None:
    assert share.run(
        same.PRELUDE
        + TOOLS
        + """
begin()
pointer, handle = alloc(100 * MIB)[1], u64()
ok("cuMemCreate", ref(handle), size(50 * MIB), ref(Properties(1, 0, Location(1, 0))), u64(0))
before = free()
ok("cuMemFree_v2", pointer); ok("cuMemRelease", handle)
results = [call("cuMemFree_v2", pointer), call("cuMemRelease", handle), call("cuMemFree_v2", u64(pointer.value + 4096)),
           call("cuMemFreeAsync", pointer, None)]
answer([before, free(), 0 in results])
"""
    ) == [810, 960, False]
    assert share.usage().cards[0].memory_peak_bytes <= LIMIT


def test_a_launch_of_a_memory_graph_on_a_full_stream_stands_in_nobodys_way(share: Share) -> None:
    """The stream is full because a callback waits for what a second thread does after its own launch: natively that ends."""
    assert (
        share.run(
            same.PRELUDE
            + TOOLS
            + """
import threading
context = begin()
def memory_graph(one):
    pointer = u64()
    ok("cuStreamBeginCapture_v2", one, 2)
    ok("cuMemAllocAsync", ref(pointer), size(MIB), one); ok("cuMemFreeAsync", pointer, one)
    return made("cuGraphInstantiateWithFlags", finish(one), u64(0))
full, other = stream(), stream()
graphs = [memory_graph(full), memory_graph(other)]
go = threading.Event()
wait = Callback(lambda _: go.wait(20) and None)
ok("cuLaunchHostFunc", full, wait, None)
function = kernel("spin_1us")
def second():
    ok("cuCtxSetCurrent", context)
    time.sleep(0.5)
    ok("cuGraphLaunch", graphs[1], other)
    go.set()
thread = threading.Thread(target=second)
thread.start()
began = time.monotonic()
for _ in range(3000):
    ok("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, full, None, None)
    if _ % 500 == 0:
        ok("cuGraphLaunch", graphs[0], full)
thread.join()
ok("cuStreamSynchronize", full)
answer(time.monotonic() - began < 15)
"""
        )
        is True
    )


def test_managed_memory_that_moves_between_cards_is_charged_on_both(both: Share) -> None:
    answered = within(
        both,
        """
begin()
other, context = P(), P()
ok("cuDevicePrimaryCtxRetain", ref(other), 1)
ok("cuCtxGetCurrent", ref(context))
ok("cuCtxSetCurrent", other)
filled = len(fill(100 * MIB)[1])
ok("cuCtxSetCurrent", context)
results = []
for _ in range(9):
    result, pointer = alloc(100 * MIB, "cuMemAllocManaged", 1)
    if result == 0:
        ok("cuMemPrefetchAsync", pointer, size(100 * MIB), 1, None)
    results.append(result)
ok("cuCtxSynchronize")
answer([filled, results])
""",
    )
    assert answered == [9, [2] * 9]
    assert both.run(
        same.PRELUDE
        + "begin()\nbefore = info()\n"
        + 'for _ in range(20):\n    ok("cuMemFree_v2", alloc(100 * MIB, "cuMemAllocManaged", 1)[1])\nanswer(info() == before)'
    )


def test_external_memory_that_is_freed_in_a_stream_is_charged_until_the_stream_got_there(
    share: Share,
) -> None:
    answered = within(
        share,
        """
class Source(C.Structure):
    _fields_ = [("type", uint), ("descriptor", u64), ("name", P), ("size", u64), ("flags", uint * 17)]
class Buffer(C.Structure):
    _fields_ = [("offset", u64), ("size", u64), ("flags", uint * 17)]
begin()
one, results = stream(), []
spin(one); spin(one)
for _ in range(8):
    file = os.memfd_create("external")
    os.truncate(file, 300 * MIB)
    memory, pointer = P(), u64()
    results.append(call("cuImportExternalMemory", ref(memory), ref(Source(1, file, None, 300 * MIB))))
    if results[-1] == 0:
        ok("cuExternalMemoryGetMappedBuffer", ref(pointer), memory, ref(Buffer(0, 300 * MIB)))
        ok("cuDestroyExternalMemory", memory)
        ok("cuMemFreeAsync", pointer, one)
ok("cuStreamSynchronize", one)
answer([results, free()])
""",
    )
    assert answered == [[0, 0, 0, 2, 2, 2, 2, 2], 957]  # its stream, and the kernel


def test_a_chunk_is_charged_until_all_streams_that_free_something_in_it_got_there(share: Share) -> None:
    answered = within(
        share,
        """
begin()
busy, idle = stream(), stream()
held = [alloc(MIB)[1] for _ in range(800)]
spin(busy); spin(busy)
for pointer in held[::2]:
    ok("cuMemFreeAsync", pointer, busy)
for pointer in held[1::2]:
    ok("cuMemFreeAsync", pointer, idle)
ok("cuStreamSynchronize", idle)
results = [alloc(500 * MIB)[0]]
ok("cuStreamSynchronize", busy)
answer(results + [free(), alloc(500 * MIB)[0]])
""",
    )
    assert answered == [2, 957, 0]
