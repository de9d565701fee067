"""Pods of several containers: never refused where they fit, and never at any price."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest

from scheduler_ext.scoring import exact_search, placing
from scheduler_ext.scoring.scores import Scores
from scheduler_ext.state.cluster import Usage
from scheduler_ext.state.shape import Shape, Step
from tests.scheduler_ext import exact_search_reference
from tests.scheduler_ext.extender_engine import engine_with
from tests.scheduler_ext.extender_support import NAMES, cards, container, node, pod
from vcuda.spec import placement, request
from vcuda.spec.request import Policy

BLOCKS = 40


def fits_somehow(one: dict[str, Any], free: list[tuple[int, int]]) -> bool:
    """Every way to give the containers cards is tried."""
    asked = request.parse_pod(one, NAMES)
    ways = [list(itertools.combinations(range(len(free)), each.card_count)) for each in asked.containers]
    for chosen in itertools.product(*ways):
        picked = {}
        for each, columns in zip(asked.containers, chosen, strict=True):
            blocks = BLOCKS if each.whole else each.memory_blocks
            picked[each.name] = tuple(
                placement.CardShare(str(column), each.cores_per_card, blocks) for column in columns
            )
        use = placement.peak_use(asked, placement.Placement(picked))
        if all(use[at][0] <= free[int(at)][0] and use[at][1] <= free[int(at)][1] for at in use):
            return True
    return False


def engine_of(free: list[tuple[int, int]], policy: Policy) -> Any:
    engine, _ = engine_with(node("a", cards("a", len(free), blocks=BLOCKS)), policy=policy)
    used = {f"GPU-a-{at}": (100 - cores, BLOCKS - blocks) for at, (cores, blocks) in enumerate(free)}
    engine.cache.cluster.book("others", "a", Usage(used))
    return engine


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("seed", range(60))
def test_a_pod_is_refused_exactly_where_no_choice_of_cards_holds_it(policy: Policy, seed: int) -> None:
    dice = random.Random(seed)
    free = [(dice.choice((100, 100, 70, 50, 30, 0)), dice.choice((40, 30, 20, 10))) for _ in range(dice.randint(2, 4))]
    free = [(cores, BLOCKS if cores == 100 else blocks) for cores, blocks in free]

    def some(name: str, **fields: Any) -> dict[str, Any]:
        cores = dice.choice((10, 20, 30, 50, 60, 100, 100, 200))
        return container(name, cores, None if cores >= 100 else dice.choice((5, 10, 20, 30)), **fields)

    apps = [some(f"c{number}") for number in range(dice.randint(1, 3))]
    inits = [
        some(f"i{number}", **dice.choice(({}, {"restartPolicy": "Always"}))) for number in range(dice.randint(0, 2))
    ]
    one = pod("p", uid="p", containers=apps, init=inits)
    chosen = engine_of(free, policy).filter(one, ["a"]).chosen
    assert (chosen == "a") == fits_somehow(one, free), (free, apps, inits)


@pytest.mark.parametrize("policy", list(Policy))
def test_a_share_before_a_whole_card_fits_on_two_cards(policy: Policy) -> None:
    """`spread` put the share on one card and then found no untouched one for the rest, on every empty node for ever."""
    apps = [container("share", 30, 10), container("whole", 100, None), container("more", 60, 5)]
    assert engine_of([(100, BLOCKS)] * 2, policy).filter(pod("p", uid="p", containers=apps), ["a"]).chosen == "a"


@pytest.mark.parametrize("seed", range(40))
def test_eight_containers_fit_where_a_way_was_planted(seed: int) -> None:
    dice = random.Random(seed)
    free, shares = [], []
    for _ in range(4):
        parts = sorted(dice.sample(range(5, 100, 5), 1))
        sizes = [parts[0], 100 - parts[0]]
        free.append((100, BLOCKS))
        shares += [(size, max(1, size * BLOCKS // 100)) for size in sizes]
    dice.shuffle(shares)
    apps = [container(f"c{at}", cores, blocks) for at, (cores, blocks) in enumerate(shares)]
    engine = engine_of(free, Policy.SPREAD)
    assert engine.filter(pod("p", uid="p", containers=apps), ["a"]).chosen == "a"
    assert engine.overbooked() == []


def test_what_one_pass_has_no_choices_left_for_the_next_one_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """150 nodes that cost 1,900 choices each hid one that fits from a pod for good."""
    wanted = [(35, 46), (31, 39), (34, 37), (38, 44), (40, 33), (31, 42), (31, 36), (44, 36)]
    apps = [container(f"c{at}", cores, blocks) for at, (cores, blocks) in enumerate(wanted)]
    monkeypatch.setattr(exact_search, "MOST_AHEAD", 2 * exact_search.MOST_STEPS)
    dice, filled = random.Random(7), dict[str, list[tuple[int, int]]]()
    shape = engine_of([(100, BLOCKS)], Policy.FGD).cache.asked(pod("p", containers=apps))[1]
    while len(filled) < 8:  # the sums fit, the shares don't, and that takes long to be sure of
        free = [(dice.randrange(45, 58), dice.randrange(47, 62)) for _ in range(6)]
        budget = exact_search.Budget()
        found, _ = exact_search.search(shape, [(*each, 100) for each in free], budget)
        if found is None and exact_search.MOST_IN_ALL - budget.left > 1000:
            filled[f"n{len(filled)}"] = free
    filled["z"] = [(66, 82), (62, 81), (74, 70), (82, 80), (0, 0), (0, 0)]
    engine, _ = engine_with(*(node(name, cards(name, 6, blocks=100)) for name in filled))
    for name, free in filled.items():
        use = {f"GPU-{name}-{at}": (100 - one, 100 - other) for at, (one, other) in enumerate(free)}
        engine.cache.cluster.book(f"fill-{name}", name, Usage(use))
    asks = 1
    one = pod("p", uid="p", containers=apps)
    while engine.filter(one, list(filled)).chosen is None and asks < 10:
        assert "p" in engine.cache.unschedulable and engine.cache.scores.unsure(shape)
        asks += 1
    assert 1 < asks < 10


def test_who_has_no_choices_left_computes_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a gang's thousand members asks within one budget."""
    engine = engine_of([(60, BLOCKS), (60, BLOCKS)], Policy.FGD)
    shape = engine.cache.asked(pod("p", containers=[container(f"c{at}", 40, 1) for at in range(3)]))[1]
    monkeypatch.setattr(exact_search, "search", lambda *_: (None, False))
    table, cluster, typical = engine.cache.table(shape), engine.cache.cluster, engine.cache.typical()
    assert table.unsure
    plan, planned = placing.plan_rows, list[Any]()
    monkeypatch.setattr(placing, "plan_rows", lambda *given: planned.append(given) or plan(*given))
    assert not table.refresh(cluster, typical, budget=exact_search.Budget(0)) and not planned
    assert not table.refresh(cluster, typical, budget=exact_search.Budget(1)) and len(planned) == 1


def test_the_work_of_one_search_is_bounded() -> None:
    apps = [container(f"c{number}", 35 + number % 7, 1) for number in range(23)]
    shape = engine_of([(100, BLOCKS)], Policy.FGD).cache.asked(pod("p", containers=apps))[1]
    budget = exact_search.Budget()
    began = time.thread_time()
    for free in range(60, 101):
        exact_search.search(shape, [(100, BLOCKS, BLOCKS)] * 9 + [(free, BLOCKS, BLOCKS)], budget)
    assert budget.left <= exact_search.MOST_IN_ALL and time.thread_time() - began < 5


def test_hundreds_of_classes_keep_their_scores_and_large_clusters_fewer() -> None:
    """256 were kept, real mixes have 312 to 432: then each request scored every node anew."""
    engine, _ = engine_with(*(node(f"n{at}", cards(f"n{at}", 2)) for at in range(40)))
    shapes = [engine.cache.asked(one)[1] for one in (pod("p", 1 + at % 99, 1 + at // 99) for at in range(450))]
    for shape in shapes:
        engine.cache.table(shape)
    assert all(engine.cache.scores.knows(shape) for shape in shapes)
    small = Scores(most_bytes=80 * engine.cache.table(shapes[0]).size_bytes)
    for shape in shapes:
        small.table(shape, engine.cache.cluster, engine.cache.typical())
    assert sum(small.knows(shape) for shape in shapes) == 80


def test_a_pod_of_many_containers_is_scored_ahead_a_few_rows_at_a_time() -> None:
    """One of 64 containers held up every other request for 5.7 s."""
    engine, _ = engine_with(*(node(f"n{at}", cards(f"n{at}", 8)) for at in range(300)))
    one = pod("p", uid="p", containers=[container(f"c{at}", 5, 1) for at in range(64)])
    shape = engine.cache.asked(one)[1]
    assert engine.cache.scores.warm(shape, engine.cache.cluster, engine.cache.typical())
    assert int((engine.cache.scores._tables[shape]._at >= 0).sum()) == 16
    engine.prepare(one)
    assert not engine.cache.scores.warm(shape, engine.cache.cluster, engine.cache.typical())
    assert engine.filter(one, ["n7"]).chosen == "n7"


def searched(monkeypatch: pytest.MonkeyPatch) -> list[exact_search.Budget]:
    """The budget of each search that is made from now on."""
    budgets: list[exact_search.Budget] = []
    search = exact_search.search

    def noted(shape: Any, free: Any, budget: exact_search.Budget) -> tuple[list[int] | None, bool]:
        budgets.append(budget)
        return search(shape, free, budget)

    monkeypatch.setattr(exact_search, "search", noted)
    return budgets


@pytest.mark.parametrize("seed", range(8))
def test_the_core_tries_the_same_choices_in_the_same_order_as_plain_python(seed: int) -> None:
    draw = random.Random(seed)
    found = bounded = 0
    for _ in range(400):
        standing, inits = draw.randint(1, 7), draw.randint(0, 2)
        steps = []
        for number in range(standing + inits):
            init, whole = number >= standing, draw.random() < 0.15
            amounts = (100, 0) if whole else (draw.choice([5, 20, 34, 50, 67]), draw.randint(0, 20))
            beside = draw.randint(0, standing) if init else 0
            steps.append(Step(*amounts, draw.choice([1, 1, 1, 2, 3]), whole, init, beside))
        shape = Shape(tuple(steps), Policy.FGD)
        totals = [draw.choice([0, 40, 40, 80]) for _ in range(draw.randint(0, 7))]
        free = sorted((draw.choice([0, 30, 67, 100, 100]), draw.choice([total // 2, total]), total) for total in totals)
        most = draw.choice([-1, 0, 1, 7, 60, 2000])
        budget = exact_search.Budget(most)
        assert exact_search.search(shape, free, budget)[0] == exact_search_reference.search(shape, free, most)[0]
        left = exact_search_reference.search(shape, free, most)[1]
        assert budget.left == left or (most < 0 and budget.left == most)
        found += next(iter(budget.found.values())) is not None
        bounded += left == 0 < most
    assert found > 20 and bounded > 5


def test_all_nodes_of_one_pass_share_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sixteen rows had one of their own: 320,000 choices for 256 nodes, and 6 s before a pod's first answer."""
    engine, _ = engine_with(*(node(f"n{at}", cards(f"n{at}", 8, blocks=BLOCKS)) for at in range(60)))
    for at in range(60):  # no two nodes alike
        used = {f"GPU-n{at}-{column}": (at % 7 + column % 3, at % 5) for column in range(8)}
        engine.cache.cluster.book(f"others-{at}", f"n{at}", Usage(used))
    monkeypatch.setattr(exact_search, "MOST_STEPS", 100)
    budgets = searched(monkeypatch)
    one = pod("p", uid="p", containers=[container(f"c{at}", 34 + at % 4, 1) for at in range(17)])
    engine.prepare(one)
    assert len(budgets) == 60 and len({id(budget) for budget in budgets}) == 1
    assert budgets[0].left < exact_search.MOST_AHEAD


def test_a_gang_of_a_thousand_searches_no_more_than_one_request_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pod that names a large gang held up everybody for 1.5 s at each request, for ever: each place was searched anew."""
    engine, _ = engine_with(*(node(f"n{at}", cards(f"n{at}", 8, blocks=BLOCKS)) for at in range(40)))
    apps = [container(f"c{at}", 34 + at % 4, 1) for at in range(9)]
    one = pod("p", uid="p", containers=apps, annotations={NAMES.gang: "g/1024"})
    engine.prepare(one)
    budgets = searched(monkeypatch)
    assert engine.filter(one, [f"n{at}" for at in range(40)]).chosen is None
    assert len(budgets) >= 40 and len({id(budget) for budget in budgets}) == 1
    assert 0 <= budgets[0].left <= exact_search.MOST_IN_ALL


def test_a_heavy_pod_that_its_owner_edits_holds_up_no_watch() -> None:
    """Twelve edits in twelve seconds kept the watch of all pods busy for 40 s."""
    engine, _ = engine_with(node("a", cards("a", 8)))
    heavy = pod("p", uid="p", containers=[container(f"c{at}", 5, 1) for at in range(4)])
    light = pod("q", 5, 1, uid="q")
    for one in heavy, light:
        engine.see_pod(one)
        engine.score_next(0)
    assert not engine.cache.scores.knows(engine.cache.asked(heavy)[1])
    assert engine.cache.scores.knows(engine.cache.asked(light)[1])


def test_what_was_found_for_one_pod_is_not_given_to_another_of_the_same_pass() -> None:
    """A gang's members share a pass: one got another one's cards, 130 cores and 44 of 40 blocks of one of them."""
    shapes = [
        Shape(tuple(Step(cores, 4, 1, cores == 100, False, 0) for cores in wanted), Policy.SPREAD)
        for wanted in ((60, 50, 50), (30, 30, 100), (30, 30, 30, 100))
    ]
    two, one, budget = [(60, 36, BLOCKS), (100, 40, BLOCKS)], [(100, 40, BLOCKS)], exact_search.Budget()
    for free in (two, one):
        for shape in shapes:
            assert exact_search.search(shape, free, budget) == exact_search.search(shape, free, exact_search.Budget())


@pytest.mark.parametrize("left", [0, 1, 3])
def test_what_was_not_known_of_one_pod_says_nothing_of_another(left: int) -> None:
    deep = Shape(tuple(Step(40 + at, 4, 1, False, False, 0) for at in range(8)), Policy.SPREAD)
    plain, free = Shape((Step(100, 4, 1, True, False, 0),) * 2, Policy.SPREAD), [(100, 40, BLOCKS)] * 5
    budget = exact_search.Budget(left)
    assert not exact_search.search(deep, free, budget)[1]
    budget.left = exact_search.MOST_IN_ALL
    assert exact_search.search(plain, free, budget) == exact_search.search(plain, free, exact_search.Budget())
