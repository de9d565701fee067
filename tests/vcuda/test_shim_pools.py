"""Pools are charged what the driver says they have reserved, where they lie, whatever becomes of them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support import books, same
from tests.support import share as shares
from tests.support.share import Share


@pytest.fixture
def share(tmp_path: Path) -> Share:
    return books.share_of_one_card(tmp_path)


@pytest.fixture
def both(tmp_path: Path) -> Share:
    return books.share_of_two_cards(tmp_path)


def test_memory_is_charged_on_the_card_of_its_stream_or_pool(both: Share) -> None:
    answered = books.within(
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
    answered = books.within(
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


def test_destroyed_pools_are_charged_what_they_keep(share: Share) -> None:
    answered = books.within(
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
        + books.TOOLS
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


def test_a_pool_that_gave_something_back_meanwhile_is_not_taken_for_one_of_small_steps(share: Share) -> None:
    """The driver's steps are learnt from its own figures: what was charged may not have followed the driver down yet."""
    answered = books.within(
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
    answered = books.within(
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


@pytest.fixture
def held_up(share: Share) -> Share:
    """A share whose driver holds a thread up between its answer what of a pool is in use and the next that the shim does."""
    folder, compiler = share.lib64 / "drv", ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-x", "c"]
    alias, name = folder / "libcuda-driver.so.1", "libsimulated-driver.so"
    source = Path(__file__).with_name("pool_reading_driver.c")
    alias.rename(folder / name)
    stub = share.folder / name  # the simulated driver is called like the shim
    subprocess.run([*compiler, "/dev/null", f"-Wl,-soname,{name}", "-o", str(stub)], check=True, timeout=60)
    output = [f"-Wl,-soname,{alias.name}", "-Wl,--no-as-needed", "-o", str(alias)]
    needed = [f"-L{share.folder}", f"-l:{name}", "-Wl,-rpath,$ORIGIN", "-ldl"]
    subprocess.run([*compiler, str(source), *output, *needed], check=True, timeout=60)
    return share


@pytest.mark.parametrize("first, second", [(900, 100), (940, 60), (100, 100)])
def test_a_call_knows_of_what_another_took_while_it_looked_how_much_is_in_use(
    held_up: Share, first: int, second: int
) -> None:
    answered = books.within(
        held_up,
        f"""
import threading
driver, context, results = C.CDLL("libcuda-driver.so.1"), begin(), []
ok("cuMemFreeAsync", alloc(1, "cuMemAllocAsync", None)[1], None)
ok("cuStreamSynchronize", None)
held = C.c_int.in_dll(driver, "is_held")
def late():
    ok("cuCtxSetCurrent", context)
    driver.hold_next()
    results.append(alloc({second} * MIB, "cuMemAllocAsync", None)[0])
thread = threading.Thread(target=late, daemon=True)
thread.start()
while not held.value and thread.is_alive():
    time.sleep(0.001)
results.append(alloc({first} * MIB, "cuMemAllocAsync", None)[0])
C.c_int.in_dll(driver, "may_go").value = 1
thread.join()
answer(results)
""",
    )
    assert answered == [0, 0 if first + second < 900 else 2]


def test_what_a_pool_gave_back_beside_a_call_that_was_refused_is_not_charged(share: Share) -> None:
    answered = books.within(
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
    answered = books.within(
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
        + books.TOOLS
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


IMPOSSIBLE = {
    "plain": "alloc({0} * MIB)[0]",
    "managed": 'alloc({0} * MIB, "cuMemAllocManaged", 1)[0]',
    "pitched": 'call("cuMemAllocPitch_v2", ref(u64()), ref(size()), size({0} << 10), size(1 << 10), 4)',
    "physical": 'call("cuMemCreate", ref(u64()), size({0} * MIB), ref(Properties(1, 0, Location(1, 0))), u64(0))',
    "the same pool": 'alloc({0} * MIB, "cuMemAllocAsync", one)[0]',
    "another pool": 'alloc({0} * MIB, "cuMemAllocFromPoolAsync", pool_on(), one)[0]',
    "heap": 'call("cuCtxSetLimit", 2, size({0} * MIB))',
    "graph": "run(allocating({0} * MIB), one)[1]",
}


@pytest.mark.parametrize("mebibytes", [1000, 2000])
@pytest.mark.parametrize("way", IMPOSSIBLE)
def test_a_request_that_can_never_be_met_leaves_pools_what_they_keep(share: Share, way: str, mebibytes: int) -> None:
    """More than the limit, or than the limit beside the context: no idle memory would make room for it."""
    assert share.run(
        same.PRELUDE
        + books.TOOLS
        + f"""
begin()
one, pool = stream(), made("cuDeviceGetDefaultMemPool", 0)
ok("cuMemPoolSetAttribute", pool, 4, ref(u64(2**64 - 1)))
def allocating(count):
    pointer = u64()
    def body():
        ok("cuMemAllocAsync", ref(pointer), size(count), one)
        ok("cuMemFreeAsync", pointer, one)
    return captured(one, body)
ok("cuMemFreeAsync", alloc(320 * MIB, "cuMemAllocAsync", one)[1], one)
ok("cuStreamSynchronize", one)
answer([figure(pool, 5), {IMPOSSIBLE[way].format(mebibytes)}, figure(pool, 5)])
"""
    ) == [320, 2, 320]


def test_one_process_learns_for_all_of_the_container_how_pools_grow(share: Share) -> None:
    """On this driver the first byte takes 72 MiB. Where all that is left is less, no process after the first asks for it."""
    ragged = "ragged:9"
    assert share.machine
    assert share.run("begin(); answer(alloc(1, 'cuMemAllocAsync', None)[0])", VCUDA_SIM_POOLS=ragged) == 0
    process = share.start(
        """
begin(); held = [alloc(900 * MIB)]
answer([held[0][0], alloc(1, "cuMemAllocAsync", None)[0], alloc(2 * MIB)[0]])
sys.stdin.read()
""",
        VCUDA_SIM_POOLS=ragged,
    )
    assert process.stdout
    said = process.stdout.readline()
    peak = max(one.peak_bytes for one in share.machine.report().cards[0].processes)
    shares.end(process)
    assert (said, peak <= books.LIMIT) == ("[0, 2, 0]\n", True)
