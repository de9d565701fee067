"""Claims as a runtime gives them: mounted below /etc/vcuda, and shared by pods that see nothing of each other's processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import share as shares
from tests.support.share import MIB, PRELUDE, Share
from vcuda import region
from vcuda.sim import Machine, SimCard

LIMIT = 512 * MIB
CONTEXT = 64 * MIB

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make namespaces and mounts here")

# A container: /etc is its own to write, the claim's folder is mounted. What its root adds there comes by `forge`.
CONTAINER = """
from pathlib import Path
from vcuda import region
libc = C.CDLL(None, use_errno=True)
def must(result):
    if result != 0: sys.exit("skip: " + os.strerror(C.get_errno()))
must(libc.unshare(0x20000))  # CLONE_NEWNS
must(libc.mount(b"none", b"/", None, 0x44000, None))  # MS_REC | MS_PRIVATE
must(libc.mount(b"none", b"/etc", b"tmpfs", 0, None))
def mounted(source, folder, kind=None):
    os.makedirs(folder)
    must(libc.mount(source.encode(), folder.encode(), kind, 0 if kind else 0x1000, None))  # MS_BIND
def forge(folder):
    os.makedirs(folder, exist_ok=True)
    region.create(Path(folder), [region.CardLimit(sys.argv[2], 0, 1 << 40, 100, 100)])
mounted(sys.argv[1], "/etc/vcuda/claims/real")
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine.create(tmp_path / "machine", [SimCard()])


def made(folder: Path, machine: Machine) -> Path:
    folder.mkdir()
    region.create(folder, [shares.limit(machine, memory_bytes=LIMIT)])
    return folder


def inside(share: Share, claim: Path, code: str) -> tuple[object, list[str]]:
    """What a client in the container answers and says."""
    assert share.machine
    process = share.start(CONTAINER + code, str(claim), share.machine.cards[0].uuid)
    output, said = process.communicate(timeout=60)
    if said.startswith("skip: "):
        pytest.skip(f"this machine does not let the test mount: {said[6:].strip()}")
    assert process.returncode == 0, said
    return json.loads(output), said.splitlines()


FORGERIES = {
    "a folder whose name comes first": ('forge("/etc/vcuda/claims/0")', "/etc/vcuda/claims/0"),
    "what the device plugin would mount": ('forge("/etc/vcuda")', "/etc/vcuda"),
    "a link to a mount": (
        'mounted("none", "/etc/own", b"tmpfs"); forge("/etc/own"); os.symlink("/etc/own", "/etc/vcuda/claims/0")',
        "/etc/vcuda/claims/0",
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_what_a_containers_root_writes_gives_it_no_more_of_a_card(
    tmp_path: Path, machine: Machine, forgery: str
) -> None:
    code, folder = FORGERIES[forgery]
    share = shares.simulated(tmp_path / "share", machine, None)
    (answer, said) = inside(share, made(tmp_path / "claim", machine), code + "\nbegin(); answer(info()[1])")
    assert answer == LIMIT
    assert said == [
        f"vcuda: two shares name GPU {machine.cards[0].uuid}: /etc/vcuda/claims/real counts, {folder} does not; "
        "give the container one share of each GPU"
    ]


def test_what_is_below_etc_comes_before_what_lies_beside_the_library(tmp_path: Path, machine: Machine) -> None:
    """There the driver directory of gpu-manager has a link that leads to nothing in a container that has claims alone."""
    share = shares.simulated(tmp_path / "share", machine, None)
    share.region_directory.mkdir()
    (share.region_directory / "limits").symlink_to("/etc/vcuda/limits")
    claim = made(tmp_path / "claim", machine)
    assert inside(share, claim, "begin(); answer(info()[1])") == (LIMIT, [])
    (answer, said) = inside(
        share, claim, 'must(libc.umount(b"/etc/vcuda/claims/real")); begin(); answer(alloc(MIB)[0])'
    )
    assert answer == 2 and len(said) == 1 and said[0].startswith(f"vcuda: cannot open {share.lib64}/../vcuda/limits: ")


UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def in_a_pod(share: Share, code: str) -> subprocess.Popen[str]:
    """A client in a PID namespace of its own, with its own /proc."""
    return subprocess.Popen(
        [*UNSHARE, sys.executable, "-c", PRELUDE + code],
        env=share.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_pods_that_share_a_claim_share_its_limit_and_see_each_others_deaths(tmp_path: Path, machine: Machine) -> None:
    """The processes of both have the same PIDs, and neither can look at the other's."""
    if subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may make no PID namespace")
    claim = made(tmp_path / "claim", machine)
    pods = [shares.simulated(tmp_path / name, machine, None) for name in ("one", "two")]
    for pod in pods:
        (pod.region_directory / "claims").mkdir(parents=True)
        (pod.region_directory / "claims/shared").symlink_to(claim)
    holder = in_a_pod(pods[0], "begin(); answer([os.getpid(), alloc(300 * MIB)[0]]); sys.stdin.read()")
    assert holder.stdout and json.loads(holder.stdout.readline()) == [1, 0]
    taker = in_a_pod(
        pods[1],
        """
begin()
for _ in range(3):
    answer([os.getpid(), alloc(300 * MIB)[0], info()[0] // MIB])
sys.stdin.readline()
until = time.monotonic() + 60
while alloc(300 * MIB)[0]:
    assert time.monotonic() < until, "what the dead had is not free"
    time.sleep(0.02)
answer(info()[0] // MIB)
""",
    )
    try:
        assert taker.stdout and taker.stdin
        left = (LIMIT - 2 * CONTEXT) // MIB - 300
        for _ in range(3):  # asking what is free frees what the dead had, and only that
            assert json.loads(taker.stdout.readline()) == [1, 2, left]
        seen = region.read_usage(claim)
        assert [process.alive for process in seen.processes] == [True, True]
        assert seen.cards[0].memory_used_bytes == 300 * MIB + 2 * CONTEXT
        holder.kill()
        taker.stdin.write("\n")
        taker.stdin.flush()
        assert json.loads(taker.stdout.readline()) == (LIMIT - CONTEXT) // MIB - 300, taker.communicate()[1]
        assert taker.communicate(timeout=60)[0] == "" and taker.returncode == 0
    finally:
        holder.kill()
        taker.kill()
        holder.communicate(timeout=60)
