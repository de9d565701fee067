"""What rarely happens to a pod, a gang, a quota or a lease: each is answered, and what is kept for nobody is given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scheduler_ext import settings
from scheduler_ext.engine import filter
from scheduler_ext.lab import trace
from scheduler_ext.lab.trace import TraceError
from scheduler_ext.main import main
from scheduler_ext.planning import explain
from scheduler_ext.protocol.extender_v1 import Victims
from scheduler_ext.scoring import quotas
from scheduler_ext.state import decisions, objects
from tests.scheduler_ext.extender_election import Replica, World
from tests.scheduler_ext.extender_engine import engine_with, free
from tests.scheduler_ext.extender_support import NAMES, FakeApi, cards, node, plain_pod, pod
from vcuda.kube.errors import ApiError
from vcuda.settings import InvalidSettings
from vcuda.spec import request
from vcuda.spec.inventory import Card


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ([np.inf, np.inf], [0, 0]),
        ([], []),
        ([3.0, np.inf, 3.0], [10, 0, 10]),
        ([1.0, 2.0, np.inf, 4.0], [10, 7, 0, 1]),
    ],
)
def test_costs_become_grades_even_when_nothing_fits_or_all_are_equal(costs: list[float], expected: list[int]) -> None:
    assert filter.graded(np.array(costs)) == expected


@pytest.mark.parametrize("option", ["--body-mib", "--record-mib"])
@pytest.mark.parametrize(("value", "good"), [("1", True), ("1024", True), ("0", False), ("1048577", False)])
def test_sizes_are_taken_within_their_bounds_only(option: str, value: str, good: bool) -> None:
    name = option[2:].replace("-", "_")
    given = {"allow_anyone": "true", name: value}
    if good:
        assert getattr(settings.read(given, {}), name) == int(value)
    else:
        with pytest.raises(InvalidSettings, match=f"^{option}: '{value}' is not valid .give a whole number from 1 to "):
            settings.read(given, {})


def test_the_extender_too_reads_its_environment_and_a_file(tmp_path: Path) -> None:
    """A flag wins over a variable, a variable over the file, the file over the default."""
    config = tmp_path / "settings.yaml"
    config.write_text("allow-anyone: true\nport: 1\nbody-mib: 1\ngang-seconds: 7\n")
    variables = {"GPU_SCHEDULER_EXTENDER_PORT": "2", "GPU_SCHEDULER_EXTENDER_BODY_MIB": "2"}
    found = settings.read({"config": str(config), "port": "3"}, variables)
    assert (found.port, found.body_mib, found.gang_seconds, found.policy) == (3, 2, 7.0, settings.Policy.FGD)


@pytest.mark.parametrize("seeds", ["2-1", "1-1001", "x"])
def test_seeds_that_are_none_or_too_many_end_with_usage(seeds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--nodes", "n", "--pods", "p", "--seeds", seeds])
    assert "argument --seeds: invalid" in capsys.readouterr().err


def test_a_trace_without_cards_is_an_error_and_no_endless_search() -> None:
    with pytest.raises(TraceError, match="no pod of the trace asks for a card"):
        trace.drawn([trace.TracePod(request.parse_pod(plain_pod("p"), NAMES), 1000, 1024)], 5.0, 1)


@pytest.mark.parametrize("spec", [None, [], "x", 5])
def test_a_pod_without_a_specification_asks_for_no_cpu(spec: object) -> None:
    assert objects.pod_requests({"spec": spec}) == (0, 0)


@pytest.mark.parametrize("odd", [[None, "x", 5], [{"resources": 3}], {"a": 1}, "abc", 5])
@pytest.mark.parametrize("where", ["containers", "initContainers"])
def test_what_is_no_container_asks_for_no_cpu(where: str, odd: object) -> None:
    right = {"resources": {"requests": {"cpu": "2", "memory": "1Mi"}}}
    other = {"containers": "initContainers", "initContainers": "containers"}[where]
    assert objects.pod_requests({"spec": {where: odd, other: [right]}}) == (2000, 2**20)


def test_links_to_cards_that_the_node_does_not_have_are_left_out() -> None:
    linked = Card("GPU-0", 0, "A100", 2**33, links=(("GPU-9", 50), ("GPU-1", 50)))
    engine, _ = engine_with(node("a", (linked, Card("GPU-1", 1, "A100", 2**33))))
    assert engine.filter(pod("p", 200, None), ["a"]).chosen == "a"


def test_only_the_newest_decisions_about_a_pod_are_shown() -> None:
    engine, _ = engine_with(node("a", cards("a", 1)))
    for _ in range(decisions._FOR_ONE_POD + 3):
        engine.filter(pod("p", 30, 400, uid="p"), ["a"])
    found = explain.explanation(engine.evidence(uid="p"))
    assert found is not None and len(found["decisions"]) == decisions._FOR_ONE_POD


def test_a_pod_that_was_offered_no_known_node_is_told_so() -> None:
    engine, _ = engine_with(node("a", cards("a", 1)))
    engine.filter(pod("p", uid="p"), ["nowhere"])
    found = explain.explanation(engine.evidence(uid="p"))
    assert found is not None
    assert (found["state"], found["summary"]) == (
        "waiting",
        "kube-scheduler offered no node that is known here",
    )


def test_cards_for_a_pod_with_a_share_are_not_graded_as_for_one_without(api: FakeApi, start: Any) -> None:
    api.put("nodes", node("a", cards("a", 1)))
    running = start()
    body = {"Pod": pod("p"), "NodeNames": ["a", "b"]}
    assert [row["Score"] for row in running.post("/scheduler/cpu/prioritize", body)] == [0, 0]
    body["Pod"] = plain_pod("q")
    assert [row["Score"] for row in running.post("/scheduler/cpu/prioritize", body)] != [0, 0]


def test_preemption_answers_for_pods_without_a_share_and_for_requests_that_are_none() -> None:
    engine, _ = engine_with(node("a", cards("a", 1)))
    offered = {"a": Victims(("x",)), "gone": Victims(("y",))}
    assert engine.preempt(plain_pod("p"), offered) == offered
    assert engine.preempt(pod("p", 30, None), offered) == {}


def test_a_nomination_to_a_node_that_is_gone_keeps_nothing() -> None:
    engine, _ = engine_with(node("a", cards("a", 1)))
    one = pod("p", uid="p")
    one["status"]["nominatedNodeName"] = "gone"
    engine.see_pod(one)
    assert not engine.holds("p") and free(engine) == 100
    one["status"]["nominatedNodeName"] = "a"
    engine.see_pod(one)
    assert engine.holds("p")
    found = explain.explanation(engine.evidence(uid="p"))
    assert found is not None
    assert found["summary"] == "cards of node a are kept for it; kube-scheduler will ask again"


@pytest.mark.parametrize(
    ("quota", "over"),
    [
        ("cores: 100", True),
        ("cores: 200", False),
        ("cores: 10, models: [A100]", True),
        ("cores: 10, models: [H100]", False),
        ("cores: 10, nodes: {pool: x}", False),
    ],
)
def test_a_use_counts_only_against_quotas_of_its_models_and_nodes(quota: str, over: bool) -> None:
    engine, _ = engine_with(node("a", cards("a", 2)))
    engine.see_quotas({"metadata": {"name": "q"}, "data": {"quotas": f"[{{namespace: default, {quota}}}]"}})
    held: quotas.Quotas = engine.cache.quotas
    assert bool(held.over("default", (), "a", {"GPU-a-0": (100, 5), "GPU-a-1": (1, 5)})) is over
    assert not held.over("other", (), "a", {"GPU-a-0": (100, 5)})


def test_a_lease_that_can_not_be_written_for_another_reason_than_a_rival_is_no_leadership() -> None:
    world = World()
    one = Replica(world, "one")
    lines: Any = one.election._api
    put = lines.put_lease

    def forbidden(*_: object) -> None:
        raise ApiError(403, "leases is forbidden")

    one.step()
    world.now += one.election._longest + 0.1  # what it found may have been another's
    lines.put_lease = forbidden
    one.step()
    problem = one.election.standby_reason()
    assert problem is not None and "403" in problem and "leases is forbidden" in problem and one.events == []
    lines.put_lease = put
    world.now += 1
    one.step()
    assert one.serves and one.events == ["gained"]
