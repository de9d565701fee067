"""Simulations for autoscalers: template nodes judged by what their objects say, nodes that exist by what is booked; nothing stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from scheduler_ext.state.pods import State
from tests.scheduler_ext.conftest import Running
from tests.scheduler_ext.extender_engine import engine_with, free
from tests.scheduler_ext.extender_support import NAMES, FakeApi, cards, codes, container, node, plain_pod, pod

Start = Callable[..., Running]
H100 = "NVIDIA H100 80GB HBM3"


def template(
    name: str,
    count: int = 2,
    blocks: int = 40,
    *,
    model: str | None = None,
    inventory: str | None = None,
    **allocatable: str,
) -> dict[str, Any]:
    """What Cluster Autoscaler makes of an empty node group: a name that no node has, labels, what the group's tags say is allocatable."""
    amounts = {
        "cpu": "64",
        "memory": "256Gi",
        NAMES.core: str(100 * count),
        NAMES.memory: str(blocks * count),
    }
    amounts = {key: value for key, value in (amounts | allocatable).items() if value}
    return {
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/hostname": name} | ({NAMES.model_label: model} if model else {}),
            "annotations": {NAMES.inventory: inventory} if inventory else None,
        },
        "spec": {"providerID": f"aws:///{name}"},
        "status": {
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def why(one: dict[str, Any], *nodes: dict[str, Any], engine: Any = None) -> dict[str, str]:
    asked = engine or engine_with()[0]
    found: dict[str, str] = asked.simulate(
        one, [it["metadata"]["name"] for it in nodes], {it["metadata"]["name"]: it for it in nodes}
    )
    return found


def test_as_cluster_autoscaler_asks_over_http(api: FakeApi, start: Start) -> None:
    """ExtenderArgs with whole nodes, as Go writes it: nodeCacheCapable false, one pod, several groups' templates and a node that exists."""
    api.put("nodes", node("a", cards("a", 1)))
    extender = start()
    extender.filter(pod("first", 80), ["a"])
    before = extender.engine.figures()
    small, large, bare = (
        template("template-node-for-small-1", 1),
        template("template-node-for-large-1", 8),
        plain_node("cpu"),
    )
    sent = [node("a", None), small, large, bare]
    wanted = pod("p", 200, None)
    answer = extender.post(
        "/scheduler/simulate", {"Pod": wanted, "Nodes": {"metadata": {}, "items": sent}, "NodeNames": None}
    )
    assert answer["Nodes"]["items"] == [large] and answer["NodeNames"] is None and answer["Error"] == ""
    assert codes(answer["FailedNodes"])["a"] == "InsufficientWholeCards"
    assert codes(answer["FailedNodes"])[small["metadata"]["name"]] == "InsufficientWholeCards"
    assert answer["FailedNodes"]["cpu"].startswith(f"NoInventory: its allocatable has no {NAMES.core}")
    assert extender.engine.figures() == before and not extender.engine.holds(wanted["metadata"]["uid"])
    assert extender.engine.cache.decisions.of(uid=wanted["metadata"]["uid"]) == []


def plain_node(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": {"allocatable": {"cpu": "8", "memory": "32Gi"}}}


def test_a_pod_without_a_share_passes_untouched(start: Start) -> None:
    sent = [plain_node("x")]
    answer = start(follow=False).post("/scheduler/simulate", {"Pod": plain_pod("p"), "Nodes": {"items": sent}})
    assert answer["Nodes"]["items"] == sent


def test_the_answer_is_the_same_again_and_again_and_so_are_decisions() -> None:
    """Templates are free cards: what was simulated on them before does not count, and a filter goes on as if nobody had asked."""
    engine, _ = engine_with(node("a", cards("a", 1)), node("b", cards("b", 1)))
    other, _ = engine_with(node("a", cards("a", 1)), node("b", cards("b", 1)))
    for number in range(20):
        assert why(pod(f"s{number}", 60), template("t", 1), node("a", None), engine=engine)["t"] == ""
        one = pod(f"p{number}", 15, 2, uid=f"p{number}")
        assert engine.filter(one, ["a", "b"]).chosen == other.filter(one, ["a", "b"]).chosen
    assert free(engine) == free(other)
    assert engine.cache.decisions.of(uid="s1") == []


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        (pod("p", 99, 40), True),
        (pod("p", 99, 41), False),
        (pod("p", 200, None), True),
        (pod("p", 300, None), False),
        (pod("p", containers=[container("a", 60, 1), container("b", 60, 1)]), True),
        (pod("p", containers=[container(name, 60, 1) for name in "abc"]), False),
    ],
    ids=[
        "a share",
        "too much memory",
        "all cards",
        "too many cards",
        "two on two cards",
        "sums alone would do",
    ],
)
def test_a_template_has_the_cards_that_its_allocatable_names(asked: dict[str, Any], fits: bool) -> None:
    assert (why(asked, template("t"))["t"] == "") is fits


def test_a_template_copied_from_a_node_has_that_nodes_cards_free_and_well_and_under_other_uuids() -> None:
    """Of a group that has nodes, Cluster Autoscaler copies one with its annotations."""
    its = cards("a", 2, model=H100)
    engine, _ = engine_with(node("a", its))
    engine.filter(pod("q", 200, None), ["a"])
    text = json.loads(node("a", its)["metadata"]["annotations"][NAMES.inventory])
    text["cards"][0]["healthy"] = False
    copied = template("t", inventory=json.dumps(text))
    exact = {NAMES.card_model: H100}
    assert codes(why(pod("p", 200, None, annotations=exact), copied, node("a", its), engine=engine)) == {
        "t": "", "a": "InsufficientWholeCards",
    }  # fmt: skip
    wants = pod("p", 30, 1, annotations={NAMES.card_uuid: "GPU-a-0"})
    assert codes(why(wants, copied, engine=engine)) == {"t": "CardNotAllowed"}


@pytest.mark.parametrize("known", [True, False])
def test_a_label_stands_for_the_model_whose_label_it_is(known: bool) -> None:
    engine, _ = engine_with(*([node("a", cards("a", 1, model=H100))] if known else []))
    labelled = template("t", model="NVIDIA-H100-80GB-HBM3")
    assert why(pod("p", annotations={NAMES.card_model: H100}), labelled, engine=engine)["t"] == ""
    for models in (f"!{H100}", "A100"):
        asked = pod("p", annotations={NAMES.card_model: models})
        assert codes(why(asked, labelled, engine=engine)) == {"t": "CardNotAllowed"}


@pytest.mark.parametrize(
    ("asked", "made", "message"),
    [
        (pod("p"), template("t", **{NAMES.core: ""}), "NoInventory: its allocatable has no tencent.com/vcuda-core; give the autoscaler's template"),
        (pod("p"), template("t", **{NAMES.core: "50"}), "InvalidInventory: its allocatable 50 tencent.com/vcuda-core and 80"),
        (pod("p"), template("t", **{NAMES.core: "1000000"}), "InvalidInventory"),
        (pod("p"), template("t", **{NAMES.memory: ""}), "InvalidInventory: its allocatable 200 tencent.com/vcuda-core and 0"),
        (pod("p"), template("t", **{NAMES.core: "many"}), "NoInventory"),
        (pod("p"), template("t", inventory="{"), ""),
        (pod("p", annotations={NAMES.card_model: H100}), template("t"), f"CardNotAllowed: it has no label {NAMES.model_label}"),
        (pod("p", 150), template("t"), "InvalidCores: container 'main' asks for 150"),
        (pod("p", 30, 1, containers=[container("main", 30, 1) | {"resources": {"limits": {NAMES.core: "30", NAMES.memory: "1"}, "requests": {"cpu": "65"}}}]), template("t"), ""),
    ],
    ids=["no cores", "half a card", "too many", "no memory", "no number", "broken copy", "no label", "impossible", "cpu is not ours"],
)  # fmt: skip
def test_what_can_not_be_told_from_a_template_has_a_clear_reason(asked: Any, made: Any, message: str) -> None:
    found = why(asked, made)["t"]
    assert found.startswith(message) and bool(found) is bool(message), found


@pytest.mark.parametrize("junk", [None, [], "x", {"allocatable": []}, {"allocatable": {NAMES.core: []}}])
def test_any_json_as_a_template_raises_nothing(junk: Any) -> None:
    for made in (
        {"metadata": {"name": "t"}, "status": junk},
        {"metadata": {"name": "t", "labels": junk, "annotations": junk}},
    ):
        assert "NoInventory" in why(pod("p"), made)["t"]


def test_a_name_without_an_object_is_unknown_unless_the_node_exists() -> None:
    engine, _ = engine_with(node("a", cards("a", 1)))
    found = engine.simulate(pod("p"), ["a", "ghost"], {})
    assert found["a"] == "" and found["ghost"].startswith("UnknownNode: no such node is known, and no object")


def test_no_node_is_added_for_a_namespace_whose_quota_is_full() -> None:
    engine, _ = engine_with(node("a", cards("a", 2)))
    engine.see_quotas(
        {"data": {"quotas": "[{namespace: default, cores: 100, nodes: {pool: train}}, {namespace: default, cards: 0}]"}}
    )
    inside, outside = template("t"), template("u")
    inside["metadata"]["labels"]["pool"] = "train"
    assert why(pod("p", 90), inside, outside, engine=engine) == {"t": "", "u": ""}
    assert why(pod("p", 100, None), outside, engine=engine)["u"].startswith(
        "QuotaExceeded: namespace default may hold 0 cards"
    )
    engine.see_quotas({"data": {"quotas": "[{namespace: default, cores: 100}]"}})
    engine.filter(pod("q", 60), ["a"])
    found = why(pod("p", 50), outside, node("a", None), engine=engine)
    assert {reason.split(":")[0] for reason in found.values()} == {"QuotaExceeded"}


def test_cards_that_are_kept_for_a_pod_count_for_it_and_stay_kept() -> None:
    engine, _ = engine_with(node("a", cards("a", 1)))
    waits = pod("p", 100, None, uid="p")
    engine.filter(waits, ["a"])
    record = engine.evidence(uid="p").record
    assert record is not None
    record.state = State.NOMINATED
    engine.cache.pods.put(record)
    assert why(waits, node("a", None), engine=engine) == {"a": ""}
    assert codes(why(pod("q", 10), node("a", None), engine=engine)) == {"a": "InsufficientCores"}
    assert engine.holds("p")


def test_a_pod_of_many_containers_is_judged_on_many_templates() -> None:
    one = pod("p", containers=[container(f"c{number}", 40, 4) for number in range(8)])
    found = why(one, *(template(f"t{number}", 1 + number % 4) for number in range(300)))
    assert {name for name, reason in found.items() if not reason} == {f"t{number}" for number in range(3, 300, 4)}
