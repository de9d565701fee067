"""Odd places to run in: a read-only usage, a user namespace, a PID namespace, no /proc. What holds there, and what is said."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support import share as shares
from tests.support.share import MIB, Share
from vcuda.sim import Machine, SimCard

LIMIT = 256 * MIB
CONTEXT = 64 * MIB

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make namespaces and mounts here")

# The client changes its place before it looks for a driver; TAKE then fills its share.
_PLACE = """
libc = C.CDLL(None, use_errno=True)
def must(result):
    if result != 0: sys.exit("skip: " + os.strerror(C.get_errno()))
def private_mounts():
    must(libc.unshare(0x20000))  # CLONE_NEWNS
    must(libc.mount(b"none", b"/", None, 0x44000, None))  # MS_REC | MS_PRIVATE
"""
_TAKE = """
begin()
answer([alloc(100 * MIB)[0], alloc(200 * MIB)[0], info()[0]])
"""
WITHIN = [0, 2, LIMIT - CONTEXT - 100 * MIB]  # the first fits, the second does not


@pytest.fixture
def share(tmp_path: Path) -> Share:
    machine = Machine.create(tmp_path / "machine", [SimCard()])
    return shares.simulated(tmp_path / "share", machine, [shares.limit(machine)])


def outcome(share: Share, place: str) -> tuple[object, list[str]]:
    process = share.start(_PLACE + place + _TAKE, str(share.region_directory))
    output, said = process.communicate(timeout=60)
    if said.startswith("skip: "):
        pytest.skip(f"this machine does not let the test change its place: {said[6:].strip()}")
    assert process.returncode == 0, said
    return json.loads(output), said.splitlines()


def test_with_a_read_only_usage_each_process_is_held_to_the_share_by_itself(share: Share) -> None:
    place = """
private_mounts()
folder = sys.argv[1].encode()
must(libc.mount(folder, folder, None, 0x1000, None))  # MS_BIND
must(libc.mount(None, folder, None, 0x1021, None))  # MS_BIND | MS_REMOUNT | MS_RDONLY
"""
    found, said = outcome(share, place)
    assert found == WITHIN
    assert (
        len(said) == 1
        and "/usage: Read-only file system; this process is held to the share by itself" in said[0]
    )


def test_in_a_user_namespace_the_limit_holds_and_nothing_is_said(share: Share) -> None:
    assert outcome(share, "must(libc.unshare(0x10000000))  # CLONE_NEWUSER\n") == (WITHIN, [])


def test_in_a_pid_namespace_of_its_own_the_limit_holds_and_the_dead_hold_nothing(share: Share) -> None:
    place = """
must(libc.unshare(0x20000000))  # CLONE_NEWPID: for the children
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    for _ in range(2):  # what the first one took when it ended is free again
        assert outcome(share, place) == (WITHIN, [])
    assert share.usage().cards[0].memory_used_bytes == 0


def test_without_proc_the_limit_holds_and_nothing_is_said(share: Share) -> None:
    place = """
private_mounts()
must(libc.mount(b"none", b"/proc", b"tmpfs", 0, None))
"""
    for _ in range(2):
        assert outcome(share, place) == (WITHIN, [])
    assert share.usage().cards[0].memory_used_bytes == 0
