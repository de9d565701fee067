"""Pods that are being deleted, or are gone, and have no node: the API server binds none, so nothing is kept for them."""

from __future__ import annotations

import copy
import json
from typing import Any, cast

import pytest

from scheduler_ext.engine.core import Engine
from scheduler_ext.http.app import Extender
from scheduler_ext.protocol.reasons import ExtenderReason
from scheduler_ext.state.pods import State
from scheduler_ext.sync.binder import Binder
from tests.scheduler_ext.extender_claims import ask, claim, node_slices, user
from tests.scheduler_ext.extender_engine import engine_with, free
from tests.scheduler_ext.extender_support import NAMES, cards, container, node, pod
from tests.scheduler_ext.test_extender_doubt import ARGS, Api, bind, state
from vcuda.kube.errors import ApiError, ApiUnreachable

CONFLICT = ApiError(409, "pod p is being deleted, cannot be assigned to a host")


def going(one: dict[str, Any]) -> dict[str, Any]:
    changed = copy.deepcopy(one)
    changed["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return changed


def shown(engine: Engine, one: dict[str, Any], how: str) -> None:
    if how == "terminating":
        engine.see_pod(going(one))
    elif how == "deleted":
        engine.lose_pod(one["metadata"]["uid"], one)
    elif how == "not listed":
        engine.filter(one, ["a"])
        engine.keep_pods([], listed_since=1e12)


HOW = ["terminating", "deleted", "not listed"]


@pytest.mark.parametrize("how", [*HOW, "kube-scheduler says so"])
@pytest.mark.parametrize("gang", [False, True])
def test_a_pod_that_goes_is_not_booked_by_filter(how: str, gang: bool) -> None:
    """Its cards were kept for --assume-seconds: no Bind comes."""
    engine, _ = engine_with(node("a", cards("a", 2)))
    annotations = {NAMES.gang: "g/1"} if gang else {}
    one = pod("p", uid="p", annotations=annotations)
    engine.see_pod(one)
    shown(engine, one, how)
    verdict = engine.filter(going(one) if how == "kube-scheduler says so" else one, ["a"])
    assert verdict.chosen is None and verdict.refusal is not None and not verdict.curable
    reason, message = verdict.refusal
    assert reason is ExtenderReason.NO_SUCH_POD and "pod default/p is gone or is being deleted" in message
    assert free(engine) == 200
    # One of the same name is another pod.
    assert engine.filter(pod("p", uid="p2", annotations=annotations), ["a"]).chosen == "a"


@pytest.mark.parametrize("heavy", [False, True])
def test_nothing_is_planned_for_a_pod_that_goes(heavy: bool) -> None:
    engine, _ = engine_with(node("a", cards("a", 2)))
    containers = [container(f"c{number}", 10, 1) for number in range(9)] if heavy else [container("main", 30, 10)]
    one = going(pod("p", uid="p", containers=containers, annotations={} if heavy else {NAMES.gang: "g/2"}))
    body = json.dumps({"Pod": one, "NodeNames": ["a"]}).encode()
    answer = Extender(engine, cast(Binder, None)).filter(body)
    assert isinstance(answer, bytes), "it is not waited for"
    assert json.loads(answer)["FailedNodes"]["a"].startswith("NoSuchPod: ")


def test_what_was_assumed_for_it_is_free_when_kube_scheduler_says_that_it_goes() -> None:
    engine, _ = engine_with(node("a", cards("a", 1)))
    one = pod("p", uid="p")
    assert engine.filter(one, ["a"]).chosen == "a" and free(engine) == 70
    assert engine.filter(going(one), ["a"]).chosen is None and free(engine) == 100


def test_a_pod_that_is_there_again_is_booked() -> None:
    """The API server went back to an earlier state."""
    engine, _ = engine_with(node("a", cards("a", 1)))
    one = pod("p", uid="p")
    engine.see_pod(one)
    engine.lose_pod("p", one)
    assert engine.filter(one, ["a"]).chosen is None
    engine.see_pod(one)
    assert engine.filter(one, ["a"]).chosen == "a"


def test_a_bind_that_comes_after_its_pods_end_began_books_and_writes_nothing() -> None:
    """It was decided anew, the API server answered 409, and the share stayed booked."""
    engine, _ = engine_with(node("a", cards("a", 1)))
    one = pod("p", uid="p")
    engine.see_pod(one)
    engine.filter(one, ["a"])
    engine.see_pod(going(one))
    assert free(engine) == 100
    api = Api(going(one), CONFLICT)
    refused = bind(engine, api)
    assert refused is not None and str(refused) == "NoSuchPod: pod default/p is being deleted"
    assert (api.written, state(engine), free(engine)) == ([], None, 100)


@pytest.mark.parametrize("error", [CONFLICT, ApiError(500, "etcd"), ApiUnreachable("cut")], ids=["409", "500", "cut"])
def test_a_write_that_fails_because_the_pod_goes_gives_the_share_back_at_once(error: Exception) -> None:
    """The watch had not shown it yet; of such a pod no write that is late is carried out either."""
    engine, _ = engine_with(node("a", cards("a", 1)))
    one = pod("p", uid="p")
    engine.see_pod(one)
    engine.filter(one, ["a"])
    api = Api(going(one), error)
    refused = bind(engine, api)
    assert refused is not None and refused.reason is ExtenderReason.BIND_FAILED
    assert (api.written, state(engine), free(engine)) == ([("p", "a")], None, 100)
    assert engine.filter(one, ["a"]).chosen is None and free(engine) == 100


def test_a_conflict_of_a_pod_that_stays_keeps_its_place() -> None:
    engine, _ = engine_with(node("a", cards("a", 1)))
    one = pod("p", uid="p")
    engine.filter(one, ["a"])
    assert bind(engine, Api(one, CONFLICT), ARGS) is not None
    assert state(engine) is State.ASSUMED and free(engine) == 70


@pytest.mark.parametrize("how", ["terminating", "deleted", "kube-scheduler says so"])
def test_a_pod_with_claims_that_goes_books_none(how: str) -> None:
    engine, _ = engine_with(node("a", None))
    for one_slice in node_slices("a"):
        engine.see_slice(one_slice)
    engine.see_claim(claim("c", ask("r", 30, 10)))
    one = user("p", "c", uid="p")
    engine.see_pod(one)
    shown(engine, one, how)
    verdict = engine.filter_claims(going(one) if how == "kube-scheduler says so" else one, ["a"])
    assert verdict is not None and verdict.refusal is not None and verdict.refusal[0] is ExtenderReason.NO_SUCH_POD
    assert engine.filter_claims(user("p", "c", uid="p2"), ["a"]).chosen == "a"  # type: ignore[union-attr]
