"""Settings of every test run: how long hypothesis may look, and that no test leaves a process behind."""

from __future__ import annotations

import hypothesis

from tests.support.leftovers import pytest_runtest_setup, pytest_runtest_teardown

__all__ = ["pytest_runtest_setup", "pytest_runtest_teardown"]  # hooks

# No deadline per example: CI machines stall. The fuzz tier of .ci/run selects the second profile (--hypothesis-profile).
hypothesis.settings.register_profile("suite", deadline=None, max_examples=80)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=6_000)
hypothesis.settings.load_profile("suite")
