"""What the API server shows, as the engine takes it in; and answers of the API server that are none: never believed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localcluster.apiserver.faults import Fault
from scheduler_ext.engine.bindings import Write
from scheduler_ext.state.pods import State
from scheduler_ext.sync import feed
from scheduler_ext.sync.api import ApiServer
from tests.scheduler_ext.extender_engine import bound, engine_with, free
from tests.scheduler_ext.extender_support import FakeApi, cards, eventually, node, pod
from tests.scheduler_ext.test_extender_two_books import reporting
from tests.scheduler_ext.test_extender_writing import certificate, kubeconfig
from vcuda.kube import client
from vcuda.kube.errors import ApiError, ApiUnreachable


def test_the_engine_follows_nodes_through_broken_watches_and_malformed_objects(api: FakeApi, tmp_path: Path) -> None:
    api.put("nodes", node("a", cards("a", 1)))
    engine, _ = engine_with()
    server = ApiServer.connect(api.kubeconfig(tmp_path), timeout_seconds=3)
    following = feed.informer(server, engine, feed.handlers(engine)[0], longest_wait=0.05)
    following.start()
    eventually(lambda: free(engine) == 100)
    api.break_watches()
    api.put("nodes", node("b", cards("b", 1)))
    eventually(lambda: free(engine) == 200)
    with api.deaf():
        api.remove("nodes", "a")
    eventually(lambda: free(engine) == 100)
    following.stop()
    following.worker.join(10)
    assert following.worker.problem() is None


# The client below it.


def answering(api: FakeApi, directory: Path, status: int, body: bytes) -> ApiServer:
    """A client of a server that answers every read so."""

    api.hook = lambda _: Fault(status, body=body)
    return ApiServer.connect(api.kubeconfig(directory), timeout_seconds=3)


CALLS: dict[str, Callable[[ApiServer], Any]] = {
    "pages": lambda server: list(server.client.pages("nodes")),
    "watch": lambda server: [
        server.client.parsed(line) for line in server.client.watch("nodes", "", "1", "", seconds=9, silence=9).lines()
    ],
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
    server = answering(api, tmp_path, status, body)
    if call == "watch" and body == b"[1, 2]\n":
        assert CALLS[call](server) == [[1, 2]], "an event of a wrong shape, which the informer skips"
        return
    with pytest.raises(kind, match=message):
        CALLS[call](server)


def test_a_list_of_many_pages_is_whole(api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_PAGE", 2)
    api.put("nodes", *(node(f"n{number}", None) for number in range(5)))
    server = ApiServer.connect(api.kubeconfig(tmp_path), timeout_seconds=3)
    pages = list(server.client.pages("nodes"))
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
    key.unlink()
    with pytest.raises(ApiUnreachable, match=r"a certificate for https://127.0.0.1:.* cannot be read"):
        server.pod("default", "p")


def test_a_restored_etcd_is_believed(api: FakeApi, tmp_path: Path) -> None:
    """Node b and the Binding of a pod came after the backup. The watch from then would be silent, and miss what comes."""
    api.put("nodes", node("a", cards("a", 1)))
    waiting = pod("p", 40, 10, uid="p")
    api.put("pods", waiting)
    backup = api.operations.clock.version
    engine, _ = engine_with()
    server = ApiServer.connect(api.kubeconfig(tmp_path), timeout_seconds=3)
    informers = [feed.informer(server, engine, how, longest_wait=0.05) for how in feed.handlers(engine)]
    for one in informers:
        one.start()
    eventually(
        lambda: free(engine) == 100 and all(one._stream for one in informers)
    )  # before the first nothing is asked
    assert engine.filter(waiting, ["a"]).chosen == "a"
    write = engine.begin_bind("p", "a")
    assert isinstance(write, Write)
    engine.end_bind("p", State.BOUND)
    for name in ("b", "c", "d"):
        api.put("nodes", node(name, cards(name, 1)))
    api.put("pods", bound(waiting, write))
    eventually(lambda: free(engine) == 360 and engine.bound_to("p") == "a")
    api.restore(backup)
    api.put("nodes", node("e", cards("e", 1)))
    eventually(lambda: set(engine.cache.cluster.index) == {"a", "e"} and free(engine) == 200)
    assert engine.filter(waiting, ["a"]).chosen == "a" and isinstance(engine.begin_bind("p", "a"), Write)
    for one in informers:
        one.stop()
        one.worker.join(10)
        assert one.worker.problem() is None


def test_whom_a_restored_etcd_does_not_know_goes_on_and_stays_booked(api: FakeApi, tmp_path: Path) -> None:
    """It gave way to the next one at once, as if somebody had deleted it by force."""
    api.put("nodes", reporting({}, 1))
    api.put("nodes", node("b", cards("b", 1)))
    backup = api.operations.clock.version
    engine, _ = engine_with()
    server = ApiServer.connect(api.kubeconfig(tmp_path), timeout_seconds=3)
    informers = [feed.informer(server, engine, how, longest_wait=0.05) for how in feed.handlers(engine)]
    for one in informers:
        one.start()
    eventually(lambda: free(engine) == 200 and all(one._stream for one in informers))
    api.put("pods", waiting := pod("p", 40, 10, uid="p"))
    eventually(lambda: engine.filter(waiting, ["a"]).chosen == "a")
    write = engine.begin_bind("p", "a")
    assert isinstance(write, Write)
    engine.end_bind("p", State.BOUND)
    api.put("pods", bound(waiting, write))
    eventually(lambda: engine.figures()["confirmed"] == 1)
    api.restore(backup)
    api.put("nodes", node("e", cards("e", 1)))
    eventually(lambda: not engine.holds("p") and "e" in engine.cache.cluster.index)
    assert engine.filter(pod("x", 80, 10, uid="x"), ["a"]).chosen is None
    for one in informers:
        one.stop()
        one.worker.join(10)


def test_a_binding_that_a_list_does_not_show_was_restored_away() -> None:
    """Its write succeeded before the list began; another one, after it, is not in the list yet."""
    engine, clock = engine_with(node("a", cards("a", 1)))
    for name in ("before", "after"):
        one = pod(name, 40, 10, uid=name)
        engine.see_pod(one)
        assert engine.filter(one, ["a"]).chosen == "a"
        assert isinstance(engine.begin_bind(name, "a"), Write)
        engine.end_bind(name, State.BOUND)
        clock.now += 10
    engine.keep_pods(["before", "after"], clock.now - 15)
    assert not engine.holds("before") and engine.bound_to("after") == "a"
