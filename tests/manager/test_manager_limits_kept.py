"""The driver's limits are kept through looks, restarts and --driver-limits=off, and end when nobody is in the group any more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from manager.allocations.record import Allocation
from manager.cgroups import pods
from manager.errors import Refusal
from manager.limits.standing import FILE_NAME, Standing
from tests.manager.manager_limits import ONE, TWO, Place, item, shared


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


def test_a_disk_that_takes_no_record_gets_no_limit_that_nobody_would_know(make_place: Callable[..., Place]) -> None:
    place = make_place(require_driver_limits=True)
    (place.state / f".{FILE_NAME}").mkdir()  # so that nothing can be written there
    mine = place.pod(ONE, ("a", {"G0": 4}))
    with pytest.raises(Refusal, match="make room or make it writable"):
        place.daemon.prepare(mine)
    assert place.blocks() == {}
    (place.state / f".{FILE_NAME}").rmdir()
    place.daemon.prepare(mine)
    assert place.held(mine[0]) == 4
