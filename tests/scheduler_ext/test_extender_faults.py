"""A short fault run (T35): two processes, a failing API server, kills and storms; the long one is benchmarks/extender_faults.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import extender_faults
from benchmarks._faults_api import NAMES, Api, Faults, Truth
from tests.scheduler_ext.extender_support import pod
from vcuda.spec import placement


def test_nothing_is_doubled_and_nothing_is_left_over(tmp_path: Path) -> None:
    run = extender_faults.Run(tmp_path, pods=120, nodes=3, seed=5, kills=1, rate=8.0, looks=1)
    tally = run.run(limit_s=90)
    assert tally.finished and tally.happened["pods bound"] > 40
    assert tally.kills_of_the_leader == 1 and tally.starts >= 3 and sum(tally.faults.values()) > 5
    assert tally.standby_ready > 0
    assert tally.looks == 2 and tally.waiting_seen > 0  # whether there was room for one at first is a matter of time
    assert tally.findings == [] and tally.clean


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


def test_who_waits_is_held_against_the_cards_themselves() -> None:
    api = Api(Faults(1, 0.0, late_s=0.0))
    for number in range(4):
        api.truth.blocks[f"GPU-{number}"], api.truth.nodes[f"GPU-{number}"] = 64, "ab"[number // 2]

    def held(number: int, cores: int, blocks: int) -> None:
        api.truth.held[f"x{number}"] = {f"GPU-{number}": (cores, blocks)}

    def waits(name: str, cores: int, blocks: int | None, gang: str = "", node: str | None = None) -> None:
        annotations: dict[str, Any] = {NAMES.gang: gang} if gang else {}
        api.put("pods", pod(name, cores, blocks, uid=name, annotations=annotations, **({"node": node} if node else {})))

    try:
        for number, use in enumerate(((60, 60), (40, 10), (100, 64), (0, 0))):
            held(number, *use) if any(use) else None
        for name, cores, blocks in (
            ("pa", 30, 4), ("pb", 70, 60), ("pc", 100, None), ("pd", 200, None), ("pe", 60, 54),
        ):  # fmt: skip
            waits(name, cores, blocks)
        assert api.has_room() == ["pa", "pb", "pc", "pe"]
        held(3, 50, 20)
        # Neither two whole cards on two nodes, nor cores of one card with blocks of another.
        assert api.has_room() == ["pa", "pe"]
        for name in ("pa", "pe"):
            api.delete("pods", f"default/{name}")
        for name in ("pg0", "pg1"):
            waits(name, 50, 10, "g/2")
            assert api.has_room() == (["pg0", "pg1"] if name == "pg1" else [])
        waits("ph0", 50, 10, "h/3")
        waits("ph1", 50, 10, "h/3")
        assert api.has_room() == ["pg0", "pg1"]  # a third of the other gang is not there
        waits("ph2", 50, 10, "h/3")
        assert api.has_room() == ["pg0", "pg1"]  # it is, and there are but two places
        waits("ph2", 50, 10, "h/3", node="a")
        assert api.has_room() == ["pg0", "pg1", "ph0", "ph1"]  # each for itself, now that one runs
    finally:
        api.stop()
