"""An API server that refuses, breaks off or sends nonsense: nothing is lost that can still arrive, nothing is sent for ever."""

# ruff: noqa: ARG002  (the parameters are those of the real client)
from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from manager.kube import writer as outbox_module
from manager.kube.api import Kube
from manager.kube.writer import ApiWriter
from tests.manager.manager_pods import eventually
from vcuda.kube.errors import ApiError, ApiUnreachable, KubeError
from vcuda.kube.events import Correlator, Said

# What is sent.


class Answers:
    """Answers calls one after the other with these, then with success; None is success."""

    def __init__(self, *answers: KubeError | None) -> None:
        self.answers = list(answers)
        self.calls: list[str] = []
        self.held: threading.Event | None = None

    def _answer(self, what: str) -> None:
        self.calls.append(what)
        if self.held is not None:
            assert self.held.wait(20)
        answer = self.answers.pop(0) if self.answers else None
        if answer is not None:
            raise answer

    def patch_pod(self, namespace: str, name: str, uid: str, annotations: Any, timeout: float) -> None:
        self._answer(f"annotate {name} {annotations}")

    def event(self, said: Said, correlator: Correlator, timeout: float) -> None:
        self._answer(f"event {said.message}")

    def evict(self, namespace: str, name: str, uid: str, timeout: float) -> None:
        self._answer(f"evict {name}")

    def delete_pod(self, namespace: str, name: str, uid: str, timeout: float) -> None:
        self._answer(f"delete {name}")


@contextlib.contextmanager
def sending(api: Answers) -> Iterator[ApiWriter]:
    made = ApiWriter(cast(Kube, api))
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("_FIRST_PAUSE_S", "_BETWEEN_FAILURES_S"):
        monkeypatch.setattr(outbox_module, pause, 0.01)


@pytest.mark.parametrize("status", [400, 403, 404, 409, 422])
def test_what_trying_again_can_not_change_is_said_once_and_holds_up_nothing(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    api = Answers(ApiError(status, "no"))
    with sending(api) as api_writer:
        api_writer.annotate_pod("default", "p", "u", {})
        api_writer.delete_pod("default", "q", "v")
        assert api_writer.wait_empty(10)
    assert api.calls == ["annotate p {}", "delete q"]
    assert f"pod was refused: the API server answered {status}: no" in caplog.text


@pytest.mark.parametrize("status", [401, 429, 500, 503, None])
def test_what_may_pass_is_tried_until_it_arrives(status: int | None, caplog: pytest.LogCaptureFixture) -> None:
    api = Answers(*[ApiError(status, "away") if status else ApiUnreachable("away")] * 3)
    with sending(api) as api_writer:
        api_writer.annotate_pod("default", "p", "u", {})
        assert api_writer.wait_empty(10)
    assert api.calls == ["annotate p {}"] * 4
    assert caplog.text.count("the API server takes no messages: ") == 1 and "away; trying again" in caplog.text


@pytest.mark.parametrize("failure", [ApiError(500, "500 the webhook is broken"), TypeError("a defect")])
def test_a_message_that_always_fails_blocks_no_other(failure: Exception) -> None:
    class Broken(Answers):
        def annotate_fails(self) -> None:
            self.calls.append("annotate")
            raise failure

        def patch_pod(self, *_: Any) -> None:
            self.annotate_fails()

    api = Broken()
    with sending(api) as api_writer:
        api_writer.annotate_pod("default", "p", "u", {})
        for word in "abc":
            api_writer.pod_event("default", "q", "v", "Reason", word)
        eventually(lambda: {"event a", "event b", "event c"} <= set(api.calls), "the other messages")
        eventually(lambda: api.calls.count("annotate") >= 3, "further tries")


def test_an_eviction_that_a_disruption_budget_forbids_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    api = Answers(ApiError(429, "the budget needs 2 healthy pods"))
    with sending(api) as api_writer:
        api_writer.evict("default", "p", "u")
        assert api_writer.wait_empty(10)
    assert api.calls == ["evict p"]
    assert "default/p is not evicted: the API server answered 429: the budget needs 2 healthy pods" in caplog.text


def test_an_eviction_that_found_nobody_to_answer_is_asked_again() -> None:
    api = Answers(ApiError(503, "away"))
    with sending(api) as api_writer:
        api_writer.evict("default", "p", "u")
        assert api_writer.wait_empty(10)
    assert api.calls == ["evict p"] * 2


def test_what_is_newer_than_the_message_under_way_is_sent_after_it() -> None:
    api = Answers()
    api.held = threading.Event()
    with sending(api) as api_writer:
        api_writer.annotate_pod("default", "p", "u", {"a": "1"})
        eventually(lambda: api.calls, "the first is under way")
        api_writer.annotate_pod("default", "p", "u", {"a": "2"})
        assert not api_writer.wait_empty(0.01)
        api.held.set()
        assert api_writer.wait_empty(10)
    assert api.calls == ["annotate p {'a': '1'}", "annotate p {'a': '2'}"]


def test_of_more_messages_than_are_kept_the_oldest_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "_KEPT", 3)
    api = Answers()
    api_writer = ApiWriter(cast(Kube, api))
    for word in "abcde":
        api_writer.event({"uid": "u"}, "Warning", "Xid", word)
    api_writer.start()
    assert api_writer.wait_empty(10)
    api_writer.stop()
    assert api.calls == ["event c", "event d", "event e"]


def test_an_event_that_repeats_waits_its_turn_and_then_says_how_often() -> None:
    class Counting(Answers):
        def event(self, said: Said, correlator: Correlator, timeout: float) -> None:
            self.calls.append(f"{said.message} x{said.count}")
            said.sent_at = correlator.clock()

    now, api = [100.0], Counting()
    writer = ApiWriter(cast(Kube, api), lambda: now[0])

    def refused(times: int) -> None:
        for number in range(times):
            writer.pod_event("default", "p", "u", "MemoryRefused", f"refused {number} MiB")
        while (entry := writer._next()) is not None:
            writer._send(cast(Kube, api), *entry)

    refused(3)
    refused(4)
    now[0] = 109.9
    refused(5)
    assert api.calls == ["refused 2 MiB x3"] and not writer.failing
    now[0] = 110.0
    refused(0)
    assert api.calls[1:] == ["refused 4 MiB x12"]


def test_without_an_api_server_nothing_is_kept() -> None:
    api_writer = ApiWriter(None)
    api_writer.start()
    api_writer.event({"uid": "u"}, "Warning", "Xid", "x")
    assert api_writer.wait_empty(1)
    api_writer.stop()


def test_what_tenants_cause_neither_delays_nor_pushes_out_what_pods_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand processes without our library were a thousand events: the node's report waited 17 s, or was given up."""
    monkeypatch.setattr(outbox_module, "_KEPT", 20)
    api = Answers()
    writer = ApiWriter(cast(Kube, api))
    writer.annotate_pod("default", "p", "uid-p", {"a": "1"})
    writer.describe_node({"cards": "1"}, {})
    for number in range(100):
        writer.pod_event("default", "hog", "uid-hog", "DriverWithoutShim", f"process of {number}x")
        writer.pod_event("default", "hog", "uid-hog", f"Reason{number}", "another")
    names = list(writer._pending)
    assert len(names) == 20 and {"node", "pod uid-p"} <= set(names)
    writer.annotate_pod("default", "q", "uid-q", {"a": "1"})
    sent = []
    while (entry := writer._next()) is not None:
        sent.append(entry[0].partition(" ")[0])
        del writer._pending[entry[0]]
    assert sent == ["pod", "node", "pod", *["event"] * 17]
