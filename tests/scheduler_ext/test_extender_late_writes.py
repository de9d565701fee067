"""Writes of an extender that was killed in mid-bind: its successor, without a lease, gives their cards to nobody else."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from localcluster.apiserver.faults import Fault, Request
from scheduler_ext.sync.late import LateWrites
from tests.scheduler_ext.extender_engine import engine_with
from tests.scheduler_ext.extender_support import (
    NAMES,
    FakeApi,
    Served,
    cards,
    eventually,
    node,
    plain_pod,
    pod,
)
from tests.support import web
from vcuda.kube.errors import ApiError, ApiUnreachable, KubeError
from vcuda.spec import placement, resize


def _args(one: dict[str, Any]) -> dict[str, Any]:
    metadata = one["metadata"]
    return {
        "PodName": metadata["name"], "PodNamespace": "default", "PodUID": metadata["uid"], "Node": "a"
    }  # fmt: skip


def _post(url: str, verb: str, body: dict[str, Any]) -> httpx.Response:
    return web.post(f"{url}/scheduler/{verb}", json=body, timeout=20)


def _held(api: FakeApi) -> list[str]:
    """The card that each bound pod got."""
    return [
        share.uuid
        for one in (api.find("pods", f"default/{name}") for name in ("first", "second"))
        if one["spec"].get("nodeName")
        for shares in placement.decode(one["metadata"]["annotations"][NAMES.placement]).containers.values()
        for share in shares
    ]


def first_binding_stalls(api: FakeApi, seconds: float) -> threading.Event:
    """The first Binding of the pod `first` is carried out so much later; set when it has come."""
    arrived, usual = threading.Event(), api.hook

    def hook(request: Request) -> Fault | None:
        if request.path.endswith("/first/binding") and not arrived.is_set():
            arrived.set()
            return Fault(stalled_s=seconds)
        return usual(request)

    api.hook = hook
    return arrived


@pytest.mark.parametrize("stalled", [1.0, 30.0])
def test_a_restarted_extender_waits_for_what_the_killed_one_wrote(api: FakeApi, tmp_path: Path, stalled: float) -> None:
    """It believed that the card was free; the API server carried the dead one's Binding out 8 s later, on the same card.

    The one that would come after 30 s never does: a Binding says for how long it may be carried out.
    """
    api.put("nodes", node("a", cards("a", 1)))
    first, second = pod("first", 100, None, uid="u1"), pod("second", 100, None, uid="u2")
    api.put("pods", first)
    arrived = first_binding_stalls(api, stalled)
    options = (
        "--kubeconfig",
        api.kubeconfig(tmp_path),
        "--api-timeout-seconds",
        "2",
        "--assume-seconds",
        "60",
    )
    killed = Served(*options)
    eventually(lambda: web.get(killed.url + "/readyz").status_code == 200 or None, 30)
    assert _post(killed.url, "filter", {"Pod": first, "NodeNames": ["a"]}).json()["NodeNames"] == ["a"]

    def bind() -> None:
        with contextlib.suppress(httpx.HTTPError):
            _post(killed.url, "bind", _args(first))

    binding = threading.Thread(target=bind)
    binding.start()
    assert arrived.wait(10)
    killed.process.kill()
    killed.stop()
    binding.join(10)
    served = Served(*options)
    try:
        api.put("pods", second)
        answer = eventually(
            lambda: (
                found
                if (found := _post(served.url, "filter", {"Pod": second, "NodeNames": ["a"]})).status_code == 200
                else None
            )
        )
        if answer.json()["NodeNames"]:
            assert _post(served.url, "bind", _args(second)).json()["Error"] == ""
        eventually(lambda: _held(api))
        late = threading.Event()
        late.wait(max(0.0, 2.0 - stalled))
        assert _held(api) == ["GPU-a-0"]
    finally:
        served.stop()


class Way:
    """Between an extender and the API server: cut, the first is told, and the second goes on with what it has."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._ours: list[socket.socket] = []
        self._theirs: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one, _ = self._listener.accept()
                other = socket.create_connection(("127.0.0.1", self._to))
                self._ours.append(one)
                self._theirs.append(other)
                for pair in ((one, other), (other, one)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    @staticmethod
    def _carry(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)

    def cut(self) -> None:
        for one in self._ours:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for one in (self._listener, *self._ours, *self._theirs):
            one.close()


@pytest.fixture
def way(api: FakeApi) -> Iterator[Way]:
    made = Way(int(api.url.rpartition(":")[2]))
    yield made
    made.close()


def test_a_leader_that_ends_keeps_the_lease_while_a_write_of_it_may_be_carried_out(
    api: FakeApi, tmp_path: Path, way: Way
) -> None:
    """The connection broke, so the Binding's result was not known; the lease was given back at once, and the successor
    gave the card away before the API server carried the Binding out: two pods with all of it.
    """
    api.put("nodes", node("a", cards("a", 1)))
    first, second = pod("first", 100, None, uid="u1"), pod("second", 100, None, uid="u2")
    api.put("pods", first)
    arrived = first_binding_stalls(api, 2.5)
    direct = api.kubeconfig(tmp_path)
    (tmp_path / "way").write_text(Path(direct).read_text().replace(api.url, f"http://127.0.0.1:{way.port}"))
    options = "--api-timeout-seconds", "3", "--lease", "default/extender", "--lease-seconds", "6"

    def explained(one: Served) -> httpx.Response:
        return web.get(one.url + "/explain/default/nobody")

    ending = Served("--kubeconfig", str(tmp_path / "way"), "--assume-seconds", "60", *options)
    running = [ending]
    try:
        eventually(lambda: explained(ending).status_code == 404, 30)
        next_one = Served("--kubeconfig", direct, "--assume-seconds", "60", *options)
        running.append(next_one)
        eventually(lambda: "holds lease" in explained(next_one).text)
        assert _post(ending.url, "filter", {"Pod": first, "NodeNames": ["a"]}).json()["NodeNames"] == ["a"]
        answers: list[httpx.Response] = []
        binding = threading.Thread(target=lambda: answers.append(_post(ending.url, "bind", _args(first))))
        binding.start()
        assert arrived.wait(10)
        way.cut()
        binding.join(10)
        assert "BindFailed" in answers[0].json()["Error"]
        assert ending.stop() == 0
        api.put("pods", second)
        eventually(lambda: explained(next_one).status_code == 404, 30)

        def decided() -> dict[str, Any] | None:  # on a busy machine it may have to get the lease again
            answer = _post(next_one.url, "filter", {"Pod": second, "NodeNames": ["a"]}).json()
            return answer if "NodeNames" in answer else None

        if eventually(decided)["NodeNames"]:
            assert _post(next_one.url, "bind", _args(second)).json()["Error"] == ""
        eventually(lambda: _held(api))
        threading.Event().wait(2.5)
        assert _held(api) == ["GPU-a-0"]
    finally:
        for one in running:
            one.stop()


@pytest.mark.parametrize("cut", [False, True])
def test_a_leader_that_ends_keeps_the_lease_while_an_answer_to_a_resize_may_be_carried_out(
    api: FakeApi, tmp_path: Path, way: Way, cut: bool
) -> None:
    """Its successor did not know what it had granted: it gave what the pod was to have to another one."""
    api.put("nodes", node("a", cards("a", 1)))
    chosen = placement.Placement({"main": (placement.CardShare("GPU-a-0", 30, 4),)})
    annotations = {NAMES.placement: placement.encode(chosen), NAMES.resize: "core=90"}
    arrived, usual = threading.Event(), api.hook
    asked: list[Request] = []

    def hook(request: Request) -> Fault | None:
        if request.path.endswith("/first/status") and not arrived.is_set():
            asked.append(request)
            arrived.set()
            return Fault(stalled_s=2.0)
        return Fault(503) if request.path.endswith("/first/status") else usual(request)  # only that one is taken

    api.hook = hook
    direct = api.kubeconfig(tmp_path)
    (tmp_path / "way").write_text(Path(direct).read_text().replace(api.url, f"http://127.0.0.1:{way.port}"))
    options = "--api-timeout-seconds", "3", "--lease", "default/extender", "--lease-seconds", "6"
    ending = Served("--kubeconfig", str(tmp_path / "way"), *options)
    try:
        eventually(lambda: web.get(ending.url + "/explain/default/nobody").status_code == 404, 30)
        api.put("pods", pod("first", 30, 4, uid="u1", node="a", annotations=annotations))
        assert arrived.wait(10) and asked[0].query["timeout"] == "3000ms"
        if cut:
            way.cut()
        assert ending.stop() == 0
        answer = resize.read(api.find("pods", "default/first"), NAMES)
        assert answer is not None and answer.granted["main"].share.cores == 90
    finally:
        ending.stop()


def test_what_may_be_carried_out_late_is_what_nobody_told_the_result_of() -> None:
    now = [100.0]
    late = LateWrites(11.0, lambda: now[0])

    def fails(error: KubeError) -> None:
        def work() -> None:
            assert late.until() == now[0] + 11  # while it is under way
            raise error

        with pytest.raises(KubeError):
            late.write(work)

    assert late.write(lambda: None) and late.until() < 0
    fails(ApiError(409, "no"))
    assert late.until() < 0
    fails(ApiError(503, "perhaps"))
    assert late.until() == 111
    now[0] = 105.0
    fails(ApiUnreachable("cut"))
    assert late.until() == 116
    now[0] = 120.0
    assert late.write(lambda: None) and late.until() < 0
    late.close()
    assert not late.write(lambda: pytest.fail("it was begun"))


def test_only_pods_that_waited_at_the_start_are_waited_for() -> None:
    """Nothing else can have been written by a predecessor: an extender without waiting pods is ready at once."""
    engine, clock = engine_with()
    engine.cache.unsynced.update({"nodes", "pods"})
    engine.expect_late_writes(10)
    engine.synced("nodes")
    for one in (
        plain_pod("cpu"),
        pod("bound", uid="b", node="a"),
        pod("waits", uid="w"),
        pod("gone", uid="g"),
    ):
        engine.see_pod(one)
    engine.synced("pods")
    assert "of 2 waiting pods" in str(engine.not_ready())
    engine.see_pod(pod("new", uid="n"))
    engine.lose_pod("g")
    assert "of 1 waiting pods" in str(engine.not_ready())
    engine.see_pod(pod("waits", uid="w", node="a", annotations={}))
    assert engine.not_ready() is None
    engine.see_pod(pod("later", uid="l"))
    clock.now += 20
    assert engine.not_ready() is None


def test_the_wait_for_late_writes_ends_by_itself() -> None:
    engine, clock = engine_with()
    engine.cache.unsynced.update({"nodes", "pods"})
    engine.expect_late_writes(10)
    engine.synced("nodes")
    engine.see_pod(pod("waits", uid="w"))
    engine.synced("pods")
    clock.now += 9.9
    assert engine.not_ready() is not None
    clock.now += 0.2
    assert engine.not_ready() is None


def test_a_binding_says_for_how_long_it_may_be_carried_out(api: FakeApi, start: Any) -> None:
    extender = start()
    api.put("nodes", node("a", cards("a", 1)))
    one = pod("p", uid="p")
    api.put("pods", one)
    asked: list[Request] = []
    usual = api.hook

    def hook(request: Request) -> Fault | None:
        asked.append(request)
        return usual(request)

    api.hook = hook
    eventually(lambda: "a" in extender.engine.cache.cluster.index)
    assert extender.filter(one, ["a"])["NodeNames"] == ["a"] and extender.bind(one, "a") == ""
    (binding,) = [request for request in asked if request.path.endswith("/binding")]
    assert binding.query["timeout"] == "3000ms" and binding.timeout_s == 3.0


def test_a_stalled_request_is_not_carried_out_after_its_timeout(api: FakeApi, tmp_path: Path) -> None:
    """The stand-in does what kube-apiserver does: otherwise the tests above would prove nothing."""
    from scheduler_ext.sync.api import ApiServer

    api.put("pods", pod("p", uid="p"))
    server = ApiServer.connect(api.kubeconfig(tmp_path), timeout_seconds=5)
    api.hook = lambda _: Fault(stalled_s=0.3)
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "p", "namespace": "default", "uid": "p"},
            "target": {"kind": "Node", "name": "a"}}  # fmt: skip
    with pytest.raises(KubeError, match="504"):
        server.client.call("POST", "/api/v1/namespaces/default/pods/p/binding?timeout=100ms", body)
    assert not api.find("pods", "default/p")["spec"].get("nodeName")
    server.client.call("POST", "/api/v1/namespaces/default/pods/p/binding?timeout=2s", body)
    assert api.find("pods", "default/p")["spec"]["nodeName"] == "a"
