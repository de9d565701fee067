"""What free parts of cards and card models are worth, and that the default policy places accordingly."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_ext.scoring import placing, prices
from scheduler_ext.scoring.scores import Scores, cheapest
from scheduler_ext.scoring.typical_pods import Workload
from scheduler_ext.state.cluster import Cluster, Usage
from scheduler_ext.state.shape import Shape, shape_of
from tests.scheduler_ext import scoring_reference as reference
from tests.scheduler_ext.extender_support import NAMES, cards, pod
from vcuda.spec import request
from vcuda.spec.request import Policy

MIXES = st.dictionaries(st.integers(1, 99), st.floats(0.01, 100.0), min_size=1, max_size=8)


def wish(cores: int, **annotations: str) -> Shape:
    asked = pod(
        "p",
        cores,
        max(cores * 40 // 100, 1),
        annotations={f"tencent.com/{k.replace('_', '-')}": v for k, v in annotations.items()},
    )
    return shape_of(request.parse_pod(asked, NAMES), Policy.FGD)


@pytest.mark.parametrize(
    ("wanted", "value"),
    [
        ({60: 1, 40: 1}, {100: 1.0}),
        ({60: 2, 40: 1}, {40: 0.0, 60: 1.0}),  # more 60s than 40s: what is left beside them is worth nothing
        ({60: 1, 40: 2}, {39: 0.0, 40: 0.5, 60: 0.5, 80: 1.0}),
        ({81: 3, 47: 2, 16: 1}, {16: 0.0, 47: 0.5, 53: 0.5, 81: 1.0}),
        ({100 // 3: 1}, {32: 0.0, 33: 1 / 3, 66: 2 / 3, 100: 1.0}),
        ({}, {99: 0.0, 100: 1.0}),
    ],
)  # fmt: skip
def test_free_parts_are_worth_what_the_best_packing_makes_of_them(
    wanted: dict[int, float], value: dict[int, float]
) -> None:
    found = prices.values(wanted)
    assert {free: found[free] for free in value} == pytest.approx(value)


def _fewest_cards(wanted: dict[int, float]) -> float:
    """The optimum of the linear program for two sizes, by trying all pairs of patterns."""
    (a, many), (b, few) = wanted.items()
    patterns = [(i, j) for i in range(100 // a + 1) for j in range((100 - i * a) // b + 1)]
    best = np.inf
    for one, two in itertools.combinations(patterns, 2):
        matrix = np.array([one, two], float).T
        if abs(np.linalg.det(matrix)) > 1e-9:
            amounts = np.linalg.solve(matrix, [many, few])
            if (amounts >= -1e-9).all():
                best = min(best, amounts.sum())
    return float(best)


@given(st.tuples(st.integers(10, 99), st.integers(10, 99), st.floats(0.1, 10), st.floats(0.1, 10)))
def test_the_prices_pay_for_the_fewest_cards(case: tuple[int, int, float, float]) -> None:
    a, b, many, few = case
    if a == b:
        b = a - 1
    wanted = {a: many, b: few}
    found = prices.values(wanted)
    # Duality; a size that is worth less than what else fits into its room is served by that room.
    assert many * found[a] + few * found[b] >= _fewest_cards(wanted) - 1e-6


@given(MIXES)
def test_values_never_fall_and_two_rooms_hold_no_more_than_one_as_large(wanted: dict[int, float]) -> None:
    found = prices.values(wanted)
    assert found[0] == 0 and found[100] == pytest.approx(1) and (np.diff(found) >= 0).all()
    for one in range(101):
        assert (found[: 101 - one] + found[one] <= found[one:] + 1e-6).all()


def test_rent_is_the_demand_per_card_of_those_who_accept_the_model() -> None:
    # 10 cards of the first model, 30 of the second, none of the third; a fifth of the demand accepts the first only.
    accepted = np.array([[True, True, True], [True, False, False], [False, False, True]])
    found = prices.rents(np.array([4.0, 1.0, 9.0]), accepted, np.array([10, 30, 0]))
    assert found.tolist() == pytest.approx([0.2 / 0.25, 0.0, 0.0])
    assert prices.rents(np.zeros(1), accepted[:1], np.array([10, 30, 0])).tolist() == [0, 0, 0]


def _decide(cluster: Cluster, wanted: Shape, workload: Workload) -> str:
    table = Scores().table(wanted, cluster, workload.typical(cluster, 0.0))
    row = cheapest(table, cluster, np.arange(len(cluster)))
    assert row is not None
    return cluster.names[row]


def test_a_share_goes_where_the_rest_can_still_be_filled() -> None:
    workload = Workload([wish(81)] * 8 + [wish(47)] * 6 + [wish(65)] * 3 + [wish(32)] * 3)
    cluster = Cluster()
    for name, taken in (("a", 47), ("b", 0)):
        cluster.set_node(name, cards(name, 1), 64_000, 2**38)
        cluster.book("filler", name, Usage({f"GPU-{name}-0": (taken, taken * 40 // 100)}))
    # Beside the 47, a 32 leaves 21 for nobody. Fragmentation alone takes that place, to keep the free card for an 81.
    assert _decide(cluster, wish(32), workload) == "b"
    assert _decide(cluster, wish(47), workload) == "a"
    # Beside a 65 it fills the card.
    cluster.set_node("c", cards("c", 1), 64_000, 2**38)
    cluster.book("filler", "c", Usage({"GPU-c-0": (65, 65 * 40 // 100)}))
    assert _decide(cluster, wish(32), workload) == "c"


def test_who_accepts_all_models_leaves_a_scarce_one_to_those_who_do_not() -> None:
    def one(cpu_milli: int, **annotations: str) -> Shape:
        return dataclasses.replace(wish(50, **annotations), cpu_milli=cpu_milli)

    cluster = Cluster()
    cluster.set_node("a", cards("a", 2, model="T4"), 64_000, 2**38)
    for name in "bcd":
        cluster.set_node(name, cards(name, 2, model="A100"), 16_000, 2**38)
    # The T4 are a quarter of the cards, and one pod in seven depends on them: 0.57 of each.
    choosy = one(4_000, vcuda_card_model="T4")
    workload = Workload([choosy] + [one(4_000)] * 6)
    # The others' nodes have just the cpu that their cards need. A little too much is better than a T4 taken away …
    assert _decide(cluster, one(5_000), workload) == "b"
    # … but not much too much.
    assert _decide(cluster, one(12_000), workload) == "a"
    assert _decide(cluster, choosy, workload) == "a"


def _cards_pod(count: int, cpu_milli: int, memory_bytes: int = 0) -> Shape:
    shape = shape_of(request.parse_pod(pod("p", 100 * count, None), NAMES), Policy.FGD)
    return dataclasses.replace(shape, cpu_milli=cpu_milli, memory_bytes=memory_bytes)


@pytest.mark.parametrize("large", [_cards_pod(8, 120_000), _cards_pod(8, 60_000, 2**39)])
def test_who_fits_on_every_node_leaves_large_nodes_to_those_who_do_not(large: Shape) -> None:
    cluster = Cluster()
    cluster.set_node("a", cards("a", 8), 128_000, 2**39)
    for name in "bcd":
        cluster.set_node(name, cards(name, 8), 96_000, 2**38)
    small = _cards_pod(8, 60_000, 2**33)
    assert _decide(cluster, small, Workload([small])) == "a", "the first of equals"
    workload = Workload([small] * 30 + [large])
    assert _decide(cluster, small, workload) == "b"


def test_rent_is_by_size_of_node_and_model() -> None:
    cluster = Cluster()
    cluster.set_node("one", cards("one", 1, model="T4"), 16_000, 2**36)
    cluster.set_node("small", cards("small", 4, model="T4"), 16_000, 2**36)
    cluster.set_node("large", cards("large", 4, model="A100"), 128_000, 2**36)
    # A third each: for any card, for two on one node (which "one" lacks), for one with the cpu of "large" alone.
    workload = Workload([_cards_pod(1, 1_000)] * 2 + [_cards_pod(2, 1_000)] + [_cards_pod(1, 99_000)] * 2)
    rent = workload.typical(cluster, 0.0).rent
    at = {name: (cluster.size[row], cluster.model[row, 0]) for name, row in cluster.index.items()}
    assert {name: rent[place] for name, place in at.items()} == pytest.approx(
        {"one": 0.0, "small": 3 / 8, "large": 3 / 8 + 3 / 4}
    )
    assert rent.shape == (3, 2) and np.count_nonzero(rent) == 2


def test_a_node_whose_cpu_and_memory_nobody_told_is_large_enough() -> None:
    cluster = Cluster()
    cluster.set_node("a", cards("a", 8), 0, 0)
    cluster.set_node("b", cards("b", 1), 0, 0)
    typical = Workload([_cards_pod(8, 120_000, 2**40)] + [_cards_pod(1, 1_000)] * 8).typical(cluster, 0.0)
    assert typical.rent.ravel().tolist() == pytest.approx([0.5 / (8 / 9), 0.0])


def test_a_node_of_a_new_size_costs_no_rent_before_the_next_version_which_knows_it() -> None:
    cluster = Cluster()
    workload = Workload([_cards_pod(8, 60_000)] * 3 + [_cards_pod(8, 120_000)])
    for name in "bc":
        cluster.set_node(name, cards(name, 8), 96_000, 2**38)
    first = workload.typical(cluster, 0.0)
    for name in [f"n{at}" for at in range(60)]:
        cluster.set_node(name, cards(name, 8), 96_000 + 1, 2**38)
        assert cluster.size[cluster.index[name]] == cluster.size[0], "about as large"
    cluster.set_node("a", cards("a", 8), 128_000, 2**38)
    assert workload.typical(cluster, 30.0) is first
    asked, view = _cards_pod(8, 60_000), cluster.whole()
    assert (
        placing.plan(asked, view, None, first).cost.tolist() == reference.plan(asked, view, None, first).cost.tolist()
    )
    cluster.remove_node("a")
    for at in range(60):
        cluster.remove_node(f"n{at}")
    assert workload.typical(cluster, 70.0).version == first.version + 1, "a size was added"


def test_nodes_of_ever_new_sizes_do_not_fill_the_memory() -> None:
    cluster = Cluster()
    for at in range(600):
        cluster.set_node(f"n{at}", cards(f"n{at}", 1), (1 + at % 60) << at // 12, 2**38)
    workload = Workload([_cards_pod(1, 1_000)])
    assert len(workload.typical(cluster, 0.0).rent) == len(cluster.sizes) == 256
    table = Scores().table(_cards_pod(1, 1), cluster, workload.typical(cluster, 0.0))
    assert (table.code[: len(cluster)] == 0).all()
