"""Room for bodies: who waits, and for what."""

from __future__ import annotations

import gc

from scheduler_ext.http.room import Room


def test_who_waits_for_his_own_share_keeps_nobody_else_waiting() -> None:
    room = Room(4000)
    greedy, other, third = (room.part(name) for name in ("greedy", "other", "third"))
    came: list[str] = []
    assert greedy.take(1000, lambda: False) and room.part("greedy").take(1000, lambda: False)
    assert not greedy.take(1000, lambda: came.append("greedy") is None)
    assert not greedy.take(1, lambda: came.append("behind it") is None)  # in order, of one client
    assert other.take(1000, lambda: False)
    assert not third.take(1000, lambda: came.append("third") is None)
    greedy.give(1000)
    assert came == ["third"]  # who has least
    assert (greedy.held, other.held, room.left) == (0, 1000, 1000)
    other.give_all()
    assert came == ["third"]  # else the greedy one had more than is left
    third.give_all()
    assert came == ["third", "greedy"] and room.left == 2000


def test_where_nobody_has_a_name_all_is_given_in_order() -> None:
    room = Room(4000)
    parts = [room.part(None) for _ in range(6)]
    came: list[int] = []
    for number, part in enumerate(parts):
        assert part.take(1000, lambda number=number: came.append(number) is None) is (number < 4)  # type: ignore[misc]
    parts[0].give_all()
    assert came == [4] and room.left == 0
    parts[1].give_all()
    assert came == [4, 5]


def test_what_nobody_wants_any_more_is_given_to_the_next() -> None:
    room = Room(10)
    first, second = room.part(None), room.part(None)
    assert first.take(10, lambda: False)
    assert not second.take(10, lambda: False) and not second.take(5, lambda: True)
    first.give_all()
    assert second.held == 5 and room.left == 5


def test_a_client_that_is_gone_leaves_nothing() -> None:
    room = Room(10)
    part = room.part("name")
    assert part.take_now(5) and not room.part("name").take_now(1)
    part.give_all()
    del part
    gc.collect()
    assert room.left == 10 and not room._clients and not room._waiting
