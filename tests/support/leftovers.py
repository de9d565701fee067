"""Ends the processes that a test started and left, and says so as that test's failure: no test may fail another.

A process is known by its environment, which its children inherit: who cleans it passes `MARKS` on. What a test's call
started is ended after the test, what fixtures started after the module that made them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

RUN, TEST = MARKS = (
    "TESTS_RUN",
    "PYTEST_CURRENT_TEST",
)  # this pytest process; pytest's own: "nodeid (phase)"
os.environ[RUN] = uuid.uuid4().hex
_GRACE_SECONDS = 3.0  # for what has been told to end
_PROC = Path("/proc")


@dataclass(frozen=True)
class Leftover:
    """A process that is alive and was started by a test of this pytest process."""

    pid: int
    test: str
    phase: str
    command: str


def _pids() -> set[int]:
    return {int(name) for name in os.listdir(_PROC) if name.isdigit()}  # noqa: PTH208 - three times as fast


def _look(pid: int) -> Leftover | None:
    folder = _PROC / str(pid)
    with contextlib.suppress(OSError):
        words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        marks = {name: value for name, _, value in (word.partition("=") for word in words) if name in MARKS}
        state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        if pid != os.getpid() and marks.get(RUN) == os.environ[RUN] and state not in "ZX":
            test, _, phase = marks.get(TEST, "").rpartition(" ")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            return Leftover(pid, test, phase.strip("()"), command)
    return None


def _left(before: set[int], test: str, phases: tuple[str, ...]) -> list[Leftover]:
    """Those that are not among `before`, of the test or of the tests of a module; some time is given to what is ending."""
    deadline = time.monotonic() + _GRACE_SECONDS
    suspects = _pids() - before
    while True:
        found = [
            left for left in map(_look, sorted(suspects))
            if left is not None and left.phase in phases and (left.test == test or left.test.startswith(f"{test}::"))
        ]  # fmt: skip
        if not found or time.monotonic() > deadline:
            return found
        suspects = {left.pid for left in found}
        time.sleep(0.02)


class Guard:
    """What was there when the present test and the present module began."""

    def __init__(self) -> None:
        self.test: set[int] = set()
        self.module: set[int] = set()
        self.name = ""

    def begin(self, item: pytest.Item) -> None:
        self.test = _pids()
        module = item.nodeid.partition("::")[0]
        if module != self.name:
            self.name, self.module = module, self.test

    def end(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        found = _left(self.test, item.nodeid, ("call",))
        if nextitem is None or nextitem.nodeid.partition("::")[0] != self.name:
            found += _left(self.module, self.name, ("setup", "call", "teardown"))
        for left in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(left.pid, signal.SIGKILL)
        if found:
            rows = "\n".join(f"  {left.pid} {left.command:.200} (of {left.test}, {left.phase})" for left in found)
            pytest.fail(f"processes outlived the test that started them and were ended:\n{rows}", pytrace=False)


_GUARD = Guard()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _GUARD.begin(item)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    try:
        yield
    finally:
        if item.get_closest_marker("kube") is None:  # its cluster outlives modules
            _GUARD.end(item, nextitem)
