"""Addresses take turns, however many connections one of them has."""

from __future__ import annotations

import asyncio
import time

import pytest

from scheduler_ext.http import strangers as module
from scheduler_ext.http.strangers import Strangers


class Fake:
    def __init__(self, peer: str, turns: list[str], seconds: float = 0.0) -> None:
        self.peer, self.turns, self.seconds, self.aborted = peer, turns, seconds, False

    def turn(self) -> None:
        self.turns.append(self.peer)
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            pass

    def abort(self) -> None:
        self.aborted = True


def test_an_address_with_many_connections_waits_no_longer_than_one_with_one() -> None:
    turns: list[str] = []

    async def line() -> None:
        strangers = Strangers()
        for _ in range(20):
            strangers.wait(Fake("10.0.0.1", turns, 0.003))
        strangers.wait(Fake("10.0.0.2", turns, 0.003))
        while len(turns) < 4:
            await asyncio.sleep(0.001)

    asyncio.run(line())
    assert "10.0.0.2" in turns[:2]


def test_the_oldest_connection_of_the_address_with_the_most_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 3)
    strangers, turns = Strangers(), list[str]()
    probe = Fake("10.0.0.2", turns)
    many = [Fake("10.0.0.1", turns) for _ in range(5)]
    for one in (probe, *many):
        strangers.enter(one)
    assert [one.aborted for one in (probe, *many)] == [False, True, True, True, False, False]
    for one in many:
        strangers.leave(one)  # an aborted one counts once
    for _ in range(2):
        strangers.enter(Fake("10.0.0.1", turns))
    assert not probe.aborted
