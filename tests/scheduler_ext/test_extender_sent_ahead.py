"""Clients that send requests ahead of their answers: each answer is its own request's, whatever comes behind it."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from localcluster.apiserver.faults import Fault
from scheduler_ext.http import exchange
from tests.scheduler_ext.conftest import Running
from tests.scheduler_ext.extender_support import FakeApi, cards, eventually, node, pod

Start = Callable[..., Running]


def sent(path: str, body: dict[str, Any] | None = None, more: str = "") -> bytes:
    if body is None:
        return f"GET {path} HTTP/1.1\r\nHost: x\r\n{more}\r\n".encode()
    text = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {len(text)}\r\n\r\n".encode() + text


def binding(name: str) -> bytes:
    return sent("/scheduler/bind", {"PodName": name, "PodNamespace": "default", "PodUID": name, "Node": "a"})


def answers(extender: Running, *parts: bytes, count: int) -> list[tuple[int, dict[str, Any]]]:
    """Status and body of so many answers, and that no more comes."""
    found: list[tuple[int, dict[str, Any]]] = []
    with socket.create_connection(extender.address, timeout=20) as connection:
        for part in parts:
            connection.sendall(part)
        with connection.makefile("rb") as stream:
            while len(found) < count and (line := stream.readline()):
                size = 0
                while (header := stream.readline().strip().lower()) != b"":
                    if header.startswith(b"content-length:"):
                        size = int(header.partition(b":")[2])
                found.append((int(line.split()[1]), json.loads(stream.read(size))))
    return found


@pytest.fixture
def slow(api: FakeApi, start: Start) -> Running:
    """An extender that is about to bind pod p, for which the API server takes its time."""
    api.put("nodes", node("a", cards("a", 4)))
    api.put("pods", one := pod("p", uid="p"))
    usual = api.hook
    api.hook = lambda request: usual(request) or (Fault(late_s=0.5) if request.path.endswith("/binding") else None)
    extender = start()
    eventually(lambda: extender.filter(one, ["a"])["NodeNames"] == ["a"])
    return extender


def test_a_client_may_send_as_far_ahead_as_it_likes(slow: Running, api: FakeApi) -> None:
    """With nine, the answer to the bind was that too many had been sent, and the bind was carried out."""
    asks = sent("/scheduler/filter", {"Pod": pod("q", uid="q"), "NodeNames": ["a"]})
    found = answers(slow, binding("p"), asks * 40, binding("q"), sent("/version") * 3000, binding("p"), count=3043)
    assert [status for status, _ in found] == [200] * 3043
    assert [one["Error"] for _, one in (found[0], found[41], found[-1])] == [
        "",
        "NoSuchPod: pod default/q does not exist",
        "",
    ]
    assert all(one["NodeNames"] == ["a"] for _, one in found[1:41])
    assert "version" in found[42][1] and "NoSuchPod" in found[41][1]["Error"]
    assert [one["metadata"]["name"] for one in api.bindings] == ["p", "q"]


def test_what_is_sent_too_far_ahead_is_not_read_before_its_turn(slow: Running, api: FakeApi) -> None:
    usual = api.hook
    api.hook = lambda request: Fault(late_s=2.5) if usual(request) else None
    body = {"Pod": pod("big", uid="big", annotations={"x": "y" * 100_000}), "NodeNames": ["a"]}
    with socket.create_connection(slow.address, timeout=20) as connection:
        connection.sendall(binding("p"))
        connection.settimeout(0.3)
        part, taken = sent("/scheduler/filter", body), 0
        with pytest.raises(TimeoutError):
            for _ in range(1000):
                connection.sendall(part)
                taken += 1
        assert 8 < max(len(one._ready) for one in slow.server.connections) <= 16


@pytest.mark.parametrize(
    ("behind", "status"),
    [
        (b"\x16\x03\x01 no HTTP\r\n\r\n", 400),
        (sent("/nowhere"), 404),
        (sent("/scheduler/bind", {"PodName": "x" * 2**20}), 400),
        (sent("/scheduler/filter", {"Pod": 5}), 400),
        (b"GET /version HTTP/1.1\r\n" + b"x: " + b"y" * 600_000, 431),
        (sent("/version", None, "Upgrade: x\r\nConnection: Upgrade\r\n") + sent("/version"), 200),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_what_can_not_be_read_is_told_behind_the_answer_before_it(
    behind: bytes, status: int, at_once: bool, slow: Running, api: FakeApi
) -> None:
    parts = (binding("p") + behind,) if at_once else (binding("p"), behind)
    found = answers(slow, *parts, count=2)
    assert found[0] == (200, {"Error": ""}) and found[1][0] == status and len(api.bindings) == 1


def test_who_stops_in_the_middle_of_the_next_head_gets_the_answer_before_it(
    slow: Running, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "HEAD_SECONDS", 0.1)
    found = answers(slow, binding("p") + b"GET /ver", count=2)
    assert found[0] == (200, {"Error": ""}) and found[1][0] == 408 and len(api.bindings) == 1


def test_a_body_that_stops_is_told_behind_the_answer_before_it(slow: Running, api: FakeApi) -> None:
    usual = api.hook
    api.hook = lambda request: Fault(late_s=2.0) if usual(request) else None
    found = answers(slow, binding("p") + sent("/scheduler/filter", {"Pod": "x" * 99})[:-50], count=2)
    assert found[0] == (200, {"Error": ""}) and found[1][0] == 400 and "did not arrive" in found[1][1]["Error"]
