"""Whose process it is: control groups first, then the kernel's mounts; nothing that a tenant can write leads to a neighbour."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from manager.allocations.record import Allocation
from manager.audit.device_cgroups import Watcher
from manager.audit.foreign_use import ForeignUse
from manager.audit.owners import Place
from manager.cards.driver import CardProcess, NodeCard
from manager.cgroups import pods
from tests.manager import manager_pods
from tests.manager.manager_proc import Proc, group
from vcuda.region import ProcessUsage, Usage
from vcuda.spec.inventory import Card
from vcuda.spec.placement import CardShare

CARD = "GPU-1"
MINE, VICTIM, STATIC = (f"{digit}2345678-1234-1234-1234-123456789abc" for digit in "abc")
STATIC = STATIC.replace("-", "")


def allocation(directory: Path, uid: str, name: str = "c") -> Allocation:
    region = directory / "regions" / uid / name
    region.mkdir(parents=True)
    (region / "limits").touch()
    return manager_pods.allocation(
        CardShare(CARD, 10, 4), pod_uid=uid, pod_name=uid, container=name, region=str(region)
    )


FLAT = MINE.replace("-", "")


def test_a_look_asks_for_a_pods_groups_once_however_many_processes_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every look goes through all processes of the node: what is asked for each of them is its processor time."""
    item, proc = allocation(tmp_path, MINE), Proc(tmp_path)
    for pid in range(10, 20):
        proc.add(pid, group(MINE))
    asked: list[str] = []
    for name in ("of_pod", "hierarchy"):
        real = getattr(pods, name)
        monkeypatch.setattr(pods, name, lambda *words, name=name, real=real: (asked.append(name), real(*words))[1])
    look = proc.owners().among([item])
    assert all(look.place(pid) is not None for pid in range(10, 20))
    assert sorted(asked) == ["hierarchy", "of_pod"]
    assert proc.owners().among([item]).place(10) is not None and len(asked) == 4, "the next look asks anew"


def placed(tmp_path: Path, uid: str, text: str, listed: str) -> tuple[Place | None, tuple[str, str] | None]:
    """Of a process with this text in /proc that the kernel lists in the group `listed`; whose region nobody shows."""
    item, proc = allocation(tmp_path, uid), Proc(tmp_path)
    (proc.add(10, listed) / "cgroup").write_text(text)
    owners = proc.owners().among([item])
    return owners.place(10), owners.container(10)


@pytest.mark.parametrize(
    ("uid", "text", "listed", "container"),
    [
        (MINE, "0::{0}\n", group(MINE), "0123"),
        (MINE, "0::{0}\n", group(MINE, systemd=True), "cri-containerd-0123.scope"),
        (MINE, "4:cpu:/\n0::{0}\n", f"/kubepods/pod{MINE}/x", "x"),
        (STATIC, "0::/../../pod{1}/x\n", f"/kubepods/burstable/pod{STATIC}/x", "x"),
        (MINE, "0::/../kubelet-kubepods-besteffort-pod{2}.slice/crio-7.scope/init\n",
         "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod{2}.slice/crio-7.scope/init",
         "crio-7.scope"),
        (MINE, "0::{0}\n", f"/kubepods/pod{MINE}/x/pod{VICTIM}/y", "x"),  # its own groups
        (MINE, "0::{0}\n", f"/kubepods/pod{MINE}", ""),
        (MINE, "0::{0}/threads\n", f"/kubepods/pod{MINE}/x", "x"),  # a group of threads lists nobody
        (MINE, "0::/../../../kubepods/burstable/pod{1}/x\n", f"/kubepods/burstable/pod{MINE}/x", "x"),
        (MINE, "0::/../../burstable/pod{1}/x\n", f"/kubepods/burstable/pod{MINE}/x", "x"),
        (MINE, "0::{0}\n", f"/a/kubepods/pod{MINE}/x", "x"),
    ],
)  # fmt: skip
def test_a_process_is_of_the_pod_in_whose_group_the_kernel_lists_it(
    tmp_path: Path, uid: str, text: str, listed: str, container: str
) -> None:
    listed = listed.format("", uid, uid.replace("-", "_"))
    found, key = placed(tmp_path, uid, text.format(listed, uid, uid.replace("-", "_")), listed)
    assert found == Place(uid.replace("-", ""), container)
    assert key == (uid, "c")


@pytest.mark.parametrize(
    "text",
    [
        "0::{0}",
        "0::/../..{0}",
        "0::/../../../../..{0}",
        "0::/../../kubepods/pod{1}",
        "0::/../../pod{1}/c",
        "0::/../burstable/pod{1}/x",
        "0::/kubepods/burstable/pod{1}/x",
        "0::/user/a\x0b0::/kubepods/burstable/pod{1}/x",
        "0::/user/a\u20280::/kubepods/burstable/pod{1}/x",
        "4:memory:/kubepods/pod{1}\n1:cpu:/\n0::/user.slice/session-1.scope",
        "4:memory:/user/alice/kubepods/pod{1}\n0::{0}",
        "5:devices:/kubepods/pod{1}/x\n0::/",
    ],
)
@pytest.mark.parametrize(
    "listed",
    [
        "/mine/kubepods/burstable/pod{1}/x",
        "/user/alice/0/kubepods/pod{1}/x",
        "/user.slice/user-1000.slice/user@1000.service/kubepods/burstable/pod{1}/x",
        "/user.slice/user-1000.slice/user@1000.service/pod{1}/x",
        "/lxc.payload.box/kubepods/pod{1}",
        "/machine.slice/machine-box.scope/payload/kubepods/pod{1}",
        "/user.slice/mypod{1}/x",
        "/pod{1}/x",
    ],
)
@pytest.mark.parametrize("there", [True, False], ids=["pod's group is there", "it is not"])
def test_no_text_makes_a_users_process_a_pods(tmp_path: Path, text: str, listed: str, there: bool) -> None:
    """Users to whom a part of the hierarchy was given name groups as they like; kubelet's lists none of theirs."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to make another user's folder")
    listed = listed.format("", VICTIM)
    given = tmp_path / "cgroup"
    for name in listed.strip("/").split("/"):
        given = given / name
        given.mkdir(parents=True)
        os.chown(given, 1000, 1000)
    if there:
        Proc(tmp_path).add(9, group(VICTIM, "x"))
        Proc(tmp_path).add(8, f"/kubepods/pod{VICTIM}")
    assert placed(tmp_path, VICTIM, text.format(listed, VICTIM) + "\n", listed) == (None, None)


def test_in_one_hierarchy_of_version_1_that_of_the_devices_tells(tmp_path: Path) -> None:
    (tmp_path / "cgroup/devices").mkdir(parents=True)
    (tmp_path / "cgroup/devices/devices.list").touch()
    text = f"5:devices:{group(MINE)}\n4:cpu:/\n1:memory:/kubepods/pod{VICTIM}/x\n0::/\n"
    assert placed(tmp_path, MINE, text, group(MINE)) == (Place(FLAT, "0123"), (MINE, "c"))
    assert placed(tmp_path / "other", VICTIM, text, group(MINE)) == (None, None)


def test_a_root_of_the_tenants_own_leads_to_nobody_else(tmp_path: Path) -> None:
    mine, victim = (allocation(tmp_path, uid) for uid in (MINE, VICTIM))
    proc = Proc(tmp_path)
    proc.add(10, group(MINE), region=mine.region, link=victim.region)
    proc.add(11, group(MINE), link=victim.region)  # after a chroot its table of mounts is empty
    proc.add(12, group(STATIC), link=victim.region)  # a pod without a share
    owners = proc.owners().among([mine, victim])
    assert [owners.container(pid) for pid in (10, 11, 12, 13)] == [mine.key, mine.key, None, None]


def test_in_a_pod_of_two_shares_the_mounts_tell_and_a_changed_root_its_ancestors(tmp_path: Path) -> None:
    one, two = (allocation(tmp_path, MINE, name) for name in ("one", "two"))
    proc = Proc(tmp_path)
    proc.add(10, group(MINE, "aa"), region=one.region)
    proc.add(20, group(MINE, "bb"), region=two.region)
    proc.add(21, group(MINE, "bb"), link=one.region, parent=20)
    proc.add(30, group(MINE, "cc"), link=one.region, parent=10)  # no share, and its parent is another container's
    for item in (one, two):
        (Path(item.region) / "usage").touch()
    owners = proc.owners()
    found = [owners.among([one, two]).container(pid) for pid in (21, 10, 20, 30)]
    assert found == [two.key, one.key, two.key, None]
    (proc.path / "20/cgroup").unlink()  # its first process has ended: the group's container is known
    assert owners.among([one, two]).container(21) == two.key


def test_a_slot_that_names_a_neighbours_process_is_not_believed(tmp_path: Path) -> None:
    one, two, liar = (
        *(allocation(tmp_path, MINE, name) for name in ("one", "two")), allocation(tmp_path, VICTIM)
    )  # fmt: skip
    proc = Proc(tmp_path)
    proc.add(10, group(MINE), namespace=7, inner=3)
    proc.add(11, namespace=7, inner=3)  # of no pod at all: the machine's own
    slot = Usage((), (ProcessUsage(0, 3, True, {}, pid_namespace=7),))
    owners = proc.owners().among([one, two, liar], {liar.key: slot})
    assert (owners.container(10), owners.container(11)) == (None, liar.key)
    owners = proc.owners().among([one, two, liar], {one.key: slot})
    assert owners.container(10) == one.key


def test_a_tenant_that_calls_itself_mps_blocks_no_card(tmp_path: Path) -> None:
    mine = allocation(tmp_path, MINE)
    proc = Proc(tmp_path)
    proc.add(10, group(MINE), comm="nvidia-cuda-mps")
    proc.add(11, "/system.slice/mps.service", comm="nvidia-cuda-mps")
    owners = proc.owners().among([mine])
    held = {"GPU-1": (CardProcess(10, 1),), "GPU-2": (CardProcess(11, 1),)}
    cards = [NodeCard(Card(uuid, 0, "m", 2**30), 0) for uuid in held]
    found = ForeignUse(held.get, dict, owners.has_share, proc.path).blocked(cards)
    assert list(found) == ["GPU-2"]


def test_no_devices_are_given_to_a_control_group_that_only_points_at_a_region(tmp_path: Path) -> None:
    mine, victim = (allocation(tmp_path, uid) for uid in (MINE, VICTIM))
    proc = Proc(tmp_path)
    proc.add(10, group(MINE), link=victim.region)
    folder = tmp_path / "cgroup/devices" / group(MINE).strip("/")
    folder.mkdir(parents=True)
    (tmp_path / "cgroup/devices/devices.list").write_text("a *:* rwm\n")
    (folder / "devices.list").write_text("c 1:3 rwm\n")
    (folder / "cgroup.procs").write_text("10\n")
    told: list[str] = []
    watcher = Watcher(
        tmp_path / "cgroup", tmp_path / "nodes", lambda _: {"/dev/nvidia7": (195, 7)}, lambda item, *_: told.append(item.pod_uid),
        proc.owners(),
    )  # fmt: skip
    watcher.look((mine, victim), restore=True)
    assert not (folder / "devices.allow").exists() and told == []
