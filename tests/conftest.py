"""Settings of every test run: how long hypothesis may look."""

from __future__ import annotations

import hypothesis

# No deadline per example: CI machines stall. The fuzz tier of .ci/run selects the second profile (--hypothesis-profile).
hypothesis.settings.register_profile("suite", deadline=None, max_examples=80)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=6_000)
hypothesis.settings.load_profile("suite")
