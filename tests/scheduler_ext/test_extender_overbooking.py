"""The engine: whatever happens in whatever order, no card is ever booked beyond what it has, and nothing stays booked for nobody."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scheduler_ext.engine.bindings import Write
from scheduler_ext.protocol.extender_v1 import Victims
from scheduler_ext.state.pods import State
from tests.scheduler_ext.extender_engine import bound, engine_with, free
from tests.scheduler_ext.extender_support import BLOCKS, NAMES, cards, container, node, pod
from vcuda.spec import placement, request
from vcuda.spec.request import Policy

NODES = ("a", "b", "c")


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
        self.engine.cache.policy = policy

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
        one = pod(f"p{self.count}", uid=f"u{self.count}", containers=apps, init=inits, annotations=annotations)
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

    from scheduler_ext.protocol import extender_v1

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
        args = extender_v1.read_args(body)
    except extender_v1.BadInput:
        return
    if request.asks_for_share(args.pod, NAMES):
        extender_v1.filter_answer(args, engine.filter(args.pod, args.names))
        engine.prioritize(args.pod, args.names)
    assert engine.overbooked() == []
