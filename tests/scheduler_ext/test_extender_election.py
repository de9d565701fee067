"""Leader and standby: whatever happens to calls, clocks and processes, never two replicas serve at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.scheduler_ext.extender_election import GIVEN_BACK, Lines, Replica, World
from vcuda.kube.errors import ApiError, ApiUnreachable


def test_the_first_leads_and_the_second_takes_over_only_after_the_whole_lease() -> None:
    world = World()
    one, two = Replica(world, "one"), Replica(world, "two")
    one.lead()
    two.step()
    assert (one.serves, two.serves, one.events, two.events) == (True, False, ["gained"], [])
    assert "one_1 holds lease n/extender" in str(two.election.standby_reason())
    assert world.labels == {"one": "leader", "two": "standby"}
    world.now += 19.9
    assert one.serves
    world.now += 0.2  # 10 s before the lease ends, the leader has stopped
    assert not one.serves
    two.step()
    assert not two.serves
    world.now += 10
    two.step()
    assert two.serves and two.events == ["gained"] and world.labels == {"one": "standby", "two": "leader"}
    assert world.found is not None and world.found["spec"]["leaseTransitions"] == 2
    one.step()
    assert one.events == ["gained", "lost"] and "taken by two_1" in str(one.election.standby_reason())
    one.step()
    world.down.add("two")
    world.now += 100
    one.step()
    assert not one.serves  # its view is stale for good


def test_a_leader_that_could_not_renew_goes_on_if_nobody_took_the_lease() -> None:
    world = World()
    one, two = Replica(world, "one"), Replica(world, "two")
    one.lead()
    two.step()
    world.down |= {"one", "two"}
    world.now += 60
    one.step()
    two.step()
    assert not one.serves and "could not be read" in str(one.election.standby_reason())
    world.down.clear()
    one.step()
    assert one.serves and one.events == ["gained"]
    two.step()
    assert not two.serves


def test_a_lease_given_back_is_taken_at_once() -> None:
    world = World()
    one, two = Replica(world, "one"), Replica(world, "two")
    one.lead()
    two.step()
    one.election.release()
    one.step()  # comes too late to take it again
    assert not one.serves
    two.step()
    assert two.serves and world.labels == {"one": "standby", "two": "leader"}
    one.election.release()
    assert two.serves and world.found is not None and world.found["spec"]["holderIdentity"] == "two_1"


def test_who_finds_no_lease_makes_it_and_serves_only_after_a_whole_duration() -> None:
    """A deleted lease looks like a first installation, and its leader goes on until it looks again."""
    world = World(new=True)
    one, two = Replica(world, "one"), Replica(world, "two")
    one.step()
    two.step()
    assert (
        not one.serves and not two.serves and one.events == [] and world.labels == {"one": "standby", "two": "standby"}
    )
    assert "one_1 holds lease" in str(two.election.standby_reason())
    assert "there was no lease n/extender" in str(one.election.standby_reason())
    world.now += 29.9
    one.step()
    assert not one.serves
    world.now += 0.2
    one.step()
    assert one.serves and one.events == ["gained"]


@pytest.mark.parametrize("left", [None, {}, {"holderIdentity": ""}, {"holderIdentity": "", "leaseDurationSeconds": 30},
                                  {"holderIdentity": 7, "leaseDurationSeconds": -5}])  # fmt: skip
def test_a_lease_that_is_deleted_or_emptied_while_its_leader_lives_makes_no_second_one(left: Any) -> None:
    world = World()
    one, two = Replica(world, "one"), Replica(world, "two")
    one.lead()
    two.step()
    if left is None:
        world.found = None
    else:
        world.edit(left)
    until = world.now + 19.9  # that long the leader may serve, whoever can't reach the API server
    while world.now < until:
        two.step()
        assert one.serves and not two.serves
        world.now += 1
    one.step()
    assert not one.serves and one.events[1:] == ["lost"]
    world.now += 12
    two.step()
    world.now += 31
    two.step()
    assert two.serves and two.events == ["gained"]


@pytest.mark.parametrize("left", [None, {"holderIdentity": ""}, {"holderIdentity": "", "leaseDurationSeconds": 1}])
def test_a_leader_stops_as_soon_as_it_finds_that_its_lease_is_not_its_own(left: Any) -> None:
    world = World()
    one = Replica(world, "one")
    one.lead()
    if left is None:
        world.found = None
    else:
        world.edit(left)
    one.step()
    assert not one.serves and one.events == ["gained", "lost"] and world.labels == {"one": "standby"}
    one.election.release()
    assert world.found is None if left is None else world.found is not None and world.found["spec"] == left


def test_the_lease_of_one_that_may_not_serve_yet_is_not_given_back() -> None:
    world = World(new=True)
    one, two = Replica(world, "one"), Replica(world, "two")
    one.step()
    one.election.release()
    two.step()
    assert not two.serves
    world.now += 30.1
    two.step()
    assert two.serves


def test_who_lost_the_answer_to_its_creation_waits_from_when_it_knows_of_it() -> None:
    world = World(new=True)
    one = Replica(world, "one")
    call = world.call

    def lossy(who: str, act: Callable[[], Any]) -> Any:
        call(who, act)
        raise ApiUnreachable("the answer is lost")

    lines: Any = one.election._api
    lines.lease, real = (lambda *_: None), lines.lease
    world.call = lossy  # type: ignore[method-assign]
    one.step()
    lines.lease, world.call = real, call  # type: ignore[method-assign]
    world.now += 20
    one.step()
    world.now += 29.9
    one.step()
    assert not one.serves
    world.now += 0.2
    one.step()
    assert one.serves


@pytest.mark.parametrize("late", [False, True])
def test_a_leader_whose_renewals_are_carried_out_but_not_answered_goes_on(late: bool) -> None:
    world = World()
    a, b = Replica(world, "a"), Replica(world, "b")
    a.lead()
    delayed: list[Callable[[], Any]] = []
    lines: Any = a.election._api
    put = Lines.put_lease

    def unanswered(*given: Any) -> None:
        delayed.append(lambda: put(lines, *given))
        if not late:
            delayed.pop()()
        raise ApiUnreachable("the answer is lost")

    lines.put_lease = unanswered
    for _ in range(40):
        world.now += 5
        a.step()
        assert a.serves
        world.now += 1
        for act in delayed:
            act()
        delayed.clear()
        b.step()
        assert not b.serves
    assert a.events == ["gained"]


def test_a_renewal_that_was_not_answered_counts_from_when_it_was_sent() -> None:
    world = World()
    a, b = Replica(world, "a"), Replica(world, "b")
    a.lead()
    world.now += 5
    plain = world.call

    def lossy(who: str, act: Callable[[], Any]) -> Any:
        plain(who, act)
        raise ApiUnreachable("the answer is lost")

    election = a.election
    put = Lines.put_lease
    lines: Any = election._api
    lines.put_lease = lambda *given: (put(lines, *given), lossy("a", lambda: None))
    a.step()
    b.step()  # sees that renewal, which was sent at 5 s
    lines.put_lease = lambda *_: lossy("a", lambda: None)
    world.now += 14
    a.step()
    assert a.serves
    world.now += 7  # 21 s after it was sent, and its last word says nothing
    a.step()
    assert not a.serves
    b.step()
    assert not b.serves
    world.now += 10
    b.step()
    assert b.serves


def test_a_lease_that_somebody_touches_all_the_time_lapses_all_the_same() -> None:
    world = World()
    a, b = Replica(world, "a"), Replica(world, "b")
    a.lead()
    for _ in range(32):
        b.step()
        world.now += 1
        world.edit(world.found["spec"] if world.found else {})
    b.step()
    assert b.serves


def test_a_leader_whose_lease_others_touch_in_between_renews_it() -> None:
    world = World()
    a = Replica(world, "a")
    a.lead()
    found, touched = Lines.lease, 0
    lines: Any = a.election._api

    def touched_behind(*place: str) -> Any:
        nonlocal touched
        lease = found(lines, *place)
        if touched % 5 < 4:  # four of five writes come too late
            world.edit(lease["spec"])
        touched += 1
        return lease

    lines.lease = touched_behind
    for _ in range(10):
        world.now += 5
        a.step()
        assert a.serves


def test_a_lease_of_before_a_restored_backup_gives_nobody_the_right_to_serve_at_once() -> None:
    world = World(new=True)
    one, two = Replica(world, "one"), Replica(world, "two")
    two.step()
    saved = world.found
    assert saved is not None
    world.edit({**GIVEN_BACK})
    one.lead()
    two.step()
    assert one.serves
    world.edit(saved["spec"])  # it names two, which waited for it and then saw another's
    two.step()
    assert not two.serves
    world.now += 29
    two.step()
    assert not two.serves
    world.now += 1.1
    two.step()
    assert two.serves


def restored(world: World, spec: Mapping[str, Any], *, older: bool) -> None:
    """A backup has come back; `older`: with the version of then, else with one that the server has raised."""
    now = world.version
    if older:
        world.version = 1
    world.edit(spec)
    world.version = now + 1000  # the next write


@pytest.mark.parametrize("older", [False, True], ids=["raised", ""])
@pytest.mark.parametrize("saw", ["nothing", "the leader", "both leaders", "the leader long ago"])
def test_a_restored_lease_that_was_given_back_makes_no_second_leader(saw: str, older: bool) -> None:
    """A backup of while nothing ran, or of between two leaders; the leader serves until it looks again."""
    world = World()
    one, two, three = (Replica(world, name) for name in ("one", "two", "three"))
    one.lead()
    if saw != "nothing":
        three.step()
    if saw == "both leaders":
        two.step()
    one.election.release()
    assert world.found is not None
    backup = world.found["spec"]
    if saw == "the leader long ago":  # it could not reach the API server since
        world.now += 16
    elif saw == "the leader":
        backup = {**backup, "leaseTransitions": 0}
    two.lead()
    if saw == "both leaders":
        three.step()
        assert "two_1 holds" in str(three.election.standby_reason())
    restored(world, backup, older=older)
    until = world.now + 19.9
    while world.now < until:
        three.step()
        assert two.serves and not three.serves, world.now
        world.now += 1
    assert "whether it was given back just now is not known" in str(three.election.standby_reason())
    two.step()
    assert two.events == ["gained", "lost"]
    world.now += 12
    three.step()
    assert three.serves


def test_a_given_back_lease_that_a_new_replica_finds_is_waited_out() -> None:
    world = World()
    one = Replica(world, "one")
    one.step()
    world.now += 29.9
    one.step()
    assert not one.serves
    world.now += 0.2
    one.step()
    assert one.serves


def test_who_saw_a_lease_given_back_takes_it_though_the_first_try_fails() -> None:
    world = World()
    one, two = Replica(world, "one"), Replica(world, "two")
    one.lead()
    two.step()
    one.election.release()
    lines: Any = two.election._api
    put = lines.put_lease

    def fail(*_: Any) -> None:
        raise ApiError(500, "injected")

    lines.put_lease = fail
    two.step()
    assert not two.serves
    lines.put_lease = put
    world.now += 5
    two.step()
    assert two.serves


def test_a_longer_lease_of_the_holder_is_respected() -> None:
    world = World()
    one, two = Replica(world, "one", lease_seconds=90.0), Replica(world, "two")
    one.lead()
    two.step()
    world.now += 79
    assert one.serves
    two.step()
    assert not two.serves
    world.found = None  # whoever has seen it waits as long
    two.step()
    world.now += 89
    two.step()
    assert not two.serves
    world.now += 1.1
    two.step()
    assert two.serves


def test_the_role_label_waits_for_readiness() -> None:
    world = World()
    one = Replica(world, "one")
    one.ready = False
    one.lead()
    assert one.serves and world.labels == {"one": "standby"}
    one.ready = True
    one.step()
    assert world.labels == {"one": "leader"}


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("edits", [False, True], ids=["", "edited"])
def test_never_two_serve_whatever_is_late_or_lost(seed: int, edits: bool) -> None:
    dice = random.Random(seed)
    world = World(dice, new=edits)
    names = iter(range(10_000))
    replicas = [Replica(world, f"r{next(names)}") for _ in range(3)]
    served = 0
    backups: list[dict[str, Any]] = []
    for _ in range(400):
        one = dice.choice(replicas)
        if world.found is not None and edits and dice.random() < 0.1:
            backups.append(world.found["spec"])
        fate = dice.random()
        if fate < 0.03:
            one.election.release()
        if fate < 0.06 or "lost" in one.events:
            replicas[replicas.index(one)] = Replica(world, f"r{next(names)}")  # a process ends, the next one starts
        elif fate < 0.07 and edits:
            edit = dice.choice((None, None, {}, {"holderIdentity": ""}, {"holderIdentity": "who"}, *backups[-20:]))
            if edit is None:
                world.found = None
            else:
                world.edit(edit)
        elif fate < 0.09:
            world.down ^= {one.election._identity[:-2]}
        else:
            one.step()
        world.now += dice.choice((0, 1, 2, 5, 12))
        serving = [other for other in replicas if other.serves]
        assert len(serving) <= 1
        served += len(serving)
    assert served > (5 if edits else 20)
