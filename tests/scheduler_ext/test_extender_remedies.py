"""Ways out against brute force: what `explain` says suffices, and nothing less does."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from scheduler_ext.engine.core import Engine
from scheduler_ext.planning import explain
from scheduler_ext.scoring import exact_search
from scheduler_ext.state.cluster import Usage
from scheduler_ext.state.shape import Shape, Step
from tests.scheduler_ext.extender_support import NAMES, cards, container, node, pod
from tests.scheduler_ext.test_extender_gang_search import made
from vcuda.spec.request import Policy

CORES, BLOCKS = 100, 8
Wish = tuple[int, int]  # cores, blocks; a multiple of 100 cores: whole cards
Free = list[list[int]]  # of a node: cores and blocks of each card


def fits(wishes: list[Wish], free: Free) -> bool:
    """Every way to give each container cards of its own choice."""
    if not wishes:
        return True
    (cores, blocks), rest = wishes[0], wishes[1:]
    whole = cores >= CORES
    count, each = (cores // CORES, (CORES, BLOCKS)) if whole else (1, (cores, blocks))
    for chosen in itertools.combinations(range(len(free)), count):
        if all(free[card][0] >= each[0] and free[card][1] >= each[1] for card in chosen):
            left = [[c - each[0], b - each[1]] if at in chosen else [c, b] for at, (c, b) in enumerate(free)]
            if fits(rest, left):
                return True
    return False


class Case:
    """A few nodes, with pods on them, and a pod that waits."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.engine = Engine(NAMES)
        self.free: dict[str, Free] = {}
        self.pods: dict[str, tuple[str, int, Wish]] = {}  # node, card, amounts
        for name in "ab"[: self.rng.randint(1, 2)]:
            self._fill(name, self.rng.randint(1, 3))
        self.engine.synced("nodes")
        self.engine.synced("pods")

    def _fill(self, name: str, count: int) -> None:
        made = cards(name, count, blocks=BLOCKS)
        self.engine.see_node(node(name, made))
        self.free[name] = [[CORES, BLOCKS] for _ in range(count)]
        for card in range(count):
            for _ in range(self.rng.randint(0, 3)):
                cores, blocks = self.rng.choice([5, 20, 35, 60]), self.rng.randint(1, 4)
                left = self.free[name][card]
                if cores <= left[0] and blocks <= left[1]:
                    left[0] -= cores
                    left[1] -= blocks
                    holder = f"h{len(self.pods)}"
                    self.pods[holder] = name, card, (cores, blocks)
                    self._bind(holder, name, f"GPU-{name}-{card}", (cores, blocks))

    def _bind(self, holder: str, name: str, uuid: str, amounts: Wish) -> None:
        one = pod(holder, *amounts, annotations={NAMES.card_uuid: uuid})
        assert self.engine.filter(one, [name]).chosen == name
        write = self.engine.begin_bind(one["metadata"]["uid"], name)
        metadata = one["metadata"] | {"annotations": dict(write.annotations)}  # type: ignore[union-attr]
        self.engine.see_pod(one | {"metadata": metadata, "spec": one["spec"] | {"nodeName": name}})

    def fits(self, wishes: list[Wish], gone: tuple[str, ...] = ()) -> set[str]:
        found = set()
        for name, free in self.free.items():
            left = [list(one) for one in free]
            for holder in gone:
                where, card, (cores, blocks) = self.pods[holder]
                if where == name:
                    left[card][0] += cores
                    left[card][1] += blocks
            if fits(wishes, left):
                found.add(name)
        return found

    def ways(self, wishes: list[Wish]) -> list[dict[str, Any]]:
        wanted = [
            container(f"c{at}", cores, blocks if cores % CORES else None) for at, (cores, blocks) in enumerate(wishes)
        ]
        one = pod("waiting", containers=wanted)
        assert self.engine.filter(one, sorted(self.free)).chosen is None
        found = explain.explanation(self.engine.evidence(uid=one["metadata"]["uid"]))
        assert found is not None
        return list(found["would_fit"])


def shares(rng: random.Random, count: int) -> list[Wish]:
    return [(rng.choice([10, 25, 45, 70, 95]), rng.randint(1, BLOCKS)) for _ in range(count)]


def cases(count: int, wishes: int) -> Iterator[tuple[Case, list[Wish]]]:
    """Those that wait of some at random, the same each time."""
    found = 0
    for seed in itertools.count():
        case = Case(seed)
        asked = shares(case.rng, wishes)
        if not case.fits(asked):
            found += 1
            yield case, asked
        if found == count:
            return


def smaller(wish: Wish, less: dict[str, int]) -> Wish:
    return wish[0] - less.get("core", 0), wish[1] - less.get("block", 0)


def by_force(case: Case, asked: list[Wish], at: int) -> list[tuple[dict[str, int], float]]:
    """Blocks alone, cores alone, and the smallest part of both where that is smaller than either."""
    cores, blocks = asked[at]

    def suffices(less: dict[str, int]) -> bool:
        return bool(case.fits([*asked[:at], smaller(asked[at], less), *asked[at + 1 :]]))

    def least(things: Iterator[dict[str, int]]) -> tuple[dict[str, int], float] | None:
        good = [(one, one.get("block", 0) / blocks + one.get("core", 0) / cores) for one in things if suffices(one)]
        return min(good, key=lambda pair: pair[1], default=None)

    alone = [
        one
        for one in (
            least({"block": n} for n in range(1, blocks)),
            least({"core": n} for n in range(1, cores)),
        )
        if one is not None
    ]
    both = least({"block": b, "core": c} for b in range(1, blocks) for c in range(1, cores))
    if both is not None and all(both[1] < cost for _, cost in alone):
        alone.append(both)
    return alone


@pytest.mark.parametrize("containers", [1, 2])
def test_one_container_is_asked_for_exactly_what_is_missing(containers: int) -> None:
    for case, asked in cases(60 if containers == 1 else 25, containers):
        expected = [(at, *one) for at in range(containers) for one in by_force(case, asked, at)]
        said = [way for way in case.ways(asked) if "less" in way]
        costs = sorted(cost for _, _, cost in expected)[:3]
        if not expected:
            continue
        found = []
        for way in said:
            at, less = int(way["container"][1:]), way["less"]
            assert way["node"] in case.fits([*asked[:at], smaller(asked[at], less), *asked[at + 1 :]]), (way, asked)
            cores, blocks = asked[at]
            found.append(less.get("block", 0) / blocks + less.get("core", 0) / cores)
        assert found == pytest.approx(costs), (said, expected, asked, case.free)


def test_where_all_containers_must_ask_less_none_is_asked_for_more_than_it_must() -> None:
    seen = 0
    for case, asked in cases(60, 3):
        if any(by_force(case, asked, at) for at in range(3)):
            continue
        ways = [way for way in case.ways(asked) if "containers" in way or "less" in way]
        if not case.fits([(1, 1)] * 3):
            assert ways == []
            continue
        (way,) = ways
        less = way["containers"]
        seen += 1

        def suffices(cut: dict[str, dict[str, int]], case: Case = case, asked: list[Wish] = asked) -> set[str]:
            return case.fits([smaller(wish, cut.get(f"c{at}", {})) for at, wish in enumerate(asked)])

        assert way["node"] in suffices(less)
        for name, amounts in less.items():
            for thing, amount in amounts.items():
                assert not suffices({**less, name: {**amounts, thing: amount - 1}}), (way, name, thing, asked)
    assert seen > 5


def test_whole_cards() -> None:
    """A pod that asks a whole card may take the part that is free: that no card is free is not all that is missing."""
    seen = {"card": 0, "core": 0}
    for seed in range(60):
        case = Case(seed)
        for count in (1, 3):
            asked = (CORES * count, BLOCKS)
            if case.fits([asked]):
                continue
            ways = [way for way in case.ways([asked]) if "less" in way]
            if count == 1:
                parts = [(c, b) for free in case.free.values() for c, b in free if c and b]
                best = max(parts, default=None)
                assert [tuple(way["instead"].values()) for way in ways] == ([best] if best else [])
                seen["core"] += best is not None
                if best:
                    assert way_text(ways) == f"container c0 asks {_cores(best)} of a card instead of a whole one"
            else:
                fewer = [n for n in range(1, count) if case.fits([(CORES * (count - n), BLOCKS)])]
                assert [way["less"] for way in ways] == [{"card": n} for n in fewer[:1]]
                seen["card"] += bool(fewer)
    assert min(seen.values()) > 5


def _cores(best: Wish) -> str:
    return f"{best[0]} core{'s' * (best[0] > 1)} and {best[1]} block{'s' * (best[1] > 1)}"


def way_text(ways: list[dict[str, Any]]) -> str:
    return str(ways[0]["text"]).partition(" if ")[2]


def test_no_more_pods_are_named_than_must_end() -> None:
    seen = set()
    for case, asked in cases(60, 2):
        ways = [way["pods"] for way in case.ways(asked) if "pods" in way]
        names = sorted(case.pods)
        for count in range(1, 4):
            good = [gone for gone in itertools.combinations(names, count) if case.fits(asked, gone)]
            if good:
                sizes = sorted(
                    (sum(case.pods[one][2][0] for one in gone), sum(case.pods[one][2][1] for one in gone))
                    for gone in good
                )
                said = [tuple(one.removeprefix("default/") for one in way) for way in ways]
                assert {len(one) for one in said} == {count} and all(gone in good for gone in said)
                first = (sum(case.pods[one][2][0] for one in said[0]), sum(case.pods[one][2][1] for one in said[0]))
                assert first == sizes[0]
                seen.add(count)
                break
    assert seen >= {1, 2}


EIGHT = [(35, 46), (31, 39), (34, 37), (38, 44), (40, 33), (31, 42), (31, 36), (44, 36)]  # shares of one pod
SHAPE = Shape(tuple(Step(cores, blocks, 1, False, False, 0) for cores, blocks in EIGHT), Policy.FGD)


def choices(free: list[Wish]) -> tuple[bool, int]:
    """Whether the eight shares fit on a node's cards, and how many choices that takes to find out."""
    budget = exact_search.Budget(10_000)
    found, _ = exact_search.search(SHAPE, [(*one, 100) for one in free], budget)
    return found is not None, 10_000 - budget.left


def in_vain(rng: random.Random) -> list[Wish]:
    """Free cores and blocks of six cards that have enough in sum, but no way to place them."""
    while True:
        free = [(rng.randrange(45, 58), rng.randrange(47, 62)) for _ in range(6)]
        enough = all(sum(one[at] for one in free) >= sum(one[at] for one in EIGHT) for at in (0, 1))
        if enough and not choices(free)[0]:
            return free


def by_one_way(rng: random.Random) -> list[Wish]:
    """Of six cards on which they fit exactly."""
    while True:
        free = [[0, 0] for _ in range(6)]
        for share in EIGHT:
            card = rng.choice(free)
            card[:] = card[0] + share[0], card[1] + share[1]
        found = [(cores, blocks) for cores, blocks in free]
        if max(map(max, found)) < 100 and choices(found)[1] > 100:
            return found


def explained(last: list[Wish]) -> dict[str, Any]:
    """Of a pod that was refused where 30 nodes take 1,000 choices and more, and what has room since is behind them."""
    rng = random.Random(7)
    free = {f"n{at:02}": in_vain(rng) for at in range(30)} | {"zz": [(0, 0)] * 6}
    engine = made(free, blocks=100)
    one = pod("p", uid="p", containers=[container(f"c{at}", *share) for at, share in enumerate(EIGHT)])
    assert engine.filter(one, sorted(free)).chosen is None
    used = {f"GPU-zz-{at}": (100 - cores, 100 - blocks) for at, (cores, blocks) in enumerate(last)}
    engine.cache.cluster.book("others", "zz", Usage(used))
    found = explain.explanation(engine.evidence(uid="p"))
    assert found is not None
    return found


def test_a_node_where_a_pod_of_many_containers_fits_is_found_behind_many_that_take_long() -> None:
    """It read: fits on node zz if container c0 asks  less."""
    found = explained(by_one_way(random.Random(3)))
    assert found["summary"] == "fits now on node zz; kube-scheduler will ask again"


def test_where_the_search_for_less_was_cut_off_it_says_so() -> None:
    """The least that was found in time was told as the least."""
    found = explained([(0, 0)] * 6)
    assert found["summary"].startswith("0 of 31 nodes that kube-scheduler offered fit: ")
    (way,) = found["would_fit"]
    assert way["cut_off"] and way["text"].endswith(" (perhaps less would do: the search was cut off)")
