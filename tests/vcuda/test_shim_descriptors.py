"""Exported memory between processes: the exporter's container or the importer pays, whatever becomes of either; never nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import share as shares
from tests.support.exports import CLIENT, LIMIT, share_of, shown
from tests.support.share import Share


@pytest.fixture
def share(tmp_path: Path) -> Share:
    return share_of(tmp_path)


@pytest.mark.parametrize("ends", ["killed(child)", "ended(child, here)"], ids=["killed", "exits"])
def test_an_exporter_that_ends_pays_until_its_importer_lets_go(share: Share, ends: str) -> None:
    found = shown(
        share,
        f"""
child, here = export(None, CHILD)
descriptor = taken(here)
begin(); show()
result, handle = imported(descriptor); os.close(descriptor); show(result)
{ends}; show()
show(*[alloc(600 * MIB)[0], alloc(300 * MIB)[0]])
ok("cuMemRelease", handle); show()
""",
    )
    assert found == [[596], [596, 0], [660], [60, 0, 2], [360]]


def test_an_exporter_that_execs_pays_until_its_importer_lets_go(share: Share) -> None:
    found = shown(
        share,
        """
child, here = export(None, EXECS)
descriptor = taken(here)
begin()
result, handle = imported(descriptor); os.close(descriptor); show(result)
here.send(b"e"); time.sleep(0.5); show()
ok("cuMemRelease", handle); time.sleep(0.1); show()
killed(child); show()
""",
    )
    assert found == [[596, 0], [660], [960], [960]]


def test_an_exporter_that_lets_go_pays_as_long_as_somebody_holds_it(share: Share) -> None:
    found = shown(
        share,
        """
child, here = export(None, RELEASES)
descriptor = taken(here)
begin()
result, handle = imported(descriptor); os.close(descriptor)
here.send(b"e"); here.recv(1); show(result)
ok("cuMemRelease", handle)
ended(child, here); show()
""",
    )
    assert found == [[596, 0], [960]]


def test_who_imports_what_a_dead_process_has_exported_pays(share: Share) -> None:
    found = share.run(
        CLIENT
        + """
descriptors = []
for _ in range(3):
    child, here = export(None, CHILD)
    descriptors.append(taken(here))
    killed(child)
begin()
held = alloc(500 * MIB)[1]
first = [imported(one) for one in descriptors]
left = free()
ok("cuMemFree_v2", held)
for result, handle in first:
    if result == 0:
        ok("cuMemRelease", handle)
answer([[result for result, _ in first], left, free()])
"""
    )
    assert found == [[0, 2, 2], 160, 960]


def test_what_was_imported_and_is_given_on_is_its_makers_still(share: Share) -> None:
    found = shown(
        share,
        """
child, here = export(None, CHILD)
descriptor = taken(here)
begin()
result, handle = imported(descriptor); os.close(descriptor)
shared = C.c_int()
again = call("cuMemExportToShareableHandle", C.byref(shared), handle, 1, u64(0)); show(result, again)
killed(child); show()
ok("cuMemRelease", handle)
if again == 0:
    os.close(shared.value)
show()
""",
    )
    assert found == [[596, 0, 0], [660], [960]]


def test_who_gave_it_on_is_killed_and_its_maker_pays_for_the_descriptor(share: Share) -> None:
    """And for who imports that, or takes it back; not once it is closed."""
    found = shown(
        share,
        """
GIVES = '''
descriptor = taken(there)
begin(); result, handle = imported(descriptor); os.close(descriptor)
shared = C.c_int()
ok("cuMemExportToShareableHandle", C.byref(shared), handle, 1, u64(0))
socket.send_fds(there, [b"x"], [shared.value]); there.recv(1)
'''
giver, here = export(None, GIVES)
taker, there = export(None, "descriptor = taken(there); begin(); imported(descriptor); os.close(descriptor); there.send(b'i'); there.recv(1)")
handle, shared = exporter(here)
descriptor = taken(here); show()
os.close(shared); ok("cuMemRelease", handle); killed(giver); show(); show()
result, handle = imported(descriptor); show(result); ok("cuMemRelease", handle); show()
socket.send_fds(there, [b"x"], [descriptor]); os.close(descriptor); there.recv(1); show()
killed(taker); show(); show()
""",
    )
    assert found == [[596], [660], [660], [660, 0], [660], [596], [960], [960]]


def test_an_importer_of_another_container_pays(share: Share, tmp_path: Path) -> None:
    assert share.machine
    other = shares.simulated(tmp_path / "other", share.machine, [shares.limit(share.machine, memory_bytes=LIMIT)])
    server = f"""
{CLIENT}
listener = socket.socket(socket.AF_UNIX); listener.bind(os.environ["SOCKET"]); listener.listen()
answer("ready")
there = listener.accept()[0]
exporter(there)
sys.stdin.readline()
"""
    address = str(tmp_path / "s")
    exporting = share.start(server, SOCKET=address)
    assert exporting.stdout and exporting.stdout.readline() == '"ready"\n'
    found = other.run(
        CLIENT
        + """
here = socket.socket(socket.AF_UNIX); here.connect(os.environ["SOCKET"])
descriptor = taken(here)
begin()
result, handle = imported(descriptor)
held = free()
ok("cuMemRelease", handle)
answer([result, held, free()])
""",
        SOCKET=address,
    )
    shares.end(exporting)
    assert found == [0, 660, 960]


def test_memory_goes_when_a_process_without_cuda_closes_the_last_descriptor(share: Share) -> None:
    """ "… all outstanding references to the handle (including its shareable counterparts)": whoever has them."""
    assert share.machine
    process = share.start(
        CLIENT
        + """
child, here = export(None, '''
descriptor = socket.recv_fds(there, 1, 1)[1][0]
there.recv(1); os.close(descriptor); there.send(b"c"); there.recv(1)
''')
handle, shared = exporter(here, 500)
ok("cuMemRelease", handle); os.close(shared); before = free()
here.send(b"e"); here.recv(1)
answer([before, len(fill(60 * MIB)[1])])
sys.stdin.readline()
"""
    )
    assert process.stdout and process.stdout.readline() == "[460, 16]\n"
    peak = max(one.peak_bytes for one in share.machine.report().cards[0].processes)
    shares.end(process)
    assert peak <= LIMIT
