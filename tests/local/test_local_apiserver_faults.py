"""What tests do to the stand-in API server: faults by its hook, watches that break, objects that no validation saw."""

from __future__ import annotations

import http.client
import time
from typing import Any

import pytest

from localcluster import api as apis
from localcluster.apiserver.faults import Fault, Request
from localcluster.apiserver.server import Server

NODES = "/api/v1/nodes"


def node(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name}}


def names(api: apis.Api) -> list[str]:
    return [item["metadata"]["name"] for item in api.call("GET", NODES)["items"]]


@pytest.mark.parametrize(
    ("fault", "code", "done"),
    [
        (Fault(503), 503, False),
        (Fault(500, done=True), 500, True),
        (Fault(0), 0, False),
        (Fault(0, done=True), 0, True),
        (Fault(502, body=b"<html>"), 502, False),
    ],
)
def test_a_request_fails_before_or_after_it_was_carried_out(
    server: Server, api: apis.Api, fault: Fault, code: int, done: bool
) -> None:
    server.hook = lambda request: fault if request.method == "POST" else None
    with pytest.raises(apis.ApiFailure) as error:
        api.call("POST", NODES, node("n"))
    assert error.value.code == code
    assert names(api) == ["n"] * done


def test_a_late_answer_is_the_true_one(server: Server, api: apis.Api) -> None:
    server.hook = lambda _: Fault(late_s=0.2)
    began = time.monotonic()
    assert names(api) == [] and time.monotonic() - began >= 0.2


def test_the_hook_sees_what_was_sent(server: Server, api: apis.Api) -> None:
    seen: list[Any] = []
    server.hook = lambda request: seen.append((request.method, request.path, dict(request.query), request.body))
    with pytest.raises(apis.ApiFailure):
        api.call("DELETE", f"{NODES}/none?x=1", {"a": 1})
    assert ("DELETE", f"{NODES}/none", {"x": "1"}, {"a": 1}) in seen


def test_a_broken_watch_goes_on_where_it_was_and_a_forgotten_one_is_410(server: Server, api: apis.Api) -> None:
    version = api.call("GET", NODES)["metadata"]["resourceVersion"]
    watch = api.watch(NODES, version)
    server.put("nodes", node("a"))
    assert next(watch)["object"]["metadata"]["name"] == "a"
    server.break_watches()
    assert list(watch) == []
    server.put("nodes", node("b"))
    again = api.watch(NODES, version)
    assert [next(again)["object"]["metadata"]["name"] for _ in "ab"] == ["a", "b"]
    server.break_watches("nodes", forget=True)
    with pytest.raises(apis.ApiFailure) as error:
        list(api.watch(NODES, version))
    assert error.value.code == 410
    newest = api.call("GET", NODES)["metadata"]["resourceVersion"]
    server.put("nodes", node("c"))
    assert next(api.watch(NODES, newest))["object"]["metadata"]["name"] == "c"


def test_a_watch_that_is_broken_before_it_begins_ends_at_once(server: Server, api: apis.Api) -> None:
    """It was let in before the hook was changed, so it would go on unharmed by what should befall it."""

    def slow(request: Request) -> None:
        if request.watches:
            server.break_watches()

    version = api.call("GET", NODES)["metadata"]["resourceVersion"]
    server.hook = slow
    began = time.monotonic()
    assert list(api.watch(NODES, version, seconds=5)) == [] and time.monotonic() - began < 3


def test_pages_make_a_whole_list(server: Server, api: apis.Api) -> None:
    server.put("nodes", *(node(f"n{number}") for number in range(5)))
    found, token = [], ""
    while True:
        page = api.call("GET", f"{NODES}?limit=2&continue={token}")
        found.append([item["metadata"]["name"] for item in page["items"]])
        token = page["metadata"].get("continue", "")
        if not token:
            break
    assert found == [["n0", "n1"], ["n2", "n3"], ["n4"]]


def test_a_patch_of_another_incarnation_is_a_conflict(server: Server, api: apis.Api) -> None:
    server.put("nodes", node("n"))
    with pytest.raises(apis.ApiFailure) as error:
        api.patch(f"{NODES}/n", {"metadata": {"uid": "another", "labels": {"x": "1"}}})
    assert error.value.code == 409 and "labels" not in server.find("nodes", "n")["metadata"]


def test_nobody_is_answered_once_the_server_is_stopped(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), timeout=10)
    connection.request("GET", "/healthz")
    assert connection.getresponse().read() == b"ok"
    server.stop()
    with pytest.raises((http.client.HTTPException, OSError)):
        connection.request("GET", "/healthz")
        connection.getresponse()
