"""An API server that refuses, breaks off or sends nonsense: nothing is lost that can still arrive, nothing is sent for ever."""

# ruff: noqa: ARG002  (the parameters are those of the real client)
from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest

from manager.kube import pod_watch as podwatch_module
from manager.kube import writer as outbox_module
from manager.kube.api import Kube
from manager.kube.http import Endpoint, HttpError
from manager.kube.pod_watch import PodWatch
from manager.kube.writer import Outbox
from tests.manager.manager_pods import container, eventually, pod

# The watch of pods.


class Lines:
    """An endpoint whose watch sends these lines."""

    url = "http://api"

    def __init__(self, *lines: bytes) -> None:
        self.sent = lines

    def lines(self, *_: object) -> Iterator[bytes]:
        yield from self.sent


def watched(*lines: bytes) -> list[tuple[str, Any]]:
    return list(Kube(cast(Endpoint, Lines(*lines)), "node-1").watch_pods("1", lambda _: None))


def line(kind: str, thing: object) -> bytes:
    return json.dumps({"type": kind, "object": thing}).encode() + b"\n"


def test_keep_alives_and_bookmarks_of_a_watch_are_no_pods() -> None:
    assert watched(b"\n", line("BOOKMARK", {}), line("ADDED", {"a": 1}), b"  \n") == [("ADDED", {"a": 1})]


@pytest.mark.parametrize("text", [b"<html>\n", b"[]\n", b"5\n", b'{"type": "ADDED"}\n', b'{"object": {}}\n'])
def test_what_is_no_event_ends_the_watch_with_what_came(text: bytes) -> None:
    with pytest.raises(HttpError, match="the watch of pods sent something else than an event: ") as error:
        watched(text)
    assert repr(text)[1:10] in str(error.value)


def test_a_watch_that_is_too_old_ends_with_the_servers_words() -> None:
    with pytest.raises(HttpError, match="the watch of pods ended: too old resource version: 1") as error:
        watched(line("ERROR", {"code": 410, "message": "too old resource version: 1"}))
    assert error.value.status == 410


class Watched:
    """An API server of one life: each element is a list's failure, or the events of one watch and perhaps its end."""

    def __init__(self, *lives: Any) -> None:
        self.lives = list(lives)
        self.lists = 0
        self.over = threading.Event()

    def pods(self, timeout: float) -> tuple[list[Any], str]:
        self.lists += 1
        if self.lives and isinstance(self.lives[0], HttpError):
            raise self.lives.pop(0)
        return [], "1"

    def watch_pods(self, version: str, opened: Callable[[socket.socket], None]) -> Iterator[tuple[str, Any]]:
        if not self.lives:
            self.over.wait(20)
            yield "DELETED", {}
            return
        for event in self.lives.pop(0):
            if isinstance(event, HttpError):
                raise event
            yield event


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[int]]]:
    """Follows such a server to the end of its lives; the list that grows with every hint."""
    made: list[tuple[PodWatch, Watched]] = []
    monkeypatch.setattr(podwatch_module, "_FIRST_PAUSE_S", 0.01)

    def start(api: Watched) -> list[int]:
        hints: list[int] = []
        watch = PodWatch(cast(Kube, api), lambda: hints.append(api.lists))
        made.append((watch, api))
        watch.start()
        eventually(lambda: not api.lives, "the end of its lives")
        return hints

    yield start
    for watch, api in made:
        watch._stop.set()
        api.over.set()
        watch.stop()
        assert not watch._thread.is_alive()


ENDED = pod("p", container("c", 10, 1)) | {"status": {"phase": "Failed"}}
RUNNING = pod("q", container("c", 10, 1)) | {"status": {"phase": "Running"}}


def test_only_pods_that_go_or_end_are_a_hint(follow: Callable[..., list[int]]) -> None:
    api = Watched([("ADDED", RUNNING), ("MODIFIED", RUNNING), ("MODIFIED", ENDED), ("DELETED", RUNNING)])
    hints = follow(api)
    eventually(lambda: api.lists == 2, "the next list")
    assert hints[:3] == [1, 1, 1]  # its first list, one that ended, one that went


@pytest.mark.parametrize("status", [410, 403, 500, None])
def test_every_end_of_a_watch_is_followed_by_a_list_and_a_hint(
    follow: Callable[..., list[int]], status: int | None
) -> None:
    error = HttpError("the watch of pods ended", status)
    api = Watched([("ADDED", RUNNING), error], error, error, [])
    hints = follow(api)
    eventually(lambda: api.lists >= 5 and hints[-1] >= 5, "the list after all failures")
    assert [lists for lists in hints if lists in (2, 3)] == [], "a list that failed tells nothing"


# What is sent.


class Answers:
    """Answers calls one after the other with these, then with success; None is success."""

    def __init__(self, *answers: HttpError | None) -> None:
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

    def event(self, about: Any, kind: str, reason: str, message: str, timeout: float) -> None:
        self._answer(f"event {message}")

    def evict(self, namespace: str, name: str, uid: str, timeout: float) -> None:
        self._answer(f"evict {name}")

    def delete_pod(self, namespace: str, name: str, uid: str, timeout: float) -> None:
        self._answer(f"delete {name}")


@contextlib.contextmanager
def sending(api: Answers) -> Iterator[Outbox]:
    made = Outbox(cast(Kube, api))
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "_FIRST_PAUSE_S", 0.01)


@pytest.mark.parametrize("status", [400, 403, 404, 409, 422])
def test_what_trying_again_can_not_change_is_said_once_and_holds_up_nothing(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    api = Answers(HttpError(f"{status} no", status))
    with sending(api) as outbox:
        outbox.annotate_pod("default", "p", "u", {})
        outbox.delete_pod("default", "q", "v")
        assert outbox.wait_empty(10)
        assert outbox.reachable
    assert api.calls == ["annotate p {}", "delete q"]
    assert f"the API server refused pod: {status} no" in caplog.text


@pytest.mark.parametrize("status", [401, 429, 500, 503, None])
def test_what_may_pass_is_tried_until_it_arrives(
    status: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    api = Answers(*[HttpError("away", status)] * 3)
    with sending(api) as outbox:
        outbox.annotate_pod("default", "p", "u", {})
        assert outbox.wait_empty(10)
        assert outbox.reachable
    assert api.calls == ["annotate p {}"] * 4
    assert caplog.text.count("the API server can't be reached: away; trying on") == 1


@pytest.mark.parametrize("failure", [HttpError("500 the webhook is broken", 500), TypeError("a defect")])
def test_a_message_that_always_fails_blocks_no_other(failure: Exception) -> None:
    class Broken(Answers):
        def annotate_fails(self) -> None:
            self.calls.append("annotate")
            raise failure

        def patch_pod(self, *_: Any) -> None:
            self.annotate_fails()

    api = Broken()
    with sending(api) as outbox:
        outbox.annotate_pod("default", "p", "u", {})
        for number in range(3):
            outbox.pod_event("default", "q", "v", "Reason", f"{number}")
        eventually(lambda: {"event 0", "event 1", "event 2"} <= set(api.calls), "the other messages")
        eventually(lambda: api.calls.count("annotate") >= 3, "further tries")


def test_an_eviction_that_a_disruption_budget_forbids_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    api = Answers(HttpError("429 the budget needs 2 healthy pods", 429))
    with sending(api) as outbox:
        outbox.evict("default", "p", "u")
        assert outbox.wait_empty(10)
    assert api.calls == ["evict p"]
    assert "default/p is not evicted: 429 the budget needs 2 healthy pods" in caplog.text


def test_an_eviction_that_found_nobody_to_answer_is_asked_again() -> None:
    api = Answers(HttpError("away", 503))
    with sending(api) as outbox:
        outbox.evict("default", "p", "u")
        assert outbox.wait_empty(10)
    assert api.calls == ["evict p"] * 2


def test_what_is_newer_than_the_message_under_way_is_sent_after_it() -> None:
    api = Answers()
    api.held = threading.Event()
    with sending(api) as outbox:
        outbox.annotate_pod("default", "p", "u", {"a": "1"})
        eventually(lambda: api.calls, "the first is under way")
        outbox.annotate_pod("default", "p", "u", {"a": "2"})
        assert not outbox.wait_empty(0.01)
        api.held.set()
        assert outbox.wait_empty(10)
    assert api.calls == ["annotate p {'a': '1'}", "annotate p {'a': '2'}"]


def test_of_more_messages_than_are_kept_the_oldest_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "_KEPT", 3)
    api = Answers()
    outbox = Outbox(cast(Kube, api))
    for number in range(5):
        outbox.event({"uid": "u"}, "Warning", "Xid", f"{number}")
    outbox.start()
    assert outbox.wait_empty(10)
    outbox.stop()
    assert api.calls == ["event 2", "event 3", "event 4"]


def test_without_an_api_server_nothing_is_kept() -> None:
    outbox = Outbox(None)
    outbox.start()
    outbox.event({"uid": "u"}, "Warning", "Xid", "x")
    assert outbox.wait_empty(1) and outbox.reachable is None
    outbox.stop()


# The client below it.


@contextlib.contextmanager
def one_by_one(*lives: Sequence[bytes]) -> Iterator[tuple[Endpoint, list[bytes]]]:
    """A server whose connections each answer one request per piece and then end; and the requests that came."""
    listener = socket.create_server(("127.0.0.1", 0))
    seen: list[bytes] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            for life in lives:
                connection, _ = listener.accept()
                with connection:
                    for piece in life:
                        seen.append(connection.recv(65536).split(b"\r\n")[0])
                        connection.sendall(piece)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield Endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}"), seen
    finally:
        listener.close()


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


def test_a_kept_connection_that_the_server_has_ended_costs_no_request() -> None:
    with one_by_one([OK], [OK]) as (endpoint, seen):
        assert endpoint.json("GET", "/one", timeout=5) == {}
        assert endpoint.json("GET", "/two", timeout=5) == {}
        assert seen == [b"GET /one HTTP/1.1", b"GET /two HTTP/1.1"]


def test_a_server_that_ends_every_connection_is_an_error_after_one_try_more() -> None:
    with one_by_one([OK], [b""], [b""]) as (endpoint, seen):
        endpoint.json("GET", "/one", timeout=5)
        with pytest.raises(HttpError, match=r"http://127.0.0.1:.*: Remote end closed connection"):
            endpoint.json("GET", "/two", timeout=5)
        assert seen == [b"GET /one HTTP/1.1", b"GET /two HTTP/1.1"]
        with pytest.raises(
            HttpError, match="Remote end closed connection"
        ):  # a new connection: not once more
            endpoint.json("GET", "/three", timeout=5)
        assert seen[2:] == [b"GET /three HTTP/1.1"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"message": "pods is forbidden: no  rights"}', "403 pods is forbidden: no rights"),
        (b"<html>a proxy says no</html>", "403 <html>a proxy says no</html>"),
        (b"[1]", "403 [1]"),
        (b"", "403 "),
    ],
)
def test_a_watch_that_is_refused_says_what_the_server_said(body: bytes, words: str) -> None:
    head = b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n" % len(body)
    with one_by_one([head + body]) as (endpoint, _), pytest.raises(HttpError) as error:
        list(endpoint.lines("/api/v1/pods", {}, 5.0, lambda _: None))
    assert error.value.status == 403 and f"GET {endpoint.url}/api/v1/pods: {words}" == str(error.value)


def test_a_watch_that_is_cut_off_in_a_chunk_is_an_error_and_no_end() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n{}\n"
    with one_by_one([head]) as (endpoint, _), pytest.raises(HttpError, match=endpoint.url):
        list(endpoint.lines("/api/v1/pods", {}, 5.0, lambda _: None))


def test_no_request_is_sent_after_its_time() -> None:
    with one_by_one([OK]) as (endpoint, seen):
        with pytest.raises(HttpError, match="timed out"):
            endpoint.json("GET", "/late", timeout=0.0)
        assert endpoint.json("GET", "/now", timeout=5) == {}
        assert seen == [b"GET /now HTTP/1.1"]
