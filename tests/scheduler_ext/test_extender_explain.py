"""Explain: why a pod waits, what would let it in, where it is; over HTTP, by the command, from the engine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scheduler_ext import main
from scheduler_ext.engine.bindings import Write
from scheduler_ext.engine.core import Engine
from scheduler_ext.planning import explain
from scheduler_ext.state import decisions
from tests.scheduler_ext.extender_support import NAMES, FakeApi, cards, container, node, pod

Start = Callable[..., Any]


def engine_with(*nodes: dict[str, Any]) -> Engine:
    engine = Engine(NAMES)
    for one in nodes:
        engine.see_node(one)
    engine.synced("nodes")
    engine.synced("pods")
    return engine


def run(engine: Engine, one: dict[str, Any], name: str) -> None:
    """Place a pod on a node, and let the watch show it there."""
    assert engine.filter(one, [name]).chosen == name
    write = engine.begin_bind(one["metadata"]["uid"], name)
    assert isinstance(write, Write)
    metadata = one["metadata"] | {"annotations": dict(write.annotations)}
    engine.see_pod(one | {"metadata": metadata, "spec": one["spec"] | {"nodeName": name}})


def explained(engine: Engine, one: dict[str, Any]) -> dict[str, Any]:
    found = explain.explanation(engine.evidence(uid=one["metadata"]["uid"]))
    assert found is not None
    return found


def texts(engine: Engine, one: dict[str, Any]) -> list[str]:
    assert engine.filter(one, engine_nodes(engine)).chosen is None
    return [way["text"] for way in explained(engine, one)["would_fit"]]


def engine_nodes(engine: Engine) -> list[str]:
    return sorted(engine.cache.cluster.index)


def test_the_least_reduction_is_named_and_is_exact() -> None:
    engine = engine_with(node("a", cards("a", 1)), node("b", cards("b", 1)))
    run(engine, pod("on-a", 10, 34), "a")
    run(engine, pod("on-b", 10, 33), "b")
    ways = texts(engine, pod("p", 40, 10))
    assert ways[0] == "fits on node b if container main asks 3 blocks less"
    assert engine.filter(pod("q", 40, 8), ["a", "b"]).chosen is None
    assert engine.filter(pod("r", 40, 7), ["a", "b"]).chosen == "b"


def test_cores_alone_both_together_and_cards() -> None:
    engine = engine_with(node("a", cards("a", 1)))
    run(engine, pod("x", 60, 10), "a")
    assert "fits on node a if container main asks 1 core less" in texts(engine, pod("p", 41, 10))
    # Neither alone suffices: 31 blocks are too many at any cores, 50 cores at any blocks.
    both = texts(engine, pod("q", 50, 40))
    assert both[0] == "fits on node a if container main asks 10 blocks and 10 cores less"
    engine.see_node(node("w", cards("w", 3)))
    whole = texts(engine, pod("r", 500, None))
    assert whole == ["fits on node w if container main asks 2 cards less"]


def test_of_several_containers_the_one_that_must_change_is_named() -> None:
    engine = engine_with(node("a", cards("a", 1)))
    two = pod("p", containers=[container("small", 5, 5), container("large", 50, 37)])
    assert texts(engine, two) == [
        "fits on node a if container large asks 2 blocks less", "fits on node a if container small asks 2 blocks less",
    ]  # fmt: skip


def test_the_smallest_pod_whose_end_suffices_is_named() -> None:
    engine = engine_with(node("a", cards("a", 1)), node("b", cards("b", 1)))
    run(engine, pod("large", 60, 10), "a")
    run(engine, pod("small", 40, 10), "a")
    run(engine, pod("all", 100, None), "b")
    ways = texts(engine, pod("p", 35, 5))
    assert ways[-3:] == [
        "fits on node a when pod default/small ends", "fits on node a when pod default/large ends",
        "fits on node b when pod default/all ends",
    ]  # fmt: skip


def test_where_no_single_end_suffices_the_fewest_pods_are_named() -> None:
    engine = engine_with(node("a", cards("a", 3)), node("b", cards("b", 2)))
    for name, where in (("x0", "a"), ("x1", "a"), ("x2", "a"), ("y0", "b"), ("y1", "b")):
        run(engine, pod(name, 90, 5), where)
    run(engine, pod("tiny", 5, 5), "b")
    # On b, tiny would have to go too, as it shares a card; on a, two of three suffice.
    ends = [text for text in texts(engine, pod("p", 200, None)) if "end" in text]
    assert len(ends) == 1 and re.fullmatch(r"fits on node a when pods default/x., default/x. end", ends[0])


def test_only_nodes_that_kube_scheduler_offered_are_spoken_of() -> None:
    engine = engine_with(node("full", cards("full", 1)), node("tainted", cards("tainted", 1)))
    run(engine, pod("x", 95, 5), "full")
    waiting = pod("p", 10, 5)
    assert engine.filter(waiting, ["full", "unknown"]).chosen is None
    found = explained(engine, waiting)
    assert found["summary"] == "0 of 1 nodes that kube-scheduler offered fit: InsufficientCores on 1"
    assert {way["node"] for way in found["would_fit"]} == {"full"}
    assert found["decisions"][0]["reasons"] == {"UnknownNode": 1, "InsufficientCores": 1}
    # The row of a node that is gone goes to a new one, which kube-scheduler has not offered.
    engine.lose_node("full")
    engine.see_node(node("new", cards("new", 1)))
    assert "new" not in json.dumps(explained(engine, waiting))


def test_a_change_since_the_decision_is_seen() -> None:
    engine = engine_with(node("a", cards("a", 1)))
    other, waiting = pod("x", 95, 5), pod("p", 10, 5)
    run(engine, other, "a")
    assert engine.filter(waiting, ["a"]).chosen is None
    engine.lose_pod(other["metadata"]["uid"])
    assert explained(engine, waiting)["summary"] == "fits now on node a; kube-scheduler will ask again"


def test_an_unplaced_pod_is_a_way_out_too() -> None:
    engine = engine_with(node("a", cards("a", 1)))
    engine.see_pod(pod("stranger", 10, 5, node="a"))
    assert texts(engine, pod("p", 10, 5)) == ["fits on node a when pod default/stranger ends"]


def test_what_can_never_fit_has_no_way_out() -> None:
    engine = engine_with(node("a", cards("a", 1)), node("none", None))
    waiting = pod("p", 10, 5, annotations={NAMES.card_model: "H100"})
    assert texts(engine, waiting) == []
    assert explained(engine, waiting)["reasons_now"] == {"NoInventory": 1, "CardNotAllowed": 1}
    absurd = pod("absurd", 150, 5)
    engine.filter(absurd, ["a"])
    found = explained(engine, absurd)
    assert found["state"] == "refused" and found["decisions"][0]["reason"] == "InvalidCores"


def test_decisions_keep_inputs_and_results_newest_first() -> None:
    engine = engine_with(node("a", cards("a", 1)))
    one = pod("p", 30, 10)
    engine.filter(one, ["nowhere"])
    engine.filter(one, ["a"])
    found = explained(engine, one)
    assert found["state"] == "assumed" and found["cards"] == {"GPU-a-0": {"cores": 30, "memory_blocks": 10}}
    newest, oldest = found["decisions"]
    assert newest["node"] == "a" and oldest["node"] is None and oldest["reasons"] == {"UnknownNode": 1}
    assert newest["asked"] == [{"container": "main", "kind": "app", "cores": 30, "memory_blocks": 10}]
    assert newest["policy"] == "fgd" and newest["candidates"] == 1
    engine.lose_pod(one["metadata"]["uid"])
    assert explained(engine, one)["state"] == "released"


def test_the_ring_is_bounded() -> None:
    ring = decisions.Decisions(3)
    for number in range(5):
        ring.add(decisions.Decision(str(number), "n", f"p{number}", 0, 0, 1))
    assert ring.of(namespace="n", name="p1") == [] and len(ring.of(namespace="n", name="p2")) == 1
    bits = decisions.packed(np.array([3, -1, 17]), 20)
    assert decisions.unpacked(bits).tolist() == [3, 17] and bits.nbytes == 3


def test_over_http_and_by_the_command(api: FakeApi, start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    api.put("nodes", node("a", cards("a", 1)))
    extender = start()
    first, waiting = pod("first", 70, 10), pod("waiting", 40, 10)
    assert extender.filter(first, ["a"])["NodeNames"] == ["a"]
    assert extender.filter(waiting, ["a"])["NodeNames"] == []
    by_name = extender.client.get("/scheduler/explain/default/waiting").json()
    by_uid = extender.client.get(f"/explain/{waiting['metadata']['uid']}").json()
    assert by_name == by_uid and by_name["pod"]["name"] == "waiting"
    unknown = extender.client.get("/scheduler/explain/default/nobody")
    assert unknown.status_code == 404 and "default/nobody" in unknown.json()["Error"]
    url = f"http://127.0.0.1:{extender.address[1]}"
    assert main.main(["explain", "waiting", "--url", url]) == 0
    printed = capsys.readouterr().out
    assert "fits on node a if container main asks 10 cores less" in printed
    assert "fits on node a when pod default/first ends" in printed
    assert main.main(["explain", "first", "-n", "default", "--url", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["node"] == "a"
    assert main.main(["explain", "nobody", "--url", url]) == 1
    assert main.main(["explain", "nobody", "--url", "http://127.0.0.1:9"]) == 1
    assert "--url" in capsys.readouterr().err


def test_a_card_that_others_overbooked_is_counted_as_it_is() -> None:
    engine = engine_with(node("a", cards("a", 1)))
    big = pod("big", 90, 30)
    run(engine, big, "a")
    engine.see_node(node("a", cards("a", 1, blocks=20)))
    # 10 blocks are overbooked: when the pod ends there are 20 blocks, not 30.
    assert texts(engine, pod("p", 20, 15))[-1] == "fits on node a when pod default/big ends"
    assert all("ends" not in text for text in texts(engine, pod("q", 20, 25)))
