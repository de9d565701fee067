"""When the housekeeping waits, and for how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from manager import housekeeping


def test_what_can_wait_waits_until_kubelet_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "QUIET_S", 0.1)
    monkeypatch.setattr(housekeeping, "PATIENCE_S", 0.4)
    wake = threading.Event()

    def waited(quiet_s: Callable[[], float]) -> float:
        started = time.monotonic()
        housekeeping.await_quiet(quiet_s, wake)
        return time.monotonic() - started

    called = time.monotonic()
    assert 0.09 < waited(lambda: time.monotonic() - called) < 0.35
    assert waited(lambda: 60.0) < 0.05
    assert 0.4 <= waited(lambda: 0.0) < 2  # a burst without an end
    wake.set()
    assert waited(lambda: 0.0) < 0.05
