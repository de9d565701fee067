"""When the housekeeping waits, and for how long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from manager import housekeeping
from manager.allocate.book import Book
from manager.config.settings import Settings
from tests.manager.manager_pods import eventually


class Wake(threading.Event):
    """Waiting for it is what makes the time pass."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.now += timeout
        return self.is_set()


def test_what_can_wait_waits_until_kubelet_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    wake = Wake()
    monkeypatch.setattr(housekeeping, "time", SimpleNamespace(monotonic=lambda: wake.now))

    def waited(quiet_s: Callable[[], float]) -> float:
        started = wake.now
        housekeeping.await_quiet(quiet_s, wake)
        return wake.now - started

    called = wake.now
    assert waited(lambda: wake.now - called) == pytest.approx(housekeeping.QUIET_S)
    assert waited(lambda: 60.0) == 0
    assert waited(lambda: 0.0) == pytest.approx(housekeeping.PATIENCE_S)  # a burst without an end
    wake.set()
    assert waited(lambda: 0.0) == 0


def test_a_wake_that_comes_during_a_turn_is_followed_by_another_turn() -> None:
    """It was forgotten by the chore that collects: a SIGHUP's settings came an interval late."""
    turns = []

    def chore() -> None:
        turns.append(1)
        if len(turns) == 1:
            keeper.look_again()

    settings = Settings(health_check_interval=60.0, allocation_check_period=60.0)
    book = cast(Book, SimpleNamespace(quiet_s=60.0, sync=lambda: None))
    keeper = housekeeping.Housekeeper(lambda: settings, book, [chore], lambda: None, lambda: None)
    keeper.start()
    eventually(lambda: len(turns) == 2, "a second turn")
    keeper.stop()
    assert keeper.worker.join(10), "a turn that is asked to stop waits for no interval"
