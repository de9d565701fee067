"""The packing benchmark: its bound is what an exact search finds on small clusters, no packing exceeds it, and its rows are the simulator's."""

from __future__ import annotations

import csv
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import _targets, packing
from benchmarks._claim_ways import BOTH, BUILT, WAYS
from scheduler_ext.lab import simulate, trace
from scheduler_ext.scoring.typical_pods import Workload
from scheduler_ext.state.cluster import Cluster, Usage
from scheduler_ext.state.shape import Shape, Step
from vcuda.spec.inventory import Card
from vcuda.spec.request import CardFilter, Policy

ROOT = Path(__file__).parents[2]


def files(folder: Path, nodes: list[tuple[int, int, str]], pods: list[tuple[int, int, int]]) -> tuple[Any, Any]:
    """`nodes`: cpu, cards, model; `pods`: cpu, cards, thousandths of a card."""
    with (folder / "openb_node_list_gpu_node.csv").open("w", newline="") as file:
        rows = [("sn", "cpu_milli", "memory_mib", "gpu", "model")]
        rows += [(f"n{at}", cpu, 262144, gpu, model) for at, (cpu, gpu, model) in enumerate(nodes)]
        csv.writer(file).writerows(rows)
    header = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "gpu_spec", "qos", "pod_phase", "creation_time",
              "deletion_time", "scheduled_time")  # fmt: skip
    with (folder / "openb_pod_list_default.csv").open("w", newline="") as file:
        rows = [
            (f"p{at}", cpu, 1024, gpu, milli, "", "LS", "Running", at, at + 1, at)
            for at, (cpu, gpu, milli) in enumerate(pods)
        ]
        csv.writer(file).writerows([header, *rows])
    return trace.read_nodes(folder / "openb_node_list_gpu_node.csv"), trace.read_pods(
        folder / "openb_pod_list_default.csv"
    )


def bound(nodes: Any, pods: Any) -> float:
    return packing._Program(nodes, pods).bound()


def test_the_bound_is_exact_where_pods_are_cut_into_nothing(tmp_path: Path) -> None:
    """One card and shares of 60, 60 and 30 hundredths: two of 60 are too many, 60 + 30 is the best; a sum would say 100."""
    nodes, pods = files(tmp_path, [(64000, 1, "T4")], [(1000, 1, 600), (1000, 1, 600), (1000, 1, 300)])
    best = max(
        sum(some) for count in range(4) for some in itertools.combinations((60, 60, 30), count) if sum(some) <= 100
    )
    assert bound(nodes, pods) == pytest.approx(best / 100)


@pytest.mark.parametrize(
    ("nodes", "pods", "most"),
    [
        ([(4000, 2, "T4")], [(4000, 1, 1000), (4000, 1, 1000)], 1.0),
        ([(64000, 2, "T4")], [(1000, 4, 1000)], 0.0),
        ([(64000, 4, "T4")] * 2, [(1000, 2, 1000)] * 9, 8.0),
        ([(64000, 1, "T4")] * 3, [(1000, 1, 810)] * 9, 2.43),
    ],
    ids=["cpu", "no node has so many cards", "whole cards", "a fifth of each card is left"],
)
def test_what_no_packing_exceeds(nodes: Any, pods: Any, most: float, tmp_path: Path) -> None:
    assert bound(*files(tmp_path, nodes, pods)) == pytest.approx(most)


@pytest.mark.parametrize(
    ("pods", "until"),
    [
        ([(1000, 1, 600), (1000, 1, 400), (1000, 1, 600), (1000, 1, 400)], 2.0),
        ([(1000, 1, 600), (1000, 1, 600), (1000, 1, 600), (1000, 1, 100)], 1.2),
        ([(1000, 1, 810), (1000, 0, 0), (1000, 1, 1000), (1000, 1, 190)], 2.0),
        ([(1000, 2, 1000), (1000, 1, 100)], 2.0),
        ([(1000, 4, 1000), (1000, 1, 100)], 0.0),
    ],
)
def test_until_when_all_fit(pods: Any, until: float, tmp_path: Path) -> None:
    """Two cards. What comes later does not count, though it would fit, and nobody is cut in two to fit here."""
    nodes, arriving = files(tmp_path, [(64000, 2, "T4")], pods)
    assert packing.full(nodes, arriving) == pytest.approx(until)


def test_no_policy_exceeds_the_bound_and_a_row_is_what_was_simulated(tmp_path: Path) -> None:
    nodes, pods = files(
        tmp_path, [(32000, 4, "T4"), (64000, 8, "V100M32"), (16000, 2, "T4")], [(2000, 1, 250), (2000, 1, 700), (4000, 1, 1000), (8000, 2, 1000)] * 6
    )  # fmt: skip
    row = packing.measure(nodes, pods, "default", [1, 2, 3])
    for policy, seed in itertools.product(Policy, (1, 2, 3)):
        reached = simulate.run(nodes, pods, policy, seed).allocated
        assert reached <= bound(nodes, trace.drawn(pods, 14, seed)) / 14 + 1e-9, policy
    learnt = [100 * simulate.run(nodes, pods, Policy.FGD, seed, learnt=True).allocated for seed in (1, 2, 3)]
    assert row.learnt == pytest.approx(sum(learnt) / 3) and (row.least, row.most) == (
        min(learnt),
        max(learnt),
    )
    assert row.learnt <= row.bound and row.beyond == pytest.approx(row.learnt - row.published)


def test_the_program_writes_its_rows_and_says_where_a_trace_is_missing(tmp_path: Path) -> None:
    files(tmp_path, [(32000, 2, "T4")], [(1000, 1, 500), (1000, 1, 1000)])
    command = [
        sys.executable,
        "-m",
        "benchmarks.packing",
        "--seeds",
        "7",
        "--json",
        str(tmp_path / "out.json"),
    ]
    done = subprocess.run(
        [*command, "--trace", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert row["variant"] == "default" and row["seeds"] == 1 and 0 < row["learnt"] <= row["bound"] <= 100
    assert "default" in done.stdout
    nowhere = subprocess.run(
        [*command, "--trace", str(tmp_path / "no")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert "skipped, the public trace is not in no" in nowhere.stderr


def two_cards(cores: tuple[int, int]) -> Cluster:
    """One node with two cards, of which so much is taken."""
    cluster = Cluster()
    cluster.set_node("n", (Card("a", 0, "T4", 25 << 30), Card("b", 1, "T4", 25 << 30)), 64000, 1 << 40)
    cluster.book("before", "n", Usage({"a": (cores[0], cores[0]), "b": (cores[1], cores[1])}))
    return cluster


def share(cores: int) -> Shape:
    return Shape((Step(cores, cores, 1, False, False, 0),), Policy.FGD)


@pytest.mark.parametrize(
    ("way", "column"),
    [
        ("kube-scheduler, by name", 0),
        ("kube-scheduler, fullest card first", 1),
        ("node by us, by name", 0),
        ("node by us, fullest card first", 1),
        ("node by us for the card by name", 0),
        ("node and card by us", 1),
    ],
)
def test_a_way_takes_the_card_that_its_allocator_would(way: str, column: int) -> None:
    """30 cores beside 20 that are taken on the first card and 70 on the second, where they fit exactly."""
    cluster = two_cards((20, 70))
    typical = Workload().typical(cluster, 0.0)
    assert WAYS[way](1).place(cluster, np.array([0]), share(30), typical) == (0, [column])
    assert WAYS[way](1).place(cluster, np.array([0]), share(81), typical) is None


def test_slices_that_come_one_allocation_late_say_what_was_before() -> None:
    cluster = two_cards((20, 30))
    late = WAYS["node by us, fullest, one late"](1)
    typical = Workload().typical(cluster, 0.0)
    assert late.place(cluster, np.array([0]), share(10), typical) == (0, [1])
    cluster.book("next", "n", Usage({"a": (40, 40)}))
    assert late.place(cluster, np.array([0]), share(10), typical) == (0, [1])  # card a is fuller now
    cluster.book("third", "n", Usage({"b": (1, 1)}))
    assert late.place(cluster, np.array([0]), share(10), typical) == (0, [0])


def test_the_program_compares_the_ways_to_place_claims(tmp_path: Path) -> None:
    files(tmp_path, [(32000, 2, "T4")], [(1000, 1, 500), (1000, 1, 1000)])
    for more, ways in ((["--ways"], list(WAYS)), ([], [BUILT, BOTH])):
        command = [sys.executable, "-m", "benchmarks.claims_packing", *more, "--seeds", "7", "--trace", str(tmp_path)]
        command += ["--json", str(tmp_path / "out.json")]
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
        rows = json.loads((tmp_path / "out.json").read_text())["rows"]
        assert [row["way"] for row in rows] == ways
        assert rows[-1]["behind"] == 0 and all(0 < row["allocated"] <= 100 for row in rows)


def test_the_target_of_claims_needs_all_variants_within_half_a_point() -> None:
    def verdict(*behind: float) -> str:
        rows = [
            {"variant": f"v{at}", "way": way, "seeds": 3, "allocated": 90.0, "behind": points}
            for at, one in enumerate(behind)
            for way, points in ((BUILT, one), (BOTH, 0.0))
        ]
        found = _targets.judge({"claims_packing": {"rows": rows}})
        return next(one.verdict for one in found if one.name == "T39")

    assert verdict(0.0, 0.5, -0.1, 0.2) == "met"
    assert verdict(0.0, 0.51, -0.1, 0.2) == verdict(0.0, 0.0, 0.0) == "missed"
    assert verdict() == "not measured: claims_packing found no trace"


def test_the_target_of_preparing_claims_needs_the_time_and_nothing_wrong() -> None:
    def verdict(p99_ms: float, claims: int, *leaked: str) -> str:
        tally = {"cycles": 100, "kills": 41, "doubled": [], "lost": [], "leaked": list(leaked), "refused": []}
        found = _targets.judge({"claims": {"times": {"p99_ms": p99_ms, "claims": claims}, "tally": tally}})
        return next(one.verdict for one in found if one.name == "T27")

    assert verdict(10.0, 200) == "met"
    assert verdict(10.1, 200) == verdict(9.0, 40) == verdict(9.0, 200, "a region of no claim") == "missed"


def test_what_is_built_takes_no_card_of_another_model() -> None:
    """kube-scheduler offers only nodes with a card that the claim's selector takes; the extender can't read that."""
    cluster = Cluster()
    for name, model in (("a", "T4"), ("b", "A100")):
        cluster.set_node(name, (Card(f"{name}-0", 0, model, 16 << 30),), 64000, 1 << 38)
    cluster.book("old", "a", Usage({"a-0": (70, 10)}))  # the better fit for 30 cores, but a T4
    shape = Shape((Step(30, 10, 1, False, False, 0),), Policy.FGD, models=CardFilter(include=frozenset({"A100"})))
    typical = Workload().typical(cluster, 0.0)
    for way in (BUILT, "the same, selectors not read"):
        assert WAYS[way](1).place(cluster, np.arange(2), shape, typical) == (1, [0])
        assert WAYS[way](1).place(cluster, np.array([0]), shape, typical) is None
