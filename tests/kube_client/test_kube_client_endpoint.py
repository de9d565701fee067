"""The one HTTP client: answers of every form, each whole or an error, none later than its deadline; names that stay names."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from vcuda.kube import endpoint as endpoints
from vcuda.kube import objects
from vcuda.kube.aio import AsyncClient
from vcuda.kube.client import Client
from vcuda.kube.config import Login
from vcuda.kube.endpoint import Endpoint
from vcuda.kube.errors import ApiError, ApiUnreachable, BadName, KubeError

HEAD = b"HTTP/1.1 200 OK\r\n"
FORMS = {
    "its length": HEAD + b"Content-Length: 6\r\n\r\n[1, 2]",
    "chunks": HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n[1\r\n4\r\n, 2]\r\n0\r\n\r\n",
    "its end": HEAD + b"Connection: close\r\n\r\n[1, 2]",
    "nothing": b"HTTP/1.1 204 No Content\r\n\r\n",
}


@contextlib.contextmanager
def server(pieces: Sequence[bytes], pause: float = 0.0, *, stay: bool = False) -> Iterator[Endpoint]:
    """Answers each connection's first request with these pieces and then ends it, or stays silent."""
    listener = socket.create_server(("127.0.0.1", 0))
    kept = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with contextlib.suppress(OSError):
                    connection.recv(65536)
                    for piece in pieces:
                        connection.sendall(piece)
                        time.sleep(pause)
                kept.append(connection)
                if not stay:
                    connection.close()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield Endpoint(Login(f"http://127.0.0.1:{listener.getsockname()[1]}"), agent="test")
    finally:
        listener.close()
        for connection in kept:
            connection.close()


@pytest.mark.parametrize("form", FORMS)
def test_answers_of_every_form(form: str) -> None:
    with server([FORMS[form]]) as endpoint:
        for _ in range(2):
            assert endpoint.raw("GET", "/", timeout=5) == (b"" if form == "nothing" else b"[1, 2]")


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_that_drips_ends_at_the_deadline(form: str) -> None:
    """A time-out for each byte would let it go on for as long as it is long."""
    text = FORMS[form]
    with server([text[at : at + 1] for at in range(len(text))], pause=0.02) as endpoint:
        started = time.monotonic()
        with pytest.raises(ApiUnreachable, match=r"no answer from http://127.0.0.1:.*timed out"):
            endpoint.raw("GET", "/", timeout=0.3)
        assert time.monotonic() - started < 0.9


@pytest.mark.parametrize(
    "text",
    [HEAD + b"Content-Length: 9\r\n\r\n[1, 2]", HEAD + b"Transfer-Encoding: chunked\r\n\r\n9\r\n[1, 2]"],
)
def test_an_answer_that_ends_too_early_is_an_error(text: bytes) -> None:
    with server([text]) as endpoint, pytest.raises(ApiUnreachable, match="IncompleteRead"):
        endpoint.raw("GET", "/", timeout=5)


@pytest.mark.parametrize("form", ["its length", "chunks", "its end"])
def test_an_answer_that_is_too_long_is_an_error(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "MAX_BODY_BYTES", 5)
    with server([FORMS[form]]) as endpoint, pytest.raises(ApiUnreachable, match="too long"):
        endpoint.raw("GET", "/", timeout=5)


def test_every_cut_of_an_answer_is_an_error_of_ours() -> None:
    text = FORMS["its length"]
    for at in range(len(text)):
        with server([text[:at]]) as endpoint, pytest.raises(KubeError):
            endpoint.raw("POST", "/", timeout=5, body=b"{}")


class Counting:
    """Serves kept connections and counts them and the requests."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.connections: list[socket.socket] = []
        self.requests: list[bytes] = []
        threading.Thread(target=self._accept, daemon=True).start()
        self.endpoint = Endpoint(Login(f"http://127.0.0.1:{self.listener.getsockname()[1]}"), agent="test")

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                self.connections.append(connection)
                threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := connection.recv(65536):
                if b" HTTP/1." in data:  # and not the body, which may come by itself
                    self.requests.append(data)
                    connection.sendall(FORMS["its length"])

    def close(self) -> None:
        self.listener.close()
        for connection in self.connections:
            connection.close()


@pytest.fixture
def counting() -> Iterator[Counting]:
    one = Counting()
    yield one
    one.close()


def test_threads_that_call_one_after_another_share_a_connection(counting: Counting) -> None:
    answers: list[bytes] = []
    for _ in range(5):
        caller = threading.Thread(target=lambda: answers.append(counting.endpoint.raw("GET", "/", timeout=10)))
        caller.start()
        caller.join()
    assert answers == [b"[1, 2]"] * 5
    assert len(counting.connections) == 1


def test_who_has_closed_keeps_no_connection_and_may_ask_again(counting: Counting) -> None:
    for _ in range(2):
        counting.endpoint.raw("GET", "/", timeout=10)
        counting.endpoint.close()
        assert counting.connections[-1].recv(1) == b"", "the server sees its end"
    assert len(counting.connections) == 2


def test_a_kept_connection_that_the_server_has_closed_is_made_anew(counting: Counting) -> None:
    for method in ("GET", "POST", "PATCH", "POST"):
        counting.endpoint.raw(method, "/", timeout=10, body=None if method == "GET" else b"{}")
        counting.connections[-1].shutdown(socket.SHUT_RDWR)
        time.sleep(0.05)
    assert len(counting.connections) == 4 and len(counting.requests) == 4


def test_a_write_that_may_have_arrived_is_not_sent_twice() -> None:
    """The server takes a kept connection's second request and ends it: only what can be repeated is sent again."""
    for method, sent in (("POST", 2), ("GET", 3)):
        listener = socket.create_server(("127.0.0.1", 0))
        requests: list[bytes] = []

        def serve(listener: socket.socket = listener, requests: list[bytes] = requests) -> None:
            with contextlib.suppress(OSError):
                for most in (1, 9):
                    connection, _ = listener.accept()
                    with connection:
                        answers = 0
                        while data := connection.recv(65536):
                            if b" HTTP/1.1\r\n" not in data:
                                continue
                            requests.append(data)
                            if answers == most:
                                break
                            answers += 1
                            connection.sendall(FORMS["its length"])

        threading.Thread(target=serve, daemon=True).start()
        endpoint = Endpoint(Login(f"http://127.0.0.1:{listener.getsockname()[1]}"), agent="test")
        with listener:
            endpoint.raw("GET", "/", timeout=5)
            with contextlib.ExitStack() as stack:
                if method == "POST":
                    stack.enter_context(pytest.raises(ApiUnreachable))
                endpoint.raw(method, "/", timeout=5)
        assert len(requests) == sent, method


@pytest.mark.parametrize(
    "name",
    [
        "",
        "?watch=1",
        "..",
        ".",
        "a/b",
        "x?dryRun=All",
        "a%2fb",
        "A",
        "a b",
        "-a",
        "a-",
        "a..b",
        "é",
        "a\n",
        "a" * 254,
    ],
)
def test_what_is_no_name_never_reaches_a_url(name: str) -> None:
    with pytest.raises(BadName, match="is not the name of a Kubernetes object"):
        objects.path("pods", "default", name, "binding")
    if name:
        with pytest.raises(BadName):
            objects.path("pods", name, "p")


def test_paths() -> None:
    assert objects.path("nodes") == "/api/v1/nodes"
    assert objects.path("pods", "a", "b.c-d", "binding") == "/api/v1/namespaces/a/pods/b.c-d/binding"
    assert objects.path("leases", "a", "l") == "/apis/coordination.k8s.io/v1/namespaces/a/leases/l"


@pytest.mark.parametrize("answer", [b'{"message": "pods is forbidden"}', b"<html>Forbidden"])
def test_a_refusal_has_the_servers_words(answer: bytes) -> None:
    head = b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n" % len(answer)
    words = "pods is forbidden" if answer.startswith(b"{") else "<html>Forbidden"
    with server([head + answer]) as endpoint:
        with pytest.raises(ApiError, match=f"the API server answered 403: {words}") as caught:
            Client(endpoint).get("pods", "default", "p")
        assert caught.value.status == 403
        asyncio.run(_refused(endpoint, words))


async def _refused(endpoint: Endpoint, words: str) -> None:
    client = AsyncClient(endpoint)
    with pytest.raises(ApiError, match=f"the API server answered 403: {words}"):
        await client.post("/api/v1/x", b"{}")
    await client.close()


def test_a_token_that_cannot_be_read_is_an_error_of_ours_and_nothing_is_sent(
    tmp_path: Path, counting: Counting
) -> None:
    from vcuda.kube.config import token_file

    login = Login(counting.endpoint.url, token_file(tmp_path / "none"))
    broken = Endpoint(login, agent="test")
    with pytest.raises(ApiUnreachable, match=r"token file .*none cannot be read"):
        broken.raw("GET", "/", timeout=5)

    async def write() -> None:
        client = AsyncClient(broken)
        with pytest.raises(ApiUnreachable, match=r"token file .*none cannot be read"):
            await client.post("/api/v1/x", b"{}")
        await client.close()

    asyncio.run(write())
    assert not counting.requests


def test_a_proxy_is_used(counting: Counting) -> None:
    endpoint = Endpoint(Login("http://10.255.255.1:80", proxy=counting.endpoint.url), agent="test")
    with contextlib.suppress(ApiUnreachable):  # the stand-in is no proxy
        endpoint.raw("GET", "/x", timeout=1)
    assert counting.requests[0].startswith(b"CONNECT 10.255.255.1:80")


def test_a_watch_whose_peer_is_silent_ends_in_bounded_time_and_says_so() -> None:
    event = json.dumps({"type": "BOOKMARK"}).encode() + b"\n"
    with server([HEAD + b"Connection: close\r\n\r\n" + event], stay=True) as endpoint:
        stream = endpoint.stream("/api/v1/pods", {"watch": "true"}, silence=0.3)
        lines = stream.lines()
        assert next(lines) == event.strip()
        began = time.monotonic()
        with pytest.raises(ApiUnreachable, match="the watch of /api/v1/pods broke off: timed out"):
            next(lines)
        assert time.monotonic() - began < 2


def test_a_watch_that_drips_without_a_whole_line_is_silent() -> None:
    with server([HEAD + b"Connection: close\r\n\r\n", *[b"x"] * 200], pause=0.02) as endpoint:
        began = time.monotonic()
        with pytest.raises(ApiUnreachable, match="timed out"):
            list(endpoint.stream("/api/v1/pods", {}, silence=0.3).lines())
        assert time.monotonic() - began < 2


def test_events_of_a_busy_watch_are_taken_together_and_none_waits_for_what_comes_later() -> None:
    events = [b"%d\n" % number for number in range(10)]
    with server([HEAD + b"Connection: close\r\n\r\n", *events], pause=0.02, stay=True) as endpoint:
        lines = endpoint.stream("/api/v1/pods", {}, silence=9).lines(rest=0.5)
        began = time.monotonic()
        came = [0.0]
        for event in events:
            assert next(lines) == event.strip()
            came.append(time.monotonic() - began)
    assert came[-1] < 2, "each rests for itself"
    assert max(later - earlier for earlier, later in itertools.pairwise(came)) > 0.3, "it never rested"


STREAMS = {
    "its length": HEAD + b"Content-Length: 13\r\n\r\nab\n\ncdef\n\r\ngh",
    "chunks": HEAD
    + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n3;x=y\r\n\n\nc\r\nC\r\ndef\n\r\ngh    \r\n0\r\n\r\nmore",
    "its end": HEAD + b"Connection: close\r\n\r\nab\n\ncdef\n\r\ngh",
}


@pytest.mark.parametrize("form", STREAMS)
def test_a_watch_has_the_same_lines_wherever_it_is_cut_into_packets(form: str) -> None:
    text = STREAMS[form]
    for size in (1, 2, 3, 5, len(text)):
        with server([text[at : at + size] for at in range(0, len(text), size)], pause=0.001) as endpoint:
            lines = list(endpoint.stream("/api/v1/pods", {}, silence=9).lines())
            assert [line.strip() for line in lines] == [b"ab", b"cdef", b"gh"]


@pytest.mark.parametrize("form", ["its length", "chunks"])
def test_a_watch_that_is_cut_off_gives_its_whole_lines_and_says_so(form: str) -> None:
    text = STREAMS[form]
    with server([text[: text.index(b"gh")]]) as endpoint:
        lines = endpoint.stream("/api/v1/pods", {}, silence=9).lines()
        assert [next(lines), next(lines)] == [b"ab", b"cdef"]
        with pytest.raises(ApiUnreachable, match="broke off: it was cut off"):
            next(lines)


def test_a_line_without_an_end_ends_a_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read of it would copy all that had come."""
    monkeypatch.setattr(endpoints, "_LONGEST_LINE", 1000)
    with (
        server([HEAD + b"Connection: close\r\n\r\n" + 900 * b"x" + b"\n", 1100 * b"y"], stay=True) as endpoint,
        pytest.raises(ApiUnreachable, match="a line has no end"),
    ):
        list(endpoint.stream("/api/v1/pods", {}, silence=9).lines())


@pytest.mark.parametrize("mark", [2000 * b"x", b"zz\r\n", b"2\r\nab\r\n;\r\n", b"2\r\nab!\n"])
def test_a_chunk_without_a_size_ends_a_watch(mark: bytes) -> None:
    text = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + mark
    with server([text], stay=True) as endpoint, pytest.raises(ApiUnreachable, match="a chunk has no size"):
        list(endpoint.stream("/api/v1/pods", {}, silence=9).lines())


def test_closing_a_watch_ends_its_reader() -> None:
    with server([HEAD + b"Connection: close\r\n\r\n"], stay=True) as endpoint:
        stream = endpoint.stream("/api/v1/pods", {}, silence=60)
        threading.Timer(0.1, stream.close).start()
        began = time.monotonic()
        with contextlib.suppress(ApiUnreachable):
            list(stream.lines())
        assert time.monotonic() - began < 5


def test_connections_notice_a_machine_that_is_gone(counting: Counting) -> None:
    counting.endpoint.raw("GET", "/", timeout=5)
    (kept,) = counting.endpoint._kept
    assert kept.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert kept.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


@pytest.mark.parametrize(
    "body", ["{}", '{"kind":"PodList","metadata":{}}', '{"items":{}}', '{"items":7,"metadata":[]}']
)
def test_what_is_no_list_is_not_taken_for_an_empty_one(body: str) -> None:
    """Whoever asks would take all objects to be gone, and free what their pods hold."""
    answer = HEAD + f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
    with server([answer]) as endpoint, pytest.raises(ApiUnreachable, match="no list"):
        list(Client(endpoint, timeout=5).pages("pods"))


def test_an_empty_list_as_go_writes_it() -> None:
    body = b'{"items":null,"metadata":null}'
    with server([HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)]) as endpoint:
        assert list(Client(endpoint, timeout=5).pages("pods")) == [([], "")]
