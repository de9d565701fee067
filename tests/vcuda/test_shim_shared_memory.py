"""Memory that several processes hold: one object is charged once, as long as anybody has it, whoever frees or dies first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import share as shares
from tests.support.exports import CLIENT, IPC, LIMIT, across, share_of, shown
from tests.support.share import MIB, Share
from vcuda import _native, region
from vcuda.sim import Machine, SimCard


@pytest.fixture
def share(tmp_path: Path) -> Share:
    return share_of(tmp_path)


@pytest.mark.parametrize(
    "call", ["info()", 'ok("cuCtxSynchronize")', 'ok("cuStreamSynchronize", None)', "alloc(800 * MIB)"]
)
def test_ipc_memory_that_its_maker_frees_is_charged_while_it_is_open(share: Share, call: str) -> None:
    """And until the maker waits for the card, asks what is free, or needs the room."""
    found = shown(
        share,
        IPC.replace("info(); there", f"{call}; there")
        + """
child, here = export(None, MAKER)
begin()
result, pointer = open_ipc(here); show(result)
here.send(b"g"); here.recv(1); show(alloc(700 * MIB)[0])
ok("cuIpcCloseMemHandle", pointer); here.send(b"g"); here.recv(1); show()
ended(child, here); show()
""",
    )
    assert found == [[596, 0], [596, 2], [96 if "alloc" in call else 896], [960]]


def test_ipc_memory_of_a_killed_maker_is_charged_while_it_is_open(share: Share) -> None:
    found = shown(
        share,
        IPC
        + """
child, here = export(None, MAKER)
begin()
result, pointer = open_ipc(here); show(result)
killed(child); show(alloc(700 * MIB)[0])
ok("cuIpcCloseMemHandle", pointer); show(alloc(700 * MIB)[0])
""",
    )
    assert found == [[596, 0], [660, 2], [260, 0]]


def test_ipc_memory_of_another_container_is_charged_to_who_opens_it(share: Share, tmp_path: Path) -> None:
    found = across(
        share,
        tmp_path,
        LIMIT,
        "exec(MAKER)",
        """
begin()
result, pointer = open_ipc(here); held = free()
here.send(b"g"); here.recv(1); freed = free()
ok("cuIpcCloseMemHandle", pointer); here.send(b"gg")
answer([result, held, freed, free()])
""",
    )
    assert found == [0, 660, 660, 960]


def test_small_ipc_memory_of_a_killed_maker_is_charged_by_the_chunks_that_it_shares(share: Share) -> None:
    """400 allocations of 4 KiB lie in one chunk, or in two."""
    found = shown(
        share,
        IPC
        + """
child, here = export(None, '''
begin()
pointers = [alloc(4096)[1] for _ in range(400)]
for pointer in pointers:
    handle = Ipc()
    ok("cuIpcGetMemHandle", C.byref(handle), pointer); there.send(bytes(handle))
while there.recv(1) == b"f":
    ok("cuMemFree_v2", pointers.pop()); info(); there.send(b"f")
''')
begin()
opened = [open_ipc(here) for _ in range(400)]; show({result for result, _ in opened} == {0})
for _ in range(100):
    here.send(b"f"); here.recv(1)
for _, pointer in opened[300:350]:
    ok("cuIpcCloseMemHandle", pointer)
show()
killed(child); show(alloc(900 * MIB)[0])
for _, pointer in opened[:300] + opened[350:]:
    ok("cuIpcCloseMemHandle", pointer)
show(alloc(2 * MIB)[0], alloc(2 * MIB)[0])
""",
    )
    assert [row[1:] for row in found] == [[True], [], [0], [0, 0]]
    assert [row[0] for row in found] in ([894, 894, 58, 56], [892, 892, 56, 56])


POOL = """
class Pool(C.Structure):
    _fields_ = [("type", C.c_int), ("handles", C.c_int), ("location", Location), ("security", C.c_void_p), ("most", size), ("reserved", C.c_ubyte * 56)]
POOLED = '''
begin()
pool, pointer, shared, data = C.c_void_p(), u64(), C.c_int(), Ipc()
ok("cuMemPoolCreate", C.byref(pool), C.byref(Pool(1, 1, Location(1, 0))))
ok("cuMemAllocFromPoolAsync", C.byref(pointer), size(300 * MIB), pool, None); ok("cuCtxSynchronize")
ok("cuMemPoolExportToShareableHandle", C.byref(shared), pool, 1, u64(0))
ok("cuMemPoolExportPointer", C.byref(data), pointer)
socket.send_fds(there, [bytes(data)], [shared.value]); there.recv(1)
'''
def open_pooled(here):
    data, descriptors, _, _ = socket.recv_fds(here, 64, 1)
    pool, pointer = C.c_void_p(), u64()
    ok("cuMemPoolImportFromShareableHandle", C.byref(pool), C.c_void_p(descriptors[0]), 1, u64(0)); os.close(descriptors[0])
    return call("cuMemPoolImportPointer", C.byref(pointer), pool, C.byref(Ipc.from_buffer_copy(data))), pointer
"""


@pytest.mark.parametrize("free_by", ["cuMemFree_v2", "cuMemFreeAsync"])
def test_pool_memory_of_a_killed_maker_is_charged_while_it_is_imported(share: Share, free_by: str) -> None:
    found = shown(
        share,
        IPC
        + POOL
        + f"""
child, here = export(None, POOLED)
begin()
result, pointer = open_pooled(here); ok("cuCtxSynchronize"); show(result)
killed(child); show(alloc(700 * MIB)[0])
ok({free_by!r}, pointer, None); ok("cuCtxSynchronize"); show(alloc(700 * MIB)[0])
""",
    )
    assert [row[1:] for row in found] == [[0], [2], [0]]
    assert found[0][0] <= 596 and 640 <= found[1][0] <= 660 and found[2][0] == 260


def test_a_dead_exporter_pays_for_what_is_imported_alone_and_once(share: Share) -> None:
    """It exported one object three times and another one, which nobody imported."""
    found = shown(
        share,
        IPC
        + """
child, here = export(None, TWO)
descriptor = taken(here)
begin()
result, handle = imported(descriptor); os.close(descriptor); show(result)
killed(child); show(alloc(700 * MIB)[0], alloc(60 * MIB)[0], alloc(2 * MIB)[0])
ok("cuMemRelease", handle); show(alloc(200 * MIB)[0])
""",
    )
    assert found == [[396, 0], [0, 0, 0, 2], [0, 0]]


@pytest.mark.parametrize("loses", ["reopened", "unlocked", "no descriptor left"])
def test_who_imports_what_nothing_says_the_owner_of_pays(share: Share, loses: str) -> None:
    found = share.run(
        CLIENT
        + IPC
        + f"""
loses = {loses!r}
handles = []
results = []
for child, here in [export(None, "there.recv(1); exporter(there, 250); there.recv(1)") for _ in range(2)]:
    here.send(b"g")
    descriptor = taken(here)
    if loses == "reopened":
        descriptor = reopened(descriptor)
    elif loses == "unlocked":
        unlock(descriptor)
    if not handles:
        begin()
    if loses == "no descriptor left":
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), 4096))
        taken_up = []
        while True:
            try:
                taken_up.append(os.dup(0))
            except OSError:
                break
        os.close(taken_up.pop())  # the driver's own
    result, handle = imported(descriptor)
    if loses == "no descriptor left":
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
        for one in taken_up: os.close(one)
    results.append(result); handles.append(handle)
    os.close(descriptor)
    killed(child)
more = len(fill(2 * MIB)[1]) * 2
answer([results.count(0), more])
"""
    )
    assert found == [2, 460], found


def test_external_memory_is_charged_as_much_as_its_object_is_large(share: Share) -> None:
    found = shown(
        share,
        IPC
        + """
child, here = export(None, CHILD)
descriptor = taken(here)
begin()
result, memory = external(descriptor); show(result)
killed(child); show(alloc(700 * MIB)[0])
ok("cuDestroyExternalMemory", memory); show(alloc(700 * MIB)[0])
""",
    )
    assert found == [[596, 0], [660, 2], [260, 0]]


def test_a_forked_child_of_the_importer_keeps_nothing_alive(share: Share) -> None:
    found = shown(
        share,
        """
child, here = export(None, RELEASES)
descriptor = taken(here)
begin()
result, handle = imported(descriptor); os.close(descriptor)
fork = os.fork()
if not fork:
    time.sleep(60); os._exit(0)
here.send(b"e"); here.recv(1); show(result)
ok("cuMemRelease", handle); here.send(b"e"); os.waitpid(child, 0); show(alloc(900 * MIB)[0])
killed(fork)
""",
    )
    assert found == [[596, 0], [60, 0]]


@pytest.mark.parametrize("by", ["imported", "external"])
def test_an_orphan_whose_slot_was_taken_again_is_charged_to_who_imports_it(share: Share, by: str) -> None:
    """Its signature says the same slot and the same first chunk as what the slot's new process has exported."""
    found = shown(
        share,
        IPC
        + f"""
orphans = []
for _ in range(3):
    child, here = export(None, CHILD)
    orphans.append(taken(here)); killed(child)
child, here = export(None, "exporter(there, 2); there.recv(1)")
living = taken(here)
begin()
results = [{by}(living)[0]]
for one in orphans:
    results.append({by}(one)[0])
    if {by} == imported or results[-1]:
        os.close(one)  # who imports external memory takes it
show(results)
""",
    )
    assert found == [[294, [0, 0, 0, 2]]]


def test_what_another_container_exported_is_charged_though_one_of_ours_exported_alike(
    share: Share, tmp_path: Path
) -> None:
    found = across(
        share,
        tmp_path,
        LIMIT,
        "exporter(there); there.recv(1)",
        """
child, ours = export(None, "exporter(there, 2); there.recv(1)")
descriptors = [taken(ours), taken(here)]
begin()
results = [imported(one)[0] for one in descriptors]
answer([results, free()])
killed(child)
""",
    )
    assert found == [[0, 0], 594]


def test_what_was_given_on_where_nothing_is_limited_is_charged_to_who_imports_it(share: Share, tmp_path: Path) -> None:
    maker = """
child, far = export(None, "exporter(there); there.recv(1)")
begin(); handle = imported(taken(far))[1]
shared = C.c_int(); ok("cuMemExportToShareableHandle", C.byref(shared), handle, 1, u64(0))
socket.send_fds(there, [b"x"], [shared.value]); there.recv(1)
"""
    found = across(share, tmp_path, LIMIT, maker, "begin(); answer([imported(taken(here))[0], free()])", whole=True)
    assert found == [0, 660]


def test_what_nothing_says_the_owner_of_is_refused_where_it_does_not_fit(share: Share, tmp_path: Path) -> None:
    found = across(
        share,
        tmp_path,
        3 * LIMIT,
        "exporter(there, 2500); there.recv(1)",
        "begin(); answer([imported(reopened(taken(here)))[0], free()])",
    )
    assert found == [2, 960]


@pytest.mark.parametrize("way", ["ipc", "pooled"])
def test_memory_of_unknown_size_that_does_not_fit_is_given_back_at_once(share: Share, tmp_path: Path, way: str) -> None:
    """Another container's, of which only the driver knows the size once it has it: it adds nothing to the card, and nothing stays."""
    maker = "begin(); give_ipc(there, 2500); there.recv(1)" if way == "ipc" else "exec(POOLED)"
    found = across(
        share,
        tmp_path,
        3 * LIMIT,
        POOL.replace("300", "2500") + maker,
        POOL
        + f"""
driver = C.CDLL("libcuda-driver.so.1")
def on_card():
    left, total = size(), size()
    driver.cuMemGetInfo_v2(C.byref(left), C.byref(total))
    return (total.value - left.value) // MIB
data, descriptors, _, _ = socket.recv_fds(here, 64, 1)
begin()
if {way!r} == "ipc":
    def take():
        return cu.cuIpcOpenMemHandle_v2(C.byref(u64()), Ipc.from_buffer_copy(data), 1)
else:
    pool = C.c_void_p()
    ok("cuMemPoolImportFromShareableHandle", C.byref(pool), C.c_void_p(descriptors[0]), 1, u64(0))
    def take():
        return call("cuMemPoolImportPointer", C.byref(u64()), pool, C.byref(Ipc.from_buffer_copy(data)))
before = on_card()
results = [take() for _ in range(5)]
added = on_card() - before
here.send(b"g")  # its maker ends: what nobody else holds is gone
until = time.monotonic() + 20
while on_card() > 1024 and time.monotonic() < until:
    time.sleep(0.01)
answer([results, added, on_card() <= 1024, free(), alloc(900 * MIB)[0]])
""",
    )
    assert found == [[2] * 5, 0, True, 960, 0]


def test_what_nobody_can_measure_is_refused(share: Share) -> None:
    """No address space is left to map it."""
    found = shown(
        share,
        IPC
        + """
child, here = export(None, CHILD)
descriptor = reopened(taken(here))
begin()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 300 * MIB, resource.RLIM_INFINITY))
result = imported(descriptor)[0]; os.close(descriptor); killed(child)
show(result)
""",
    )
    assert found == [[960, 2]]


def test_an_orphan_for_which_there_is_no_room_never_reaches_the_driver(share: Share) -> None:
    assert share.machine
    process = share.start(
        CLIENT
        + """
child, here = export(None, "exporter(there, 700)")
descriptor = taken(here)
os.waitpid(child, 0)
begin()
result, held = alloc(400 * MIB)
answer([imported(descriptor)[0], imported(descriptor)[0]])
sys.stdin.readline()
"""
    )
    assert process.stdout and process.stdout.readline() == "[2, 2]\n"
    peak = max(one.peak_bytes for one in share.machine.report().cards[0].processes)
    shares.end(process)
    assert peak // MIB == 464


def test_an_orphan_on_another_card_than_the_full_one_is_imported(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path / "machine", [SimCard(), SimCard()])
    share = shares.simulated(
        tmp_path / "share", machine, [shares.limit(machine, card, memory_bytes=LIMIT) for card in range(2)]
    )
    found = share.run(
        CLIENT
        + """
def second(there):
    begin(1)
    handle, shared = u64(), C.c_int()
    ok("cuMemCreate", C.byref(handle), size(700 * MIB), C.byref(Properties(1, 1, Location(1, 1))), u64(0))
    ok("cuMemExportToShareableHandle", C.byref(shared), handle, 1, u64(0))
    socket.send_fds(there, [b"x"], [shared.value])
descriptors = []
for _ in range(2):
    child, here = export(None, "second(there)")
    descriptors.append(taken(here)); os.waitpid(child, 0)
begin(1); begin(0); results = [alloc(900 * MIB)[0], *(imported(one)[0] for one in descriptors)]
first = free()
ok("cuCtxPopCurrent_v2", C.byref(C.c_void_p()))
answer([results, first, free()])
"""
    )
    assert found == [[0, 0, 2], 60, 260]


def test_what_a_process_has_exported_and_imports_as_external_memory_is_charged_once(share: Share) -> None:
    found = shown(
        share,
        IPC
        + """
begin()
handle, shared = C.c_uint64(), C.c_int()
ok("cuMemCreate", C.byref(handle), size(600 * MIB), C.byref(Properties(1, 1, Location(1, 0))), u64(0))
ok("cuMemExportToShareableHandle", C.byref(shared), handle, 1, u64(0))
result, memory = external(shared.value); show(result)
ok("cuMemRelease", handle); show(alloc(700 * MIB)[0])
ok("cuDestroyExternalMemory", memory); show(alloc(700 * MIB)[0])
""",
    )
    assert found == [[360, 0], [360, 2], [260, 0]]


BESIDE = {
    "ipc": ("begin(); give_ipc(there, 600); there.recv(1)", "result = open_ipc(here)[0]"),
    "pooled": ("exec(POOLED.replace('300', '600'))", "result = open_pooled(here)[0]"),
    "external": ("exporter(there, 600); there.recv(1)", "result = external(taken(here))[0]"),
    "descriptor": ("exporter(there, 600); there.recv(1)", "result = imported(taken(here))[0]"),
}


@pytest.mark.parametrize("claims", [False, True])
@pytest.mark.parametrize("way", BESIDE)
def test_who_imports_and_pays_pays_on_the_card_where_it_lies(tmp_path: Path, way: str, claims: bool) -> None:
    """Another container's memory on card 0, imported while a context of card 1 is current: its books and the card's agree."""
    machine = Machine.create(tmp_path / "machine", [SimCard(), SimCard()])
    cards = [shares.limit(machine, card, memory_bytes=LIMIT) for card in range(2)]
    share = shares.simulated(tmp_path / "share", machine, None if claims else cards)
    for card in range(2) if claims else ():
        folder = share.region_directory / "claims" / str(card)
        folder.mkdir(parents=True)
        region.create(folder, cards[card : card + 1])
    maker, code = BESIDE[way]
    found = across(
        share,
        tmp_path,
        LIMIT,
        POOL + maker,
        POOL
        + f"""
begin(0); begin(1)
{code}
other = alloc(900 * MIB)[0]
ok("cuCtxPopCurrent_v2", C.byref(C.c_void_p()))
answer([result, other, free(), alloc(400 * MIB)[0], alloc(300 * MIB)[0]])
""",
    )
    assert found == [0, 0, 360, 2, 0]


def test_external_memory_that_another_card_has_no_room_for_is_refused(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path / "machine", [SimCard(), SimCard()])
    cards = [shares.limit(machine, card, memory_bytes=LIMIT) for card in range(2)]
    share = shares.simulated(tmp_path / "share", machine, cards)
    found = across(
        share,
        tmp_path,
        LIMIT,
        "exporter(there, 600); there.recv(1)",
        """
begin(0); alloc(500 * MIB); begin(1)
descriptor = taken(here)
result = external(descriptor)[0]
first = free()
ok("cuCtxPopCurrent_v2", C.byref(C.c_void_p()))
answer([result, first, free()])
""",
    )
    assert found == [2, 960, 460]


def test_a_record_that_names_less_than_was_opened_lets_nobody_off(share: Share) -> None:
    """A tenant writes over the extents in the table of names: who opens the memory pays for it himself, and it is charged when its owner is gone."""
    names = _native.ffi.offsetof("struct vc_usage", "names")
    found = shown(
        share,
        IPC
        + f"""
child, here = export(None, MAKER)
handle = here.recv(64, socket.MSG_PEEK)
with open({str(share.region_directory / "usage")!r}, "r+b") as usage:
    for at in range({names}, {names} + {_native.lib.VC_MAX_NAMES} * 16, 16):
        usage.seek(at)
        owner, place = struct.unpack("QQ", usage.read(16))
        if owner:
            usage.seek(at + 8)
            usage.write(struct.pack("Q", (place >> 30) << 30 | 1))
begin()
result, pointer = open_ipc(here); show(result)
here.send(b"g"); here.recv(1); here.send(b"g"); here.recv(1); show(alloc(700 * MIB)[0])
ok("cuIpcCloseMemHandle", pointer); show(alloc(700 * MIB)[0])
""",
    )
    assert found == [[296, 0], [596, 2], [196, 0]]


@pytest.mark.parametrize("way", ["ipc", "external", "descriptor"])
def test_what_a_dead_owner_pays_for_is_counted_on_the_card_where_it_lies(tmp_path: Path, way: str) -> None:
    """His memory on card 0 was imported while a context of card 1 was current."""
    machine = Machine.create(tmp_path / "machine", [SimCard(), SimCard()])
    cards = [shares.limit(machine, card, memory_bytes=LIMIT) for card in range(2)]
    share = shares.simulated(tmp_path / "share", machine, cards)
    maker, code = BESIDE[way]
    found = share.run(
        CLIENT
        + IPC
        + f"""
child, here = export(None, {maker!r})
begin(0); begin(1)
{code}
killed(child)
other = alloc(900 * MIB)[0]
ok("cuCtxPopCurrent_v2", C.byref(C.c_void_p()))
answer([result, other, free(), alloc(400 * MIB)[0], alloc(300 * MIB)[0]])
"""
    )
    assert found == [0, 0, 360, 2, 0]
