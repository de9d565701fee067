"""A short version of the churn; `python -m benchmarks.manager_churn` is the whole one."""

from __future__ import annotations

from benchmarks import manager_churn


def test_nothing_but_the_running_pods_is_kept() -> None:
    samples, grew = manager_churn.run(cycles=60, seed=3, live=8, samples=4)
    assert grew == []
    assert [sample.booked for sample in samples] == [8, 8, 8, 8, 0]
    assert samples[0].regions == 8 and samples[-1].regions == 0
