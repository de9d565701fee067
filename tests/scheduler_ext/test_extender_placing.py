"""Policies and card choice on small clusters where the right answer is known; cached scores against fresh ones."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import numpy as np
import pytest

from scheduler_ext.engine.core import Engine
from scheduler_ext.scoring import scores
from scheduler_ext.scoring.scores import Scores, Table, cheapest
from scheduler_ext.scoring.typical_pods import Typical, Workload
from scheduler_ext.state.cluster import Cluster, Usage, View
from scheduler_ext.state.objects import cpu_and_memory, pod_requests
from scheduler_ext.state.shape import Shape, shape_of
from tests.scheduler_ext import scoring_reference as reference
from tests.scheduler_ext.extender_support import NAMES, cards, container, node, pod
from vcuda.spec import request
from vcuda.spec.errors import InvalidRequest
from vcuda.spec.inventory import Card
from vcuda.spec.request import Policy


def cluster_of(**used: list[int]) -> Cluster:
    """Nodes with one card per entry, each with that many cores and as large a part of its 40 blocks taken."""
    cluster = Cluster()
    for name, cores in used.items():
        its = cards(name, len(cores))
        cluster.set_node(name, its, 64_000, 2**38)
        booked = {card.uuid: (taken, taken * 40 // 100) for card, taken in zip(its, cores, strict=True) if taken}
        cluster.book(f"filler-{name}", name, Usage(booked))
    return cluster


def shape(cores: int, blocks: int | None = 1, policy: Policy = Policy.FGD, **fields: object) -> Shape:
    return shape_of(request.parse_pod(pod("p", cores, blocks, **fields), NAMES), policy)


def decide(cluster: Cluster, wanted: Shape, workload: Workload | None = None) -> tuple[str, list[int]] | None:
    typical = (workload or Workload()).typical(cluster, 0.0)
    table = Scores().table(wanted, cluster, typical)
    row = cheapest(table, cluster, np.arange(len(cluster)))
    return None if row is None else (cluster.names[row], table.picks[row].tolist())


def test_binpack_takes_the_fullest_card_that_fits_and_spread_the_emptiest_node() -> None:
    cluster = cluster_of(a=[0, 50], b=[80, 0], c=[0, 0])
    assert decide(cluster, shape(20, policy=Policy.BINPACK)) == ("b", [0])
    assert decide(cluster, shape(30, policy=Policy.BINPACK)) == ("a", [1])
    assert decide(cluster, shape(30, policy=Policy.SPREAD)) == ("c", [0])
    assert decide(cluster, shape(100, None, policy=Policy.BINPACK)) == ("b", [1])
    assert decide(cluster, shape(200, None, policy=Policy.BINPACK)) == ("c", [0, 1])


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [
        # n has one card 60 % and one 20 % used; m has one of 50 %: the emptier node, and a card in between.
        ("binpack", ("n", 0)), ("spread", ("m", 1)), ("node=binpack,card=binpack", ("n", 0)), ("node=binpack,card=spread", ("n", 1)),
        ("node=spread, card=binpack", ("m", 0)), ("card=spread,node=spread", ("m", 1)), ("node=topology,card=fgd", None),
    ],
)  # fmt: skip
def test_node_and_card_are_chosen_by_a_policy_each(policy: str, chosen: tuple[str, int] | None) -> None:
    engine = Engine(NAMES)
    for name in "mn":
        engine.see_node(node(name, cards(name, 2)))
    engine.synced("nodes")
    engine.synced("pods")
    for name, index, cores, blocks in (("n", 0, 60, 24), ("n", 1, 20, 8), ("m", 0, 50, 20)):
        only = {NAMES.card_uuid: f"GPU-{name}-{index}"}
        assert engine.filter(pod("x", cores, blocks, annotations=only), ["m", "n"]).chosen == name
    one = pod("p", 10, 4, uid="p", annotations={NAMES.policy: policy})
    found = engine.filter(one, ["m", "n"]).chosen
    assert found is not None
    if chosen is not None:
        (card,) = engine.cache.pods.get("p").usage.cards  # type: ignore[union-attr]
        assert (found, card) == (chosen[0], f"GPU-{chosen[0]}-{chosen[1]}")


@pytest.mark.parametrize(
    "policy",
    ["", "best", "node=spread", "node=spread,card=x", "node=fgd,card=fgd,x=fgd", "node=fgd,node=fgd"],
)
def test_malformed_policies_are_refused(policy: str) -> None:
    with pytest.raises(InvalidRequest, match=NAMES.policy):
        request.parse_pod(pod("p", annotations={NAMES.policy: policy}), NAMES)


def test_fgd_keeps_what_typical_pods_need() -> None:
    # Typical pods take 60 cores: on the card with 70 free, a share of 10 still leaves room for one; on the one
    # with 65 free it does not, and the rest of 55 would be lost for all.
    workload = Workload([shape(60, 24)] * 10)
    assert decide(cluster_of(a=[35], b=[30]), shape(10, 4), workload) == ("b", [0])
    # A card that no typical pod fits any more is the best place for what still fits it.
    assert decide(cluster_of(a=[0], b=[50], c=[40]), shape(30, 12), workload) == ("b", [0])
    # Whole machines are typical: shares gather where a machine is broken already.
    assert decide(cluster_of(a=[0, 0], b=[0, 10]), shape(50, 20), Workload([shape(200, None)] * 5)) == (
        "b",
        [1],
    )


def test_fgd_counts_cards_without_cpu_as_lost() -> None:
    cluster = cluster_of(a=[0], b=[0])
    cluster.book("cpu hog", "b", Usage({}, cpu_milli=60_000))
    hungry = shape_of(request.parse_pod(pod("p", 50, 20), NAMES), Policy.FGD, cpu_milli=8_000)
    light = shape_of(request.parse_pod(pod("p", 50, 20), NAMES), Policy.FGD, cpu_milli=1_000)
    assert decide(cluster, light, Workload([hungry] * 5)) == ("b", [0])


def test_fgd_does_not_strand_cards_on_a_node_whose_cpu_runs_out() -> None:
    # Both nodes can host one more typical pod after either choice, so the paper's measure sees no difference.
    cluster = cluster_of(a=[0] * 8, b=[0] * 8)
    cluster.set_node("b", cards("b", 8), 128_000, 2**38)
    cluster.book("cpu hog", "a", Usage({}, cpu_milli=24_000))

    def wish(cpu: int) -> Shape:
        return shape_of(request.parse_pod(pod("p", 100, None), NAMES), Policy.FGD, cpu_milli=cpu)

    workload = Workload([wish(8_000)] * 5)
    assert decide(cluster, wish(20_000), workload) == ("b", [0])
    assert decide(cluster, wish(1_000), workload) == ("a", [0])


def direct_fragmentation(free: list[tuple[int, int]], total: int, typical: Typical) -> float:
    """The definition, pod by pod and card by card."""
    result = 0.0
    for position, weight in enumerate(typical.weight.tolist()):
        need, blocks, count = (
            int(typical.cores[position]),
            int(typical.blocks[position]),
            int(typical.cards[position]),
        )
        whole = bool(typical.whole[position])
        takes = [
            (cores == 100 and rest == total) if whole else (cores >= need and rest >= blocks) for cores, rest in free
        ]
        for (cores, rest), fits in zip(free, takes, strict=True):
            if not fits or sum(takes) < count:
                result += weight * (cores / 100 + rest / total) / 2
    return result


def test_fgd_gradients_are_differences_of_the_definition() -> None:
    dice = random.Random(5)
    workload = Workload([shape(c, b) for c, b in ((100, None), (200, None), (30, 8), (45, 30), (60, 10), (30, 8))])
    for _ in range(50):
        cluster = cluster_of(a=[dice.choice((0, 0, 10, 55, 70, 100)) for _ in range(4)])
        typical = workload.typical(cluster, 0.0)
        typical = dataclasses.replace(typical, values=np.zeros_like(typical.values))  # fragmentation alone
        view = cluster.view(np.array([0]))
        free = list(zip(view.free_cores[0, :4].tolist(), view.free_blocks[0, :4].tolist(), strict=True))
        rest = reference.Rest(view.free_cores, view.free_blocks, view.free_cpu, view.free_memory)
        assert reference.fragmentation(view, rest, typical)[0] == pytest.approx(direct_fragmentation(free, 40, typical))
        after = rest._replace(cores=rest.cores - 20, blocks=rest.blocks - 8)
        costs = reference.fgd_one_card(view, rest, after, view.usable, typical)[0]
        for card, (cores, blocks) in enumerate(free):
            if cores < 20:
                continue
            then = [*free[:card], (cores - 20, blocks - 8), *free[card + 1 :]]
            gradient = direct_fragmentation(then, 40, typical) - direct_fragmentation(free, 40, typical)
            left = sum((cores / 100 + blocks / 40) / 2 for cores, blocks in then)
            ties = 2e-2 * left + 1e-3 * ((cores - 20) / 100 + (blocks - 8) / 40) / 2
            assert costs[card] == pytest.approx(gradient + ties)


def linked(name: str, pairs: dict[tuple[int, int], int], count: int = 4) -> tuple[Card, ...]:
    def ranks(index: int) -> tuple[tuple[str, int], ...]:
        both = {**pairs, **{(b, a): rank for (a, b), rank in pairs.items()}}
        return tuple((f"{name}{peer}", both[index, peer]) for peer in range(count) if (index, peer) in both)

    return tuple(Card(f"{name}{index}", index, "A100", 2**34, links=ranks(index)) for index in range(count))


def test_several_cards_are_the_best_linked_ones() -> None:
    cluster = Cluster()
    cluster.set_node("n", linked("n", {(0, 1): 1, (0, 2): 1, (1, 3): 9, (2, 3): 2}), 64_000, 2**38)
    for policy in Policy:
        assert decide(cluster, shape(200, None, policy=policy)) == ("n", [1, 3])
        assert decide(cluster, shape(300, None, policy=policy)) == ("n", [1, 2, 3])
    cluster.book("x", "n", Usage({"n3": (5, 1)}))
    assert decide(cluster, shape(200, None)) == ("n", [0, 1])


def test_topology_goes_where_the_links_are() -> None:
    cluster = Cluster()
    cluster.set_node("a", linked("a", {(0, 1): 2}), 64_000, 2**38)
    cluster.set_node("b", linked("b", {(2, 3): 7}), 64_000, 2**38)
    assert decide(cluster, shape(200, None, policy=Policy.TOPOLOGY)) == ("b", [2, 3])


def test_best_linked_agrees_with_trying_all_pairs() -> None:
    dice = np.random.default_rng(3)
    links = dice.integers(0, 9, (40, 6, 6))
    links = np.triu(links, 1) + np.triu(links, 1).transpose(0, 2, 1)
    free = dice.random((40, 6)) < 0.7
    picked = reference.best_linked(links, free, 2)
    for row in np.flatnonzero(free.sum(axis=1) >= 2):
        best = max(links[row, a, b] for a, b in itertools.combinations(np.flatnonzero(free[row]), 2))
        a, b = np.flatnonzero(picked[row])
        assert free[row, a] and free[row, b] and links[row, a, b] == best


def test_an_init_container_uses_cards_that_are_booked_anyway() -> None:
    cluster = cluster_of(a=[0, 0, 0])
    wanted = shape(0, containers=[container("x", 40, 10), container("y", 100, None)], init=[container("i", 100, None)])
    decided = decide(cluster, wanted)
    assert decided is not None
    x, y, init = decided[1]
    assert init == y != x
    pairs = shape(0, containers=[container("x", 40, 10), container("y", 200, None)], init=[container("i", 200, None)])
    assert decide(cluster_of(a=[0, 0, 0, 0]), pairs) == ("a", [0, 1, 2, 1, 2])
    narrow = cluster_of(a=[70])
    phases = shape(0, containers=[container("x", 30, 10)], init=[container("i", 30, 12), container("j", 30, 1)])
    assert decide(narrow, phases) == ("a", [0, 0, 0])
    sidecar = shape(
        0,
        containers=[container("x", 10, 1)],
        init=[container("s", 10, 1, restartPolicy="Always"), container("i", 30, 12)],
    )
    assert decide(narrow, sidecar) is None


def test_more_cards_than_any_node_has_fit_nowhere() -> None:
    assert decide(cluster_of(a=[0, 0]), shape(1600, None)) is None


def test_cached_scores_equal_fresh_ones_after_any_changes() -> None:
    dice = random.Random(11)
    cluster = cluster_of(**{f"n{number}": [dice.choice((0, 20, 60, 100)) for _ in range(4)] for number in range(30)})
    workload = Workload()
    shapes = [shape(cores, 4 if cores < 100 else None, policy) for cores in (10, 50, 100, 200) for policy in Policy]
    scores = Scores()
    for step in range(60):
        name = f"n{dice.randrange(30)}"
        match dice.randrange(4):
            case 0:
                cluster.remove_node(name)
            case 1:
                cluster.set_node(name, cards(name, dice.randrange(1, 12)), 64_000, 2**38)
            case _:
                cluster.book(
                    f"pod{step}",
                    name,
                    Usage({f"GPU-{name}-{dice.randrange(4)}": (dice.randrange(1, 30), 2)}, 500),
                )
        wanted = dice.choice(shapes)
        typical = workload.typical(cluster, float(step))
        cached, fresh = scores.table(wanted, cluster, typical), Table(wanted)
        fresh.refresh(cluster, typical, most=len(cluster))  # in pieces, as ahead of a request
        count = len(cluster)
        assert np.array_equal(cached.cost[:count], fresh.cost[:count])
        assert np.array_equal(cached.code[:count], fresh.code[:count])


def test_a_class_is_scored_before_it_is_asked_for_a_few_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"n{number:03d}" for number in range(600)]
    warm, cold = Engine(NAMES), Engine(NAMES)
    for engine in (warm, cold):
        for name in names:
            engine.see_node(node(name, cards(name, 2)))
        engine.synced("nodes")
        engine.synced("pods")
    computed: list[int] = []
    refresh = scores.Table.refresh

    def counted(self: scores.Table, *how: Any, **more: Any) -> bool:
        before = self._at.copy()
        done = refresh(self, *how, **more)
        after = self._at
        computed.append(int((after > np.pad(before, (0, len(after) - len(before)), constant_values=-1)).sum()))
        return done

    monkeypatch.setattr(scores.Table, "refresh", counted)
    warm.see_pod(pod("early"))
    assert computed == [], "the watch computes nothing"
    warm.score_next(0)
    assert computed == [256, 256, 88]
    warm.see_pod(pod("again"))
    computed.clear()
    first, second = pod("p"), pod("q")
    assert warm.filter(first, names).chosen == cold.filter(first, names).chosen
    assert computed == [0, 600], "only the cold one had anything to compute"
    computed.clear()
    assert warm.filter(second, names).chosen == cold.filter(second, names).chosen
    assert computed == [1, 1]


def test_a_node_may_have_more_cards_than_the_arrays_had_columns() -> None:
    cluster = cluster_of(a=[0] * 3)
    cluster.set_node("mig", cards("mig", 56), 64_000, 2**38)
    decided = decide(cluster, shape(1000, None))
    assert decided == ("mig", list(range(10)))
    assert isinstance(cluster.view(np.array([0])), View)


def test_typical_pods_are_the_frequent_ones_and_change_rarely() -> None:
    workload = Workload([shape(30)] * 6 + [shape(50)] * 3 + [shape(100, None)])
    empty = Cluster()
    first = workload.typical(empty, 0.0)
    assert dict(zip(first.cores.tolist(), first.weight.round(2).tolist(), strict=True)) == {
        30: 0.6,
        50: 0.3,
        100: 0.1,
    }
    workload.observe(shape(70))
    assert workload.typical(empty, 30.0) is first
    for _ in range(100):
        workload.observe(shape(70))
    assert workload.typical(empty, 59.0) is first
    second = workload.typical(empty, 61.0)
    assert second.version != first.version and second.cores[0] == 70
    assert workload.typical(empty, 1e6) is second
    # Another card model, or many more cards, change the rents.
    grown = Cluster()
    grown.set_node("a", cards("a", 4), 64_000, 2**38)
    third = workload.typical(grown, 1e6)
    assert third.version != second.version
    grown.set_node("b", cards("b", 4), 64_000, 2**38)
    assert workload.typical(grown, 1e6) is third
    assert workload.typical(grown, 1e6 + 61).version != third.version


def test_the_past_fades_and_one_time_wishes_are_forgotten() -> None:
    workload = Workload([])
    some = shape(30)
    for number in range(20_001):
        workload.observe(dataclasses.replace(some, cpu_milli=number % 2_500 if number < 15_000 else number % 4_000))
    # What came six times counts three or more; what came once at the end is forgotten.
    assert min(workload._counts.values()) >= 1 and workload._total == pytest.approx(20_001 / 2, abs=1000)
    assert len(workload._counts) == 3_500


@pytest.mark.parametrize(
    ("cpu", "milli"),
    [("500m", 500), ("2", 2000), (3, 3000), ("1.5", 1500), ("0.1", 100), (".5", 500), ("1u", 1), ("junk", 0), (None, 0), ("-5", 0),
     (True, 0), ("٣", 0)],
)  # fmt: skip
def test_cpu_is_counted_in_thousandths_rounded_up(cpu: object, milli: int) -> None:
    assert cpu_and_memory({"cpu": cpu}) == (milli, 0)


@pytest.mark.parametrize(
    ("memory", "number"),
    [
        ("1Gi", 2**30),
        ("1e3", 1000),
        ("1M", 10**6),
        ("128974848000m", 128974848),
        ("9007199254740993", 2**53 + 1),
        ("9" * 39, 2**54),
    ],
)
def test_memory_is_counted_in_bytes_exactly(memory: str, number: int) -> None:
    assert cpu_and_memory({"memory": memory}) == (0, number)


def test_pod_requests_take_the_larger_of_init_and_rest() -> None:
    def one(cpu: str, **fields: object) -> dict[str, object]:
        return {"name": "c", "resources": {"requests": {"cpu": cpu, "memory": "1Mi"}}, **fields}

    spec = {
        "containers": [one("1"), one("500m")],
        "initContainers": [one("1", restartPolicy="Always"), one("2")],
        "overhead": {"cpu": "250m"},
    }
    assert pod_requests({"spec": spec}) == (3250, 3 * 2**20)
