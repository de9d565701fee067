"""The stand-in scheduler loop against an extender written for the test: what is sent, bound, refused and retried."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from localcluster import api as apis
from localcluster.scheduler import Scheduler


class FakeExtender:
    """Answers filter and bind; `verdict` maps a pod's name to a node name, or to the reason it is refused with."""

    def __init__(self, api: apis.Api) -> None:
        outer = self
        self.api = api
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.accept: dict[str, str] = {}
        self.broken = False

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                code, answer = (500, {"broken": True}) if outer.broken else (200, outer.answer(self.path, body))
                data = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/scheduler"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.calls.append((path, body))
        if path.endswith("/bind"):
            pod = {"metadata": {"name": body["PodName"], "namespace": body["PodNamespace"]}}
            metadata = {"name": body["PodName"], "uid": body["PodUID"], "annotations": {"placed": "yes"}}
            self.api.call(
                "POST",
                apis.pod_path(pod, "binding"),
                {"metadata": metadata, "target": {"name": body["Node"]}},
            )
            return {"Error": ""}
        node = self.accept.get(body["Pod"]["metadata"]["name"])
        failed = {} if node else dict.fromkeys(body["NodeNames"], "InvalidCores: ask less")
        return {"NodeNames": [node] if node else [], "FailedAndUnresolvableNodes": failed, "Error": ""}

    def filtered(self, name: str) -> list[dict[str, Any]]:
        return [b for path, b in self.calls if path.endswith("/filter") and b["Pod"]["metadata"]["name"] == name]


@pytest.fixture
def extender(api: apis.Api) -> Iterator[FakeExtender]:
    made = FakeExtender(api)
    for name, ready in (("n1", "True"), ("n2", "True"), ("down", "False")):
        api.call("POST", "/api/v1/nodes", {"metadata": {"name": name}, "spec": {}})
        api.patch(f"/api/v1/nodes/{name}/status", {"status": {"conditions": [{"type": "Ready", "status": ready}]}})
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def scheduler(api: apis.Api, extender: FakeExtender) -> Iterator[Scheduler]:
    made = Scheduler(api, extender.url)
    made.start()
    yield made
    made.stop()


def create(api: apis.Api, pod: dict[str, Any]) -> dict[str, Any]:
    return api.call("POST", "/api/v1/namespaces/default/pods", pod)


def bound(api: apis.Api, name: str) -> Callable[[], Any]:
    return lambda: api.call("GET", f"/api/v1/namespaces/default/pods/{name}")["spec"].get("nodeName")


def test_the_extender_decides_and_binds_gpu_pods(
    api: apis.Api, extender: FakeExtender, scheduler: Scheduler, make_pod: Any, wait_for: Any
) -> None:
    extender.accept["a"] = "n2"
    create(api, make_pod("a", core=30, memory=4))
    assert wait_for(bound(api, "a"), "the binding") == "n2"
    sent = extender.filtered("a")[0]
    assert set(sent) == {"Pod", "Nodes", "NodeNames"} and sent["Nodes"] is None
    assert sorted(sent["NodeNames"]) == ["n1", "n2"]
    assert api.call("GET", "/api/v1/namespaces/default/pods/a")["metadata"]["annotations"] == {"placed": "yes"}


def test_other_pods_never_reach_the_extender(
    api: apis.Api, extender: FakeExtender, scheduler: Scheduler, make_pod: Any, wait_for: Any
) -> None:
    extender.broken = True
    create(api, make_pod("a"))
    create(api, make_pod("b", schedulerName="another"))
    assert wait_for(bound(api, "a"), "the binding") in ("n1", "n2")
    assert not extender.calls and not bound(api, "b")()


def test_a_refused_pod_says_why_and_is_tried_again(
    api: apis.Api, extender: FakeExtender, scheduler: Scheduler, make_pod: Any, wait_for: Any
) -> None:
    create(api, make_pod("a", core=150, memory=4))

    def refusal() -> Any:
        conditions = api.call("GET", "/api/v1/namespaces/default/pods/a")["status"].get("conditions", [])
        return next((c for c in conditions if c["type"] == "PodScheduled" and c["status"] == "False"), None)

    condition = wait_for(refusal, "the refusal")
    assert condition["reason"] == "Unschedulable"
    wanted = "0/3 nodes are available: 2 InvalidCores: ask less, 1 node(s) were not ready."
    assert condition["message"] == wanted
    events = api.call("GET", "/api/v1/events")["items"]
    assert [(event["reason"], event["message"]) for event in events] == [("FailedScheduling", wanted)]
    wait_for(lambda: len(extender.filtered("a")) >= 2, "a second try")
    extender.accept["a"] = "n1"
    assert wait_for(bound(api, "a"), "the binding") == "n1"


def test_a_broken_extender_is_a_reason_and_no_harm(
    api: apis.Api, extender: FakeExtender, scheduler: Scheduler, make_pod: Any, wait_for: Any
) -> None:
    extender.broken = True
    extender.accept["a"] = "n1"
    create(api, make_pod("a", core=30, memory=4))
    wait_for(
        lambda: any("answers 500" in e["message"] for e in api.call("GET", "/api/v1/events")["items"]),
        "the reason",
    )
    extender.broken = False
    assert wait_for(bound(api, "a"), "the binding") == "n1"


def test_a_pending_pod_is_tried_at_once_when_another_ends(
    api: apis.Api, extender: FakeExtender, scheduler: Scheduler, make_pod: Any, wait_for: Any
) -> None:
    create(api, make_pod("a", core=30, memory=4))
    wait_for(lambda: len(extender.filtered("a")) >= 3, "backing off", 20)
    extender.accept["a"] = "n1"
    create(api, make_pod("other", schedulerName="another"))
    api.call("DELETE", "/api/v1/namespaces/default/pods/other")
    # The third failure means 4 s of back-off.
    assert wait_for(bound(api, "a"), "the binding", 3) == "n1"


def unschedulable(api: apis.Api, name: str) -> Callable[[], Any]:
    """The message with which the pod waits, once it has one."""

    def told() -> Any:
        conditions = api.call("GET", f"/api/v1/namespaces/default/pods/{name}")["status"].get("conditions", [])
        return next((one["message"] for one in conditions if one["type"] == "PodScheduled"), None)

    return told


def test_nodes_that_are_out_of_question_are_counted_by_their_reason(
    api: apis.Api, extender: FakeExtender, scheduler: Scheduler, make_pod: Any, wait_for: Any
) -> None:
    api.patch("/api/v1/nodes/n1", {"spec": {"unschedulable": True}})
    create(api, make_pod("a", nodeSelector={"disk": "ssd"}))
    assert wait_for(unschedulable(api, "a"), "the reasons") == (
        "0/3 nodes are available: 1 node(s) didn't match Pod's node affinity/selector, 1 node(s) were not ready, "
        "1 node(s) were unschedulable."
    )
    api.patch("/api/v1/nodes/n2", {"metadata": {"labels": {"disk": "ssd"}}})
    assert wait_for(bound(api, "a"), "the binding") == "n2"


def test_what_the_extender_says_of_its_own_failure_is_what_the_pod_waits_for(
    api: apis.Api, extender: FakeExtender, scheduler: Scheduler, make_pod: Any, wait_for: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(extender, "answer", lambda *_: {"Error": "no node is known yet"})
    create(api, make_pod("a", core=30, memory=4))
    assert wait_for(unschedulable(api, "a"), "the reason") == "0 nodes are available: no node is known yet"
