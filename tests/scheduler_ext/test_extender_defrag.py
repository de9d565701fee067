"""Defragmentation plans: what they promise is what applying them gives, and whom they leave alone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_ext.engine.core import Engine
from scheduler_ext.lab.recording import Recorder
from scheduler_ext.main import main
from scheduler_ext.planning import defrag
from tests.scheduler_ext.extender_support import NAMES, FakeApi, cards, eventually, node, pod
from vcuda.spec.request import Policy


def placed(
    name: str, where: str, cores: int, *, annotations: dict[str, str] | None = None, **fields: Any
) -> dict[str, Any]:
    """A running pod with a share of one card, `where` = "NODE-CARD"; a tenth of its cores as blocks of 40."""
    blocks = max(cores * 40 // 100, 1)
    placement = json.dumps({"version": 1, "containers": {"main": [[f"GPU-{where}", cores, blocks]]}})
    return pod(
        name,
        cores,
        blocks,
        uid=name,
        node=where.rpartition("-")[0],
        annotations={NAMES.placement: placement} | (annotations or {}),
        **fields,
    )


def engine_of(nodes: dict[str, int], *pods: dict[str, Any], engine: Engine | None = None) -> Engine:
    engine = engine or Engine(NAMES)
    for name, count in nodes.items():
        engine.see_node(node(name, cards(name, count)))
    for one in pods:
        engine.see_pod(one)
    return engine


def moves(plan: defrag.Plan) -> list[tuple[str, str, list[str]]]:
    return [(move.uid, move.target, list(move.cards)) for move in plan.moves]


def test_two_half_empty_cards_become_one() -> None:
    engine = engine_of({"a": 2, "b": 2}, placed("p", "a-0", 50), placed("q", "b-1", 40))
    plan = defrag.plan(engine.snapshot())
    assert moves(plan) == [("p", "b", ["GPU-b-1"])] or moves(plan) == [("q", "a", ["GPU-a-0"])]
    assert (plan.before.untouched, plan.after.untouched) == (2, 3)
    assert (plan.before.pods[2], plan.after.pods[2]) == (0, 1)
    assert plan.after.fragmented < plan.before.fragmented and engine.overbooked() == []
    assert defrag.plan(engine.snapshot()) == plan  # the plan changed nothing


def test_no_move_without_a_card_freed_and_none_to_an_untouched_one() -> None:
    plan = defrag.plan(engine_of({"a": 4}, placed("p", "a-0", 60), placed("q", "a-1", 60)).snapshot())
    assert plan.moves == [] and plan.before == plan.after


@pytest.mark.parametrize("annotation", [NAMES.movable, "cluster-autoscaler.kubernetes.io/safe-to-evict"])
def test_pods_that_must_stay_stay(annotation: str) -> None:
    kept = {annotation: "false"}
    engine = engine_of({"a": 2}, placed("p", "a-0", 50, annotations=kept), placed("q", "a-1", 40, annotations=kept))
    plan = defrag.plan(engine.snapshot())
    assert plan.moves == [] and plan.stay == 2
    # Others may still come to them.
    engine = engine_of({"a": 2}, placed("p", "a-0", 50, annotations=kept), placed("q", "a-1", 40))
    assert moves(defrag.plan(engine.snapshot())) == [("q", "a", ["GPU-a-0"])]


def test_members_of_gangs_and_pods_that_are_not_bound_yet_stay() -> None:
    gang = {NAMES.gang: "g/2"}
    engine = engine_of({"a": 2}, placed("p", "a-0", 50, annotations=gang), placed("q", "a-1", 40, annotations=gang))
    assert defrag.plan(engine.snapshot()).moves == []
    engine = engine_of({"a": 1, "b": 1})
    for name, where in (("p", "a"), ("q", "b")):
        assert engine.filter(pod(name, 40, 10), [where]).chosen == where
    assert defrag.plan(engine.snapshot()).moves == []


def test_card_filters_cpu_and_quotas_are_respected() -> None:
    def with_filter(**annotations: str) -> Engine:
        return engine_of(
            {"a": 1, "b": 1},
            placed("p", "a-0", 50, annotations={NAMES.movable: "false"}),
            placed("q", "b-0", 40, annotations=annotations),
        )

    assert len(defrag.plan(with_filter().snapshot()).moves) == 1
    assert defrag.plan(with_filter(**{NAMES.card_uuid: "!GPU-a-0"}).snapshot()).moves == []
    hungry = with_filter()
    hungry.see_node(node("a", cards("a", 1), cpu="0"))
    wants = placed("q", "b-0", 40)
    wants["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "1"}
    hungry.lose_pod("q")
    hungry.see_pod(wants)
    assert defrag.plan(hungry.snapshot()).moves == []
    limited = with_filter()
    limited.see_node(
        node("a", cards("a", 1)) | {"metadata": {**node("a", cards("a", 1))["metadata"], "labels": {"pool": "x"}}}
    )
    limited.see_quotas({"data": {"quotas": "[{namespace: default, nodes: {pool: x}, cores: 60}]"}})
    assert defrag.plan(limited.snapshot()).moves == []


def test_the_number_of_moves_is_bounded_and_the_cheapest_cards_come_first() -> None:
    crowd = [placed(f"small{number}", "a-0", 10) for number in range(3)]
    engine = engine_of(
        {"a": 3, "b": 1},
        *crowd,
        placed("one", "a-1", 30),
        placed("host", "b-0", 40, annotations={NAMES.movable: "false"}),
    )
    plan = defrag.plan(engine.snapshot(), 1)
    assert [move.uid for move in plan.moves] == ["one"] and "most moves" in plan.stopped


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_applying_a_plan_gives_what_it_promises(seed: int) -> None:
    dice = random.Random(seed)
    nodes = {f"n{number}": dice.randint(1, 4) for number in range(dice.randint(1, 6))}
    engine = engine_of(nodes)
    number = 0
    for name, count in nodes.items():
        for card in range(count):
            left = 100
            while left >= 10 and dice.random() < 0.6:
                cores = dice.choice([10, 20, 30, 50, 70])
                if cores <= left:
                    kept = {NAMES.movable: "false"} if dice.random() < 0.2 else {}
                    engine.see_pod(placed(f"p{number}", f"{name}-{card}", cores, annotations=kept))
                    left, number = left - cores, number + 1
    snapshot = engine.snapshot()
    plan = defrag.plan(snapshot)
    cluster, pods = defrag.applied(snapshot, plan)
    assert defrag.capacity(cluster, snapshot.typical) == plan.after
    assert plan.after.untouched == plan.before.untouched + len(plan.freed)
    assert len(pods.uids()) == number and len({move.uid for move in plan.moves}) == len(plan.moves)
    assert (cluster.free_cores >= 0).all() and (cluster.free_blocks >= 0).all()
    for move in plan.moves:
        record = pods.get(move.uid)
        assert record is not None and record.node == move.target and record.shape is not None


def test_the_route_and_the_command_print_the_plan(api: FakeApi, start: Any, capsys: pytest.CaptureFixture[str]) -> None:
    api.put("nodes", node("a", cards("a", 2)), node("b", cards("b", 2)))
    api.put("pods", placed("p", "a-0", 50, annotations={NAMES.movable: "false"}), placed("q", "b-1", 40))
    running = start()
    eventually(lambda: running.engine.holds("q"))
    url = f"http://127.0.0.1:{running.address[1]}"
    assert main(["defrag", "--url", url]) == 0
    shown = capsys.readouterr().out
    assert "1 moves free 1 cards" in shown and "default/q: to node a card GPU-a-0 (40 cores, 16 blocks)" in shown
    assert "1 pods on shared cards may not be moved" in shown
    assert main(["defrag", "--url", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["after"]["pods"] == {"1": 3, "2": 1, "4": 0, "8": 0}
    assert running.client.get("/defrag?moves=0").status_code == 400
    assert running.client.get("/scheduler/defrag?moves=x").status_code == 400
    assert api.bindings == [] and running.engine.overbooked() == []
    assert main(["defrag", "--url", "http://127.0.0.1:1"]) == 1
    assert "--url" in capsys.readouterr().err


def test_a_plan_from_a_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = {"domain": NAMES.domain, "policy": "fgd"}
    recorder = Recorder(tmp_path / "r", header, NAMES, most_bytes=2**20)
    recorder.start()
    pods = [placed("p", "a-0", 50, annotations={NAMES.movable: "false"}), placed("q", "b-1", 40)]
    engine_of({"a": 2, "b": 2}, *pods, engine=Engine(NAMES, Policy.FGD, journal=recorder))
    recorder.close()
    assert main(["defrag", "--recording", str(tmp_path / "r")]) == 0
    assert "default/q: to node a" in capsys.readouterr().out
    assert main(["defrag", "--recording", str(tmp_path / "none")]) == 2
