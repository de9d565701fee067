"""Watches that end, break off or show nonsense, and answers of the API server that are none: followed on, never believed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from localcluster.apiserver.faults import Fault
from scheduler_ext.engine.engine import Engine
from scheduler_ext.sync import apiserver, watch
from scheduler_ext.sync.apiserver import ApiError, ApiServer, ApiUnreachable
from tests.scheduler_ext.extender_engine import free
from tests.scheduler_ext.extender_support import NAMES, FakeApi, cards, eventually, node
from tests.scheduler_ext.test_extender_writing import certificate, kubeconfig

A, B = node("a", cards("a", 1)), node("b", cards("b", 1))


class Lists:
    """Lists node a at version 7; each watch shows `events` and then ends, or breaks with an exception among them."""

    def __init__(self, *events: Any) -> None:
        self.events = events
        self.lists = 0
        self.watched_from: list[str] = []

    def pages(self, resource: str, name: str) -> Iterator[tuple[list[dict[str, Any]], str]]:
        assert (resource, name) == ("nodes", "")
        self.lists += 1
        yield [A], "7"

    def watch(self, _resource: str, version: str, _name: str) -> Iterator[Mapping[str, Any]]:
        self.watched_from.append(version)
        for event in self.events:
            if isinstance(event, Exception):
                raise event
            yield event


def watcher(api: Lists) -> tuple[watch.Watcher, Engine]:
    engine = Engine(NAMES)
    return watch.Watcher(cast(ApiServer, api), engine, watch.handlers(engine)[0], longest_wait=0.01), engine


def at(version: str, thing: dict[str, Any] | None = None) -> dict[str, Any]:
    thing = thing or {}
    return thing | {"metadata": thing.get("metadata", {}) | {"resourceVersion": version}}


def error(code: object, message: str) -> dict[str, Any]:
    return {"type": "ERROR", "object": {"kind": "Status", "code": code, "message": message}}


@pytest.mark.parametrize(
    "gone", [error(410, "too old"), ApiError(410, "the version is too old")], ids=["event", "answer"]
)
def test_a_watch_that_is_too_old_is_a_new_list_and_no_fault(gone: Any) -> None:
    api = Lists(gone)
    following, engine = watcher(api)
    following._once()
    following._once()
    assert (api.lists, api.watched_from, free(engine)) == (2, ["7", "7"], 100)


@pytest.mark.parametrize(
    ("event", "kind", "message"),
    [
        (ApiError(403, "nodes is forbidden"), ApiError, "403: nodes is forbidden"),
        (ApiUnreachable("the watch of nodes broke off"), ApiUnreachable, "broke off"),
        (error(500, "etcd is away"), ApiError, "500: etcd is away"),
        (error(None, "no code"), ApiError, "500: no code"),
        ({"type": "ADDED"}, ApiUnreachable, "a watch event without an object: .*ADDED"),
        ({"type": "ADDED", "object": [1]}, ApiUnreachable, "a watch event without an object"),
        ({"type": "ADDED", "object": {"metadata": "x"}}, ApiUnreachable, "a watch event without metadata"),
    ],
)
def test_what_ends_a_watch_is_named_and_it_goes_on_where_it_was(
    event: Any, kind: type[Exception], message: str
) -> None:
    api = Lists({"type": "ADDED", "object": at("9", B)}, event)
    following, engine = watcher(api)
    with pytest.raises(kind, match=message):
        following._once()
    assert free(engine) == 200  # what came before it counts
    api.events = ()
    following._once()
    assert (api.lists, api.watched_from) == (1, ["7", "9"])


def test_bookmarks_and_unknown_kinds_only_move_the_version() -> None:
    api = Lists({"type": "BOOKMARK", "object": at("8")}, {"type": "RENAMED", "object": at("12", B)})
    following, engine = watcher(api)
    following._once()
    following._once()
    assert (api.watched_from, free(engine)) == (["7", "12"], 100)


def test_one_malformed_object_does_not_end_the_watch_of_the_others(caplog: pytest.LogCaptureFixture) -> None:
    api = Lists({"type": "DELETED", "object": at("8")}, {"type": "ADDED", "object": at("9", B)})
    following, engine = watcher(api)
    following._once()
    assert free(engine) == 200
    assert "nodes: an object was skipped: KeyError('name')" in caplog.text


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_watcher_that_is_stopped_while_the_api_server_is_away_ends_without_a_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    api = Lists(ApiUnreachable("no answer from https://10.0.0.1"))
    following, _ = watcher(api)
    following.start()
    eventually(lambda: len(api.watched_from) > 2)
    assert not following.ended
    following.stop()
    following._thread.join(10)
    assert not following._thread.is_alive() and not following.ended
    assert "nodes: no answer from https://10.0.0.1; trying again in" in caplog.text


# The client below it.


def answering(api: FakeApi, directory: Path, status: int, body: bytes) -> ApiServer:
    """A client of a server that answers every read so."""

    api.hook = lambda _: Fault(status, body=body)
    return ApiServer.connect(api.kubeconfig(directory), timeout_seconds=3)


CALLS: dict[str, Callable[[ApiServer], Any]] = {
    "pages": lambda server: list(server.pages("nodes")),
    "watch": lambda server: list(server.watch("nodes", "1")),
    "pod": lambda server: server.pod("default", "p"),
    "lease": lambda server: server.lease("default", "l"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (200, b"<html>a proxy's log-in page\n", ApiUnreachable, "something that is not JSON"),
        (200, b"[1, 2]\n", ApiUnreachable, "JSON that is not an object"),
        (403, b'{"message": "leases is forbidden"}', ApiError, "403: leases is forbidden"),
        (502, b"<html>Bad Gateway", ApiError, "502: <html>Bad Gateway"),
        (500, b"[]", ApiError, r"500: \[\]"),
    ],
    ids=["html", "list", "403", "502", "500"],
)
def test_answers_that_are_none_are_errors_with_the_servers_words(
    api: FakeApi, tmp_path: Path, call: str, status: int, body: bytes, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        CALLS[call](answering(api, tmp_path, status, body))


def test_a_list_of_many_pages_is_whole(api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apiserver, "_PAGE", 2)
    api.put("nodes", *(node(f"n{number}", None) for number in range(5)))
    server = ApiServer.connect(api.kubeconfig(tmp_path), timeout_seconds=3)
    pages = list(server.pages("nodes"))
    assert [len(items) for items, _ in pages] == [2, 2, 1]
    assert {item["metadata"]["name"] for items, _ in pages for item in items} == {f"n{n}" for n in range(5)}


def test_a_lease_is_made_once_and_never_written_over_another_holders(api: FakeApi, tmp_path: Path) -> None:
    server = ApiServer.connect(api.kubeconfig(tmp_path), timeout_seconds=3)
    assert server.lease("kube-system", "l") is None
    server.put_lease("kube-system", "l", None, {"holderIdentity": "one"})
    with pytest.raises(ApiError, match="409"):
        server.put_lease("kube-system", "l", None, {"holderIdentity": "two"})
    found = server.lease("kube-system", "l")
    assert found is not None and found["spec"] == {"holderIdentity": "one"}
    server.put_lease("kube-system", "l", found, {"holderIdentity": "one", "renewed": 1})
    with pytest.raises(ApiError, match="409"):
        server.put_lease("kube-system", "l", found, {"holderIdentity": "two"})
    assert api.find("leases", "kube-system/l")["spec"] == {"holderIdentity": "one", "renewed": 1}


def test_a_client_certificate_that_can_not_be_read_is_named_before_anything_is_written(
    api: FakeApi, tmp_path: Path
) -> None:
    signed, key = certificate(tmp_path, "client")
    path = Path(kubeconfig(api, tmp_path))
    data = json.loads(path.read_text())
    data["users"][0]["user"] = {"client-certificate": str(signed), "client-key": str(key)}
    path.write_text(json.dumps(data))
    server = ApiServer.connect(str(path))
    assert server.tls_context() is not True
    key.unlink()
    with pytest.raises(ApiUnreachable, match=r"a certificate for https://127.0.0.1:.* cannot be read"):
        server.tls_context()
