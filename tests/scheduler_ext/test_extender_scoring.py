"""The C core's costs, reasons and cards are those of the numpy reference, to the last bit; names are read from a request's bytes."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_ext.engine.core import Engine
from scheduler_ext.protocol.extender_v1 import BadInput, read_args
from scheduler_ext.scoring import placing, scores
from scheduler_ext.scoring.typical_pods import Workload
from scheduler_ext.state.cluster import Cluster, Usage
from scheduler_ext.state.objects import pod_requests
from scheduler_ext.state.pod_classes import PodClasses
from scheduler_ext.state.shape import Shape, Step, shape_of
from tests.scheduler_ext import scoring_reference as reference
from tests.scheduler_ext.extender_support import NAMES, cards, node, pod
from vcuda.spec import request
from vcuda.spec.errors import InvalidRequest
from vcuda.spec.inventory import Card
from vcuda.spec.names import POD_GROUP_LABEL
from vcuda.spec.request import CardFilter, Policy

MODELS = ("A100", "H100", "L40S")


def random_cluster(dice: random.Random, nodes: int) -> Cluster:
    """Nodes of any size, part-filled, some overbooked past us, some unhealthy, linked anyhow."""
    cluster = Cluster()
    for number in range(nodes):
        name = f"n{number:03d}"
        count = dice.choice((0, 1, 2, 4, 8, 8, 10))
        uuids = [f"{name}-{index}" for index in range(count)]
        its = tuple(
            Card(
                uuid, index, dice.choice(MODELS), dice.choice((40, 320)) * 2**28, 0, dice.random() < 0.9,
                tuple((peer, dice.choice((0, 1, 4, 7))) for peer in uuids if peer != uuid and dice.random() < 0.6),
            )
            for index, uuid in enumerate(uuids)
        )  # fmt: skip
        cluster.set_node(name, its, dice.choice((4_000, 96_000)), dice.choice((2**34, 2**40)))
        for card in its:
            taken = dice.choice((0, 0, 0, 13, 37, 50, 81, 100, 120))
            if taken:
                use = {card.uuid: (taken, card.memory_blocks * dice.choice((taken, 10)) // 100)}
                cluster.book(f"x{card.uuid}", name, Usage(use, dice.randrange(4_000), dice.randrange(2**33)))
    return cluster


def random_shape(dice: random.Random) -> Shape:
    steps: list[Step] = []
    sidecars = 0
    count = dice.choice((1, 1, 1, 2, 3))
    for number in range(count):
        cards = dice.choice((0, 0, 0, 1, 2, 3, 8))
        init = number > 0 and dice.random() < 0.4
        cores = dice.choice((1, 13, 30, 50, 81, 99)) if not cards else 100
        steps.append(
            Step(cores, dice.choice((1, 8, 40, 200)), max(cards, 1), bool(cards), init, sidecars if init else 0)
        )
        sidecars += not init and dice.random() < 0.3
    steps.sort(key=lambda step: step.init)
    models = dice.choice(
        (
            CardFilter(),
            CardFilter(),
            CardFilter(frozenset(("A100", "L40S"))),
            CardFilter(frozenset(), frozenset(("H100",))),
        )
    )
    card_policy = dice.choice((None, None, *Policy))
    return Shape(
        tuple(steps), dice.choice(list(Policy)), models, cpu_milli=dice.choice((0, 2_000)), memory_bytes=dice.choice((0, 2**32)),
        card_policy=card_policy,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_costs_reasons_and_cards_are_those_of_the_reference(seed: int) -> None:
    dice = random.Random(seed)
    cluster = random_cluster(dice, 40)
    workload = Workload([random_shape(dice) for _ in range(60)] if seed % 3 else None)
    typical = workload.typical(cluster, 0.0)
    rows = np.arange(len(cluster))
    view = cluster.view(rows)
    fitting = 0
    for _ in range(60):
        shape = random_shape(dice)
        allowed = scores.allowed_cards(shape, cluster, rows)
        ours, theirs = (
            placing.plan(shape, view, allowed, typical),
            reference.plan(shape, view, allowed, typical),
        )
        fits = theirs.code == 0
        # What greed refuses is searched exactly by both; the reference knows greed alone.
        assert len(shape.steps) > 1 or np.array_equal(ours.code, theirs.code), shape
        assert (ours.code[fits] == 0).all(), shape
        assert np.array_equal(ours.cost[fits], theirs.cost[fits]), shape
        assert np.array_equal(ours.picks[fits], theirs.picks[fits]), shape
        fitting += int(fits.sum())
        table = scores.Table(shape)
        table.refresh(cluster, typical)
        there = cluster.code[rows] == 0
        assert np.array_equal(table.cost[rows][there], ours.cost[there]) and np.isinf(table.cost[rows][~there]).all()
    assert fitting > 300
    rest = reference.Rest(view.free_cores, view.free_blocks, view.free_cpu, view.free_memory)
    assert np.array_equal(placing.fragmentation(view, typical), reference.fragmentation(view, rest, typical))


# --- names ---

NODES = [f"gpu-node-{number:05d}" for number in range(3000)] + ["a", "b.c", "x" * 253, "12345678", "1234567"]


@pytest.fixture(scope="module")
def known() -> Cluster:
    cluster = Cluster()
    for name in NODES:
        cluster.set_node(name, (), 0, 0)
    for number in range(0, 3000, 3):
        cluster.remove_node(f"gpu-node-{number:05d}")
    return cluster


def expected(cluster: Cluster, names: list[str]) -> list[int]:
    return [cluster.index.get(name, -1) for name in names]


@given(
    st.lists(st.one_of(st.sampled_from(NODES), st.text(max_size=20))),
    st.dictionaries(
        st.text(max_size=4),
        st.text(max_size=8) | st.integers(-(2**63), 2**63 - 1) | st.lists(st.booleans()),
        max_size=3,
    ),
    st.booleans(),
)
def test_rows_are_those_of_the_names_or_a_whole_parser_looks(
    known: Cluster, names: list[str], rest: dict[str, Any], first: bool
) -> None:
    rest = {key: value for key, value in rest.items() if key.lower() != "nodenames"}
    body = orjson.dumps({"NodeNames": names, **rest} if first else {**rest, "NodeNames": names})
    found = known.named.offered(body)
    if found is None:
        assert any(not name.isascii() or not name.isprintable() or set(name) & set('"\\') for name in names)
        return
    left, offered = found
    assert offered.known == (-1 not in offered.rows)
    assert orjson.loads(left) == {**rest, "NodeNames": None}
    assert offered.rows.tolist() == expected(known, names) and list(offered) == names and len(offered) == len(names)


@given(st.binary(max_size=60), st.integers(0, 200), st.integers(0, 10))
def test_no_bytes_are_read_past_or_misread(known: Cluster, noise: bytes, at: int, gone: int) -> None:
    """Whatever is found must be what a JSON parser finds."""
    good = b'{"Pod":{"a":["}",{"b":"\\\\\\""}]},"Nodes":null,"NodeNames":["a","gpu-node-00001","zz"]}'
    body = good[:at] + noise + good[at + gone :]
    found = known.named.offered(body)
    if found is None:
        return
    try:
        whole = orjson.loads(body)
    except orjson.JSONDecodeError:
        with pytest.raises(orjson.JSONDecodeError):
            orjson.loads(found[0])
        return
    names = next(value for key, value in whole.items() if key.lower() == "nodenames" and value is not None)
    assert found[1].rows.tolist() == expected(known, names) and list(found[1]) == names


def test_a_request_cut_at_every_byte_is_refused_and_books_nothing(known: Cluster) -> None:
    body = b'{"Pod":{"metadata":{},"spec":{}},"NodeNames":["gpu-node-00001","a"]}'
    for end in range(len(body)):
        assert known.named.offered(body[:end]) is None
        with pytest.raises(BadInput):
            read_args(body[:end], known.named.offered)
    assert list(read_args(body, known.named.offered).names) == ["gpu-node-00001", "a"]


def test_names_given_twice_are_those_that_json_ends_with(known: Cluster) -> None:
    pod = b'"Pod":{"metadata":{},"spec":{}}'
    for body in (
        b'{"NodeNames":["a"],%b,"nodenames":["b.c"]}' % pod,
        b'{"NodeNames":["a"],%b,"NodeN\\u0061mes":["b.c"]}' % pod,
    ):
        assert list(read_args(body, known.named.offered).names) == ["b.c"]


def test_rows_of_names_that_changed_meanwhile_are_looked_up_again() -> None:
    """A row that a deleted node left may be another node's by the time of the decision."""
    engine = Engine(NAMES)
    for name in ("a", "b"):
        engine.see_node(node(name, cards(name, 1)))
    found = engine.offered(b'{"NodeNames":["a"]}')
    assert found is not None and engine.cache.rows(found[1]).tolist() == [0]
    engine.lose_node("a")
    engine.see_node(node("c", cards("c", 1)))
    assert engine.cache.cluster.index["c"] == 0 and engine.cache.rows(found[1]).tolist() == [-1]


# --- classes of pods ---

_TEXT = st.sampled_from(("1", "50", "200", "x", "", "-1"))
_CONTAINER = st.fixed_dictionaries(
    {"name": st.sampled_from(("m", "n")), "resources": st.fixed_dictionaries({
        "limits": st.dictionaries(st.sampled_from((NAMES.core, NAMES.memory)), _TEXT),
        "requests": st.dictionaries(st.sampled_from(("cpu", "memory")), st.sampled_from(("1", "500m", "2Gi"))),
    })},
    optional={"restartPolicy": st.just("Always")},
)  # fmt: skip
_POD = st.fixed_dictionaries({
    "metadata": st.fixed_dictionaries(
        {"uid": st.sampled_from(("u", "v")), "name": st.just("p")},
        optional={
            "annotations": st.dictionaries(
                st.sampled_from((NAMES.core_limit, NAMES.policy, NAMES.card_model, NAMES.gang, NAMES.oversell, "other")), _TEXT | st.just("fgd")
            ),
            "labels": st.dictionaries(st.sampled_from((POD_GROUP_LABEL, "app")), _TEXT),
        },
    ),
    "spec": st.fixed_dictionaries(
        {"containers": st.lists(_CONTAINER, max_size=2)}, optional={"initContainers": st.lists(_CONTAINER, max_size=2)}
    ),
})  # fmt: skip


@given(st.lists(_POD, min_size=2, max_size=6))
def test_what_a_class_of_pods_asks_for_is_what_each_of_them_does(pods: list[dict[str, Any]]) -> None:
    classes = PodClasses(NAMES, Policy.BINPACK)
    for one in [*pods, *pods]:
        try:
            asked = request.parse_pod(one, NAMES)
        except InvalidRequest as error:
            with pytest.raises(InvalidRequest, match=re.escape(error.message)):
                classes.read(one)
            continue
        assert classes.read(one) == (asked, shape_of(asked, Policy.BINPACK, *pod_requests(one)))


@pytest.mark.parametrize(
    "change",
    [
        {NAMES.core_limit: "60"}, {NAMES.oversell: "true"}, {NAMES.policy: "spread"}, {NAMES.priority: "high"},
        {NAMES.card_model: "A100"}, {NAMES.card_uuid: "!GPU-1"}, {NAMES.gang: "g/2"},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_each_annotation_of_ours_makes_another_class(change: dict[str, str]) -> None:
    classes = PodClasses(NAMES, Policy.BINPACK)
    plain, other = pod("p", 30, 10, uid="u"), pod("p", 30, 10, uid="u", annotations=change)
    assert classes.read(plain)[0] == request.parse_pod(plain, NAMES) != classes.read(other)[0]
    assert classes.read(other)[0] == request.parse_pod(other, NAMES)
