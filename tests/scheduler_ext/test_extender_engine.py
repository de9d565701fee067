"""The engine: whatever happens in whatever order, no card is ever booked beyond what it has, and nothing stays booked for nobody."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scheduler_ext.engine import Engine
from scheduler_ext.ledger import State
from scheduler_ext.outcomes import AlreadyBound, Refused, Write
from scheduler_ext.protocol import EXPLAINED_NODES, Victims
from scheduler_ext.reasons import CODE_OF, ExtenderReason
from tests.scheduler_ext.extender_support import BLOCKS, NAMES, cards, container, node, plain_pod, pod
from vcuda.spec import placement, request
from vcuda.spec.errors import Reason
from vcuda.spec.inventory import Card
from vcuda.spec.request import Policy

NODES = ("a", "b", "c")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def engine_with(*nodes: dict[str, Any], **options: Any) -> tuple[Engine, Clock]:
    clock = Clock()
    engine = Engine(NAMES, clock=clock, wall_clock=lambda: 1, **options)
    for one in nodes:
        engine.see_node(one)
    engine.synced("nodes")
    engine.synced("pods")
    return engine, clock


def bound(one: dict[str, Any], write: Write) -> dict[str, Any]:
    """The pod as the API server shows it after our write."""
    metadata = one["metadata"] | {
        "annotations": one["metadata"].get("annotations", {}) | dict(write.annotations)
    }
    return one | {"metadata": metadata, "spec": one["spec"] | {"nodeName": write.node}}


def free(engine: Engine) -> float:
    return engine.figures()["free_cores"]


class Cluster(RuleBasedStateMachine):
    """Random filters, binds with every outcome, deletions, relists, expiry and node changes against a model."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = {"a": (3, BLOCKS), "b": (1, 16), "c": (2, BLOCKS)}
        self.engine, self.clock = engine_with(*(node(name, cards(name, *self.sizes[name])) for name in NODES))
        self.pods: dict[str, dict[str, Any]] = {}
        self.server: dict[str, dict[str, Any]] = {}  # what the API server holds, bound
        self.count = 0

    @initialize(policy=st.sampled_from(list(Policy)))
    def choose_policy(self, policy: Policy) -> None:
        self.engine._policy = policy

    shares = st.tuples(st.sampled_from([5, 10, 30, 50, 70, 99]), st.integers(1, BLOCKS))
    wholes = st.tuples(st.sampled_from([100, 200, 300]), st.none())
    kinds = st.sampled_from(["app", "app", "init", "sidecar"])

    @rule(
        wishes=st.lists(st.tuples(kinds, st.one_of(shares, wholes)), min_size=1, max_size=4),
        names=st.sets(st.sampled_from(NODES)),
        gang=st.sampled_from([None, None, "g/2", "h/3"]),
        shown_first=st.booleans(),
    )
    def arrive(
        self,
        wishes: list[tuple[str, tuple[int, int | None]]],
        names: set[str],
        gang: str | None,
        shown_first: bool,
    ) -> None:
        self.count += 1
        apps, inits = [], []
        for position, (kind, (cores, blocks)) in enumerate(wishes):
            fields = {"restartPolicy": "Always"} if kind == "sidecar" else {}
            (apps if kind == "app" else inits).append(container(f"c{position}", cores, blocks, **fields))
        annotations = {NAMES.gang: gang} if gang else {}
        one = pod(
            f"p{self.count}", uid=f"u{self.count}", containers=apps, init=inits, annotations=annotations
        )
        if shown_first:
            self.engine.see_pod(one)
        self.pods[one["metadata"]["uid"]] = one
        self.engine.filter(one, sorted(names))

    def some(self, dice: random.Random) -> dict[str, Any] | None:
        return dice.choice(list(self.pods.values())) if self.pods else None

    @rule(dice=st.randoms(use_true_random=False), names=st.sets(st.sampled_from(NODES)))
    def filter_again(self, dice: random.Random, names: set[str]) -> None:
        one = self.some(dice)
        if one is not None:
            self.engine.filter(one, sorted(names))

    @rule(
        dice=st.randoms(use_true_random=False),
        node_name=st.sampled_from(NODES),
        outcome=st.sampled_from([State.BOUND, State.UNCERTAIN, State.ASSUMED, None]),
        took_effect=st.booleans(),
    )
    def bind(self, dice: random.Random, node_name: str, outcome: State | None, took_effect: bool) -> None:
        one = self.some(dice)
        if one is None:
            return
        uid = one["metadata"]["uid"]
        begun = self.engine.begin_bind(uid, node_name)
        if not isinstance(begun, Write):
            return
        assert uid not in self.server, "a pod was written twice"
        if outcome is State.BOUND or (outcome is State.UNCERTAIN and took_effect):
            self.server[uid] = bound(one, begun)
        self.engine.end_bind(uid, outcome)

    @rule(dice=st.randoms(use_true_random=False))
    def watch_shows(self, dice: random.Random) -> None:
        if self.server:
            self.engine.see_pod(dice.choice(list(self.server.values())))

    @rule(dice=st.randoms(use_true_random=False), how=st.sampled_from(["delete", "finish"]))
    def end(self, dice: random.Random, how: str) -> None:
        one = self.some(dice)
        if one is None:
            return
        uid = one["metadata"]["uid"]
        del self.pods[uid]
        shown = self.server.pop(uid, one)
        if how == "finish":
            self.engine.see_pod(shown | {"status": {"phase": "Failed"}})
        else:
            self.engine.lose_pod(uid)

    @rule()
    def list_again(self) -> None:
        for record in self.engine.uncertain():
            if record.uid not in self.server:
                self.engine.end_bind(record.uid, State.ASSUMED)
        for shown in self.server.values():
            self.engine.see_pod(shown)
        self.clock.now += 1
        self.engine.keep_pods(set(self.server) | set(self.pods), self.clock.now)

    @rule()
    def wait(self) -> None:
        self.clock.now += 400
        self.engine.expire()
        assert self.engine.figures()["reserved"] == 0, "no gang keeps places beyond its deadline"

    @rule(dice=st.randoms(use_true_random=False), node_name=st.sampled_from(NODES), nominate=st.booleans())
    def preempt(self, dice: random.Random, node_name: str, nominate: bool) -> None:
        one = self.some(dice)
        if one is None or one["metadata"]["uid"] in self.server:
            return
        important = one | {"spec": one["spec"] | {"priority": 5}}
        here = [uid for uid, shown in self.server.items() if shown["spec"]["nodeName"] == node_name]
        proposed = Victims(tuple(here))
        for victim in self.engine.preempt(important, {node_name: proposed}).get(node_name, Victims(())).uids:
            assert victim in here, "only pods that are bound there may be evicted"
            del self.server[victim], self.pods[victim]
            self.engine.lose_pod(victim)
        if nominate:
            self.engine.see_pod(important | {"status": {"nominatedNodeName": node_name}})

    @rule(name=st.sampled_from(NODES), healthy=st.booleans())
    def node_comes_and_goes(self, name: str, healthy: bool) -> None:
        count, blocks = self.sizes[name]
        if not healthy:
            self.engine.lose_node(name)
        self.engine.see_node(node(name, cards(name, count, blocks)))

    @invariant()
    def no_card_is_overbooked(self) -> None:
        assert self.engine.overbooked() == []
        # The truth, summed independently from what the API server holds.
        total: dict[str, list[int]] = {}
        for shown in self.server.values():
            asked = request.parse_pod(shown, NAMES)
            chosen = placement.decode(shown["metadata"]["annotations"][NAMES.placement])
            placement.check(chosen, asked)
            for uuid, (cores, blocks) in placement.peak_use(asked, chosen).items():
                assert uuid.startswith(f"GPU-{shown['spec']['nodeName']}-")
                sums = total.setdefault(uuid, [0, 0])
                sums[0] += cores
                sums[1] += blocks
        for uuid, (cores, blocks) in total.items():
            assert cores <= 100 and blocks <= self.sizes[uuid.split("-")[1]][1], uuid

    def teardown(self) -> None:
        for uid in [*self.pods, *self.server]:
            self.engine.lose_pod(uid)
        assert free(self.engine) == 600, "something stays booked for nobody"


TestNeverOverbooked = Cluster.TestCase
TestNeverOverbooked.settings = settings(stateful_step_count=30, deadline=None)


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
    sick = tuple(
        Card(card.uuid, card.minor, card.model, card.memory_bytes, healthy=False) for card in cards("s", 1)
    )
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


def test_models_and_uuids_are_included_and_excluded() -> None:
    engine, _ = engine_with(node("a", cards("a", 2)), node("t", cards("t", 2, model="T4")))

    def chosen(annotations: dict[str, str]) -> tuple[str | None, list[str]]:
        one = pod("p", uid="u", annotations=annotations)
        verdict = engine.filter(one, ["a", "t"])
        if verdict.chosen is None:
            return None, []
        write = engine.begin_bind("u", verdict.chosen)
        assert isinstance(write, Write)
        engine.lose_pod("u")
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
def test_equal_nodes_tie_by_name_whatever_the_order(
    watched: list[str], asked: list[str], policy: Policy
) -> None:
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
    assert engine._cluster.free_cpu[0] == 62_500
    engine.see_pod(busy | {"status": {"phase": "Succeeded"}})
    assert engine._cluster.free_cpu[0] == 64_000


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([
        "metadata", "uid", "annotations", "spec", "containers", "initContainers", "resources", "limits", "requests", "name",
        "restartPolicy", "status", "phase", "nodeName", "cpu", NAMES.core, NAMES.memory, NAMES.placement, NAMES.card_model,
        NAMES.inventory, "allocatable"]), inner, max_size=5),
    max_leaves=30,
)  # fmt: skip


@given(json_values, json_values)
def test_any_json_as_pod_or_node_raises_nothing_unforeseen(one: Any, two: Any) -> None:
    import orjson

    from scheduler_ext import protocol

    engine, _ = engine_with(node("a", cards("a", 1)))
    containers = one if isinstance(one, list) else [one]
    try:
        body = orjson.dumps(
            {
                "Pod": {"metadata": {"uid": "u", "annotations": two}, "spec": {"containers": containers}},
                "NodeNames": ["a"],
            }
        )
    except TypeError:
        return  # an integer beyond 64 bits is no JSON for orjson
    try:
        args = protocol.read_args(body)
    except protocol.BadInput:
        return
    if request.asks_for_share(args.pod, NAMES):
        protocol.filter_answer(args, engine.filter(args.pod, args.names))
        engine.prioritize(args.pod, args.names)
    assert engine.overbooked() == []
