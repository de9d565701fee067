"""The engine: assumptions, binds, deletions and lists in every order, and what it chooses or refuses, with the reason."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_ext.engine.bindings import AlreadyBound, Refused, Write
from scheduler_ext.planning.explain import explanation
from scheduler_ext.protocol.extender_v1 import EXPLAINED_NODES, ExtenderArgs, filter_answer
from scheduler_ext.protocol.reasons import CODE_OF, ExtenderReason
from scheduler_ext.state.cluster import Usage
from scheduler_ext.state.pods import Record, State
from tests.scheduler_ext.extender_engine import bound, engine_with, free
from tests.scheduler_ext.extender_support import NAMES, cards, codes, node, plain_pod, pod
from vcuda.spec import placement
from vcuda.spec.errors import Reason
from vcuda.spec.inventory import Card
from vcuda.spec.request import Policy


def test_an_assumption_without_bind_expires() -> None:
    engine, clock = engine_with(node("a", cards("a", 1)), expiry_seconds=60)
    one = pod("p", uid="u")
    assert engine.filter(one, ["a"]).chosen == "a" and free(engine) == 70
    clock.now += 59
    assert engine.expire() == 0
    clock.now += 2
    assert engine.expire() == 1 and free(engine) == 100
    assert engine.begin_bind("u", "a") is None


def test_a_bound_pod_does_not_expire_and_is_not_moved() -> None:
    engine, clock = engine_with(node("a", cards("a", 1)), node("b", cards("b", 1)))
    one = pod("p", uid="u")
    engine.filter(one, ["a"])
    assert isinstance(engine.begin_bind("u", "a"), Write)
    engine.end_bind("u", State.BOUND)
    clock.now += 10_000
    assert engine.expire() == 0 and free(engine) == 170
    assert engine.filter(one, ["a", "b"]).chosen == "a"
    refused = engine.filter(one, ["b"]).refusal
    assert refused is not None and refused[0] is ExtenderReason.OTHER_NODE
    assert isinstance(engine.begin_bind("u", "a"), AlreadyBound)


def test_a_card_of_which_others_have_had_more_since_is_not_bound() -> None:
    """Whatever chose it: who is bound beyond a card's own is refused by the node, or shares what is promised to one."""
    for others, reason in (((80, 10), Reason.INSUFFICIENT_CORES), ((10, 35), Reason.INSUFFICIENT_MEMORY)):
        engine, _ = engine_with(node("a", cards("a", 1)))
        one = pod("p", 30, 10, uid="u")
        assert engine.filter(one, ["a"]).chosen == "a"
        engine.cache.cluster.book("others", "a", Usage({"GPU-a-0": others}))
        refused = engine.begin_bind("u", "a")
        assert isinstance(refused, Refused) and refused.reason is reason and "GPU-a-0" in refused.message
        engine.cache.cluster.release("others", "a")
        assert free(engine) == 100, "nothing stays booked for it"


def test_who_passes_a_nominated_pod_of_lower_priority_is_bound_over_what_is_kept_for_it() -> None:
    engine, _ = engine_with(node("a", cards("a", 1)))
    engine.cache.pods.put(
        Record("low", "default", "low", "a", Usage({"GPU-a-0": (80, 10)}), State.NOMINATED, engine.cache.clock())
    )
    one = pod("p", 30, 10, uid="u")
    one["spec"]["priority"] = 5
    assert engine.filter(one, ["a"]).chosen == "a" and engine.cache.cluster.free_cores[0, 0] == -10
    assert isinstance(engine.begin_bind("u", "a"), Write)


def test_filtering_again_replaces_the_assumption() -> None:
    engine, _ = engine_with(node("a", cards("a", 1)), node("b", cards("b", 1)))
    one = pod("p", uid="u")
    assert engine.filter(one, ["a"]).chosen == "a"
    assert engine.filter(one, ["b"]).chosen == "b"
    assert free(engine) == 170
    assert engine.filter(one, []).chosen is None
    assert free(engine) == 200


def test_a_write_with_unknown_result_is_never_moved() -> None:
    engine, _ = engine_with(node("a", cards("a", 1)), node("b", cards("b", 1)))
    one = pod("p", uid="u")
    engine.filter(one, ["a"])
    engine.begin_bind("u", "a")
    engine.end_bind("u", State.UNCERTAIN)
    refused = engine.filter(one, ["b"]).refusal
    assert refused is not None and refused[0] is ExtenderReason.BIND_UNCERTAIN
    assert engine.filter(one, ["a", "b"]).chosen == "a"
    assert isinstance(engine.begin_bind("u", "a"), Refused)
    engine.end_bind("u", State.ASSUMED)  # a look at the API server: it had no effect
    assert engine.filter(one, ["b"]).chosen == "b"


@pytest.mark.parametrize("change", ["unhealthy", "replaced", "gone"])
def test_bind_looks_at_the_cards_once_more(change: str) -> None:
    engine, _ = engine_with(node("a", cards("a", 1)))
    engine.filter(pod("p", uid="u"), ["a"])
    if change == "gone":
        engine.lose_node("a")
        reason: object = ExtenderReason.UNKNOWN_NODE
    elif change == "replaced":
        engine.see_node(node("a", cards("other", 1)))
        reason = Reason.UNKNOWN_CARD
    else:
        (card,) = cards("a", 1)
        engine.see_node(node("a", (Card(card.uuid, 0, card.model, card.memory_bytes, healthy=False),)))
        reason = Reason.UNHEALTHY_CARD
    refused = engine.begin_bind("u", "a")
    assert isinstance(refused, Refused) and refused.reason is reason
    assert engine.figures()["assumed"] == 0


def test_a_deletion_seen_before_the_write_returns_is_not_undone() -> None:
    engine, _ = engine_with(node("a", cards("a", 1)))
    engine.filter(pod("p", uid="u"), ["a"])
    engine.begin_bind("u", "a")
    engine.lose_pod("u")
    engine.end_bind("u", State.BOUND)
    assert free(engine) == 100


def test_a_pod_that_the_watch_showed_bound_outlives_a_lost_answer() -> None:
    engine, clock = engine_with(node("a", cards("a", 1)))
    one = pod("p", uid="u")
    engine.filter(one, ["a"])
    write = engine.begin_bind("u", "a")
    assert isinstance(write, Write)
    engine.see_pod(bound(one, write))
    engine.end_bind("u", State.ASSUMED)
    clock.now += 10_000
    assert engine.expire() == 0 and free(engine) == 70
    assert isinstance(engine.begin_bind("u", "a"), AlreadyBound)


@pytest.mark.parametrize("policy", list(Policy))
def test_equal_pods_fill_all_cards_and_no_more(policy: Policy) -> None:
    engine, _ = engine_with(node("a", cards("a", 2)), node("b", cards("b", 1)), policy=policy)
    chosen = [engine.filter(pod(f"p{number}", 50, 20), ["a", "b"]).chosen for number in range(7)]
    assert sorted(filter(None, chosen)) == ["a"] * 4 + ["b"] * 2 and chosen[6] is None
    assert engine.overbooked() == [] and free(engine) == 0


def test_a_list_that_began_before_the_bind_does_not_release_it() -> None:
    engine, clock = engine_with(node("a", cards("a", 1)))
    one = pod("p", uid="u")
    began = clock.now
    clock.now += 1
    engine.filter(one, ["a"])
    engine.keep_pods([], began)
    assert free(engine) == 70
    clock.now += 1
    engine.keep_pods([], clock.now)
    assert free(engine) == 100


def test_bookings_of_a_node_that_is_not_known_yet_count_when_it_appears() -> None:
    engine, _ = engine_with(node("a", cards("a", 1)))
    one = pod("p", uid="u")
    engine.filter(one, ["a"])
    write = engine.begin_bind("u", "a")
    assert isinstance(write, Write)
    other, _ = engine_with()
    other.see_pod(bound(one, write))
    other.see_node(node("a", cards("a", 1)))
    assert free(other) == 70


def test_reasons_name_what_is_missing() -> None:
    sick = tuple(Card(card.uuid, card.minor, card.model, card.memory_bytes, healthy=False) for card in cards("s", 1))
    engine, _ = engine_with(
        node("half", cards("half", 1)), node("small", cards("small", 1, blocks=8)), node("sick", sick),
        node("other", cards("other", 1, model="T4")),
    )  # fmt: skip
    engine.filter(pod("x", 60, 30), ["half"])
    names = ["half", "small", "sick", "other"]

    def codes(one: dict[str, Any]) -> list[int]:
        verdict = engine.filter(one, names)
        assert verdict.chosen is None and verdict.codes is not None
        return list(verdict.codes)

    only = {NAMES.card_model: "A100"}
    assert codes(pod("y", 50, 10, annotations=only)) == [
        CODE_OF[reason]
        for reason in (
            Reason.INSUFFICIENT_CORES,
            Reason.INSUFFICIENT_MEMORY,
            Reason.UNHEALTHY_CARD,
            Reason.CARD_NOT_ALLOWED,
        )
    ]


def test_why_cards_are_unhealthy_is_said_to_kube_scheduler_and_in_an_explanation() -> None:
    """It was `UnhealthyCard` alone: why was on the node's daemon, which a pod's owner can't ask."""
    why = ("Xid 79", "Xid 79", "/dev/nvidia-uvm can't be given")
    sick = {
        name: tuple(replace(card, healthy=False, why=text) for card, text in zip(cards(name, 2), texts, strict=True))
        for name, texts in (("a", why[:2]), ("b", why[1:]), ("c", ("", "")))
    }
    engine, _ = engine_with(*(node(name, its) for name, its in sick.items()))
    one = pod("p", 30, 10, uid="u")
    verdict = engine.filter(one, ["a", "b", "c"])
    answer = json.loads(filter_answer(ExtenderArgs(one, ["a", "b", "c"], None), verdict))
    assert (
        answer["FailedAndUnresolvableNodes"]
        == answer["FailedNodes"]
        == {
            "a": "UnhealthyCard: Xid 79",
            "b": "UnhealthyCard: Xid 79; /dev/nvidia-uvm can't be given",
            "c": "UnhealthyCard: all its cards are: see its events, and nvidia-smi there",
        }
    )
    found = explanation(engine.evidence(uid="u"))
    assert found is not None
    assert found["summary"].endswith("UnhealthyCard on 3; Xid 79 (node a); /dev/nvidia-uvm can't be given (node b)")
    assert found["unhealthy"] == [{"why": why[0], "node": "a"}, {"why": why[2], "node": "b"}]


def test_models_and_uuids_are_included_and_excluded() -> None:
    engine, _ = engine_with(node("a", cards("a", 2)), node("t", cards("t", 2, model="T4")))

    def chosen(annotations: dict[str, str]) -> tuple[str | None, list[str]]:
        one = pod("p", annotations=annotations)
        uid = one["metadata"]["uid"]
        verdict = engine.filter(one, ["a", "t"])
        if verdict.chosen is None:
            return None, []
        write = engine.begin_bind(uid, verdict.chosen)
        assert isinstance(write, Write)
        engine.lose_pod(uid)
        return verdict.chosen, [
            share.uuid for share in placement.decode(write.annotations[NAMES.placement]).containers["main"]
        ]

    assert chosen({NAMES.card_model: "T4"})[0] == "t"
    assert chosen({NAMES.card_model: "!A100"})[0] == "t"
    assert chosen({NAMES.card_uuid: "GPU-t-1"}) == ("t", ["GPU-t-1"])
    assert chosen({NAMES.card_uuid: "!GPU-a-0,!GPU-t-0,!GPU-t-1"}) == ("a", ["GPU-a-1"])
    assert chosen({NAMES.card_model: "H100"})[0] is None


@given(
    st.permutations(["n1", "n2", "n3", "n4"]),
    st.permutations(["n1", "n2", "n3", "n4"]),
    st.sampled_from(list(Policy)),
)
def test_equal_nodes_tie_by_name_whatever_the_order(watched: list[str], asked: list[str], policy: Policy) -> None:
    engine, _ = engine_with(*(node(name, cards(name, 2)) for name in watched), policy=policy)
    assert engine.filter(pod("p"), asked).chosen == "n1"


def test_big_requests_leave_the_unchosen_out_and_choose_the_same() -> None:
    names = [f"n{number:04d}" for number in range(EXPLAINED_NODES + 5)]
    few, _ = engine_with(*(node(name, cards(name, 1)) for name in names))
    verdict = few.filter(pod("p", uid="u"), names)
    assert verdict.chosen == names[0] and verdict.codes is None
    verdict = few.filter(pod("p", uid="v"), [*names[2:], "x", "y"])
    assert verdict.chosen == names[2] and verdict.codes is None
    verdict = few.filter(pod("p", 200, None, uid="w"), names)
    assert verdict.chosen is None and verdict.codes is not None and len(verdict.codes) == len(names)


def test_nodes_without_a_share_count_their_cpu() -> None:
    engine, _ = engine_with(node("a", cards("a", 1)))
    busy = plain_pod("p", node="a")
    busy["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "1500m", "memory": "2Gi"}}
    engine.see_pod(busy)
    assert engine.cache.cluster.free_cpu[0] == 62_500
    engine.see_pod(busy | {"status": {"phase": "Succeeded"}})
    assert engine.cache.cluster.free_cpu[0] == 64_000


def test_every_refusal_of_a_node_names_the_way_out() -> None:
    """The reason stood there alone, and of a pod whose cards nobody knows not even its name."""
    engine, _ = engine_with(node("bare", None), node("none", ()), node("a", cards("a", 1)), node("b", cards("b", 1)))
    engine.see_pod(pod("stranger", 10, 5, node="b"))
    assert engine.filter(pod("p", 90, 36, uid="p"), ["a"]).chosen == "a"
    names = ["ghost", "bare", "none", "a", "b"]
    for asked, code in (
        ((20, 1), "InsufficientCores"),
        ((5, 9), "InsufficientMemory"),
        ((100, None), "InsufficientWholeCards"),
    ):
        one = pod("q", *asked, uid="q")
        answer = json.loads(filter_answer(ExtenderArgs(one, names, None), engine.filter(one, names)))
        said = answer["FailedNodes"]
        assert codes(said) == {
            "ghost": "UnknownNode",
            "bare": "NoInventory",
            "none": "NoCards",
            "a": code,
            "b": "UnplacedPod",
        }
        assert all(": " in text and len(text) < 160 for text in said.values())
        assert said["b"].endswith("pod default/stranger has: end it")
        assert answer["FailedAndUnresolvableNodes"].keys() == {"ghost", "bare", "none"}
