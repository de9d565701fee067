"""A short version of the kill -9 run; `python -m benchmarks.claims` is the whole one."""

from __future__ import annotations

from benchmarks import claims


def test_kill_9_at_random_points_of_claims_doubles_loses_and_leaves_nothing() -> None:
    tally = claims.run(cycles=20, seed=3, kill_every=4)
    assert tally.cycles == 20 and tally.kills > 2
    assert tally.clean, tally
