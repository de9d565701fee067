"""Which control groups get a limit of the driver: kubelet's own of that pod and its containers, and no other with their names."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from manager.cgroups import pods
from manager.errors import Refusal
from tests.manager.manager_limits import ONE, TWO, Place, item, shared
from vcuda.spec.request import Kind
from vcuda.spec.units import BLOCK_BYTES


@pytest.mark.parametrize(
    "decoy",
    [
        "pod{uid}",
        "user.slice/user-1000.slice/user@1000.service/pod{uid}",
        "user.slice/user-1000.slice/user@1000.service/kubepods/pod{uid}",
        "system.slice/docker-1.scope/kubepods/burstable/pod{uid}",
        "kubepods/pod{other}/pod{uid}",
        "kubepods/burstable/x/pod{uid}",
        "kubepods/x-pod{uid}.slice",
        "mine.slice/kubepods.slice/kubepods-pod{flat}.slice",
        "mine.slice/other-kubepods.slice/other-kubepods-pod{flat}.slice",
    ],
)
@pytest.mark.parametrize("own", [True, False], ids=["beside", "alone"])
def test_a_group_with_a_pods_name_that_kubelet_did_not_make_gets_no_limit(place: Place, decoy: str, own: bool) -> None:
    mine = place.pod(ONE, ("a", {"G0": 4})) if own else [item(ONE, "a", {"G0": 4})]
    place.pods = mine
    path = place.root / decoy.format(uid=ONE, other=TWO, flat=ONE.replace("-", "_"))
    path.mkdir(parents=True)
    place.daemon.prepare(mine)
    place.look()
    assert place.blocks() == ({f"G0 {ONE}": 4} if own else {})
    assert place.held(mine[0]) == (4 if own else None)


def test_a_tree_that_a_user_of_the_node_made_is_not_kubelets(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make another user's folder")
    given = tmp_path / "user.slice" / "given"
    (given / "kubepods" / f"pod{ONE}").mkdir(parents=True)
    for folder in (given, given / "kubepods"):
        os.chown(folder, 1000, 1000)
    assert pods.trees(tmp_path) == []
    os.chown(given, 0, 0)
    os.chown(given / "kubepods", 0, 0)
    (given / "kubepods").chmod(0o775)  # another group may make groups there
    assert pods.trees(tmp_path) == []
    (given / "kubepods").chmod(0o755)
    assert pods.of_pod(pods.trees(tmp_path), ONE) == [given / "kubepods" / f"pod{ONE}"]


@pytest.mark.parametrize(
    "path",
    [
        "kubepods/pod{uid}",
        "kubepods/besteffort/pod{uid}",
        "kubelet/kubepods/burstable/pod{uid}",
        "a.slice/a-b.slice/a-b-kubepods.slice/a-b-kubepods-pod{flat}.slice",
        "kubepods.slice/kubepods-pod{flat}.slice",
        "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{flat}.slice",
        "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod{flat}.slice",
    ],
)
@pytest.mark.parametrize("uid", [ONE, "0a" * 16], ids=["pod", "static"])
def test_kubelets_own_names_are_found_whatever_its_cgroup_driver_and_root(tmp_path: Path, path: str, uid: str) -> None:
    folder = tmp_path / path.format(uid=uid, flat=uid.replace("-", "_"))
    folder.mkdir(parents=True)
    assert pods.of_pod(pods.trees(tmp_path), uid) == [folder]


def test_a_pod_with_two_groups_gets_no_limit_and_the_reason_names_both(make_place: Callable[..., Place]) -> None:
    place = make_place(require_driver_limits=True)
    mine = place.pod(ONE, ("a", {"G0": 4}))
    other = place.root / "kubepods.slice" / f"kubepods-pod{ONE.replace('-', '_')}.slice"
    other.mkdir(parents=True)
    with pytest.raises(Refusal, match="has 2 control groups") as refused:
        place.daemon.prepare(mine)
    assert str(other) in str(refused.value) and str(place.group(ONE)) in str(refused.value)
    other.rmdir()
    place.daemon.prepare(mine)
    assert place.held(mine[0]) == 4


def test_containers_have_no_limit_of_their_own_where_the_driver_counts_itself(place: Place) -> None:
    place.driver.misc = True
    mine = place.pod(ONE, ("a", {"G0": 4}), ("b", {"G0": 2}))
    place.daemon.prepare(mine)
    for _ in range(2):
        place.look()
        place.begin()
    smaller = [item(ONE, "a", {"G0": 2}), mine[1]]
    for lower in (False, True):
        place.daemon.follow(smaller, lower=lower)
    assert place.blocks() == {f"G0 {ONE}": 4}


def test_a_limit_of_the_nodes_owner_on_a_group_above_is_not_taken_for_the_pods(place: Place) -> None:
    place.driver.misc = True
    place.driver.limits["G0", place.tree] = 4 * BLOCK_BYTES  # as large as the pod's is to be
    place.daemon.prepare(place.pod(ONE, ("a", {"G0": 4})))
    assert place.blocks()[f"G0 {ONE}"] == 4
    place.pods = []
    place.look()
    assert place.blocks() == {"G0 kubepods": 4}


def test_a_container_that_restarts_gets_its_limit_on_its_new_group(place: Place) -> None:
    mine = shared(place)
    (ended,) = place.leaves[mine[0].key]
    (ended / "cgroup.procs").unlink()
    ended.rmdir()
    place.driver.limits.pop(("G0", ended))
    place.look()
    assert place.held(mine[0]) == 6  # the pod's
    place.leaves[mine[0].key] = [place.group(ONE) / "a2"]
    place.leaves[mine[0].key][0].mkdir()
    place.look()
    assert place.blocks() == {f"G0 {ONE}": 6, f"G0 {ONE}/a2": 4, f"G0 {ONE}/b": 2}


def test_a_container_that_restarts_beside_a_process_that_does_not_end_has_its_limit_on_both_groups(
    place: Place,
) -> None:
    mine = shared(place)
    before, now = place.leaves[mine[0].key][0], place.group(ONE) / "a2"
    now.mkdir()
    (now / "cgroup.procs").write_text("2\n")
    place.leaves[mine[0].key] = [before, now]
    place.driver.fixed.add(now)
    place.look()
    assert place.held(mine[0]) == 6  # the pod's: of the new group the driver takes no limit
    place.driver.fixed.clear()
    place.look()
    assert place.blocks() == {f"G0 {ONE}": 6, f"G0 {ONE}/a": 4, f"G0 {ONE}/a2": 4, f"G0 {ONE}/b": 2}
    assert [place.held(one) for one in mine] == [4, 2]
    place.daemon.follow([item(ONE, "a", {"G0": 3}), mine[1]])  # a resize
    assert place.blocks() == {f"G0 {ONE}": 5, f"G0 {ONE}/a": 3, f"G0 {ONE}/a2": 3, f"G0 {ONE}/b": 2}


def test_nothing_is_said_of_a_limit_on_a_group_that_a_restarted_container_has_left(place: Place) -> None:
    mine = shared(place)
    (place.leaves[mine[0].key][0] / "cgroup.procs").write_text("")  # its group is not removed yet
    place.leaves[mine[0].key] = []  # the new one is not seen yet
    place.daemon.prepare(mine)
    assert [place.held(one) for one in mine] == [6, 2]


def test_a_group_outside_the_pods_is_not_limited_as_a_containers(place: Place) -> None:
    mine = place.pod(ONE, ("a", {"G0": 4}), ("b", {"G0": 2}))
    place.leaves[mine[0].key] = [place.root / "elsewhere"]
    place.leaves[mine[0].key][0].mkdir()
    place.look()
    assert place.blocks() == {f"G0 {ONE}": 6, f"G0 {ONE}/b": 2}


def test_of_two_groups_of_a_pod_that_with_its_processes_keeps_its_limit(make_place: Callable[..., Place]) -> None:
    place = make_place(require_driver_limits=True)
    mine = place.pod(ONE, ("a", {"G0": 4}))
    place.daemon.prepare(mine)
    (place.group(ONE) / "a/cgroup.procs").write_text("1\n")
    (place.root / "kubepods.slice" / f"kubepods-pod{ONE.replace('-', '_')}.slice").mkdir(parents=True)
    place.look()
    place.daemon.prepare(mine)
    assert (place.held(mine[0]), place.daemon.why, place.told) == (4, "", [])


def test_init_containers_and_whole_cards_have_none_of_their_own(place: Place) -> None:
    first = replace(item(ONE, "i", {"G0": 5}), kind=Kind.INIT)
    whole = replace(item(ONE, "w", {"G1": 64}), cores=100)
    mine = [first, item(ONE, "a", {"G0": 2}), whole]
    place.pods = mine
    for one in mine:
        place.leaves[one.key] = [place.group(ONE) / one.container]
        place.leaves[one.key][0].mkdir(parents=True)
    place.look()
    assert place.blocks() == {f"G0 {ONE}": 5}
