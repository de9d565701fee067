"""Settings of every test run: how long hypothesis may look, which files go first, and that no test leaves a process or a setting behind."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import hypothesis
import pytest

from tests.support.leftovers import pytest_runtest_setup, pytest_runtest_teardown

__all__ = ["pytest_runtest_setup", "pytest_runtest_teardown"]  # hooks

# No deadline per example: CI machines stall. The fuzz tier of .ci/run selects the second profile (--hypothesis-profile).
hypothesis.settings.register_profile("suite", deadline=None, max_examples=80)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=6_000)
hypothesis.settings.load_profile("suite")

# What waits longest: begun last, each would keep one process busy after all others have ended.
FIRST = ("vcuda/test_gate_cheats.py", "vcuda/test_gate_sim.py", "e2e/test_local_breaks.py", "vcuda/test_native_core.py")


gc.disable()  # nothing of what is collected is garbage: a sixth of the time that it takes, in each process


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {f"tests/{name}": rank for rank, name in enumerate(FIRST)}
    items.sort(key=lambda item: ranks.get(item.nodeid.partition("::")[0], len(ranks)))


@pytest.fixture(autouse=True)
def interpreter_as_it_was() -> Iterator[None]:
    """What an extender sets for its process (scheduler_ext/engine/garbage.py) is gone with the test in which it served.

    Else each engine of the tests after it looked twice at all objects of this process: half a second of each test.
    """
    thresholds, switch = gc.get_threshold(), sys.getswitchinterval()
    yield
    if gc.get_threshold() != thresholds:
        gc.set_threshold(*thresholds)
        gc.callbacks[:] = [
            each for each in gc.callbacks if not getattr(each, "__module__", "").startswith("scheduler_ext.")
        ]
    sys.setswitchinterval(switch)
