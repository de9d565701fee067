"""Quotas: what a namespace may hold in all, per model and per node pool; live from a ConfigMap; malformed ones."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scheduler_ext.engine.bindings import Write
from scheduler_ext.engine.core import Engine
from scheduler_ext.planning import explain
from scheduler_ext.protocol.extender_v1 import EXPLAINED_NODES
from scheduler_ext.scoring import placing, quotas
from scheduler_ext.state.pods import Source
from scheduler_ext.sync import feed
from scheduler_ext.sync.api import ApiServer
from tests.scheduler_ext.extender_support import NAMES, FakeApi, cards, container, eventually, node, pod
from tests.scheduler_ext.test_extender_copies import SpyingLock
from vcuda.spec import bookings, inventory

Start = Callable[..., Any]


def config(text: str) -> dict[str, Any]:
    return {"metadata": {"name": "quotas", "namespace": "default"}, "data": {"quotas": text}}


def engine_with(text: str, *nodes: dict[str, Any]) -> Engine:
    engine = Engine(NAMES)
    for one in nodes:
        engine.see_node(one)
    for kind in ("nodes", "pods"):
        engine.synced(kind)
    engine.see_quotas(config(text))
    return engine


def labelled(name: str, pool: str, *its: Any, **fields: Any) -> dict[str, Any]:
    one = node(name, cards(name, *its, **fields))
    one["metadata"]["labels"] = {"pool": pool}
    return one


@pytest.mark.parametrize(
    ("limit", "first", "second", "third"),
    [
        ("cores: 100", (60, 1), (41, 1), (40, 1)),
        ("memoryBlocks: 30", (10, 20), (10, 11), (10, 10)),
        ("cards: 2", (100, None), (200, None), (100, None)),
    ],
)
def test_a_limit_is_exact_and_counts_what_is_assumed(limit: str, first: Any, second: Any, third: Any) -> None:
    engine = engine_with(f"[{{namespace: default, {limit}}}]", node("a", cards("a", 4)))
    held = pod("first", *first)
    assert engine.filter(held, ["a"]).chosen == "a"
    refused = pod("second", *second)
    verdict = engine.filter(refused, ["a"])
    assert verdict.chosen is None and verdict.quota.startswith("namespace default may hold")
    assert engine.filter(pod("third", *third), ["a"]).chosen == "a"
    elsewhere = pod("elsewhere", *first)
    elsewhere["metadata"]["namespace"] = "other"
    assert engine.filter(elsewhere, ["a"]).chosen == "a"
    engine.lose_pod(held["metadata"]["uid"])
    assert engine.filter(pod("again", *first), ["a"]).chosen == "a"
    found = explain.explanation(engine.evidence(uid=refused["metadata"]["uid"]))
    assert found is not None and found["decisions"][0]["reasons"] == {"QuotaExceeded": 1}


def test_models_and_pools_leave_other_cards_open() -> None:
    nodes = (
        labelled("a", "gold", 3, model="A100"),
        labelled("b", "gold", 2, model="L40S"),
        labelled("c", "iron", 2),
    )
    engine = engine_with("[{namespace: default, models: [A100], nodes: {pool: gold}, cards: 1}]", *nodes)
    assert engine.filter(pod("other-model", 100, None), ["b"]).chosen == "b"
    assert engine.filter(pod("other-pool", 100, None), ["c"]).chosen == "c"
    assert engine.filter(pod("p", 100, None), ["a"]).chosen == "a"
    closed = engine.filter(pod("q", 100, None), ["a"])
    assert closed.quota == (
        "namespace default on models A100 and nodes with pool=gold may hold 1 cards, holds 1, and the pod would add 1"
    )
    assert engine.filter(pod("r", 100, None), ["a", "b"]).chosen == "b"
    assert engine.filter(pod("s", 100, None), ["a", "c"]).chosen == "c"
    assert engine.filter(pod("share", 10, 1), ["a"]).chosen == "a"  # takes no whole card
    engine.see_node(labelled("a", "iron", 3, model="A100"))
    assert engine.filter(pod("t", 100, None), ["c", "a"]).chosen == "a"  # a is in no limited pool any more


def test_the_peak_over_phases_counts_and_whole_cards_count_their_memory() -> None:
    engine = engine_with("[{namespace: default, memoryBlocks: 40, cores: 100}]", node("a", cards("a", 2)))
    both = pod("p", containers=[container("main", 50, 20)], init=[container("prepare", 100, None)])
    # The init container has the card before the app container does: one card in all.
    assert engine.filter(both, ["a"]).chosen == "a"
    engine.lose_pod(both["metadata"]["uid"])
    engine.see_quotas(config("[{namespace: default, memoryBlocks: 39}]"))
    assert engine.filter(pod("q", 100, None), ["a"]).chosen is None


def test_the_peaks_are_those_that_are_booked() -> None:
    engine = engine_with("[]", node("a", cards("a", 4)))
    one = pod(
        "p", containers=[container("x", 30, 10), container("y", 200, None)],
        init=[container("s", 20, 5, restartPolicy="Always"), container("i", 100, None)],
    )  # fmt: skip
    assert engine.filter(one, ["a"]).chosen == "a"
    booked = engine.cache.pods._records[one["metadata"]["uid"]].usage.cards
    engine.lose_pod(one["metadata"]["uid"])
    table = next(iter(engine.cache.scores._tables.values()))
    table.refresh(engine.cache.cluster, engine.cache.workload.typical(engine.cache.cluster, 0.0))
    cores, blocks = placing.peaks(table.shape, engine.cache.cluster.total_blocks[:1], table.picks[:1])
    assert (cores.sum(), blocks.sum()) == tuple(map(sum, zip(*booked.values(), strict=True)))


def test_a_list_without_the_config_map_ends_the_quotas() -> None:
    engine = engine_with("[{namespace: default, cores: 10}]", node("a", cards("a", 1)))
    how = feed.quota_handlers(engine, "default", "quotas")
    how.listed({"quotas"}, 0.0)
    assert engine.filter(pod("p", 11, 1), ["a"]).chosen is None
    how.listed(set(), 0.0)
    assert engine.filter(pod("p", 11, 1), ["a"]).chosen == "a"


def summed_anew(engine: Engine) -> dict[tuple[str, int], list[int]]:
    book, cache = engine.cache.quotas, engine.cache
    return {
        (namespace, at): [
            sum(amounts)
            for amounts in zip(
                *(
                    quotas._amounts(book._counted(quota, one.node, one.usage.cards))
                    for one in cache.pods.within(namespace)
                ),
                strict=True,
            )
        ]
        for namespace, its in book._quotas.items()
        for at, quota in enumerate(its)
    }


class Counted:
    """Counts the bookings that are looked at while the engine's lock is held, the most in one hold; `between` is called after each."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, between: Callable[[], None]) -> None:
        self.most = self.now = 0
        self._between = between
        vars(engine)["_lock"] = SpyingLock(self._after)
        usual = quotas.Quotas._counted

        def counted(*given: Any) -> Any:
            self.now += 1
            return usual(*given)

        monkeypatch.setattr(quotas.Quotas, "_counted", counted)

    def _after(self) -> None:
        self.most, self.now = max(self.most, self.now), 0
        self._between()
        self.now = 0


def test_a_node_that_changes_makes_nobody_sum_a_namespace_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any label of any node that changed cleared all sums: with 40,000 pods the next filter took 40 ms longer."""
    text = "[{namespace: default, models: [A100], cores: 9000}, {namespace: default, nodes: {pool: gold}, cores: 9000}]"
    engine = engine_with(text, *(labelled(name, "gold", 8, model="A100") for name in "abcdefghij"))
    dice = random.Random(7)
    for name in "abcdefghij" * 20:
        engine.filter(pod("p", 10, 1), [name])
    counted = Counted(engine, monkeypatch, lambda: None)
    for _ in range(200):
        name = dice.choice("abc")
        what = dice.randrange(4)
        if what == 0:
            engine.lose_node(name)
        elif what == 1:
            engine.filter(pod("p", 10, 1), [name])
        else:
            count, model = dice.choice((1, 2)), dice.choice(("A100", "L4"))
            engine.see_node(labelled(name, dice.choice(("gold", "iron")), count, model=model))
        assert counted.most < 200, "each of a node's 20 before and after, against two quotas; not 200 against both"
        assert {key: sums.tolist() for key, sums in engine.cache.quotas._sums.items()} == summed_anew(engine)
        counted.now = 0
    assert counted.most > 20


def test_other_quotas_are_counted_a_few_pods_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first filter after a change of the ConfigMap summed all pods of the namespace; those that come and go meanwhile count, too."""
    names = [f"n{at}" for at in range(40)]
    engine = engine_with("[{namespace: default, cores: 100000}]", *(labelled(name, "gold", 8) for name in names))
    pods = [pod(f"p{at}", 5, 1, uid=f"p{at}") for at in range(800)]
    for at, one in enumerate(pods):
        assert engine.filter(one, [names[at % 40]]).chosen
    turns = 0

    def meanwhile() -> None:
        nonlocal turns
        turns += 1
        if turns in (3, 5):
            engine.lose_pod(f"p{turns}")
            assert engine.filter(pod("new", 100, None), [names[turns]]).chosen
            engine.lose_pod("p39")
            engine.see_node(labelled(names[turns - 1], "iron", 8))
            engine.see_node(labelled(f"late{turns}", "gold", 1))
            assert engine.filter(pod("late", 100, None), [f"late{turns}"]).chosen

    counted = Counted(engine, monkeypatch, meanwhile)
    engine.see_quotas(config("[{namespace: default, nodes: {pool: gold}, cores: 4000}]"))
    assert turns > 6 and counted.most <= 128 + 2 * 20
    (sums,) = engine.cache.quotas._sums.values()
    assert sums.tolist() == summed_anew(engine)["default", 0]
    refused = engine.filter(pod("q", 600, None), names[:1])
    assert refused.chosen is None and "may hold 4000 cores" in refused.quota


@pytest.mark.parametrize("seed", range(8))
def test_whatever_managers_say_a_quota_is_charged_each_of_their_cards_once(seed: int) -> None:
    """Reports come and lie, pods and nodes come and go, cards, labels and quotas change: the sums are those of now."""
    dice, uids = random.Random(seed), [f"p{at}" for at in range(8)]
    engine = engine_with("[]", node("a", cards("a", 2)), node("b", cards("b", 2)))
    has = {"a": cards("a", 2), "b": cards("b", 2)}  # or had last
    texts = (
        "[{namespace: default, cores: 9000}]",
        "[{namespace: default, models: [L4], cores: 9000}, {namespace: default, nodes: {pool: gold}, cards: 90}]",
    )
    for _ in range(150):
        at, uid, what = dice.choice("ab"), dice.choice(uids), dice.randrange(8)
        if what == 0:
            engine.lose_node(at)
        elif what == 1:
            engine.lose_pod(uid)
        elif what == 2:
            engine.see_quotas(config(dice.choice(texts)))
        elif what <= 4 and not engine.holds(uid):
            share = f'{{"version":1,"containers":{{"main":[["GPU-{at}-0",30,10]]}}}}'
            engine.see_pod(pod(uid, 30, 10, uid=uid, node=at, annotations={NAMES.placement: share}))
        elif what >= 5:
            one = labelled(at, dice.choice(("gold", "iron")), dice.randrange(3), model=dice.choice(("L4", "A100")))
            lie = {
                each: {f"GPU-{dice.choice('ab')}-{dice.randrange(2)}": (dice.choice((30, 100)), dice.choice((10, 40)))}
                for each in dice.sample(uids, 5)
            }
            one["metadata"]["annotations"][NAMES.bookings] = bookings.encode(lie, {})
            engine.see_node(one)
            has[at] = inventory.decode(one["metadata"]["annotations"][NAMES.inventory]) or has[at]
        book = engine.cache.quotas
        for (namespace, position), sums in book._sums.items():
            quota, theirs, told = book._quotas[namespace][position], np.zeros(3, np.int64), Counter[str]()
            for record in engine.cache.pods.within(namespace):
                use = book._counted(quota, record.node, record.usage.cards)
                if record.source is Source.MANAGER:
                    for uuid, (cores, blocks) in use.items():
                        told += Counter({f"{record.node} {uuid} cores": cores, f"{record.node} {uuid} blocks": blocks})
                        told[f"{record.node} {uuid} whole"] += cores >= 100
                else:
                    theirs += quotas._amounts(use)
            for name, its in has.items():
                for card in its:
                    most = zip(("cores", "blocks", "whole"), (100, card.memory_blocks, 1), strict=True)
                    theirs += [min(told[f"{name} {card.uuid} {what}"], limit) for what, limit in most]
            assert sums.tolist() == theirs.tolist()


def test_large_requests_are_limited_too() -> None:
    engine = engine_with("[{namespace: default, cores: 10}]", node("a", cards("a", 1)))
    many = ["a", *(f"n{number}" for number in range(EXPLAINED_NODES))]
    assert engine.filter(pod("p", 10, 1), many).chosen == "a"
    assert engine.filter(pod("q", 1, 1), many).chosen is None


def test_live_from_a_config_map(api: FakeApi, start: Start, tmp_path: Any) -> None:
    api.put("nodes", node("a", cards("a", 1)))
    api.put("configmaps", config("[{namespace: default"))
    extender = start(follow=False)
    server = ApiServer.connect(api.kubeconfig(tmp_path), timeout_seconds=3)
    extender.engine.expect_quotas()
    how = feed.quota_handlers(extender.engine, "default", "quotas")
    extender.watchers.append(feed.informer(server, extender.engine, how, longest_wait=0.3))
    extender.follow(wait=False)
    metric = 'vcuda_extender_watch_errors_total{resource="configmaps"}'
    eventually(lambda: metric in extender.client.get("/metrics").text)
    eventually(lambda: str(extender.engine.not_ready()).startswith("the first list of quotas "))
    api.put("configmaps", config("[{namespace: default, cores: 50}]"))
    eventually(lambda: extender.engine.not_ready() is None)
    refused = extender.filter(pod("p", 60, 1), ["a"])
    text = "QuotaExceeded: namespace default may hold 50 cores, holds 0, and the pod would add 60"
    assert refused["FailedNodes"] == refused["FailedAndUnresolvableNodes"] == {"a": text}
    api.put("configmaps", config("nonsense"))  # the last valid ones stay
    api.put("configmaps", config("[{namespace: default, cores: 60}]"))
    eventually(lambda: extender.filter(pod("q", 60, 1), ["a"])["NodeNames"] == ["a"])
    assert extender.filter(pod("r", 10, 1), ["a"])["NodeNames"] == []
    with api.deaf():
        api.remove("configmaps", "default/quotas")
    eventually(lambda: extender.filter(pod("r", 10, 1), ["a"])["NodeNames"] == ["a"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("}", "not YAML"),
        ("[" * 1000, "nested too deep"),
        ("{}", "not a list"),
        ("", "quotas lists nothing"),
        ("# - {namespace: default, cores: 10}", "lists nothing"),
        ("[1]", "no namespace"),
        ("[{namespace: x}]", "limits nothing"),
        ("[{namespace: x, cores: -1}]", "cores is -1"),
        ("[{namespace: x, cards: true}]", "cards is True"),
        ("[{namespace: x, cards: 1, gpus: 2}]", "unknown fields: gpus"),
        ("[{namespace: x, cards: 1, models: A100}]", "not a list of card models"),
        ("[{namespace: x, cards: 1, nodes: {pool: 1}}]", "not a map of labels"),
        ("- {namespace: default, cores: 0200}", "line 1 of quotas has '0200', which YAML reads as 128"),
        ("- {namespace: default, cores: 1:40}", "'1:40', which YAML reads as 100"),
        ("- {namespace: default, cores: 0x10}", "'0x10', which YAML reads as 16"),
        ("- {namespace: default, cores: 1_0}", "'1_0', which YAML reads as 10"),
        ("- namespace: default\n  cores: 10\n  cores: 1000", "line 3 of quotas gives 'cores' again"),
        ("- {namespace: default, cores: 9, nodes: {a: b, a: c}}", "gives 'a' again"),
        ("[{namespace: Default, cores: 9}]", "namespace is 'Default', which no namespace can be called"),
        ("[{namespace: kube/x, cores: 9}]", "which no namespace can be called"),
        ("[{namespace: default, cores: " + "1" * 5000 + "}]", "has a number of 5000 characters"),
        ("[{namespace: default, cores: 2001-13-45}]", "not YAML: month must be"),
        ("[{namespace: default, cores: 9, models: ['']}]", "models has '', which is no card's"),
        ("[{namespace: default, cores: 9, models: ['A100 ']}]", "models has 'A100 ', which is no card's"),
        ('[{namespace: default, cores: 9, models: ["A\\n"]}]', "which is no card's"),
        ("[{namespace: default, cores: 9, nodes: {'a b': c}}]", "nodes has 'a b: c', which no node can have"),
        ("[{namespace: default, cores: 9, nodes: {a: 'b c'}}]", "nodes has 'a: b c', which no node can have"),
    ],
)
def test_a_malformed_config_map_changes_nothing(text: str, problem: str) -> None:
    engine = engine_with("[{namespace: default, cores: 10}]", node("a", cards("a", 1)))
    with pytest.raises(quotas.InvalidQuotas, match=problem):
        engine.see_quotas(config(text))
    assert engine.filter(pod("p", 11, 1), ["a"]).chosen is None


@pytest.mark.parametrize("data", [{}, {"data": None}, {"data": {"quota": "[{namespace: default, cores: 10}]"}}])
def test_a_config_map_without_the_key_lifts_no_quota_and_that_is_told(data: dict[str, Any]) -> None:
    """A key that was spelt wrong lifted all of them, in silence."""
    engine = engine_with("[{namespace: default, cores: 10}]", node("a", cards("a", 1)))
    wrong = {"metadata": {"name": "quotas", "namespace": "default", "uid": "u"}, **data}
    with pytest.raises(quotas.InvalidQuotas, match="it has no key quotas"):
        engine.see_quotas(wrong)
    assert engine.filter(pod("p", 11, 1), ["a"]).chosen is None
    (said,) = engine.notices()
    assert (said.kind, said.namespace, said.name, said.uid, said.reason) == (
        "ConfigMap", "default", "quotas", "u", "InvalidQuotas",
    )  # fmt: skip
    assert "the quotas of before stay" in said.message and engine.figures()["quotas_invalid"] == 1
    engine.see_quotas(config("[]"))
    assert engine.filter(pod("p", 11, 1), ["a"]).chosen == "a" and engine.figures()["quotas_invalid"] == 0


def test_quotas_that_were_never_valid_hold_all_decisions_and_say_why() -> None:
    engine = Engine(NAMES)
    engine.expect_quotas()
    for kind in ("nodes", "pods"):
        engine.synced(kind)
    with pytest.raises(quotas.InvalidQuotas):
        engine.see_quotas({"metadata": {"name": "q", "namespace": "default", "uid": "u"}})
    assert "quotas" in str(engine.not_ready())
    assert [one.message for one in engine.notices()] == [
        'it has no key quotas (to lift all quotas delete it, or write quotas: "[]"); nothing is decided until it is valid'
    ]
    engine.see_quotas(None)
    assert engine.not_ready() is None and engine.figures()["quotas_invalid"] == 0


def test_what_filter_has_placed_stays_when_its_quota_is_lowered_before_bind() -> None:
    engine = engine_with("[{namespace: default, cores: 100}]", node("a", cards("a", 1)))
    assert engine.filter(pod("p", 60, 1, uid="p"), ["a"]).chosen == "a"
    engine.see_quotas(config("[{namespace: default, cores: 10}]"))
    assert isinstance(engine.begin_bind("p", "a"), Write)
    assert engine.filter(pod("q", 10, 1), ["a"]).chosen is None


def test_of_a_gang_whose_quota_is_lowered_nobody_is_bound_but_who_asked_before_gets_a_place() -> None:
    engine = engine_with("[{namespace: default, cores: 100}]", node("a", cards("a", 1)))
    first, second = (pod(name, 40, 1, uid=name, annotations={NAMES.gang: "g/2"}) for name in "gh")
    assert engine.filter(first, ["a"]).chosen == "a"
    engine.see_quotas(config("[{namespace: default, cores: 10}]"))
    assert engine.filter(second, ["a"]).chosen is None
    assert engine.gang_waits("g")
