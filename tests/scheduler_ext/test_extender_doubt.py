"""Writes that failed, writes whose result nobody knows, and Binds of pods that we know nothing of: looked at, never doubled."""

# ruff: noqa: ARG002  (the parameters are those of the real client)
from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from scheduler_ext.engine.bindings import Refused, Write
from scheduler_ext.engine.core import Engine
from scheduler_ext.protocol.extender_v1 import BindingArgs, filter_answer, read_args
from scheduler_ext.protocol.reasons import ExtenderReason
from scheduler_ext.state.pods import State
from scheduler_ext.sync.api import ApiServer
from scheduler_ext.sync.binder import Binder
from scheduler_ext.sync.lanes import Lanes
from tests.scheduler_ext.extender_engine import bound, engine_with, free
from tests.scheduler_ext.extender_support import NAMES, cards, node, plain_pod, pod
from vcuda.kube.errors import ApiError, ApiUnreachable
from vcuda.spec import bookings, placement

ARGS = BindingArgs("p", "default", "p", "a")


class Api:
    """Answers every read with `shows`, every write with `refuses`, or with success; errors are raised."""

    def __init__(self, shows: Any = None, refuses: Exception | None = None) -> None:
        self.shows, self.refuses = shows, refuses
        self.asked: list[str] = []
        self.written: list[tuple[str, str]] = []
        self.annotations: list[Mapping[str, str]] = []

    def pod(self, namespace: str, name: str) -> Any:
        self.asked.append(f"{namespace}/{name}")
        if isinstance(self.shows, Exception):
            raise self.shows
        return self.shows

    async def bind(self, namespace: str, name: str, uid: str, where: str, annotations: Mapping[str, str]) -> None:
        self.written.append((uid, where))
        self.annotations.append(annotations)
        if self.refuses is not None:
            raise self.refuses

    async def close(self) -> None: ...


def bind(engine: Engine, api: Api, args: BindingArgs = ARGS) -> Refused | None:
    async def work() -> Refused | None:
        with ThreadPoolExecutor(1) as executor:
            binder = Binder(cast(ApiServer, api), engine, executor, writer=cast(Any, api))
            return await binder.bind(args)

    return asyncio.run(work())


def ended(engine: Engine, api: Api, *, late_seconds: float, meanwhile: Any = None) -> tuple[Refused | None, float]:
    """A Bind, and for how long its binder waits then because the API server may still carry it out."""

    async def work() -> tuple[Refused | None, float]:
        with ThreadPoolExecutor(1) as executor:
            binder = Binder(cast(ApiServer, api), engine, executor, writer=cast(Any, api), late_seconds=late_seconds)
            refused, begin = await binder.bind(ARGS), time.monotonic()
            await binder.close()
            if meanwhile is not None:
                asyncio.get_running_loop().call_later(0.3, meanwhile)
            await binder.outlive()
            return refused, time.monotonic() - begin

    return asyncio.run(work())


def state(engine: Engine) -> State | None:
    record = engine.evidence(uid="p").record
    return None if record is None else record.state


def uncertain() -> tuple[Engine, dict[str, Any], Write]:
    """A pod of 30 cores on node a, of whose write nobody knows the result."""
    engine, _ = engine_with(node("a", cards("a", 1)))
    one = pod("p", uid="p")
    engine.filter(one, ["a"])
    write = engine.begin_bind("p", "a")
    assert isinstance(write, Write)
    engine.end_bind("p", State.UNCERTAIN)
    return engine, one, write


@pytest.mark.parametrize(
    ("shows", "then", "left"),
    [
        ("bound", State.BOUND, 70),
        ("unbound", State.ASSUMED, 70),
        (pod("p", uid="another"), None, 100),
        (ApiError(404, "not found"), None, 100),
        (ApiError(403, "forbidden"), State.UNCERTAIN, 70),
        (ApiError(503, "overloaded"), State.UNCERTAIN, 70),
        (ApiUnreachable("cut"), State.UNCERTAIN, 70),
    ],
    ids=["bound", "not bound", "a namesake", "deleted", "forbidden", "overloaded", "unreachable"],
)
def test_what_became_of_a_write_is_asked_until_it_is_known(shows: Any, then: State | None, left: int) -> None:
    engine, one, write = uncertain()
    api = Api({"bound": bound(one, write), "unbound": one}[shows] if isinstance(shows, str) else shows)
    inline = Lanes(start=lambda work: work())
    with ThreadPoolExecutor(1) as executor:
        Binder(cast(ApiServer, api), engine, executor, writer=cast(Any, api), asking=inline).settle()
    assert api.asked == ["default/p"] and api.written == []
    assert (state(engine), free(engine)) == (then, left)


@pytest.mark.parametrize("as_written", [True, False], ids=["our write", "somebody else's"])
def test_the_watch_may_show_later_how_a_pod_that_was_read_was_before(as_written: bool) -> None:
    """Its own ADDED was on its way when the answer to its Bind was lost: that was taken for an API server that had gone
    back, the next report of its node freed the card, and a second pod was bound there: 160 of 100 cores.
    """
    engine, one, write = uncertain()
    there = bound(one, write)
    if not as_written:
        share = placement.Placement({"main": (placement.CardShare("GPU-a-0", 50, 10),)})
        there["metadata"]["annotations"][NAMES.placement] = placement.encode(share)
    read = there | {"metadata": there["metadata"] | {"annotations": dict(there["metadata"]["annotations"])}}
    api, inline = Api(read), Lanes(start=lambda work: work())
    with ThreadPoolExecutor(1) as executor:
        Binder(cast(ApiServer, api), engine, executor, writer=cast(Any, api), asking=inline).settle()
    left = free(engine)
    engine.see_pod(one)
    described = node("a", cards("a", 1))
    described["metadata"]["annotations"][NAMES.bookings] = bookings.encode({"other": {"GPU-a-0": (10, 1)}}, {})
    engine.see_node(described)
    assert free(engine) == left - 10 and engine.bound_to("p") == "a"
    engine.see_pod(there)
    assert free(engine) == left - 10 and state(engine) is State.CONFIRMED
    engine.see_pod(one)  # now it went back
    assert engine.bound_to("p") is None


def test_what_the_watch_has_shown_before_it_was_read_stays_so() -> None:
    """Else the next event of it, minutes later, passed for a watch that is as late."""
    engine, one, write = uncertain()
    engine.see_pod(bound(one, write))
    engine.read_pod(bound(one, write))
    assert state(engine) is State.CONFIRMED and free(engine) == 70


def test_a_second_bind_while_a_write_is_in_doubt_is_refused_and_writes_nothing() -> None:
    engine, _, _ = uncertain()
    api = Api()
    refused = bind(engine, api)
    assert refused is not None and "BindUncertain" in str(refused) and "retry" in str(refused)
    assert api.written == [] and state(engine) is State.UNCERTAIN


@pytest.mark.parametrize(
    ("error", "message", "then", "left", "asked"),
    [
        (ApiError(404, "gone"), "NoSuchPod: pod default/p does not exist", None, 100, 0),
        (ApiError(403, "no binding for you"), "BindFailed: .*403: no binding for you", State.ASSUMED, 70, 0),
        (ApiError(422, "bad name"), "BindFailed: .*422: bad name", State.ASSUMED, 70, 0),
        (ApiError(429, "slow down"), "BindFailed: .*429: slow down", State.ASSUMED, 70, 0),
        (ApiError(409, "changed"), "BindFailed: .*409: changed", State.ASSUMED, 70, 1),
        (ApiError(500, "etcd"), "BindFailed: .*500: etcd", State.ASSUMED, 70, 1),
        (ApiUnreachable("cut off"), "BindFailed: cut off", State.ASSUMED, 70, 1),
        (OSError("token file unreadable"), "BindFailed: token file unreadable", State.ASSUMED, 70, 1),
        (ZeroDivisionError(), "BindFailed: ZeroDivisionError", State.ASSUMED, 70, 1),
    ],
    ids=["404", "403", "422", "429", "409", "500", "cut", "login", "defect"],
)
def test_a_write_that_fails_is_answered_with_the_servers_words_and_looked_at_only_in_doubt(
    error: Exception, message: str, then: State | None, left: int, asked: int
) -> None:
    engine, _ = engine_with(node("a", cards("a", 1)))
    one = pod("p", uid="p")
    engine.filter(one, ["a"])
    api = Api(one, error)
    refused = bind(engine, api)
    assert refused is not None
    assert re.match(message, str(refused)), str(refused)
    assert (len(api.asked), api.written) == (asked, [("p", "a")])
    assert (state(engine), free(engine)) == (then, left)


@pytest.mark.parametrize(
    ("refuses", "waits"),
    [
        (None, False),
        (ApiError(404, "not found"), False),
        (ApiError(409, "conflict"), False),
        (ApiError(403, "forbidden"), False),
        (ApiError(504, "timeout"), True),
        (ApiUnreachable("cut"), True),
    ],
)
def test_what_may_be_carried_out_later_is_outlived(refuses: Exception | None, waits: bool) -> None:
    engine, _ = engine_with(node("a", cards("a", 1)))
    one = pod("p", uid="p")
    engine.filter(one, ["a"])
    refused, took = ended(engine, Api(shows=one, refuses=refuses), late_seconds=0.6)
    assert (refused is None) == (refuses is None) and (took >= 0.4 if waits else took < 0.4)


def test_what_is_known_to_be_bound_is_waited_for_no_longer() -> None:
    engine, _ = engine_with(node("a", cards("a", 1)))
    one = pod("p", uid="p")
    engine.filter(one, ["a"])
    api = Api(shows=one, refuses=ApiUnreachable("cut"))
    refused, took = ended(
        engine, api, late_seconds=60, meanwhile=lambda: engine.see_pod(pod("p", uid="p", node="a", annotations={}))
    )
    assert refused is not None and took < 10


def test_an_ended_binder_begins_nothing() -> None:
    """A member of a gang that had waited for the others began its write while the last ones were outlived."""
    engine, _ = engine_with(node("a", cards("a", 1)))
    engine.filter(pod("p", uid="p"), ["a"])
    api, told = Api(), list[Refused | None]()

    async def work() -> Refused | None:
        with ThreadPoolExecutor(1) as executor:
            binder = Binder(cast(ApiServer, api), engine, executor, writer=cast(Any, api))
            await binder.close()
            assert not binder.begin(ARGS, told.append)
            return await binder.bind(ARGS)

    refused = asyncio.run(work())
    assert refused is not None and refused.reason is ExtenderReason.NOT_LEADER
    assert (api.written, told, state(engine)) == ([], [], State.ASSUMED)


def test_only_the_pod_in_doubt_is_looked_at() -> None:
    engine, _, _ = uncertain()
    other = pod("q", uid="q")
    engine.filter(other, ["a"])
    api = Api(other, ApiUnreachable("cut off"))
    assert bind(engine, api, BindingArgs("q", "default", "q", "a")) is not None
    assert api.asked == ["default/q"] and state(engine) is State.UNCERTAIN


@pytest.mark.parametrize(
    ("shows", "message"),
    [
        (ApiError(404, "not found"), "NoSuchPod: pod default/p does not exist"),
        (ApiError(403, "pods is forbidden"), "BindFailed: the API server answered 403: pods is forbidden"),
        (ApiError(500, "etcd"), "BindFailed: the API server answered 500: etcd"),
        (ApiUnreachable("no answer from x"), "BindFailed: no answer from x"),
        (pod("p", uid="another"), "OtherPod: pod default/p is now another one of that name"),
        (pod("p", uid="p", node="b"), "OtherNode: the pod is bound to node b"),
        (pod("p", 30, 400, uid="p"), "InsufficientMemory: the pod does not fit on node a any more"),
        (pod("p", 30, None, uid="p"), "IncompleteRequest"),
    ],
    ids=["deleted", "forbidden", "broken", "unreachable", "namesake", "elsewhere", "full", "half a request"],
)
def test_a_bind_without_its_filter_names_why_it_is_refused_and_books_and_writes_nothing(
    shows: Any, message: str
) -> None:
    engine, _ = engine_with(node("a", cards("a", 1)), node("b", cards("b", 1)))
    api = Api(shows)
    refused = bind(engine, api)
    assert refused is not None and str(refused).startswith(message)
    assert api.written == []
    assert free(engine) == 200


@pytest.mark.parametrize("said", [{"namespace": "rich"}, {"name": "q"}, {"cores": 10}, {"blocks": 1}])
@pytest.mark.parametrize("shown", [True, False])
def test_what_a_filter_says_that_its_pod_is_not_is_decided_again(said: dict[str, Any], shown: bool) -> None:
    """It was written as it was said: a pod went past its namespace's quota in another one's name, or had a placement
    that is not what it asks. Amounts are compared with what the watch shows, names with what Bind says.
    """
    engine, _ = engine_with(node("a", cards("a", 1)))
    engine.see_quotas({"data": {"quotas": "[{namespace: default, cores: 50}]"}})
    named = "namespace" in said or "name" in said
    written = []
    for uid in ("p", "p2"):
        one = pod(uid, 50, 5, uid=uid)
        if shown:
            engine.see_pod(one)
        false = pod(uid, said.get("cores", 50), said.get("blocks", 5), uid=uid)
        false["metadata"] |= {key: said[key] for key in ("namespace", "name") if key in said}
        if engine.filter(false, ["a"]).chosen is not None:
            api = Api(shows=one)
            bind(engine, api, BindingArgs(uid, "default", uid, "a"))
            for text in api.annotations:
                (shares,) = placement.decode(text[NAMES.placement]).containers.values()
                written.append((uid, shares[0].cores, shares[0].memory_blocks))
    if shown or named:
        assert written == [("p", 50, 5)] and free(engine) == 50
    else:  # the node's manager refuses it
        assert written[0] == ("p", said.get("cores", 50), said.get("blocks", 5))


def test_a_place_at_which_a_write_may_still_arrive_is_given_up_for_no_other_name() -> None:
    engine, _ = engine_with(node("a", cards("a", 1)))
    engine.filter(pod("p", uid="p"), ["a"])
    bind(engine, Api(shows=pod("p", uid="p"), refuses=ApiUnreachable("cut")))
    api = Api(shows=pod("p", uid="p"))
    refused = bind(engine, api, BindingArgs("q", "default", "p", "a"))
    assert refused is not None and refused.reason is ExtenderReason.OTHER_POD
    assert (api.written, state(engine), free(engine)) == ([], State.ASSUMED, 70)
    assert bind(engine, api) is None and api.written == [("p", "a")]


def test_a_pod_without_a_share_is_bound_where_kube_scheduler_wants_it() -> None:
    engine, _ = engine_with(node("a", cards("a", 1)))
    api = Api(plain_pod("p", uid="p"))
    assert bind(engine, api) is None
    assert api.written == [("p", "a")] and free(engine) == 100


def test_a_bind_of_a_pod_that_is_there_already_succeeds_without_a_write() -> None:
    _, one, write = uncertain()
    fresh, _ = engine_with(node("a", cards("a", 1)))
    api = Api(bound(one, write))
    assert bind(fresh, api) is None
    assert api.written == [] and free(fresh) == 70 and state(fresh) is State.BOUND


@pytest.mark.parametrize("then", [State.BINDING, State.UNCERTAIN])
def test_while_a_write_is_in_doubt_other_nodes_are_refused_without_hope_of_preemption(then: State) -> None:
    engine, _ = engine_with(node("a", cards("a", 1)), node("b", cards("b", 1)))
    one = pod("p", uid="p")
    engine.filter(one, ["a"])
    engine.begin_bind("p", "a")
    if then is State.UNCERTAIN:
        engine.end_bind("p", then)
    args = read_args(json.dumps({"Pod": one, "NodeNames": ["b"]}).encode())
    answer = json.loads(filter_answer(args, engine.filter(one, ["b"])))
    assert answer["NodeNames"] == [] and answer["FailedNodes"] == answer["FailedAndUnresolvableNodes"]
    assert answer["FailedNodes"]["b"] == f"BindUncertain: the pod is {then.value} on node a"
    assert free(engine) == 170 and state(engine) is then


def test_a_write_that_turns_out_to_have_had_no_effect_is_made_again_by_the_next_bind() -> None:
    engine, one, _ = uncertain()
    api = Api(one)
    assert "BindUncertain" in str(bind(engine, api))
    inline = Lanes(start=lambda work: work())
    with ThreadPoolExecutor(1) as executor:
        Binder(cast(ApiServer, api), engine, executor, writer=cast(Any, api), asking=inline).settle()
    assert bind(engine, api) is None and api.written == [("p", "a")]
    assert state(engine) is State.BOUND and free(engine) == 70


@pytest.mark.parametrize("meanwhile", ["deleted", "bound"])
def test_a_pod_that_changes_while_its_forgotten_bind_is_decided_again_is_not_written(
    meanwhile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = engine_with(node("a", cards("a", 1)))
    one = pod("p", uid="p")
    api, decide = Api(one), engine.decide_for

    def decide_and_change(seen: Any, where: str) -> Refused | None:
        refused = decide(seen, where)
        if meanwhile == "deleted":
            engine.lose_pod("p")
        else:
            write = engine.begin_bind("p", where)
            assert isinstance(write, Write)
            engine.see_pod(bound(one, write))
        return refused

    monkeypatch.setattr(engine, "decide_for", decide_and_change)
    refused = bind(engine, api)
    assert refused is not None and "BindUncertain: the pod changed while it was being bound; retry" in str(refused)
    assert api.written == [] and free(engine) == (100 if meanwhile == "deleted" else 70)
