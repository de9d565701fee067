"""Text that others wrote: in no answer, event or line of a log does it do anything, and none of it is long."""

from __future__ import annotations

import argparse
import json
import logging
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest

from localcluster.apiserver.faults import Fault, Request
from scheduler_ext.commands import defrag, explain, fetch
from scheduler_ext.engine.core import Engine
from scheduler_ext.lab.replay import RecordingError
from scheduler_ext.planning import explain as explaining
from scheduler_ext.planning import overview
from scheduler_ext.sync import events
from scheduler_ext.sync.api import ApiServer
from scheduler_ext.sync.lanes import Lanes
from tests.scheduler_ext.conftest import Running
from tests.scheduler_ext.extender_claims import claim, node_slices, user
from tests.scheduler_ext.extender_engine import engine_with
from tests.scheduler_ext.extender_support import NAMES, FakeApi, cards, container, eventually, node, plain_pod, pod
from vcuda import logs
from vcuda.kube.errors import ApiError, ApiUnreachable, KubeError
from vcuda.kube.events import Correlator
from vcuda.spec.errors import InvalidRequest, Reason

HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\n2026-01-01 00:00:00 INFO all well reason=Fine\u2028\u202e\u2066 \x9b31m\x00\u200b"
LONG = HOSTILE + "x" * 2**20
MESSAGES = ("Error", "summary", "text", "message", "why", "problem", "difference", "asks")
MOST = 8192

Start = Callable[..., Running]


def clean(text: str, most: int = MOST) -> None:
    assert len(text) <= most and all(char.isprintable() for char in text), ascii(text[:300])


def messages(data: Any, within: str = "") -> Iterator[str]:
    """Of an answer all that is said to people: what only names a thing is data."""
    if isinstance(data, dict):
        for key, value in data.items():
            if isinstance(value, str) and (key in MESSAGES or within.startswith("Failed")):
                yield value
            else:
                yield from messages(value, str(key))
    elif isinstance(data, list):
        for one in data:
            yield from messages(one, within)


def all_clean(data: Any, at_least: int = 1) -> None:
    found = list(messages(data))
    assert len(found) >= at_least
    for one in found:
        clean(one)


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What is logged is clean, whatever the test does."""
    caplog.set_level(logging.DEBUG)
    yield caplog
    for formatter in (logs._Text(), logs._Json()):
        for record in caplog.get_records("call"):
            for line in formatter.format(record).split("\n"):
                clean(line, 2 * 8192 + 8 * 1024)


def gang_member(name: str, gang: str = f"{HOSTILE}/3", **more: Any) -> dict[str, Any]:
    return pod(name, 60, 10, uid=name, annotations={NAMES.gang: gang}, **more)


def test_the_name_of_a_gang(api: FakeApi, start: Start) -> None:
    api.put("nodes", node("a", cards("a", 2)))
    extender = start(gang_wait_seconds=0.05)
    one = gang_member("m1")
    refused = extender.filter(one, ["a"])
    assert "2 are there now" in refused["FailedNodes"]["a"]
    all_clean(refused)
    all_clean(extender.client.get("/explain/default/m1").json())
    api.put("nodes", node("b", cards("b", 2)))
    eventually(lambda: extender.filter(one, ["a", "b"])["NodeNames"])
    all_clean({"Error": extender.bind(one, "a")})
    all_clean(extender.client.get("/explain/default/m1").json())
    all_clean(extender.client.get("/cluster").json(), 0)
    for name in "ab":
        clean(extender.client.get(f"/cluster?node={name}").text)
    extender.engine.cache.gang_seconds = -1
    for gang in extender.engine.cache.gangs:
        gang.until = 0.0
    extender.engine.expire()
    refused = extender.filter(one, ["a", "b"])
    assert "1 of its 3 pods" in refused["FailedNodes"]["a"]
    all_clean(refused)


@pytest.mark.parametrize("word", [LONG, f"{LONG}/3", f"x/{LONG}", HOSTILE, f"x/{HOSTILE}"])
def test_annotations_that_are_refused(word: str, api: FakeApi, start: Start) -> None:
    api.put("nodes", node("a", cards("a", 2)))
    extender = start(body_bytes=2**23)
    for at, name in enumerate((NAMES.gang, NAMES.policy, NAMES.card_model, NAMES.card_uuid, NAMES.priority)):
        one = pod(f"p{at}", uid=f"u{at}", annotations={name: word})
        answer = extender.filter(one, ["a"])
        all_clean(answer, 0 if answer["NodeNames"] else 1)
        all_clean(extender.client.get(f"/explain/u{at}").json())
        all_clean(extender.post("/scheduler/simulate", {"Pod": one, "NodeNames": ["a", "ghost"]}))
    all_clean(extender.client.get("/cluster").json(), 0)


def test_names_that_no_api_server_would_take(api: FakeApi, start: Start) -> None:
    api.put("nodes", node("a", cards("a", 2)))
    extender = start(body_bytes=2**24)
    for at, text in enumerate((HOSTILE, LONG)):
        one = pod("p", 200, 10, uid=f"{at}{text}")
        one["metadata"] |= {"name": text, "namespace": text}
        one["spec"]["containers"] = [container(text, 150, 10), container(text, 30, -1)]
        all_clean(extender.filter(one, ["a", text]))
        one["spec"]["containers"] = [container(text, 100, 10), container(f"{text}2", 100, 10), container("3", 100, 1)]
        all_clean(extender.filter(one, ["a", text]))
        found = explaining.explanation(extender.engine.evidence(uid=f"{at}{text}"))
        assert found is not None
        all_clean(found)
        args = {"PodName": text, "PodNamespace": text, "PodUID": text, "Node": text}
        answer = extender.client.post("/scheduler/bind", json=args)
        all_clean(answer.json())
        victims = {"NodeNameToMetaVictims": {text: {"Pods": [{"UID": 5}]}}, "Pod": one}
        all_clean(extender.client.post("/scheduler/preempt", json=victims).json())
    for path in (
        f"/explain/{urllib.parse.quote(HOSTILE)}",
        f"/defrag?moves={urllib.parse.quote(HOSTILE)}",
        "/\x85\xff",
    ):
        all_clean(extender.client.get(path).json())
    all_clean(extender.client.get(f"/cluster?node={urllib.parse.quote(HOSTILE)}").json())


@pytest.mark.parametrize("word", [HOSTILE, LONG])
def test_names_of_nodes_that_a_caller_made_up(word: str, api: FakeApi, start: Start) -> None:
    """They come back as what failed, for people: nobody has such a node."""
    api.put("nodes", node("a", cards("a", 2)))
    extender = start(body_bytes=2**23)
    for answer in (
        extender.filter(pod("p", 150, uid="u"), ["a", word]),
        extender.filter(pod("q", 30, uid="v"), ["a", word]),
        extender.filter(pod("r", 100, 4000, uid="w"), ["a", word]),
        extender.post("/scheduler/simulate", {"Pod": pod("p", 30), "NodeNames": ["a", word]}),
    ):
        failed = {**answer["FailedNodes"], **answer["FailedAndUnresolvableNodes"]}
        assert len({*failed, *answer["NodeNames"]}) == 2
        for name in failed:
            clean(name, 253)
    assert extender.filter(plain_pod("n"), ["a", word])["NodeNames"] == ["a", word], "what passes is as it came"


def test_an_explanation_is_clean_as_a_whole(api: FakeApi, start: Start) -> None:
    """What annotations and names say stands in it as data, too, and curl shows it to a terminal."""
    api.put("nodes", node("a", cards("a", 2)))
    extender = start(body_bytes=2**23)
    odd = "\u202e\u2066\x9b31m\u200b\u2028"
    annotations = {NAMES.gang: f"{odd}/2", NAMES.card_model: f"!{odd},{odd}2", NAMES.card_uuid: odd}
    one = pod("p", uid="u", annotations=annotations, containers=[container(f"{odd}{'x' * 2**20}", 30, 10)])
    extender.filter(one, ["a", f"{odd}b"])
    clean(extender.client.get("/explain/u").text, 65536)
    one = user("q", f"c{odd}", uid="w")
    extender.engine.see_claim(claim(f"c{odd}"))
    extender.engine.see_pod(one)
    extender.engine.filter_claims(one, ["a"])
    clean(extender.client.get("/explain/w").text, 65536)


@pytest.mark.parametrize("status", [403, 404, 409, 422, 500])
def test_what_the_api_server_says(status: int, api: FakeApi, start: Start) -> None:
    api.put("nodes", node("a", cards("a", 2)))
    one = pod("p", uid="u")
    api.put("pods", one)
    extender = start()
    body = orjson.dumps({"kind": "Status", "status": "Failure", "code": status, "message": LONG})
    usual = api.hook

    def hook(request: Request) -> Fault | None:
        if request.method == "POST" or request.path.endswith("/pods/p"):
            return Fault(status=status, body=body)
        return usual(request)

    assert extender.filter(one, ["a"])["NodeNames"] == ["a"]
    api.hook = hook
    all_clean({"Error": extender.bind(one, "a")})
    all_clean({"Error": extender.bind(pod("p", uid="other"), "a")})


def test_a_node_that_the_api_server_names(api: FakeApi, start: Start) -> None:
    """Somebody else has bound the pod before: to a node of any name, if the API server's check is ours alone."""
    api.put("nodes", node("a", cards("a", 2)))
    extender = start()
    api.hook = lambda request: (
        Fault(status=200, body=orjson.dumps(pod("p", uid="u", node=HOSTILE))) if request.path.endswith("/p") else None
    )
    all_clean({"Error": extender.bind(pod("p", uid="u"), "a")})


def test_what_a_node_says_of_its_cards(api: FakeApi, start: Start) -> None:
    api.put("nodes", node("a", cards("a", 1, healthy=False, why=HOSTILE)), node("b", cards("b", 1, model=HOSTILE)))
    extender = start()
    all_clean(extender.filter(pod("p", uid="u"), ["a"]))
    all_clean(extender.client.get("/explain/u").json())
    all_clean(extender.client.get("/defrag").json(), 0)


def test_what_quotas_say(api: FakeApi, start: Start) -> None:
    api.put("nodes", node("a", cards("a", 2)))
    extender = start()
    others = [f"{number} {'m' * 90}" for number in range(50)]
    entry = {"namespace": "default", "cores": 1, "models": [*others, cards("a")[0].model]}
    extender.engine.see_quotas({"data": {"quotas": json.dumps([entry])}})
    all_clean(extender.filter(pod("p", uid="u"), ["a"]))
    all_clean(extender.client.get("/explain/u").json())
    hostile = [
        {"namespace": "x", HOSTILE: 1}, {"namespace": HOSTILE, "cores": 1},
        *({"namespace": "x", "cores": 1, "models": [model]} for model in (HOSTILE, "m" * 5000)),
        {"namespace": "x", "cores": 1, "nodes": {HOSTILE: LONG}},
    ]  # fmt: skip
    for text in (f"- {{namespace: default, {HOSTILE}", *(json.dumps([one]) for one in hostile), LONG):
        with pytest.raises(ValueError) as error:
            extender.engine.see_quotas({"data": {"quotas": text}})
        clean(str(error.value))


def test_gangs_of_claims_and_claims_that_are_refused() -> None:
    engine = Engine(NAMES)
    engine.see_node(node("a", None))
    for one in node_slices("a"):
        engine.see_slice(one)
    for kind in ("nodes", "pods"):
        engine.synced(kind)
    for name in ("x", "y", HOSTILE):
        engine.see_claim(claim(f"c-{name}"))
        one = user(name, f"c-{name}", uid=name, annotations={NAMES.gang: f"{HOSTILE}/4"})
        engine.see_pod(one)
    refused = engine.filter_claims(user("x", "c-x", uid="x", annotations={NAMES.gang: f"{HOSTILE}/4"}), ["a"])
    assert refused is not None and refused.refusal is not None and "3 of its 4" in refused.refusal[1]
    clean(refused.refusal[1])
    bad = claim("c-x", {"name": HOSTILE, "exactly": {"deviceClassName": NAMES.driver, "count": LONG}})
    engine.see_claim(bad)
    for size in (3, 1):
        found = engine.filter_claims(user("x", "c-x", uid="x", annotations={NAMES.gang: f"{HOSTILE}/{size}"}), ["a"])
        if found is not None and found.refusal is not None:
            clean(found.refusal[1])
        told = explaining.explanation(engine.evidence(uid="x"))
        assert told is not None
        all_clean(told)


def test_events(api: FakeApi, start: Start) -> None:
    extender = start()
    engine = extender.engine
    engine.see_node(node("a", cards("a", 1)))
    for at in range(2):
        one = pod(f"p{at}", 80, 10, uid=f"{at}", annotations={NAMES.placement: LONG})
        one["metadata"]["name"] = f"p{at}{HOSTILE}"
        one["spec"]["nodeName"] = "a"
        engine.see_pod(one)
    said = Correlator().note({"kind": "Pod", "name": "p", "uid": "u", "namespace": "n"}, "Warning", "Busy", LONG)
    clean(said.message, 1024)
    events.send(extender.api, engine, Correlator(), Lanes(start=lambda work: work()))


def test_errors_are_clean_wherever_they_are_told() -> None:
    for error in (
        ApiError(500, LONG), ApiError(403, HOSTILE, LONG), ApiUnreachable(f"no answer from {LONG}"), KubeError(LONG),
        InvalidRequest(Reason.INVALID_POD, LONG),
    ):  # fmt: skip
        clean(str(error), 1100)


def test_what_a_server_answers_to_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pod_ = {"namespace": HOSTILE, "name": HOSTILE, "uid": HOSTILE}
    told = {
        "pod": pod_, "summary": HOSTILE, "cards": {HOSTILE: {"cores": 1, "memory_blocks": 1}},
        "would_fit": [{"text": HOSTILE}],
        "decisions": [{"at": HOSTILE, "candidates": 1, "node": None, "message": HOSTILE, "reasons": {HOSTILE: 1}}],
    }  # fmt: skip
    move = {"pod": HOSTILE, "target": HOSTILE, "cards": {HOSTILE: [1, 1]}}
    full = {"untouched": 1, "fragmented": 0.1, "pods": {"1": 1}}
    plan = {
        "before": full, "after": full, "moves": 1, "freed": [{"node": HOSTILE, "card": HOSTILE, "moves": [move]}],
        "stay": 0, "stopped": HOSTILE,
    }  # fmt: skip
    monkeypatch.setattr(fetch, "fetch", lambda _options, path, _seconds: told if "explain" in path else plan)
    explain.run(argparse.Namespace(namespace="n", pod="p", json=False))
    defrag.run(argparse.Namespace(recording=None, moves=1, json=False))
    for line in capsys.readouterr().out.split("\n"):
        clean(line)


def test_lines_of_logs_are_short(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("scheduler_ext.test")
    began = time.process_time()
    try:
        raise RecordingError(LONG)
    except RecordingError:
        log.exception("of %s", LONG, extra=logs.fields(pod=LONG, uid=HOSTILE * 999))
    assert time.process_time() - began < 60


def test_an_api_server_that_is_no_api_server(api: FakeApi, start: Start) -> None:
    extender = start()
    api.hook = lambda _: Fault(status=502, body=LONG.encode())
    with pytest.raises(KubeError) as error:
        ApiServer(extender.api.client).pod("default", "p")
    clean(str(error.value), 1100)
    eventually(lambda: [None for watcher in extender.watchers if watcher.worker.problem()] or True)


@pytest.mark.parametrize("model", ["\ud800", HOSTILE])
def test_a_card_of_a_hostile_model_is_shown_clean_and_hides_no_other(model: str) -> None:
    """One node's lone surrogate made the page of the whole cluster a 500."""
    engine, _ = engine_with(node("a", cards("a", model=model)), node("b", cards("b")))
    seen = orjson.loads(orjson.dumps(overview.encode(engine.overview())))
    assert len(seen["nodes"]) == 2 and "A100" in seen["models"]
    for one in seen["models"]:
        clean(one)
    detail = engine.node_detail("a")
    assert detail is not None
    clean(orjson.loads(orjson.dumps(overview.encode_detail(detail)))["cards"][0]["model"])
