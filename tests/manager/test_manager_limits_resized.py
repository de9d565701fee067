"""The driver's limits while a pod is resized: they follow, wait for what is in use, and block nothing unless they are required."""

from __future__ import annotations

import threading

import pytest

from manager.errors import Refusal
from tests.manager.manager_limits import ONE, Place, item, shared
from vcuda.spec.units import BLOCK_BYTES


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
