"""However a process is started by another one of its container: the limit is one for both, and the dead hold nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support import share as shares
from tests.support.runs import wait_for
from tests.support.share import MIB, Share
from vcuda.sim import Machine, SimCard

LIMIT = 512 * MIB
CONTEXT = 64 * MIB
HELD = 50 * MIB

# A module that children import: takes 100 MiB, is refused 300 more beside what its parent has, says what is left.
TAKER = """
def take():
    begin()
    return [alloc(100 * MIB)[0], alloc(300 * MIB)[0], info()[0]]
def put(queue):
    queue.put(take())
"""
STARTS = """
import multiprocessing, subprocess
sys.path.insert(0, sys.argv[1])
import taker
CHILD = [sys.executable, "-c", "import sys; sys.path.insert(0, sys.argv[1]); import taker; taker.answer(taker.take())", sys.argv[1]]
def by_multiprocessing(method):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=taker.put, args=(queue,))
    process.start()
    found = queue.get(timeout=50)
    process.join()
    return found
def by_posix_spawn():
    reading, writing = os.pipe()
    child = os.posix_spawn(CHILD[0], CHILD, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, writing, 1)])
    os.close(writing)
    found = json.loads(os.fdopen(reading).read())
    os.waitpid(child, 0)
    return found
def by_subprocess():
    assert subprocess._USE_VFORK
    return json.loads(subprocess.run(CHILD, stdout=subprocess.PIPE, check=True).stdout)
"""


@pytest.fixture
def share(tmp_path: Path) -> Share:
    machine = Machine.create(tmp_path / "machine", [SimCard()])
    return shares.simulated(tmp_path / "share", machine, [shares.limit(machine, memory_bytes=LIMIT)])


def booked(share: Share) -> tuple[int, int]:
    """By the ledger, and by the card's own books."""
    assert share.machine
    return share.usage().cards[0].memory_used_bytes, share.machine.report().cards[0].used_bytes


@pytest.mark.parametrize(
    "start",
    [
        'by_multiprocessing("spawn")',
        'by_multiprocessing("forkserver")',
        "by_posix_spawn()",
        "by_subprocess()",
    ],
)
def test_a_child_started_beside_a_parent_at_work_shares_its_limit_and_leaves_nothing(
    share: Share, tmp_path: Path, start: str
) -> None:
    (tmp_path / "taker.py").write_text(shares.PRELUDE + TAKER)
    parents = f"begin(); held = alloc({HELD}); found = {start}; answer([found, info()[0]])"
    found, left = share.run(STARTS + parents, str(tmp_path))
    assert found == [0, 2, LIMIT - 2 * CONTEXT - HELD - 100 * MIB]
    assert left == LIMIT - CONTEXT - HELD
    assert booked(share) == (0, 0)


def test_a_multiprocessing_fork_of_a_parent_that_used_nothing_yet_has_the_limit_and_leaves_nothing(
    share: Share, tmp_path: Path
) -> None:
    (tmp_path / "taker.py").write_text(shares.PRELUDE + TAKER)
    parents = 'found = [by_multiprocessing("fork") for _ in range(2)]; begin(); answer([found, info()[0]])'
    found, left = share.run(STARTS + parents, str(tmp_path))
    assert found == [[0, 0, LIMIT - CONTEXT - 400 * MIB]] * 2
    assert left == LIMIT - CONTEXT
    assert booked(share) == (0, 0)


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)"])
def test_a_forked_child_that_uses_nothing_ends_without_giving_back_what_its_parent_holds(
    share: Share, end: str
) -> None:
    before, after, refused = share.run(
        f"""
begin()
held = alloc({HELD})
before = info()[0]
for _ in range(20):
    child = os.fork()
    if child == 0:
        {end}
    assert os.waitpid(child, 0)[1] == 0
answer([before, info()[0], alloc(before + MIB)[0]])
"""
    )
    assert before == after == LIMIT - CONTEXT - HELD
    assert refused == 2


def test_what_a_killed_parent_held_stays_booked_until_its_forked_child_ends_too(share: Share) -> None:
    """The child inherited the card's files, and with them a real card keeps the memory. It uses nothing itself."""
    parent = share.start(
        f"""
begin()
held = alloc({HELD})
child = os.fork()
if child == 0:
    time.sleep(300)
answer(child)
time.sleep(300)
"""
    )
    assert parent.stdout
    child = int(parent.stdout.readline())
    try:
        assert [process.pid for process in share.usage().processes] == [parent.pid]
        assert booked(share)[0] == CONTEXT + HELD
        parent.send_signal(signal.SIGKILL)
        parent.wait(60)
        os.kill(child, 0)  # lives on
        assert share.run("begin(); answer(info()[0])") == LIMIT - 2 * CONTEXT - HELD
        assert booked(share)[0] == CONTEXT + HELD
    finally:
        os.kill(child, signal.SIGKILL)
        parent.kill()
        parent.communicate(timeout=60)
    # Our child's child is another's to bury: its files close some time after the signal.
    wait_for("the end of what the dead held", lambda: booked(share) == (0, 0))
    assert share.run("begin(); answer(info()[0])") == LIMIT - CONTEXT
