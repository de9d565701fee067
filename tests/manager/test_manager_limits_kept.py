"""What becomes of the driver's limits when things go wrong: attacks on a pod's group, restarts, lost cards, resizes that fail, processes that outlive their pod."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from manager.allocations.record import Allocation
from manager.cgroups import pods
from manager.config.settings import Settings
from manager.doctor import Verdict, _limits
from manager.errors import Refusal
from manager.limits import possible
from manager.limits.driver_limits import DOUBTS, DriverLimits
from manager.limits.standing import FILE_NAME, Standing
from tests.manager import manager_pods
from vcuda.driver.memory_limits import CannotLimit, MemoryLimit
from vcuda.spec.placement import CardShare
from vcuda.spec.request import Kind
from vcuda.spec.units import BLOCK_BYTES

ONE, TWO = (f"{number:08x}-1111-2222-3333-444455556666" for number in (1, 2))


class Driver:
    """Limits as NVIDIA describes them: by the kernel's dmem, or counted by the driver itself (`misc`)."""

    def __init__(self, *, misc: bool = False) -> None:
        self.misc = misc
        self.limits: dict[tuple[str, Path], int] = {}
        self.used: dict[tuple[str, Path], int] = {}
        self.lost: set[str] = set()
        self.fixed: set[Path] = set()
        self.refuses = ""

    def limit_memory(self, uuid: str, group: Path, hard_bytes: int | None) -> None:
        self._require(uuid, group)
        if group in self.fixed:
            raise CannotLimit("the driver refuses the limit: Invalid Argument")
        if self.refuses:
            raise CannotLimit(self.refuses)
        if hard_bytes is None:
            self.limits.pop((uuid, group), None)
            return
        if self.misc and self.used.get((uuid, group), 0) > hard_bytes:
            raise CannotLimit("the driver refuses the limit: Invalid Argument")
        self.limits[uuid, group] = hard_bytes

    def memory_limit(self, uuid: str, group: Path) -> MemoryLimit | None:
        self._require(uuid, group)
        for path in (group, *group.parents) if self.misc else (group,):
            if (uuid, path) in self.limits:
                return MemoryLimit(self.limits[uuid, path], self.used.get((uuid, path), 0))
        return None

    def _require(self, uuid: str, group: Path) -> None:
        if uuid in self.lost:
            raise CannotLimit(f"the driver does not show the card {uuid}")
        if not group.is_dir():
            raise CannotLimit("the control group is gone")


class Place:
    """A node's control groups in a folder, its driver, and daemons one after another."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.root, self.state, self.driver = folder / "cgroup", folder / "state", Driver()
        self.tree = self.root / "kubepods"
        self.tree.mkdir(parents=True)
        self.state.mkdir()
        (self.root / "cgroup.controllers").touch()
        self.settings = replace(Settings(), cgroup_root=self.root, checkpoint_path=self.state)
        self.set(**settings)
        self.told: list[tuple[str, str, str]] = []
        self.pods: list[Allocation] = []
        self.leaves: dict[tuple[str, str], list[Path]] = {}
        self.listed: dict[tuple[tuple[str, str], str], int] = {}
        self.begin()

    def set(self, **settings: object) -> None:
        self.settings = replace(self.settings, **settings)  # type: ignore[arg-type]

    def begin(self) -> DriverLimits:
        """A daemon that knows no more than what is on disk."""
        self.daemon = DriverLimits(
            lambda: self.settings,
            self.driver,
            lambda item, reason, message: self.told.append((item.pod_uid, reason, message)),
            Standing(self.state),
        )
        return self.daemon

    def pod(self, uid: str, *containers: tuple[str, dict[str, int]]) -> list[Allocation]:
        """A pod in the state, its group and those of its containers, each with blocks by card."""
        mine = [item(uid, name, blocks) for name, blocks in containers]
        self.pods = [other for other in self.pods if other.pod_uid != uid] + mine
        for one in mine:
            self.leaves[one.key] = [self.group(uid) / one.container]
            self.leaves[one.key][0].mkdir(parents=True, exist_ok=True)
        return mine

    def end(self, *containers: Allocation) -> None:
        """Nobody is in their groups any more, and the state knows them no more."""
        for one in containers:
            self.pods.remove(next(other for other in self.pods if other.key == one.key))
            (self.leaves.pop(one.key)[0] / "cgroup.procs").write_text("")

    def group(self, uid: str) -> Path:
        return self.tree / "burstable" / f"pod{uid}"

    def look(self) -> None:
        self.daemon.look(lambda: tuple(self.pods), self.leaves, self.listed)

    def blocks(self) -> dict[str, int]:
        """What the driver says, by card and group."""
        return {
            f"{uuid} {path.relative_to(self.root)}".replace("kubepods/burstable/pod", ""): hard // BLOCK_BYTES
            for (uuid, path), hard in self.driver.limits.items()
        }

    def held(self, one: Allocation, uuid: str = "G0") -> int | None:
        found = self.daemon.held(one, uuid)
        return None if found is None else found // BLOCK_BYTES


def item(uid: str, name: str, blocks: dict[str, int]) -> Allocation:
    shares = tuple(CardShare(uuid, 10, much) for uuid, much in blocks.items())
    return manager_pods.allocation(*shares, pod_uid=uid, pod_name=f"pod-{uid[:8]}", container=name)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Place]:
    return lambda **settings: Place(tmp_path, **settings)


@pytest.fixture
def place(make: Callable[..., Place]) -> Place:
    return make()


def test_a_look_goes_through_the_allocations_as_often_with_many_pods_as_with_few(place: Place) -> None:
    class Counted(tuple[Allocation, ...]):
        passes = 0

        def __iter__(self) -> Iterator[Allocation]:
            Counted.passes += 1
            return super().__iter__()

    seen = []
    for many in (2, 40):
        for number in range(many):
            place.pod(f"{number:08x}-1111-2222-3333-444455556666", ("main", {"G0": 1}))
        known, Counted.passes = Counted(place.pods), 0
        place.daemon.look(lambda known=known: known, place.leaves, place.listed)
        seen.append(Counted.passes)
    assert seen[0] == seen[1] and len(place.driver.limits) == 40


# Whose group it is.


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


def test_a_pod_with_two_groups_gets_no_limit_and_the_reason_names_both(make: Callable[..., Place]) -> None:
    place = make(require_driver_limits=True)
    mine = place.pod(ONE, ("a", {"G0": 4}))
    other = place.root / "kubepods.slice" / f"kubepods-pod{ONE.replace('-', '_')}.slice"
    other.mkdir(parents=True)
    with pytest.raises(Refusal, match="has 2 control groups") as refused:
        place.daemon.prepare(mine)
    assert str(other) in str(refused.value) and str(place.group(ONE)) in str(refused.value)
    other.rmdir()
    place.daemon.prepare(mine)
    assert place.held(mine[0]) == 4


# When a limit ends.


def test_a_limit_outlives_its_pods_record_until_nobody_is_in_the_group(place: Place) -> None:
    place.daemon.prepare(place.pod(ONE, ("a", {"G0": 4})))
    left = place.group(ONE) / "a" / "cgroup.procs"
    left.write_text("123\n")
    place.pods.clear()  # deleted by force: kubelet has let go of it, its process lives
    for daemon in (place.daemon, place.begin()):
        daemon.look(tuple, {}, {})
        assert place.blocks() == {f"G0 {ONE}": 4}
    left.unlink()
    place.look()
    assert place.blocks() == {}


@pytest.mark.parametrize(("events", "there"), [("populated 1\nfrozen 0\n", True), ("populated 0\nfrozen 0\n", False)])
def test_what_the_kernel_says_of_a_group_counts_before_the_list_of_its_processes(
    tmp_path: Path, events: str, there: bool
) -> None:
    (tmp_path / "cgroup.events").write_text(events)
    (tmp_path / "cgroup.procs").write_text("" if there else "1\n")
    assert pods.populated(tmp_path) is there
    assert not pods.populated(tmp_path / "gone")


def test_a_pod_freed_while_no_daemon_ran_leaves_no_limit(place: Place) -> None:
    place.daemon.prepare(place.pod(ONE, ("a", {"G0": 4, "G1": 2})))
    place.pods.clear()
    place.begin()
    place.look()
    assert place.blocks() == {}
    assert Standing(place.state).pods == set()


def test_a_limit_that_could_not_be_taken_away_is_taken_away_later(place: Place) -> None:
    place.daemon.prepare(place.pod(ONE, ("a", {"G0": 4})))
    place.pods.clear()
    place.driver.lost.add("G0")
    place.look()
    place.driver.lost.clear()
    place.begin()
    place.look()
    assert place.blocks() == {}


def test_a_look_that_began_before_a_pod_was_prepared_leaves_its_limit(place: Place) -> None:
    first = place.pod(ONE, ("a", {"G0": 4}))
    place.daemon.prepare(first)
    looked, prepared = threading.Event(), threading.Event()

    def prepare() -> None:
        looked.wait(10)
        place.daemon.prepare(place.pod(TWO, ("b", {"G0": 2})))
        prepared.set()

    starting = threading.Thread(target=prepare)
    starting.start()

    def allocations() -> tuple[Allocation, ...]:
        seen = tuple(place.pods)
        looked.set()
        prepared.wait(0.2)  # where a start waits for the look, it comes after
        return seen

    place.daemon.look(allocations, {}, {})
    starting.join()
    assert place.blocks() == {f"G0 {ONE}": 4, f"G0 {TWO}": 2}


# Restarts, and --driver-limits=off.


def shared(place: Place) -> list[Allocation]:
    """A pod whose two containers share a card, with limits of its own, and of each of them."""
    mine = place.pod(ONE, ("a", {"G0": 4}), ("b", {"G0": 2}))
    for one in mine:
        (place.leaves[one.key][0] / "cgroup.procs").write_text("1\n")
    place.daemon.prepare(mine)
    place.look()
    assert place.blocks() == {f"G0 {ONE}": 6, f"G0 {ONE}/a": 4, f"G0 {ONE}/b": 2}
    return mine


@pytest.mark.parametrize("restart", [True, False], ids=["restarted", "live"])
@pytest.mark.parametrize("lost", [False, True], ids=["known", "lost"])
def test_off_takes_the_limits_of_pods_and_containers_away(place: Place, restart: bool, lost: bool) -> None:
    mine = shared(place)
    place.set(driver_limits="off")
    if lost:
        (place.state / FILE_NAME).unlink()
    if restart:
        place.begin()
    place.look()
    assert (place.blocks(), place.held(mine[0]), place.daemon.why) == ({}, None, "--driver-limits=off")
    place.set(driver_limits="auto")
    place.look()
    assert place.daemon.why == "" and place.held(mine[0]) == 4


def test_a_container_whose_pods_limit_is_as_large_grows_after_a_restart(place: Place) -> None:
    """Two containers on cards of their own: each one's share is all that the pod has there."""
    mine = place.pod(ONE, ("a", {"G0": 4}), ("b", {"G1": 4}))
    place.daemon.prepare(mine)
    place.look()
    place.begin()
    place.look()
    place.daemon.follow([item(ONE, "a", {"G0": 8}), mine[1]])
    assert place.blocks() == {f"G0 {ONE}": 8, f"G1 {ONE}": 4}


@pytest.mark.parametrize("lost", [False, True], ids=["known", "lost"])
def test_limits_of_containers_follow_a_resize_after_a_restart(place: Place, lost: bool) -> None:
    mine = shared(place)
    if lost:
        (place.state / FILE_NAME).write_text("{damaged")
    place.begin()
    if lost:
        place.look()
    after = [item(ONE, "a", {"G0": 8}), mine[1]]
    place.daemon.follow(after)
    assert place.blocks() == {f"G0 {ONE}": 10, f"G0 {ONE}/a": 8, f"G0 {ONE}/b": 2}
    place.end(*mine)
    place.begin()
    place.look()
    assert place.blocks() == {}


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


def test_a_pod_made_anew_under_its_uid_has_the_limits_of_its_new_cards_alone(place: Place) -> None:
    place.daemon.prepare(place.pod("0a" * 16, ("a", {"G0": 4})))
    place.daemon.prepare(place.pod("0a" * 16, ("a", {"G1": 3})))
    assert place.blocks() == {f"G1 {'0a' * 16}": 3}


def test_a_limit_on_a_card_that_the_pod_has_no_more_stays_while_somebody_is_in_its_group(place: Place) -> None:
    mine = place.pod(ONE, ("a", {"G0": 4}), ("b", {"G1": 3}), ("c", {"G2": 2}))  # "b" and "c" by claims
    place.daemon.prepare(mine)
    (place.group(ONE) / "a" / "cgroup.procs").write_text("123\n")
    place.pods = [mine[0], replace(item(ONE, "c", {"G2": 64}), cores=100)]
    place.look()
    assert place.blocks() == {f"G0 {ONE}": 4, f"G1 {ONE}": 3}
    (place.group(ONE) / "a" / "cgroup.procs").unlink()
    place.look()
    assert place.blocks() == {f"G0 {ONE}": 4}


def test_a_disk_that_takes_no_record_gets_no_limit_that_nobody_would_know(make: Callable[..., Place]) -> None:
    place = make(require_driver_limits=True)
    (place.state / f".{FILE_NAME}").mkdir()  # so that nothing can be written there
    mine = place.pod(ONE, ("a", {"G0": 4}))
    with pytest.raises(Refusal, match="make room or make it writable"):
        place.daemon.prepare(mine)
    assert place.blocks() == {}
    (place.state / f".{FILE_NAME}").rmdir()
    place.daemon.prepare(mine)
    assert place.held(mine[0]) == 4


# Resizes.


def test_a_raised_limit_whose_rollback_failed_is_lowered_by_the_next_look(place: Place) -> None:
    place.driver.misc = True
    mine = place.pod(ONE, ("a", {"G0": 4}))
    place.daemon.prepare(mine)
    place.daemon.follow([item(ONE, "a", {"G0": 8})], lower=False)
    place.driver.used["G0", place.group(ONE)] = 6 * BLOCK_BYTES
    place.daemon.follow(mine)  # the driver refuses less than is in use
    assert place.blocks() == {f"G0 {ONE}": 8}
    place.look()
    assert place.held(mine[0]) == 8 and "it goes on holding the pod to" in place.daemon.why
    place.driver.used.clear()
    place.look()
    assert (place.blocks(), place.held(mine[0]), place.daemon.why) == ({f"G0 {ONE}": 4}, 4, "")


def test_a_look_in_the_middle_of_a_resize_waits_for_its_end(place: Place) -> None:
    mine = place.pod(ONE, ("a", {"G0": 4}))
    place.daemon.prepare(mine)
    with place.daemon.undisturbed():
        larger = [item(ONE, "a", {"G0": 8})]
        place.daemon.follow(larger, lower=False)
        looking = threading.Thread(target=place.look)
        looking.start()
        looking.join(0.2)
        assert place.blocks() == {f"G0 {ONE}": 8}
        place.pods = larger
    looking.join()
    assert place.blocks() == {f"G0 {ONE}": 8}


def test_a_driver_that_refuses_blocks_no_resize_unless_limits_are_required(place: Place) -> None:
    mine = place.pod(ONE, ("a", {"G0": 4}))
    place.daemon.prepare(mine)
    place.driver.refuses = "NVML lets only root set them"
    place.pods = [item(ONE, "a", {"G0": 8})]
    place.daemon.follow(place.pods)
    place.look()
    place.look()
    assert place.held(place.pods[0]) == 4
    (told,) = place.told
    assert told[1] == "DriverLimitShort"
    assert f"NVML lets only root set them; it goes on holding the pod to {4 * BLOCK_BYTES} bytes" in told[2]
    place.set(require_driver_limits=True)
    with pytest.raises(Refusal, match="and --require-driver-limits is set: NVML lets only root set them"):
        place.daemon.follow(place.pods)
    place.driver.refuses = ""
    place.look()
    assert (place.held(place.pods[0]), place.daemon.why) == (8, "")


def test_less_than_what_the_driver_counts_of_a_container_waits_though_its_pod_has_room(place: Place) -> None:
    mine = shared(place)
    smaller = [item(ONE, "a", {"G0": 2}), mine[1]]
    for name, used in (("", 3), ("a", 3)):
        place.driver.used["G0", place.group(ONE) / name] = used * BLOCK_BYTES
    assert place.daemon.beyond(smaller) == BLOCK_BYTES
    assert place.daemon.beyond(mine) == 0


def test_a_containers_limit_that_could_not_be_raised_is_what_is_said_of_it(place: Place) -> None:
    mine = shared(place)
    place.driver.fixed.add(place.leaves[mine[0].key][0])
    place.pods = [item(ONE, "a", {"G0": 8}), mine[1]]
    place.daemon.follow(place.pods)
    place.look()
    assert (place.held(place.pods[0]), place.held(mine[1])) == (4, 2)
    assert [reason for _, reason, _ in place.told] == ["DriverLimitShort"]
    assert f"container a to {4 * BLOCK_BYTES} bytes, not {8 * BLOCK_BYTES}" in place.told[0][2]
    place.driver.fixed.clear()
    place.look()
    assert (place.held(place.pods[0]), place.daemon.why) == (8, "")


# What is said.


def test_a_container_that_starts_again_changes_nothing_that_is_said_of_the_others(place: Place) -> None:
    mine = shared(place)
    place.daemon.prepare(mine)
    assert [place.held(one) for one in mine] == [4, 2]


@pytest.mark.parametrize("start", [True, False], ids=["start", "look"])
def test_one_lost_card_leaves_the_pods_other_cards_limited(place: Place, start: bool) -> None:
    mine = place.pod(ONE, ("a", {"G0": 4, "G1": 3}))
    place.driver.lost.add("G0")
    place.daemon.prepare(mine) if start else place.look()
    assert place.blocks() == {f"G1 {ONE}": 3}
    assert (place.held(mine[0], "G0"), place.held(mine[0], "G1")) == (None, 3)
    assert place.daemon.why == "the driver does not show the card G0"
    place.set(require_driver_limits=True)
    with pytest.raises(Refusal, match="does not show the card G0"):
        place.daemon.prepare(mine)


def test_why_is_the_same_as_long_as_nothing_changes_and_told_once(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    well, without = place.pod(ONE, ("a", {"G0": 4})), [item(TWO, "b", {"G0": 2})]
    place.pods += without
    said = set()
    for _ in range(3):
        place.daemon.prepare(without)
        said.add(place.daemon.why)
        place.daemon.prepare(well)
        said.add(place.daemon.why)
        place.look()
        said.add(place.daemon.why)
    (why,) = said
    assert "kubelet has made no control group for the pod" in why and place.held(without[0]) is None
    assert caplog.text.count("kubelet has made no control group") == 1
    place.pod(TWO, ("b", {"G0": 2}))
    place.look()
    assert (place.daemon.why, place.held(without[0])) == ("", 2)


def test_a_reason_that_is_the_same_for_all_pods_is_told_once(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.driver.refuses = "NVML lets only root set them"
    for uid in (ONE, TWO):
        place.daemon.prepare(place.pod(uid, ("a", {"G0": 1})))
        place.look()
        place.pods.clear()
        place.look()
    assert caplog.text.count("NVML lets only root set them") == 1


def test_a_required_limit_that_is_lost_is_told_once(make: Callable[..., Place]) -> None:
    place = make(require_driver_limits=True)
    place.daemon.prepare(place.pod(ONE, ("a", {"G0": 4})))
    place.driver.lost.add("G0")
    for _ in range(3):
        place.look()
    assert [(uid, reason) for uid, reason, _ in place.told] == [(ONE, "DriverLimitLost")]


def test_a_limit_that_counts_nobody_is_doubted_by_the_drivers_own_list_of_that_pod_alone(place: Place) -> None:
    mine, other = place.pod(ONE, ("a", {"G0": 4})), place.pod(TWO, ("b", {"G0": 4}))
    for one in (mine, other):
        place.daemon.prepare(one)
    place.listed = {(mine[0].key, "G0"): 512 << 20, (other[0].key, "G0"): 512 << 20}
    place.driver.used["G0", place.group(TWO)] = 400 << 20
    for _ in range(DOUBTS):
        assert place.held(mine[0]) == 4
        place.look()
    assert (place.held(mine[0]), place.held(other[0])) == (None, 4)
    assert "the driver counts less of a pod than it lists" in place.daemon.why
    place.daemon.prepare(mine)  # a container that starts again proves nothing
    assert place.held(mine[0]) is None
    place.driver.used["G0", place.group(ONE)] = 512 << 20
    place.look()
    assert (place.held(mine[0]), place.daemon.why) == (4, "")


@pytest.mark.parametrize(("before", "after"), [(512, 0), (0, 512)], ids=["counted before", "counted after"])
def test_memory_that_comes_and_goes_around_the_drivers_list_is_no_doubt(place: Place, before: int, after: int) -> None:
    mine = place.pod(ONE, ("a", {"G0": 4}))
    place.daemon.prepare(mine)
    at = "G0", place.group(ONE)
    for _ in range(2 * DOUBTS):
        place.driver.used[at] = before << 20
        place.daemon.count()
        place.listed = {(mine[0].key, "G0"): 512 << 20}
        place.driver.used[at] = after << 20
        place.look()
        assert place.held(mine[0]) == 4


def test_memory_that_comes_and_goes_between_every_reading_is_seen_by_some_look(place: Place) -> None:
    mine = place.pod(ONE, ("a", {"G0": 4}))
    place.daemon.prepare(mine)
    at, chance = ("G0", place.group(ONE)), random.Random(1)
    for _ in range(2000):
        now = [512 << 20 if chance.random() < 1 / 3 else 0 for _ in range(3)]  # the share that doubts it most often
        place.driver.used[at] = now[0]
        place.daemon.count()
        place.listed = {(mine[0].key, "G0"): now[1]}
        place.driver.used[at] = now[2]
        place.look()
        assert place.held(mine[0]) == 4


def test_looks_at_which_nothing_is_listed_hide_no_limit_that_counts_nobody(place: Place) -> None:
    mine = place.pod(ONE, ("a", {"G0": 4}))
    place.daemon.prepare(mine)
    for number in range(2 * DOUBTS):
        place.listed = {(mine[0].key, "G0"): (512 << 20) * (number % 2)}
        place.look()
    assert place.held(mine[0]) is None


def test_a_pod_that_the_driver_lists_above_its_limit_is_not_held_by_it(place: Place) -> None:
    mine = place.pod(ONE, ("a", {"G0": 4}))
    place.daemon.prepare(mine)
    place.driver.used["G0", place.group(ONE)] = 4 * BLOCK_BYTES  # what it took since the limit stands
    place.listed = {(mine[0].key, "G0"): 7 * BLOCK_BYTES}
    for _ in range(DOUBTS):
        place.daemon.count()
        place.look()
    assert place.held(mine[0]) is None
    place.driver.used["G0", place.group(ONE)] = 7 * BLOCK_BYTES  # counted, and above a limit that was lowered
    place.look()
    assert place.held(mine[0]) == 4


def test_of_two_groups_of_a_pod_that_with_its_processes_keeps_its_limit(make: Callable[..., Place]) -> None:
    place = make(require_driver_limits=True)
    mine = place.pod(ONE, ("a", {"G0": 4}))
    place.daemon.prepare(mine)
    (place.group(ONE) / "a/cgroup.procs").write_text("1\n")
    (place.root / "kubepods.slice" / f"kubepods-pod{ONE.replace('-', '_')}.slice").mkdir(parents=True)
    place.look()
    place.daemon.prepare(mine)
    assert (place.held(mine[0]), place.daemon.why, place.told) == (4, "", [])


def test_off_and_required_starts_nothing(make: Callable[..., Place]) -> None:
    place = make(driver_limits="off", require_driver_limits=True)
    with pytest.raises(Refusal, match="--driver-limits=off"):
        place.daemon.prepare(place.pod(ONE, ("a", {"G0": 4})))


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


# Whether it can be at all.


def cards(*uuids: str) -> Iterable[SimpleNamespace]:
    return [SimpleNamespace(card=SimpleNamespace(uuid=uuid)) for uuid in uuids]


def test_the_doctor_tries_what_really_limits_and_leaves_nothing(place: Place) -> None:
    before = sorted(place.root.rglob("*"))
    assert possible.tried(place.settings, place.driver, cards("G0", "G1")) == {}  # type: ignore[arg-type]
    place.driver.refuses = "the driver counts no memory of control groups here"
    assert possible.impossible(place.settings, place.driver, cards("G0")) == ""  # type: ignore[arg-type]
    assert possible.tried(place.settings, place.driver, cards("G0")) == {"G0": place.driver.refuses}  # type: ignore[arg-type]
    place.driver.limit_memory = lambda *_: None  # type: ignore[method-assign]
    assert "the driver says that there is none" in possible.tried(place.settings, place.driver, cards("G0"))["G0"]  # type: ignore[arg-type]
    assert sorted(place.root.rglob("*")) == before


def test_the_doctor_names_the_cards_that_can_have_no_limit_beside_one_that_can(place: Place) -> None:
    place.driver.lost.add("G1")
    found = possible.tried(place.settings, place.driver, cards("G0", "G1"))  # type: ignore[arg-type]
    assert found == {"G1": "the driver does not show the card G1"}
    check = _limits(place.settings, 2, found)
    assert check.verdict is Verdict.WARN and check.details.startswith("one was set and taken away; ")
    assert "but the shim alone holds the memory of pods on G1: the driver does not show" in check.details
    assert _limits(replace(place.settings, require_driver_limits=True), 2, found).verdict is Verdict.FAIL
    assert _limits(place.settings, 1, found).details.startswith("the shim alone holds the memory of pods: ")


def test_a_pod_whose_start_was_refused_has_lost_no_limit(make: Callable[..., Place]) -> None:
    place = make(require_driver_limits=True)
    place.pods = [item(ONE, "a", {"G0": 4})]
    with pytest.raises(Refusal):
        place.daemon.prepare(place.pods)
    place.look()
    assert place.told == []
    place.leaves[place.pods[0].key] = [place.root / "somewhere"]  # another container of it runs
    place.look()
    assert [reason for _, reason, _ in place.told] == ["DriverLimitLost"]


def test_a_limit_above_the_share_is_not_called_none(make: Callable[..., Place]) -> None:
    place = make(require_driver_limits=True)
    place.daemon.prepare(place.pod(ONE, ("a", {"G0": 4})))
    place.driver.fixed.add(place.group(ONE))
    place.pods = [item(ONE, "a", {"G0": 2})]
    place.look()
    ((_, reason, message),) = place.told
    assert reason == "DriverLimitLost" and "does not hold its memory as it should: " in message
    assert "the shim alone" not in message and f"goes on holding the pod to {4 * BLOCK_BYTES} bytes" in message
