"""The watch over device cgroups: what counts as lost, told once, restored on demand; with the kernel's own cgroups where there are any."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import json
import os
import stat
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from manager.allocate import allocator as allocation_module
from manager.allocations.record import Allocation
from manager.audit import owners
from manager.audit.device_cgroups import Watcher
from manager.audit.owners import Owners
from manager.cgroups import bpf, pods
from manager.cgroups.devices import CannotTell, Probed, missing
from manager.observe import node_object
from manager.regions.storage import Storage
from tests.manager import manager_pods
from tests.manager.manager_pods import NAMES, container, eventually, pod
from tests.manager.manager_proc import Proc
from tests.manager.manager_support import Node
from vcuda import device_access
from vcuda.sim import Machine
from vcuda.spec import bookings, placement
from vcuda.spec.placement import CardShare, Placement

NEEDED = {"/dev/nvidiactl": (195, 255), "/dev/nvidia0": (195, 0), "/dev/nvidia-uvm": (237, 0)}
DEFAULTS = "c 1:3 rwm\nb 7:* m\nc 136:* rwm\n"
CGROUPS = Path("/sys/fs/cgroup")
_libc = ctypes.CDLL(None, use_errno=True)


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


@pytest.fixture
def nested(tmp_path: Path) -> Iterator[list[Path]]:
    """A chain of 1,500 folders, taken away again one by one: pytest's own way of ending old ones goes down by calls."""
    chain = [tmp_path / "pod"]
    chain[0].mkdir()
    for _ in range(1_500):
        chain.append(chain[-1] / "g")
        chain[-1].mkdir()
    yield chain
    for folder in reversed(chain):
        (folder / "cgroup.procs").unlink(missing_ok=True)
        folder.rmdir()


def test_a_container_nests_groups_deeper_than_a_stack_has_frames(nested: list[Path]) -> None:
    (nested[-1] / "cgroup.procs").write_text("7\n")
    (nested[0] / "cgroup.procs").write_text("3\n")
    assert list(pods.processes(nested[0])) == [3, 7]
    assert list(pods.with_those_below(nested[0])) == nested


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
        tmp_path / "nodes",
        lambda _: NEEDED,
        lambda *what: told.append((what[0].pod_uid, *what[1:])),
        Owners(tree.proc, tree.root),
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


def test_after_a_restart_the_new_group_is_the_containers_while_the_old_one_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, one = Tree(tmp_path), allocation(tmp_path, str(uuid.uuid4()))
    path = f"kubepods/burstable/pod{one.pod_uid}"
    old = tree.add(f"{path}/old", 10, one.region, HEALTHY)
    owners = Owners(tree.proc, tree.root)
    watchers = [Watcher(tree.root, tmp_path / "nodes", lambda _: NEEDED, lambda *_: None, owners) for _ in range(2)]
    watchers[0].look((one,), restore=False)
    assert watchers[0].folders == {one.key: (old,)}
    new = tree.add(f"{path}/new", 11, one.region, DEFAULTS)
    # The kernel numbers its groups upwards, this file system perhaps not.
    monkeypatch.setattr(pods, "inode", {old: 1, new: 2}.get)
    for watcher in watchers:
        watcher.look((one,), restore=False)
        assert watcher.folders == {one.key: (old, new)}
        assert watcher.watch.lost == {one.key: tuple(NEEDED)}  # of the new one
    (old / "cgroup.procs").write_text("")  # empty, and not removed
    for watcher in watchers:
        watcher.look((one,), restore=False)
        assert watcher.folders == {one.key: (new,)}


def test_the_mounts_of_a_pods_sandbox_are_read_once_and_a_container_that_starts_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read at each look they were most of the daemon's work in a burst. A runtime's process has no mounts of ours yet."""
    tree, one = Tree(tmp_path), allocation(tmp_path, str(uuid.uuid4()))
    path = f"kubepods/burstable/pod{one.pod_uid}"
    tree.add(f"{path}/pause", 9, "", DEFAULTS)
    started = tree.add(f"{path}/abc", 10, "", HEALTHY)
    read: list[str] = []
    monkeypatch.setattr(owners, "_mounts", lambda folder, real=owners._mounts: (read.append(folder), real(folder))[1])
    watcher = Watcher(tree.root, tmp_path / "nodes", lambda _: NEEDED, lambda *_: None, Owners(tree.proc, tree.root))
    watcher.look((one,), restore=False)
    assert {Path(folder).name for folder in read} == {"10", "9"}
    read.clear()
    for _ in range(4):
        watcher.look((one,), restore=False)
    assert read == [] and watcher.folders == {}
    # The runtime mounts, then becomes the container's program.
    exe = tree.proc / "10/exe"
    Proc(tmp_path / "beside").add(10, f"/{path}/abc", region=one.region)
    (tree.proc / "10/mountinfo").write_bytes((tmp_path / "beside/proc/10/mountinfo").read_bytes())
    exe.unlink()
    exe.symlink_to("/bin/train")
    watcher.look((one,), restore=False)
    assert watcher.folders == {one.key: (started,)}
    # One that has the runtime's own path is found, too, only later.
    two = dataclasses.replace(one, container="d")
    now = time.monotonic()
    watcher.look((one, two), restore=False)
    read.clear()
    watcher.look((one, two), restore=False)
    assert read == []
    monkeypatch.setattr(time, "monotonic", lambda: now + 120)
    watcher.look((one, two), restore=False)
    assert {Path(folder).name for folder in read} == {"9"}


def test_a_machine_without_control_groups_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = allocation(tmp_path, str(uuid.uuid4()))
    watcher = Watcher(tmp_path / "nothing", tmp_path, lambda _: NEEDED, lambda *_: None, Owners())
    for _ in range(2):
        watcher.look((one,), restore=True)
    assert (watcher.watch.readable, watcher.watch.looked_at) == (False, 0)
    assert "set --cgroup-root" in watcher.watch.why
    assert caplog.text.count("device cgroups are not watched, and no audit") == 1


class Group:
    """A group of our own below the kernel's, of either version. `root`: what --cgroup-root is told; `folder`: the group."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder

    def of_container(self, uid: str, identifier: str) -> Path:
        """As the driver names it, in the tree of a kubelet that has a root group of its own."""
        if self.folder.suffix != ".slice":
            return self.folder / f"kubepods/besteffort/pod{uid}/{identifier}"
        tree = f"{self.folder.stem}-kubepods"
        around = self.folder / f"{tree}.slice/{tree}-burstable.slice"
        return around / f"{tree}-burstable-pod{uid.replace('-', '_')}.slice/cri-containerd-{identifier}.scope"

    def forbid_all_but_null(self, group: Path) -> None:
        """What a runtime that knows nothing of the card leaves."""
        if (group / "devices.deny").exists():
            (group / "devices.deny").write_text("a")
            (group / "devices.allow").write_text("c 1:3 rwm")
            return
        descriptor = os.open(group, os.O_RDONLY | os.O_DIRECTORY)
        program = bpf.load(bpf.allowing([(1, 3)]) + bpf.answer(0))
        bpf.attach(descriptor, program)
        os.close(program)
        os.close(descriptor)


@pytest.fixture
def version() -> int:
    return 1


@pytest.fixture
def driver() -> str:
    """Kubelet's and the runtime's cgroup driver, by which the groups are named."""
    return "cgroupfs"


@pytest.fixture
def group(version: int, driver: str, tmp_path: Path) -> Iterator[Group]:
    name = f"vgm-test-{os.getpid()}" if driver == "cgroupfs" else f"vgmtest{os.getpid()}.slice"
    if version == 1:
        made = Group(CGROUPS, CGROUPS / "devices" / name)
        if not (CGROUPS / "devices/devices.list").exists():
            pytest.skip(f"{CGROUPS}/devices is no device cgroup of version 1")
    else:
        # A mount of it beside version 1's: both are there, and programs decide in its groups.
        made = Group(tmp_path / "cgroup2", tmp_path / "cgroup2" / name)
        made.root.mkdir()
        if _libc.mount(b"none", os.fsencode(made.root), b"cgroup2", 0, None) != 0:
            pytest.skip(f"cgroup2 can't be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        try:
            (made.folder / "kubepods").mkdir(parents=True)
        except OSError as error:
            pytest.skip(f"no control group can be made here: {error}")
        yield made
    finally:
        for path, _, _ in os.walk(made.folder, topdown=False):
            _remove(Path(path))
        if version == 2:
            eventually(lambda: _libc.umount2(os.fsencode(made.root), 0) == 0, "the end of the mount of cgroup2")


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
    eventually(lambda: str(process.pid) in (folder / "cgroup.procs").read_text().split(), "the process in its cgroup")
    eventually(lambda: Path(f"/proc/{process.pid}/root").readlink() == root, "the process in its root")
    return process


def contained_in(node: Node, group: Group, item: dict[str, Any]) -> subprocess.Popen[bytes]:
    """A process in the container "c" of a pod, with its region."""
    root = node.directory / "container"
    (root / "etc/vcuda").mkdir(parents=True)
    _bind(node.region(item, "c"), root / "etc/vcuda")
    return contained(group.of_container(item["metadata"]["uid"], "0123"), root)


@pytest.mark.parametrize(("version", "driver"), [(1, "cgroupfs"), (2, "systemd")])
def test_a_pod_whose_end_is_forged_is_told_to_go_on_by_its_nodes_object(
    make_node: Callable[..., Node], machine: Machine, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extender frees after a minute what only an old word names."""
    monkeypatch.setattr(node_object, "_ALIVE_S", 1.0)
    node = make_node(machine.root, with_api=True)
    node.kubelet.start()
    daemon = node.start(f"--cgroup-root={group.root}", wait=200)
    api = node.api
    assert api is not None
    item = pod("a", container("c", 30, 10))
    uid = item["metadata"]["uid"]
    api.put("pods", item)
    node.kubelet.admit(item)
    process = contained_in(node, group, item)

    def told() -> bookings.Report:
        return bookings.decode(api.node()["annotations"][NAMES.bookings])

    try:
        eventually(lambda: daemon.cgroups.watch.looked_at == 1, "the container")
        eventually(lambda: uid in told().pods, "the booking")
        assert not told().alive
        api.put("pods", item | {"status": {"phase": "Succeeded"}})
        first = eventually(lambda: told().alive.get(uid), "the word that it goes on")
        eventually(lambda: told().alive.get(uid, first) != first, "another one")
        assert uid in told().pods
    finally:
        process.kill()
        process.wait()
        Storage.remove(node.directory / "container/etc/vcuda")
    eventually(lambda: not told().pods and not told().alive, "the end of the share")


@pytest.mark.parametrize(("version", "driver"), [(1, "cgroupfs"), (2, "cgroupfs"), (2, "systemd")])
@pytest.mark.parametrize("policy", ["report", "restore"])
def test_a_card_lost_behind_the_runtimes_back_is_seen_and_given_back(node: Node, group: Group, policy: str) -> None:
    """INCIDENTS I1 with the kernel's own device cgroup: deny all, allow what the runtime knows; the card is not in it."""
    node.start("--device-cgroup-policy=" + policy, f"--cgroup-root={group.root}", wait=200)
    item = pod("a", container("c", 30, 10))
    node.kubelet.admit(item)
    root = node.directory / "container"
    (root / "etc/vcuda").mkdir(parents=True)
    _bind(node.region(item, "c"), root / "etc/vcuda")
    folder = group.of_container(item["metadata"]["uid"], "0123")
    process = contained(folder, root)
    try:
        eventually(lambda: usage(node)["device_cgroups"] == "watched", "the watch")
        eventually(lambda: node.daemon and node.daemon.cgroups.watch.looked_at == 1, "the container")
        assert lost(node) == []
        group.forbid_all_but_null(folder)
        if policy == "report":
            found = eventually(lambda: lost(node), "the loss in /usage")
            assert {"/dev/nvidiactl", "/dev/nvidia-uvm"} < set(found)
            assert "LOST /dev/nvidiactl" in node.get("/graph")[1]
            assert 'vcuda_container_lost_devices{container="c"' in node.get("/metrics")[1]
        else:
            eventually(
                lambda: 'vcuda_manager_devices_restored_total{node="node-1"} 5.0' in node.get("/metrics")[1],
                "the card back",
            )
            assert lost(node) == []
        assert may_open(folder, tmp=node.directory) == {
            (195, 255): policy == "restore",
            (1, 5): False,
            (1, 3): True,
        }
    finally:
        process.kill()
        process.wait()
        Storage.remove(root / "etc/vcuda")


@pytest.mark.parametrize(("version", "driver"), [(1, "cgroupfs"), (2, "systemd")])
@pytest.mark.parametrize("said", ["ended", "gone"])
def test_who_may_write_statuses_or_delete_pods_frees_no_share_whose_container_runs(
    node: Node, group: Group, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubelet lists the status that the API server has; who forces a deletion takes the pod out of both lists at once."""
    monkeypatch.setattr(allocation_module, "ABSENT_GRACE_S", 0.0)
    daemon = node.start(f"--cgroup-root={group.root}", wait=200)
    item = pod("a", container("c", 30, 10))
    node.kubelet.admit(item)
    process = contained_in(node, group, item)
    try:
        eventually(lambda: daemon.cgroups.watch.looked_at == 1, "the container")
        if said == "ended":
            item["status"] = {"phase": "Succeeded", "containerStatuses": [{"state": {"terminated": {"exitCode": 0}}}]}
        else:
            node.kubelet.pods.remove(item)
        assert daemon.allocator.collect() == []
        assert node.region(item, "c").exists() and sum(cores for cores, _ in node.booked().values()) == 30
    finally:
        process.kill()
        process.wait()
        Storage.remove(node.directory / "container/etc/vcuda")
    eventually(lambda: (daemon.allocator.collect(), not node.region(item, "c").exists())[1], "the end of the share")


@pytest.mark.parametrize(("version", "driver"), [(1, "cgroupfs"), (2, "systemd")])
def test_a_newcomer_waits_for_a_victim_without_a_grace_period_whose_container_still_ends(
    node: Node, machine: Machine, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preemption: out of both lists at once, and kubelet gives its container two seconds all the same."""
    monkeypatch.setattr(allocation_module, "ABSENT_GRACE_S", 0.0)
    daemon = node.start(f"--cgroup-root={group.root}", wait=200)
    written = placement.encode(Placement({"c": (CardShare(machine.cards[0].uuid, 60, 20),)}))
    victim, newcomer = (
        pod(name, container("c", 60, 20), annotations={NAMES.placement: written}) for name in ("low", "high")
    )
    node.kubelet.admit(victim)
    process = contained_in(node, group, victim)
    try:
        eventually(lambda: daemon.cgroups.watch.looked_at == 1, "the container")
        node.kubelet.pods.remove(victim)
        ending = threading.Timer(5.0, process.kill)
        ending.start()
        threading.Thread(target=process.wait, daemon=True).start()  # a zombie would stay in its cgroup
        node.kubelet.admit(newcomer)
        ending.join()
        (only,) = daemon.allocator.allocations
        assert only.pod_uid == newcomer["metadata"]["uid"]
    finally:
        process.kill()
        Storage.remove(node.directory / "container/etc/vcuda")


def may_open(folder: Path, tmp: Path) -> dict[tuple[int, int], bool]:
    """What the kernel says to a process of the group that opens the card's control node, /dev/zero and /dev/null."""
    numbers = [(195, 255), (1, 5), (1, 3)]
    nodes = []
    for major, minor in numbers:
        nodes.append(tmp / f"opened-{major}-{minor}")
        os.mknod(nodes[-1], 0o600 | stat.S_IFCHR, os.makedev(major, minor))
    told = subprocess.run(
        [sys.executable, "-c", _OPENING, str(folder), *map(str, nodes)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return dict(zip(numbers, json.loads(told.stdout), strict=True))


# EPERM is the device cgroup's word; whatever else comes (no such driver) the group allowed.
_OPENING = """
import errno, json, os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
answers = []
for path in sys.argv[2:]:
    try:
        os.close(os.open(path, os.O_RDWR))
        answers.append(True)
    except OSError as error:
        answers.append(error.errno != errno.EPERM)
print(json.dumps(answers))
"""


@pytest.mark.parametrize("version", [2])
def test_a_group_that_cannot_be_asked_keeps_what_was_known(group: Group, tmp_path: Path) -> None:
    probed = Probed(group.root, tmp_path / "nodes")
    group.forbid_all_but_null(group.folder)
    assert probed.lost(group.folder, NEEDED) == tuple(NEEDED)
    (group.folder / "cgroup.freeze").write_text("1")
    with pytest.raises(CannotTell, match="it is frozen"):
        probed.lost(group.folder, NEEDED)
    (group.folder / "cgroup.freeze").write_text("0")
    with pytest.raises(FileNotFoundError):
        probed.lost(group.folder / "gone", NEEDED)
    free = group.folder.parent / f"{group.folder.name}/free"
    free.mkdir()
    with pytest.raises(OSError, match="a group above it does"):
        probed.allow(free, [(195, 0)])


@pytest.mark.parametrize("version", [2])
def test_a_device_is_allowed_in_front_of_every_program_and_nothing_else(group: Group, tmp_path: Path) -> None:
    """systemd attaches a program beside the runtime's: each has to say yes."""
    probed = Probed(group.root, tmp_path / "nodes")
    for _ in range(2):
        group.forbid_all_but_null(group.folder)
    probed.allow(group.folder, [(195, 255)])
    assert probed.lost(group.folder, NEEDED) == ("/dev/nvidia0", "/dev/nvidia-uvm")
    probed.allow(group.folder, [(195, 0), (237, 0)])
    assert probed.lost(group.folder, NEEDED) == ()
    assert probed.lost(group.folder, {"null": (1, 3), "zero": (1, 5)}) == ("zero",)
    with pytest.raises(subprocess.CalledProcessError, match="exit status 1"):
        subprocess.run(
            [sys.executable, "-c", _MAKING, str(group.folder), str(tmp_path / "made")], check=True, timeout=30
        )


@pytest.mark.parametrize("version", [2])
def test_a_program_that_is_more_than_a_list_is_left_alone(group: Group) -> None:
    calls = struct.pack("<BBhi", 0x85, 0, 0, 14) + bpf.answer(0)  # bpf_get_current_pid_tgid
    descriptor = os.open(group.folder, os.O_RDONLY | os.O_DIRECTORY)
    program = bpf.load(calls)
    bpf.attach(descriptor, program)
    before = bpf.attached(descriptor)
    with pytest.raises(OSError, match="no plain list of devices"):
        bpf.allow(group.folder, [(195, 0)])
    assert bpf.attached(descriptor) == before
    os.close(program)
    os.close(descriptor)


# The right to make a node of the card was never asked for.
_MAKING = """
import os, stat, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
try:
    os.mknod(sys.argv[2], 0o600 | stat.S_IFCHR, os.makedev(195, 0))
except PermissionError:
    sys.exit(1)
"""


def test_a_group_that_hands_its_controllers_down_is_asked_below(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "container/init.scope").mkdir(parents=True)
    asked = []

    def closed(place: Path, nodes: Sequence[Path]) -> list[bool]:
        asked.append(place.name)
        if place.name == "container":
            raise OSError(errno.EBUSY, "busy")
        return [True] * len(nodes)

    monkeypatch.setattr(device_access, "closed", closed)
    probed = Probed(tmp_path, tmp_path)
    monkeypatch.setattr(probed, "_node", lambda _: tmp_path)
    assert probed.lost(tmp_path / "container", NEEDED) == tuple(NEEDED)
    assert asked == ["container", "init.scope"]


def usage(node: Node) -> dict[str, object]:
    return json.loads(node.get("/usage")[1])  # type: ignore[no-any-return]


def lost(node: Node) -> list[str]:
    (found,) = json.loads(node.get("/usage")[1])["containers"]
    return list(found["lost_devices"])


def _bind(source: Path, target: Path) -> None:
    if _libc.mount(os.fsencode(source), os.fsencode(target), None, 4096, None) != 0:  # MS_BIND
        pytest.skip(f"nothing can be mounted here: {os.strerror(ctypes.get_errno())}")
