"""A short version of the kill -9 run; `python -m benchmarks.manager_kill` is the whole one."""

from __future__ import annotations

from benchmarks import manager_kill


def test_kill_9_at_random_points_doubles_loses_and_leaves_nothing() -> None:
    tally = manager_kill.run(cycles=25, seed=3, kill_every=4)
    assert tally.cycles == 25 and tally.kills > 2
    assert tally.clean, tally
