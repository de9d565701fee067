"""A short fault run (T35): two processes, a failing API server, kills and storms; the long one is benchmarks/extender_faults.py."""

from __future__ import annotations

from pathlib import Path

from benchmarks import extender_faults
from benchmarks._faults_api import NAMES, Truth
from tests.scheduler_ext.extender_support import pod
from vcuda.spec import placement


def test_nothing_is_doubled_and_nothing_is_left_over(tmp_path: Path) -> None:
    run = extender_faults.Run(tmp_path, pods=120, nodes=3, seed=5, kills=1, rate=8.0)
    tally = run.run(limit_s=90)
    assert tally.finished and tally.happened["pods bound"] > 40
    assert tally.kills_of_the_leader == 1 and tally.starts >= 3 and sum(tally.faults.values()) > 5
    assert tally.standby_ready > 0
    assert tally.double_bookings == tally.stale == tally.lies == tally.tracebacks == []


def test_the_truth_finds_what_is_doubled_wrong_or_elsewhere() -> None:
    truth = Truth(blocks={"GPU-1": 10}, nodes={"GPU-1": "a"})

    def bound(name: str, on: str, cores: int) -> None:
        one = pod(name, cores, 5, uid=name, node=on)
        share = placement.CardShare("GPU-1", cores, 5)
        text = placement.encode(placement.Placement({"main": (share,)}))
        one["metadata"]["annotations"] = {NAMES.placement: text}
        truth.bind(one)

    bound("x", "a", 60)
    assert truth.findings == []
    bound("y", "a", 50)
    assert "GPU-1 is booked twice: 110 cores" in truth.findings.pop()
    del truth.held["x"], truth.held["y"]
    bound("z", "b", 10)
    assert "not on its node" in truth.findings.pop()
    truth.bind(pod("w", uid="w", node="a"))
    assert "wrong placement" in truth.findings.pop()
