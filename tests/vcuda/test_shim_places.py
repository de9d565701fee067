"""Odd places to run in: read-only files, a full disk, namespaces, another user, no /proc. What holds there, and what is said."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.gpu_clients import ORDINARY_USER, as_user
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


@pytest.fixture
def open_share() -> Iterator[Share]:
    """Below a folder that every user may enter."""
    with tempfile.TemporaryDirectory(prefix="vcuda-places-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        machine = Machine.create(folder / "machine", [SimCard()])
        yield shares.simulated(folder / "share", machine, [shares.limit(machine)])


def outcome(share: Share, place: str) -> tuple[object, list[str]]:
    process = share.start(_PLACE + place + _TAKE, str(share.region_directory))
    output, said = process.communicate(timeout=60)
    if said.startswith("skip: "):
        pytest.skip(f"this machine does not let the test change its place: {said[6:].strip()}")
    assert process.returncode == 0, said
    return json.loads(output), shares.beside_refusals(said).splitlines()


def test_with_a_read_only_usage_memory_is_refused_with_the_reason(share: Share) -> None:
    """Processes that counted alone would get the limit each."""
    place = """
private_mounts()
folder = sys.argv[1].encode()
must(libc.mount(folder, folder, None, 0x1000, None))  # MS_BIND
must(libc.mount(None, folder, None, 0x1021, None))  # MS_BIND | MS_REMOUNT | MS_RDONLY
"""
    process = share.start(_PLACE + place + "begin()\n", str(share.region_directory))
    _, said = process.communicate(timeout=60)
    if said.startswith("skip: "):
        pytest.skip(f"this machine does not let the test change its place: {said[6:].strip()}")
    reason, answer = said.splitlines()
    assert "/usage: Read-only file system; GPU memory is refused to this process" in reason
    assert answer == "cuCtxCreate_v2: CUresult 2"


def test_in_a_user_namespace_the_limit_holds_and_nothing_is_said(share: Share) -> None:
    assert outcome(share, "must(libc.unshare(0x10000000))  # CLONE_NEWUSER\n") == (WITHIN, [])


# A pod with `hostUsers: false`: its user 0 is the node's 100000, and its mounts show the node's users as its own
# (`mapped`, as kubelet asks of containerd 2) or as nobody.
_SHIFTED = """
class Attributes(C.Structure):
    _fields_ = [(name, u64) for name in ("set", "clear", "propagation", "namespace")]
def shifted(folders, user):
    private_mounts()
    ready, done = os.pipe(), os.pipe()
    keeper = os.fork()
    if keeper == 0:
        if libc.unshare(0x10000000) == 0:  # CLONE_NEWUSER
            os.write(ready[1], b".")
        os.close(done[1])
        os.read(done[0], 1)
        os._exit(0)
    os.close(ready[1])
    if not os.read(ready[0], 1):
        sys.exit("skip: no user namespace")
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/{keeper}/{name}", "w") as users:
            users.write("0 100000 65536")
    namespace = os.open(f"/proc/{keeper}/ns/user", os.O_RDONLY)
    for folder in map(str.encode, folders):
        tree = libc.syscall(428, -100, folder, 0x80001)  # open_tree: OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC
        attributes = Attributes(0x100000, 0, 0, namespace)  # MOUNT_ATTR_IDMAP
        must(libc.syscall(442, tree, b"", 0x1000, C.byref(attributes), 32))  # mount_setattr: AT_EMPTY_PATH
        must(libc.syscall(429, tree, b"", -100, folder, 4))  # move_mount: MOVE_MOUNT_F_EMPTY_PATH
    must(libc.setns(namespace, 0x10000000))
    os.close(done[1])
    os.waitpid(keeper, 0)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
"""


@pytest.mark.parametrize("user", [0, ORDINARY_USER])
@pytest.mark.parametrize("mapped", [True, False])
def test_with_shifted_users_the_limit_holds_beside_the_nodes_root_and_nothing_is_said(
    open_share: Share, mapped: bool, user: int
) -> None:
    """Both count in one ledger, whoever the owner of its files seems to be, and what the dead held is free."""
    machine = open_share.machine
    assert machine is not None
    region_directory = str(open_share.region_directory)
    folders = [region_directory, str(machine.directory)] if mapped else []
    root = open_share.start(f"begin(); held = alloc({50 * MIB}); answer(info()[0]); sys.stdin.read()")
    assert root.stdout and int(root.stdout.readline()) == LIMIT - CONTEXT - 50 * MIB
    seen_owner = 0 if mapped else 65534
    place = f"""
shifted({folders}, {user})
assert (os.getuid(), os.stat({region_directory + "/usage"!r}).st_uid) == ({user}, {seen_owner})
"""
    for _ in range(2):
        process = open_share.start(_PLACE + _SHIFTED + place + _BESIDE)
        output, said = process.communicate(timeout=60)
        if said.startswith("skip: "):
            pytest.skip(f"this machine does not shift users: {said[6:].strip()}")
        assert (process.returncode, shares.beside_refusals(said)) == (0, ""), said
        assert json.loads(output) == [0, 2, LIMIT - 2 * CONTEXT - 70 * MIB]
    root.communicate("", timeout=60)
    assert open_share.usage().cards[0].memory_used_bytes == 0


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


def test_on_a_read_only_root_file_system_the_limit_holds_and_nothing_is_said(share: Share) -> None:
    """Only the container's region and what stands for the card can be written."""
    place = f"""
private_mounts()
writable = [sys.argv[1], {str(share.folder.parent / "machine")!r}]
for folder in writable:
    must(libc.mount(folder.encode(), folder.encode(), None, 0x1000, None))  # MS_BIND
for line in open("/proc/self/mountinfo").read().splitlines():
    point = line.split()[4]
    if point not in writable and not point.startswith(("/proc", "/sys", "/dev")):
        must(libc.mount(None, point.encode(), None, 0x1021, None))  # MS_BIND | MS_REMOUNT | MS_RDONLY
for folder in ("/", "/tmp", os.getcwd(), os.path.dirname(sys.argv[1])):
    try:
        open(folder + "/written", "w").close()
        sys.exit(folder + " can be written")
    except OSError as error:
        assert error.errno == 30, error  # EROFS
"""
    for _ in range(2):  # what the first one took when it ended is free again
        assert outcome(share, place) == (WITHIN, [])
    assert share.usage().cards[0].memory_used_bytes == 0


def test_on_a_full_disk_the_limit_holds_and_nothing_is_said(share: Share) -> None:
    """The region was made while there was room: its blocks are its own."""
    place = """
private_mounts()
from vcuda import region
limits = region.read_limits(sys.argv[1])
small = os.path.dirname(sys.argv[1]) + "/small"
os.mkdir(small)
must(libc.mount(b"none", small.encode(), b"tmpfs", 0, b"size=640k"))
region.create(small, limits)
filler = open(small + "/filler", "wb", buffering=0)
try:
    while True:
        filler.write(bytes(4096))
except OSError as error:
    assert error.errno == 28, error  # ENOSPC
must(libc.mount(small.encode(), sys.argv[1].encode(), None, 0x1000, None))  # MS_BIND
"""
    assert outcome(share, place) == (WITHIN, [])


def test_a_region_that_does_not_fit_on_its_disk_is_not_made_and_leaves_nothing(share: Share) -> None:
    place = """
private_mounts()
from vcuda import region
limits = region.read_limits(sys.argv[1])
must(libc.mount(b"none", sys.argv[1].encode(), b"tmpfs", 0, b"size=100k"))
try:
    region.create(sys.argv[1], limits)
    sys.exit("made")
except region.RegionError as error:
    answer([str(error), os.listdir(sys.argv[1])])
    sys.exit()
"""
    process = share.start(_PLACE + place, str(share.region_directory))
    output, said = process.communicate(timeout=60)
    if said.startswith("skip: "):
        pytest.skip(f"this machine does not let the test change its place: {said[6:].strip()}")
    assert process.returncode == 0, said
    why, left = json.loads(output)
    assert "No space left on device" in why and left == []


def test_an_ordinary_user_without_any_capability_is_held_to_the_limit_beside_root_and_nothing_is_said(
    open_share: Share,
) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed here")
    code = (
        'status = open("/proc/self/status").read()\n'
        'assert os.getuid() != 0 and "CapEff:\\t0000000000000000" in status, status\n'
    )
    root = open_share.start(f"begin(); held = alloc({50 * MIB}); answer(info()[0]); sys.stdin.read()")
    assert root.stdout and int(root.stdout.readline()) == LIMIT - CONTEXT - 50 * MIB
    found = []
    for _ in range(2):
        user = subprocess.run(
            [*as_user(ORDINARY_USER), _python_of_all(), "-c", shares.PRELUDE + code + _BESIDE],
            env=open_share.environment(),
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (user.returncode, shares.beside_refusals(user.stderr)) == (0, "")
        found.append(json.loads(user.stdout))
    root.communicate("", timeout=60)
    assert found == [[0, 2, LIMIT - 2 * CONTEXT - 70 * MIB]] * 2
    assert open_share.usage().cards[0].memory_used_bytes == 0


_BESIDE = """
begin()
answer([alloc(20 * MIB)[0], alloc(100 * MIB)[0], info()[0]])
"""


def _python_of_all() -> str:
    """A Python that the ordinary user may execute: root's own may lie in a folder that is closed to others."""
    for python in (sys.executable, "/usr/bin/python3"):
        # The shell is there because setpriv keeps root's rights until it has executed something.
        command = [*as_user(ORDINARY_USER), "sh", "-c", '"$0" -c "import ctypes"', python]
        if shutil.which(python) and subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return python
    pytest.skip("an ordinary user can execute no Python here")
