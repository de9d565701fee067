"""The daemon's HTTP client: answers of every form, each whole or an error, and none later than its deadline."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from manager.kube import http
from manager.kube.http import Endpoint, HttpError


@contextlib.contextmanager
def server(pieces: Sequence[bytes], pause_s: float = 0.0) -> Iterator[Endpoint]:
    """Answers each connection's first request with these pieces, and then ends it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(65536)
                    for piece in pieces:
                        connection.sendall(piece)
                        time.sleep(pause_s)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield Endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}")
    finally:
        listener.close()


HEAD = b"HTTP/1.1 200 OK\r\n"
FORMS = {
    "its length": HEAD + b"Content-Length: 6\r\n\r\n[1, 2]",
    "chunks": HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n[1\r\n4\r\n, 2]\r\n0\r\n\r\n",
    "its end": HEAD + b"Connection: close\r\n\r\n[1, 2]",
    "nothing": b"HTTP/1.1 204 No Content\r\n\r\n",
}


@pytest.mark.parametrize("form", FORMS)
def test_answers_of_every_form(form: str) -> None:
    with server([FORMS[form]]) as endpoint:
        for _ in range(2):
            _, data = endpoint.raw("GET", "/", timeout=5)
            assert data == (b"" if form == "nothing" else b"[1, 2]")


def test_threads_that_call_one_after_another_share_a_connection() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    connections = 0

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while connection.recv(65536):
                connection.sendall(FORMS["its length"])

    def accept() -> None:
        nonlocal connections
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections += 1
                threading.Thread(target=serve, args=[connection], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    endpoint = Endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}")
    answers: list[bytes] = []
    with listener:
        for _ in range(5):
            caller = threading.Thread(target=lambda: answers.append(endpoint.raw("GET", "/", timeout=10)[1]))
            caller.start()
            caller.join()
    assert answers == [b"[1, 2]"] * 5
    assert connections == 1


def test_a_kept_connection_that_the_server_has_closed_is_made_anew_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with server([FORMS["its length"]]) as endpoint:
        made = []
        connect = endpoint._connect
        monkeypatch.setattr(endpoint, "_connect", lambda timeout: made.append(timeout) or connect(timeout))
        for calls in range(1, 4):
            endpoint.raw("GET", "/", timeout=10)
            assert len(made) == calls
            assert len(endpoint._kept) == 1


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_that_drips_ends_at_the_deadline(form: str) -> None:
    """A time-out for each byte would let it go on for as long as it is long."""
    text = FORMS[form]
    with server([text[at : at + 1] for at in range(len(text))], pause_s=0.02) as endpoint:
        started = time.monotonic()
        with pytest.raises(HttpError, match="timed out"):
            endpoint.raw("GET", "/", timeout=0.3)
        assert time.monotonic() - started < 0.6


@pytest.mark.parametrize(
    "text",
    [
        HEAD + b"Content-Length: 9\r\n\r\n[1, 2]",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n9\r\n[1, 2]",
    ],
)
def test_an_answer_that_ends_too_early_is_an_error(text: bytes) -> None:
    with server([text]) as endpoint, pytest.raises(HttpError, match="IncompleteRead"):
        endpoint.raw("GET", "/", timeout=5)


@pytest.mark.parametrize("form", ["its length", "chunks", "its end"])
def test_an_answer_that_is_too_long_is_an_error(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_BODY_BYTES", 5)
    with server([FORMS[form]]) as endpoint, pytest.raises(HttpError, match="too long"):
        endpoint.raw("GET", "/", timeout=5)
