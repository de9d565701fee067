"""Owners who edit their pods again and again: what is kept of all edits is bounded, and so is the work for one."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from scheduler_ext.scoring.scores import Scores
from scheduler_ext.scoring.typical_pods import Workload
from scheduler_ext.state.cluster import Cluster
from scheduler_ext.state.shape import Shape, Step
from tests.scheduler_ext.extender_engine import engine_with
from tests.scheduler_ext.extender_support import NAMES, cards, container, node, pod
from vcuda.spec.request import MAX_ANNOTATION_CHARS, MAX_FILTER_ITEMS, CardFilter, Policy

MIB = 2**20
LARGE = 250_000  # bytes: nearly all that an object's annotations may have
MANY = ",".join(f"{number:x}" for number in range(40_000))
MOST = ",".join(f"{number:x}".ljust(MAX_ANNOTATION_CHARS // MAX_FILTER_ITEMS - 1, "u") for number in range(63))


def padded(text: str, edit: int) -> str:
    """The same value, as a parser that strips it reads it, and another text for each edit."""
    return text + " " * (LARGE - edit)


EDITS: dict[str, Callable[[int], dict[str, Any]]] = {
    "uuids": lambda edit: {"annotations": {NAMES.card_uuid: f"u{edit},{MANY}"}},
    "models": lambda edit: {"annotations": {NAMES.card_model: f"u{edit},{MANY}"}},
    "valid uuids": lambda edit: {"annotations": dict.fromkeys((NAMES.card_uuid, NAMES.card_model), f"u{edit},{MOST}")},
    "policy": lambda edit: {"annotations": {NAMES.policy: padded("node=spread,card=spread", edit)}},
    "oversell": lambda edit: {"annotations": {NAMES.oversell: padded("main=20", edit)}},
    "gang": lambda edit: {"annotations": {NAMES.gang: padded("g/2", edit)}},
    "resources": lambda edit: {
        "containers": [
            container("main", 30, 10),
            {"name": "more", "resources": {"requests": {f"{edit}{'x' * LARGE}": "1"}}},
        ]
    },
}


@pytest.mark.parametrize("edit", EDITS)
def test_edits_of_a_waiting_pod_do_not_fill_the_memory(edit: str) -> None:
    """Each edit was a class of its own: 4.8 MiB, of which 4,096 were kept, also when the pod was gone."""
    engine, _ = engine_with(node("a", cards("a", 2)))
    valid = edit == "valid uuids"
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(1500 if valid else 100):
            one = pod("p", 30, 10, uid="p", **EDITS[edit](number))
            engine.see_pod(one)
            engine.filter(one, ["a"])
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept < (48 * MIB if valid else 4 * MIB), kept / MIB


def test_edits_of_a_running_pods_placement_do_not_fill_the_memory() -> None:
    """The last text of each pod was kept, to see the next edit."""
    engine, _ = engine_with(node("a", cards("a", 2)))
    tracemalloc.start()
    try:
        for number in range(100):
            uid = f"p{number}"
            engine.see_pod(pod(uid, 30, 10, uid=uid, node="a", annotations={NAMES.placement: padded("{}", number)}))
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept < 4 * MIB


def test_a_pod_of_thousands_of_containers_is_refused_early() -> None:
    """Each name was compared with all before, under the lock: 8,000 took seconds."""
    engine, _ = engine_with(node("a", cards("a", 2)))
    one = pod("p", uid="p", containers=[container(f"c{number}", 1, 1) for number in range(8000)])
    began = time.thread_time()
    engine.see_pod(one)
    assert time.thread_time() - began < 0.2
    verdict = engine.filter(one, ["a"])
    assert verdict.refusal is not None and "may have 64" in verdict.refusal[1]


def test_kinds_of_pods_that_never_come_again_are_forgotten() -> None:
    workload = Workload()
    step = Step(30, 10, 1, False, False, 0)
    for number in range(6000):
        workload.observe(Shape((step,), Policy.FGD, models=CardFilter(frozenset({f"model-{number}"}))))
    assert len(workload._counts) <= 4096


def test_tables_of_pods_with_many_cards_count_as_large_as_they_are() -> None:
    """All counted like the last one: 64 of pods with 1,024 cards were 2.6 GB at 5,000 nodes."""
    engine, _ = engine_with(*(node(f"n{at}", cards(f"n{at}", 2)) for at in range(40)))
    cluster: Cluster = engine.cache.cluster
    few = Step(30, 10, 1, False, False, 0)
    many = tuple(Step(100, 0, 16, True, False, 0) for _ in range(64))
    plain = Scores().table(Shape((few,), Policy.SPREAD), cluster, engine.cache.typical()).size_bytes
    scores = Scores(most_bytes=100 * plain)
    for number in range(20):
        scores.table(Shape((few,), Policy.SPREAD, cpu_milli=number), cluster, engine.cache.typical())
        shape = Shape(many, Policy.SPREAD, cpu_milli=number)
        while scores.warm(shape, cluster, engine.cache.typical()):
            pass
    largest = max(table.size_bytes for table in scores._tables.values())
    assert sum(table.size_bytes for table in scores._tables.values()) <= 100 * plain + largest
