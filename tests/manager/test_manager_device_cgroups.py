"""The watch over device cgroups: what counts as lost, told once, restored on demand; with the kernel's own cgroups where there are any."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from manager.allocations.record import Allocation
from manager.audit.device_cgroups import Watcher, missing
from manager.audit.owners import Owners
from manager.regions.storage import Storage
from tests.manager import manager_pods
from tests.manager.manager_pods import container, eventually, pod
from tests.manager.manager_proc import Proc
from tests.manager.manager_support import Node
from vcuda.spec.placement import CardShare

NEEDED = {"/dev/nvidiactl": (195, 255), "/dev/nvidia0": (195, 0), "/dev/nvidia-uvm": (237, 0)}
DEFAULTS = "c 1:3 rwm\nb 7:* m\nc 136:* rwm\n"
CGROUPS = Path("/sys/fs/cgroup")


@pytest.mark.parametrize(
    ("listed", "lost"),
    [
        ("a *:* rwm\n", set()),
        ("c 195:* rw\nc 237:0 rw\n", set()),
        ("c 195:255 r\nc 195:255 w\nc 195:0 rwm\nc *:0 rw\n", set()),
        ("c 195:255 rw\nc 237:0 rw\n", {"/dev/nvidia0"}),
        ("c 195:255 rw\nc 195:0 r\nc 237:0 rw\n", {"/dev/nvidia0"}),
        ("b 195:0 rw\nnonsense\n\n", set(NEEDED)),
        ("", set(NEEDED)),
    ],
)
def test_what_a_list_does_not_grant(listed: str, lost: set[str]) -> None:
    assert set(missing(DEFAULTS + listed, NEEDED)) == lost


def allocation(directory: Path, uid: str) -> Allocation:
    region = directory / "regions" / uid / "c"
    region.mkdir(parents=True)
    (region / "limits").touch()
    return manager_pods.allocation(CardShare("GPU-1", 10, 4), pod_uid=uid, pod_name=uid, region=str(region))


class Tree:
    """A cgroup tree of plain files and a /proc for it."""

    def __init__(self, directory: Path) -> None:
        self.root, self.proc = directory / "cgroup", directory / "proc"
        (self.root / "devices").mkdir(parents=True)
        (self.root / "devices/devices.list").write_text("a *:* rwm\n")

    def add(self, path: str, pid: int, region: str, listed: str) -> Path:
        folder = self.root / "devices" / path
        folder.mkdir(parents=True)
        (folder / "devices.list").write_text(listed)
        (folder / "cgroup.procs").write_text(f"{pid}\n")
        Proc(self.proc.parent).add(pid, f"/{path}", region=region)
        return folder


HEALTHY = DEFAULTS + "c 195:255 rw\nc 195:0 rw\nc 237:0 rw\n"


def test_a_loss_is_told_once_per_container_under_both_cgroup_drivers(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    one, two, three = (allocation(tmp_path, str(uuid.uuid4())) for _ in range(3))
    tree.add(f"kubepods/burstable/pod{one.pod_uid}/pause", 9, "", DEFAULTS)
    folder = tree.add(f"kubepods/burstable/pod{one.pod_uid}/abc", 10, one.region, HEALTHY)
    escaped = two.pod_uid.replace("-", "_")
    tree.add(f"kubepods.slice/kubepods-pod{escaped}.slice/cri-containerd-x.scope", 11, two.region, HEALTHY)
    told: list[tuple[str, str, str]] = []
    watcher = Watcher(
        tree.root,
        lambda _: NEEDED,
        lambda *what: told.append((what[0].pod_uid, *what[1:])),
        Owners(tree.proc),
    )
    everyone = (one, two, three)  # the third has not started yet
    watcher.look(everyone, restore=False)
    assert (watcher.watch.looked_at, watcher.watch.lost, told) == (2, {}, [])
    (folder / "devices.list").write_text(DEFAULTS)  # as runc leaves it when the devices are not in its config
    for _ in range(3):
        watcher.look(everyone, restore=False)
    assert watcher.watch.lost == {one.key: tuple(NEEDED)}
    ((uid, reason, message),) = told
    assert (uid, reason) == (one.pod_uid, "DevicesLost")
    assert "container c can no longer open /dev/nvidiactl, /dev/nvidia0, /dev/nvidia-uvm" in message
    (folder / "devices.list").write_text(HEALTHY)
    watcher.look(everyone, restore=False)
    assert watcher.watch.lost == {}


def test_version_2_is_said_to_be_unreadable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    one = allocation(tmp_path, str(uuid.uuid4()))
    watcher = Watcher(tmp_path, lambda _: NEEDED, lambda *_: None, Owners())
    for _ in range(2):
        watcher.look((one,), restore=True)
    assert (watcher.watch.readable, watcher.watch.looked_at) == (False, 0)
    assert "control groups v2 do not show" in watcher.watch.why
    assert caplog.text.count("control groups v2 do not show") == 1


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A group of our own below the kernel's device cgroups."""
    folder = CGROUPS / "devices" / f"vgm-test-{os.getpid()}"
    try:
        (folder / "kubepods").mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"no device cgroups of version 1 can be made here: {error}")
    if not (folder / "devices.list").exists():
        for made in (folder / "kubepods", folder):
            made.rmdir()
        pytest.skip(f"{CGROUPS}/devices is no device cgroup of version 1")
    yield folder
    for path, _, _ in os.walk(folder, topdown=False):
        _remove(Path(path))


def _remove(folder: Path) -> None:
    """A group whose processes have just ended is busy for a moment."""
    deadline = time.monotonic() + 10
    while True:
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


_CONTAINED = """
import os, signal, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
os.chroot(sys.argv[2])
signal.pause()
"""


def contained(folder: Path, root: Path) -> subprocess.Popen[bytes]:
    """A process in the cgroup `folder` with the root `root`, until it is killed."""
    folder.mkdir(parents=True)
    process = subprocess.Popen([sys.executable, "-c", _CONTAINED, str(folder), str(root)])
    eventually(
        lambda: str(process.pid) in (folder / "cgroup.procs").read_text().split(), "the process in its cgroup"
    )
    eventually(lambda: Path(f"/proc/{process.pid}/root").readlink() == root, "the process in its root")
    return process


@pytest.mark.parametrize("policy", ["report", "restore"])
def test_a_card_lost_behind_the_runtimes_back_is_seen_and_given_back(
    node: Node, cgroup: Path, policy: str
) -> None:
    """INCIDENTS I1 with the kernel's own device cgroup: deny all, allow what the runtime knows; the card is not in it."""
    node.start("--device-cgroup-policy=" + policy, f"--cgroup-root={cgroup.parents[1]}", wait=200)
    item = pod("a", container("c", 30, 10))
    node.kubelet.admit(item)
    root = node.directory / "container"
    (root / "etc/vcuda").mkdir(parents=True)
    _bind(node.region(item, "c"), root / "etc/vcuda")
    folder = cgroup / f"kubepods/besteffort/pod{item['metadata']['uid']}/0123"
    process = contained(folder, root)
    try:
        needed = dict(line.split()[1:] for line in (folder / "devices.list").read_text().splitlines())
        assert needed == {"*:*": "rwm"}
        eventually(lambda: usage(node)["device_cgroups"] == "watched", "the watch")
        eventually(lambda: node.daemon and node.daemon.cgroups.watch.looked_at == 1, "the container")
        assert lost(node) == []
        (folder / "devices.deny").write_text("a")
        (folder / "devices.allow").write_text("c 1:3 rwm")
        if policy == "report":
            found = eventually(lambda: lost(node), "the loss in /usage")
            assert {"/dev/nvidiactl", "/dev/nvidia-uvm"} < set(found)
            assert "LOST /dev/nvidiactl" in node.get("/graph")[1]
            assert 'vcuda_container_lost_devices{container_name="c"' in node.get("/metrics")[1]
            assert "195:255" not in (folder / "devices.list").read_text()
        else:
            eventually(lambda: "c 195:255 rw" in (folder / "devices.list").read_text(), "the card back")
            eventually(lambda: "vcuda_manager_devices_restored_total 5.0" in node.get("/metrics")[1], "count")
            assert lost(node) == []
    finally:
        process.kill()
        process.wait()
        Storage.remove(root / "etc/vcuda")


def usage(node: Node) -> dict[str, object]:
    return json.loads(node.get("/usage")[1])  # type: ignore[no-any-return]


def lost(node: Node) -> list[str]:
    (found,) = json.loads(node.get("/usage")[1])["containers"]
    return list(found["lost_devices"])


def _bind(source: Path, target: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(os.fsencode(source), os.fsencode(target), None, 4096, None) != 0:  # MS_BIND
        pytest.skip(f"nothing can be mounted here: {os.strerror(ctypes.get_errno())}")
