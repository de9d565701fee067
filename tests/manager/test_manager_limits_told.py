"""What is said of the driver's limits: why one can't be, once, and by the doctor what can be at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from manager.doctor import Verdict, _limits
from manager.errors import Refusal
from manager.limits import possible
from tests.manager.manager_limits import ONE, TWO, Place, item, shared
from vcuda.spec.units import BLOCK_BYTES


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


def test_a_required_limit_that_is_lost_is_told_once(make_place: Callable[..., Place]) -> None:
    place = make_place(require_driver_limits=True)
    place.daemon.prepare(place.pod(ONE, ("a", {"G0": 4})))
    place.driver.lost.add("G0")
    for _ in range(3):
        place.look()
    assert [(uid, reason) for uid, reason, _ in place.told] == [(ONE, "DriverLimitLost")]


def test_off_and_required_starts_nothing(make_place: Callable[..., Place]) -> None:
    place = make_place(driver_limits="off", require_driver_limits=True)
    with pytest.raises(Refusal, match="--driver-limits=off"):
        place.daemon.prepare(place.pod(ONE, ("a", {"G0": 4})))


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


def test_a_pod_whose_start_was_refused_has_lost_no_limit(make_place: Callable[..., Place]) -> None:
    place = make_place(require_driver_limits=True)
    place.pods = [item(ONE, "a", {"G0": 4})]
    with pytest.raises(Refusal):
        place.daemon.prepare(place.pods)
    place.look()
    assert place.told == []
    place.leaves[place.pods[0].key] = [place.root / "somewhere"]  # another container of it runs
    place.look()
    assert [reason for _, reason, _ in place.told] == ["DriverLimitLost"]


def test_a_limit_above_the_share_is_not_called_none(make_place: Callable[..., Place]) -> None:
    place = make_place(require_driver_limits=True)
    place.daemon.prepare(place.pod(ONE, ("a", {"G0": 4})))
    place.driver.fixed.add(place.group(ONE))
    place.pods = [item(ONE, "a", {"G0": 2})]
    place.look()
    ((_, reason, message),) = place.told
    assert reason == "DriverLimitLost" and "does not hold its memory as it should: " in message
    assert "the shim alone" not in message and f"goes on holding the pod to {4 * BLOCK_BYTES} bytes" in message
