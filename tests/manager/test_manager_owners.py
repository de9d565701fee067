"""Whose process it is: control groups first, then the kernel's mounts; nothing that a tenant can write leads to a neighbour."""

from __future__ import annotations

from pathlib import Path

import pytest

from manager.allocations.record import Allocation
from manager.audit.device_cgroups import Watcher
from manager.audit.foreign_use import ForeignUse
from manager.audit.owners import Owners, Place, place_of
from manager.cards.driver import CardProcess, NodeCard
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


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"0::{group(MINE)}\n", Place(MINE.replace("-", ""), "0123")),
        (f"0::{group(MINE, systemd=True)}\n", Place(MINE.replace("-", ""), "cri-containerd-0123.scope")),
        (f"5:devices:/kubepods/pod{MINE}/x\n4:cpu:/\n0::/\n", Place(MINE.replace("-", ""), "x")),
        (f"0::/../../pod{STATIC}/x\n", Place(STATIC, "x")),
        (f"0::/../kubelet-kubepods-besteffort-pod{MINE.replace('-', '_')}.slice/crio-7.scope/init\n",
         Place(MINE.replace("-", ""), "crio-7.scope")),
        (f"0::/kubepods/pod{MINE}/x/pod{VICTIM}/y\n", Place(MINE.replace("-", ""), "x")),  # its own groups
        (f"0::/kubepods/pod{MINE}\n", Place(MINE.replace("-", ""), "")),
        (f"0::/user.slice/mypod{MINE}/x\n", None),
        (f"0::/user.slice/user-1000.slice/user@1000.service/pod{VICTIM}/x\n", None),  # a user's own
        (f"0::/../../../user.slice/user-1000.slice/user@1000.service/kubepods/pod{VICTIM}/x\n", None),
        (f"0::/user.slice/user-1000.slice/user@1000.service/kubepods/burstable/pod{VICTIM}/x\n", None),
        (f"0::/pod{VICTIM}/x\n", None),
        (f"0::/../../../kubepods/burstable/pod{MINE}/x\n", Place(MINE.replace("-", ""), "x")),
        (f"0::/../../burstable/pod{MINE}/x\n", Place(MINE.replace("-", ""), "x")),
        (f"0::/a/kubepods/pod{MINE}/x\n", Place(MINE.replace("-", ""), "x")),
        (f"2:cpu:/kubepods/pod{MINE}/x\n1:memory:/kubepods/pod{VICTIM}/x\n", None),
        ("0::/system.slice/x.service\n", None),
    ],
)  # fmt: skip
def test_the_outermost_pod_of_a_control_group_counts(text: str, found: Place | None) -> None:
    assert place_of(text) == found


def test_a_root_of_the_tenants_own_leads_to_nobody_else(tmp_path: Path) -> None:
    mine, victim = (allocation(tmp_path, uid) for uid in (MINE, VICTIM))
    proc = Proc(tmp_path)
    proc.add(10, group(MINE), region=mine.region, link=victim.region)
    proc.add(11, group(MINE), link=victim.region)  # after a chroot its table of mounts is empty
    proc.add(12, group(STATIC), link=victim.region)  # a pod without a share
    owners = Owners(proc.path).among([mine, victim])
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
    owners = Owners(proc.path)
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
    owners = Owners(proc.path).among([one, two, liar], {liar.key: slot})
    assert (owners.container(10), owners.container(11)) == (None, liar.key)
    owners = Owners(proc.path).among([one, two, liar], {one.key: slot})
    assert owners.container(10) == one.key


def test_a_tenant_that_calls_itself_mps_blocks_no_card(tmp_path: Path) -> None:
    mine = allocation(tmp_path, MINE)
    proc = Proc(tmp_path)
    proc.add(10, group(MINE), comm="nvidia-cuda-mps")
    proc.add(11, "/system.slice/mps.service", comm="nvidia-cuda-mps")
    owners = Owners(proc.path).among([mine])
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
        Owners(proc.path),
    )  # fmt: skip
    watcher.look((mine, victim), restore=True)
    assert not (folder / "devices.allow").exists() and told == []
