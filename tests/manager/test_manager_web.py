"""The HTTP server itself: what its answers carry, and how it ends."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, cast

import pytest

from manager.observe import http
from tests.manager.manager_support import node_report
from vcuda.kube.access import Access
from vcuda.kube.client import Client
from vcuda.kube.errors import ApiUnreachable


@pytest.fixture
def server() -> Iterator[str]:
    """The address of a running one."""
    report = node_report()
    pages = http.Pages(lambda: b"", lambda: report, list, lambda: ["not yet"], "1.2.3")
    listener = http.listen("127.0.0.1", 0)
    made = http.WebServer(pages, listener)
    made.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    made.stop()
    assert not made.worker._thread.is_alive()


def test_an_answer_says_when_it_was_given(server: str) -> None:
    before = datetime.now(UTC)
    with urllib.request.urlopen(f"{server}/version", timeout=10) as answer:
        dates = answer.headers.get_all("Date")
    assert len(dates) == 1
    second = timedelta(seconds=1)  # what a Date leaves out
    assert before - second < parsedate_to_datetime(dates[0]) <= datetime.now(UTC)


def ask(port: int, text: bytes, *, until_end: bool = True) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(text)
        found = b""
        while until_end and (piece := client.recv(65536)):
            found += piece
        return found


@pytest.mark.parametrize("started", [b"", b"GET /healthz HTTP/1.1\r\nX: "])
def test_a_thousand_requests_that_never_end_hold_up_no_other(server: str, started: bytes) -> None:
    """With 1024 descriptors they took the probes, the housekeeping and the admissions with them."""
    port = int(server.rpartition(":")[2])
    half_open = []
    try:
        for _ in range(600):
            half_open.append(socket.create_connection(("127.0.0.1", port), timeout=10))
            if started:
                with contextlib.suppress(OSError):
                    half_open[-1].sendall(started)
        for _ in range(3):
            assert ask(port, b"GET /healthz HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200 OK\r\n")
    finally:
        for each in half_open:
            each.close()


def test_whole_requests_for_pages_hold_up_no_probe() -> None:
    """They took every connection, and kubelet's probes were reset: three in a row restart the daemon."""
    goes_on, report = threading.Event(), node_report()

    def metrics() -> bytes:
        goes_on.wait(20)
        return b"m 1\n"

    listener = http.listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    made = http.WebServer(http.Pages(metrics, lambda: report, list, list, "1.2.3"), listener)
    made.start()
    asking = []
    try:
        for _ in range(2 * http.CONNECTIONS):
            asking.append(socket.create_connection(("127.0.0.1", port), timeout=10))
            asking[-1].sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        for _ in range(10):
            for probe in ("healthz", "readyz"):
                assert ask(port, f"GET /{probe} HTTP/1.1\r\n\r\n".encode()).startswith(b"HTTP/1.1 200 OK\r\n")
        assert ask(port, b"GET /metrics HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        goes_on.set()
        answered = [client.recv(65536)[:12] for client in asking]
        assert answered.count(b"HTTP/1.1 200") == http.PAGES_AT_ONCE
    finally:
        goes_on.set()
        for each in asking:
            each.close()
        made.stop()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (b"GET /healthz?x=1 HTTP/1.0\r\n\r\n", b"HTTP/1.1 200 OK"),
        (b"HEAD /usage HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK"),
        (b"GET /nothing HTTP/1.1\r\n\r\n", b"HTTP/1.1 404 Not Found"),
        (b"POST /usage HTTP/1.1\r\n\r\n", b"HTTP/1.1 405 Method Not Allowed"),
        (b"GET /healthz HTTP/1.1\r\nX: " + b"a" * 20_000, b""),
        (b"nonsense\r\n\r\n", b""),
    ],
)
def test_what_is_asked_is_answered_or_the_connection_ends(server: str, text: bytes, answer: bytes) -> None:
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        found = ask(int(server.rpartition(":")[2]), text)
        assert found.split(b"\r\n")[0] == answer
        if text.startswith(b"HEAD"):
            assert found.endswith(b"\r\n\r\n")


def test_all_addresses_are_those_of_both_versions() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with http.listen("0.0.0.0", 0) as listener:
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, listener.getsockname()[1]), timeout=5).close()


def test_pages_that_name_tenants_are_for_whom_kubernetes_allows() -> None:
    """As kube-rbac-proxy does it: the token by TokenReview, the path by SubjectAccessReview; probes are for all."""
    reviews: list[str] = []
    away = False

    class Api:
        def call(self, _method: str, path: str, body: dict[str, Any], **_: Any) -> dict[str, Any]:
            if away:
                raise ApiUnreachable("away")
            reviews.append(path.rpartition("/")[2])
            spec = body["spec"]
            if body["kind"] == "TokenReview":
                return {
                    "status": {
                        "authenticated": spec["token"] != "forged",
                        "user": {"username": spec["token"]},
                    }
                }
            return {
                "status": {
                    "allowed": spec["user"] == "prometheus" and spec["nonResourceAttributes"]["path"] == "/metrics"
                }
            }

    guard = Access(cast(Client, Api())).refusal
    report = node_report()
    pages = http.Pages(lambda: b"", lambda: report, list, list, "1")
    made = http.WebServer(pages, http.listen("127.0.0.1", 0), guard)

    def status(path: str, token: str) -> int:
        return int(made._answer("GET", path, token).split()[1])

    assert [status("/metrics", token) for token in ("prometheus", "", "forged", "tenant")] == [
        200,
        401,
        401,
        403,
    ]
    assert [status(path, "prometheus") for path in ("/usage", "/graph", "/metric")] == [403] * 3
    assert [status(path, "") for path in ("/healthz", "/readyz", "/version")] == [200] * 3
    before = len(reviews)
    assert status("/metrics", "prometheus") == 200 and len(reviews) == before  # remembered
    away = True
    assert status("/metrics", "somebody new") == 503
    made.stop()
