"""An API server that answers a byte per second: the extender says what it waits for, serves whom it can, and ends when asked to."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.scheduler_ext.extender_support import FakeApi, Served, cards, codes, eventually, node, pod
from tests.support import web


class Dripping:
    """Stands before an API server; from `drip` on its answers come a byte per second."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.drip = threading.Event()
        self._ended = threading.Event()
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                self._sockets += [client, server]
                for source, sink, slow in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pass, args=(source, sink, slow), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, slow: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not (slow and self.drip.is_set()):
                    sink.sendall(data)
                    continue
                for byte in data:
                    sink.sendall(bytes([byte]))
                    if self._ended.wait(1.0):
                        return
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._ended.set()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@pytest.fixture
def dripping(api: FakeApi) -> Iterator[Dripping]:
    one = Dripping(api.url)
    yield one
    one.close()


def _kubeconfig(api: FakeApi, through: Dripping, folder: Path) -> str:
    file = Path(api.kubeconfig(folder))
    file.write_text(file.read_text().replace(api.url, through.url))
    return str(file)


def _ask(url: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    return web.get(url + path) if body is None else web.post(url + path, json=body, timeout=20)


def test_before_the_first_lists_it_is_well_not_ready_and_ends_at_once(
    api: FakeApi, dripping: Dripping, tmp_path: Path
) -> None:
    api.put("nodes", node("a", cards("a", 1)))
    dripping.drip.set()
    served = Served("--kubeconfig", _kubeconfig(api, dripping, tmp_path), "--api-timeout-seconds", "1")
    try:
        time.sleep(3)  # two lists have been given up
        assert _ask(served.url, "/healthz").status_code == 200
        ready = _ask(served.url, "/readyz")
        assert ready.status_code == 503 and "the first list of nodes and pods" in ready.text
        answer = _ask(served.url, "/scheduler/filter", {"Pod": pod("p"), "NodeNames": ["a"]})
        assert answer.status_code == 503 and "NotSynced" in answer.text
        assert re.search(r'vcuda_extender_watch_errors_total\{\w+="nodes"\} [1-9]', _ask(served.url, "/metrics").text)
        began = time.monotonic()
        assert served.stop() == 0
        assert time.monotonic() - began < 10
    finally:
        served.stop()


def test_a_binding_ends_in_time_unknown_and_filters_are_served_meanwhile(
    api: FakeApi, dripping: Dripping, tmp_path: Path
) -> None:
    api.put("nodes", node("a", cards("a", 1)))
    api.put("pods", wanted := pod("p", 60))
    options = (
        "--kubeconfig",
        _kubeconfig(api, dripping, tmp_path),
        "--api-timeout-seconds",
        "2",
        "--assume-seconds",
        "60",
    )
    served = Served(*options)
    try:
        eventually(lambda: _ask(served.url, "/readyz").status_code == 200)
        body = {"Pod": wanted, "NodeNames": ["a"]}
        # A pod that waited when it began holds all decisions up until its predecessor's writes can't arrive any more.
        eventually(lambda: _ask(served.url, "/scheduler/filter", body).status_code == 200)
        dripping.drip.set()
        metadata = wanted["metadata"]
        args = {
            "PodName": metadata["name"],
            "PodNamespace": "default",
            "PodUID": metadata["uid"],
            "Node": "a",
        }
        answers: list[str] = []
        began = time.monotonic()
        binding = threading.Thread(
            target=lambda: answers.append(_ask(served.url, "/scheduler/bind", args).json()["Error"])
        )
        binding.start()
        while binding.is_alive():
            other = _ask(served.url, "/scheduler/filter", {"Pod": pod("q", 60), "NodeNames": ["a"]}).json()
            assert codes(other["FailedNodes"]) == {"a": "InsufficientCores"}, "what is being written is booked"
            time.sleep(0.1)
        assert time.monotonic() - began < 8
        assert answers[0].startswith("BindFailed: no answer from")
        again = _ask(served.url, "/scheduler/bind", args).json()["Error"]
        assert again.startswith("BindUncertain"), again
        assert len(api.bindings) == 1, "it is never written twice"
    finally:
        served.stop()
