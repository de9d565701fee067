"""A driver's limit that counts less of a pod than the driver lists is doubted, and no other is."""

from __future__ import annotations

import random

import pytest

from manager.limits.driver_limits import DOUBTS
from tests.manager.manager_limits import ONE, TWO, Place
from vcuda.spec.units import BLOCK_BYTES


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
