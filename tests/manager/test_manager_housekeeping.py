"""When the housekeeping waits, and for how long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from manager import housekeeping


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
