"""Requests to the extender that are malformed, slow or too large: 400 with the reason, nothing booked, the next one is served."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable

import pytest

from scheduler_ext.protocol.extender_v1 import BadInput, BindingArgs, read_binding
from tests.scheduler_ext.conftest import Running
from tests.scheduler_ext.extender_support import (
    FakeApi,
)

Start = Callable[..., Running]


BAD = [
    (b"", "not JSON"),
    (b"{", "not JSON"),
    (b"\xff\xfe", "not JSON"),
    (b"[]", "list"),
    (b"{}", "Pod"),
    (b'{"Pod":3,"NodeNames":[]}', "Pod"),
    (b'{"Pod":{"metadata":{}},"NodeNames":[]}', "Pod.spec"),
    (b'{"Pod":{"metadata":{},"spec":{"containers":7}},"NodeNames":[]}', "containers"),
    (b'{"Pod":{"metadata":{},"spec":{"containers":[7]}},"NodeNames":[]}', "containers"),
    (b'{"Pod":{"metadata":{},"spec":{}}}', "NodeNames"),
    (b'{"Pod":{"metadata":{},"spec":{}},"NodeNames":"abc"}', "NodeNames"),
    (b'{"Pod":{"metadata":{},"spec":{}},"NodeNames":{"a":1}}', "NodeNames"),
    (b'{"Pod":{"metadata":{},"spec":{}},"NodeNames":["a",1]}', "NodeNames"),
    (b'{"Pod":{"metadata":{},"spec":{}},"NodeNames":7}', "NodeNames"),
    (b'{"Pod":{"metadata":{},"spec":{}},"Nodes":{"items":[{}]}}', "items[0]"),
    (b'{"Pod":{"metadata":{},"spec":{}},"Nodes":[]}', "Nodes"),
    (
        b'{"Pod":{"metadata":{},"spec":{"containers":[{"resources":{"limits":{"tencent.com/vcuda-core":1}}}]}},"NodeNames":[]}',
        "uid",
    ),
    (b"[" * 100_000, "not JSON"),
]


@pytest.mark.parametrize(("body", "names"), BAD, ids=range(len(BAD)))
def test_malformed_filter_bodies_get_400_with_the_reason(api: FakeApi, start: Start, body: bytes, names: str) -> None:
    extender = start(follow=False)
    for path in ("filter", "prioritize", "cpu/prioritize", "predicates"):
        answer = extender.client.post(f"/scheduler/{path}", content=body)
        assert answer.status_code == 400 and names in answer.json()["Error"], answer.text


# In a URL each would reach another path of the API, or ask for something else there, with the extender's rights.
NO_NAMES = ("?watch=1", "..", "x?dryRun=All", "a%2f..", "a b")


def test_malformed_bind_bodies_get_400(api: FakeApi, start: Start) -> None:
    extender = start()
    good = {"PodName": "p", "PodNamespace": "n", "PodUID": "u", "Node": "a"}
    for field in good:
        for value in (None, "", 3, "../../nodes", "x" * 300, *(() if field == "PodUID" else NO_NAMES)):
            answer = extender.client.post("/scheduler/bind", json=good | {field: value})
            assert answer.status_code == 400 and field in answer.json()["Error"]
    assert extender.client.get("/scheduler/bind").status_code == 405
    assert extender.client.post("/scheduler/nonsense").status_code == 404


def _binding(body: bytes) -> BindingArgs | str:
    try:
        return read_binding(body)
    except BadInput as problem:
        return str(problem)


def test_a_binding_in_its_usual_form_means_what_the_parser_says() -> None:
    dice = random.Random(1)
    texts = (
        "a",
        "pod-1",
        "a.b-c.d",
        "node.example",
        "A",
        "-a",
        "a-",
        "a..b",
        "",
        "x" * 254,
        'a","Node":"b',
        "a\\u0062",
        "a/b",
        "ä",
        "a\n",
        "3F-x",
    )
    read = 0
    for _ in range(3000):
        values = [dice.choice(texts[:4] if dice.random() < 0.8 else texts) for _ in range(4)]
        fields = zip(("PodName", "PodNamespace", "PodUID", "Node"), values, strict=True)
        body = "{{{}}}".format(",".join(f'"{name}":"{value}"' for name, value in fields))
        assert _binding(body.encode()) == _binding(body.encode() + b" "), body  # which is not the usual form
        read += isinstance(_binding(body.encode()), BindingArgs)
    assert read > 1000


def test_bodies_are_bounded_in_size_and_time(api: FakeApi, start: Start) -> None:
    extender = start(body_bytes=1000)
    answer = extender.client.post("/scheduler/filter", content=b"x" * 2000)
    assert answer.status_code == 400 and "2000 bytes" in answer.text
    answer = extender.client.post("/scheduler/filter", content=(b"x" * 500 for _ in range(3)))
    assert answer.status_code == 400 and "at most 1000" in answer.text
    assert "nodeCacheCapable: true" in answer.text, "the way out of a cluster whose nodes are sent whole"
    with socket.create_connection(extender.address, timeout=10) as slow:
        slow.sendall(b"POST /scheduler/filter HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
        received = b""
        while b"did not arrive" not in received:
            part = slow.recv(4096)
            assert part, received
            received += part
        assert received.startswith(b"HTTP/1.1 400")
    with socket.create_connection(extender.address, timeout=10) as rude:
        rude.sendall(b"POST /scheduler/filter HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
    assert extender.client.get("/healthz").text == "ok\n"


def test_a_body_of_64_mib_is_not_taken_in(api: FakeApi, start: Start) -> None:
    extender = start(body_bytes=32 * 2**20)
    with socket.create_connection(extender.address, timeout=10) as big:
        big.sendall(b"POST /scheduler/filter HTTP/1.1\r\nHost: x\r\nContent-Length: 67108864\r\n\r\n{")
        answer = big.recv(4096)
        assert answer.startswith(b"HTTP/1.1 400") and b"67108864" in answer, "refused before it was sent, by its length"
    with socket.create_connection(extender.address, timeout=10) as big:
        big.sendall(b"POST /scheduler/filter HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        sent, mib = 0, b"100000\r\n" + b"x" * 2**20 + b"\r\n"
        with contextlib.suppress(ConnectionError):
            while sent < 64:
                big.sendall(mib)
                sent += 1
        assert sent < 64, "it went on listening"
    assert extender.client.get("/healthz").text == "ok\n" and extender.engine.figures()["assumed"] == 0
