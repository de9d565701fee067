"""Clients that are not kube-scheduler, and those that hold what they don't need: refused clearly, or ended in time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from localcluster.apiserver.faults import Fault, Request
from scheduler_ext.http import door as doors
from scheduler_ext.http import exchange
from scheduler_ext.http import server as servers
from scheduler_ext.http.certificate import ServerCertificate
from scheduler_ext.http.http1 import connection
from scheduler_ext.main import main
from tests.scheduler_ext.extender_support import FakeApi, Served, cards, eventually, node, pod
from tests.scheduler_ext.test_extender_writing import certificate
from tests.support import web

Pair = tuple[Path, Path]


@pytest.fixture
def pairs(tmp_path: Path) -> dict[str, Pair]:
    return {name: certificate(tmp_path, name) for name in ("server", "scheduler", "stranger")}


@contextlib.contextmanager
def serving(api: FakeApi, tmp_path: Path, pairs: dict[str, Pair], *more: str) -> Iterator[Served]:
    files = ["--tls-cert", str(pairs["server"][0]), "--tls-key", str(pairs["server"][1])]
    client = ["--client-ca", str(pairs["scheduler"][0])]
    served = Served("--kubeconfig", api.kubeconfig(tmp_path), *files, *client, *more)
    try:
        yield served
    finally:
        served.stop()


def client(served: Served, pairs: dict[str, Pair], who: str | None = None) -> httpx.Client:
    context = ssl.create_default_context(cafile=str(pairs["server"][0]))
    if who is not None:
        context.load_cert_chain(*pairs[who])
    return httpx.Client(base_url=served.url, verify=context, timeout=20)


def test_only_the_holder_of_a_client_certificate_may_decide_bind_or_ask(
    api: FakeApi, tmp_path: Path, pairs: dict[str, Pair]
) -> None:
    api.put("nodes", node("a", cards("a", 1)))
    api.put("pods", wanted := pod("p", 100, None, uid="u"))
    body = {"Pod": wanted, "NodeNames": ["a"]}
    binding = {"PodName": "p", "PodNamespace": "default", "PodUID": "u", "Node": "a"}
    with serving(api, tmp_path, pairs) as served:
        with client(served, pairs) as anybody:
            eventually(lambda: anybody.get("/readyz").status_code == 200)
            assert anybody.get("/healthz").text == "ok\n"
            for verb, sent in (("filter", body), ("bind", binding), ("prioritize", body), ("preempt", body)):
                refused = anybody.post(f"/scheduler/{verb}", json=sent)
                assert refused.status_code == 403
                error = refused.json()["Error"]
                assert error.startswith("Unauthenticated: no client certificate was sent") and "certFile" in error
            for page in ("/metrics", "/defrag", "/scheduler/explain/default/p", "/nowhere"):
                assert anybody.get(page).status_code == 403
        with client(served, pairs, "stranger") as stranger, pytest.raises(httpx.TransportError):
            stranger.post("/scheduler/bind", json=binding).raise_for_status()
        assert api.bindings == []
        with client(served, pairs, "scheduler") as scheduler:
            assert b"vcuda_extender_free_cores 100.0" in scheduler.get("/metrics").content
            assert scheduler.post("/scheduler/filter", json=body).json()["NodeNames"] == ["a"]
            assert scheduler.post("/scheduler/bind", json=binding).json()["Error"] == ""
    assert len(api.bindings) == 1


def test_a_certificate_of_another_name_does_not_count(api: FakeApi, tmp_path: Path, pairs: dict[str, Pair]) -> None:
    """A cluster's own authority signs kubelets and users too."""
    for name, status in (("system:kube-scheduler", 403), ("scheduler", 400)):
        with (
            serving(api, tmp_path, pairs, "--client-name", name) as served,
            client(served, pairs, "scheduler") as ours,
        ):
            answer = ours.post("/scheduler/filter", json={})
            assert answer.status_code == status
            assert ("the certificate is of 'scheduler'" in answer.json()["Error"]) == (status == 403)


def test_probes_and_metrics_have_a_port_of_their_own(api: FakeApi, tmp_path: Path, pairs: dict[str, Pair]) -> None:
    with serving(api, tmp_path, pairs, "--probe-port", "0") as served:
        assert served.process.stderr is not None
        said = iter(served.process.stderr.readline, "")  # other lines may come in between
        found = next(match for match in (re.search(r"probes on (http://\S+)", line) for line in said) if match)
        with web.Client(base_url=found[1], timeout=20) as probes:
            eventually(lambda: probes.get("/readyz").status_code == 200)
            assert probes.get("/healthz").text == "ok\n" and "vcuda_extender_cards" in probes.get("/metrics").text
            assert "_created" not in probes.get("/metrics").text
            assert probes.post("/scheduler/filter", json={}).status_code in (404, 405)
            assert probes.get("/defrag").status_code == 404


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--bind-address", "0.0.0.0"], "everybody who reaches the port could book cards"),
        ([], "--allow-anyone"),
        (["--client-ca", "x"], "give --tls-cert and --tls-key too"),
        (["--bind-address", "::1", "--client-name", "x"], "give --client-ca too"),
        (["--port", "99999"], "--port: '99999' is not valid (a port is 0 to 65535)"),
        (["--assume-seconds", "-1"], "--assume-seconds: '-1' is not valid (give seconds between 0.001 and"),
        (["--lease", "../x"], "is not NAMESPACE/NAME"),
    ],
)
def test_without_a_client_authority_it_does_not_listen_beyond_the_machine(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *options])
    assert ended.value.code == 2 and said in capsys.readouterr().err


# --- connections ---


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(exchange, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(doors, "_SECONDS", 0.3)


class Listening:
    """Our server; it is an application too, which answers everything with its body's length."""

    body_bytes, body_seconds = 2**20, 1.0

    def __init__(self, pair: Pair | None = None) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        chosen = ServerCertificate(str(pair[0]), str(pair[1])) if pair else None
        self.server = servers.Server(cast(Any, self), self.listener, chosen)

    def refuse(self, *_: object) -> None:
        return None

    def answer(self, request: exchange.Request) -> exchange.Answer:
        return exchange.Answer(200, str(len(request.body)).encode())

    async def __aenter__(self) -> Listening:
        self.task = asyncio.create_task(self.server.run_until_stopped(catch_signals=False))
        while not self.server.started:
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.stop()
        await self.task


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("first", [b"", b"GET", b"GET / HTTP/1.1\r\nx: y\r\n"], ids=["silent", "a word", "half a head"])
@pytest.mark.parametrize("tls", [False, True])
def test_a_connection_that_sends_no_request_is_closed(first: bytes, tls: bool, tmp_path: Path) -> None:
    """1,060 of them held all descriptors, and nobody else was served."""

    async def work() -> None:
        async with Listening(certificate(tmp_path, "server") if tls else None) as one:
            reader, writer = await asyncio.open_connection(*one.address)
            writer.write(first if not tls else b"")
            async with asyncio.timeout(5):
                answer = await reader.read()
            assert tls or b"408 Request Timeout" in answer
            writer.close()

    asyncio.run(work())


@pytest.mark.usefixtures("quick")
def test_a_second_request_that_drips_is_ended_too_and_a_kept_connection_is_not() -> None:
    async def work() -> None:
        async with Listening() as one:
            reader, writer = await asyncio.open_connection(*one.address)
            whole = b"POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\nhi"
            for _ in range(2):
                writer.write(whole)
                assert b"200 OK" in await reader.readuntil(b"\r\n\r\n2")
                await asyncio.sleep(0.5)  # idle for longer than a head may take
            writer.write(b"POST / HTTP/1.1\r\n")
            async with asyncio.timeout(5):
                assert b"408" in await reader.read()
            writer.close()

    asyncio.run(work())


@pytest.mark.parametrize("line", [b"x: " + b"y" * 1000 + b"\r\n", b"y" * 1000], ids=["many headers", "one header"])
def test_a_head_without_an_end_is_refused_early(line: bytes) -> None:
    """One cost 18 s of processor time, and 799 MB."""

    async def work() -> None:
        async with Listening() as one:
            reader, writer = await asyncio.open_connection(*one.address)
            writer.write(b"GET / HTTP/1.1\r\nx: ")
            sent = 0
            with contextlib.suppress(ConnectionError):
                while sent < 10_000_000 and not reader.at_eof():
                    writer.write(line)
                    sent += len(line)
                    await asyncio.wait_for(writer.drain(), 5)
                    await asyncio.sleep(0)
            assert sent < 5_000_000
            writer.close()

    asyncio.run(work())


def test_every_cut_of_a_request_leaves_the_server_well() -> None:
    request = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nhi"

    async def work() -> None:
        async with Listening() as one:
            for at in range(len(request) + 1):
                _, writer = await asyncio.open_connection(*one.address)
                writer.write(request[:at])
                await writer.drain()
                writer.close()
            reader, writer = await asyncio.open_connection(*one.address)
            writer.write(request)
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n2")
            writer.close()
            deadline = time.monotonic() + 5
            while one.server.connections and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            assert not one.server.connections

    asyncio.run(work())


def test_all_descriptors_that_are_allowed_are_used() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
        servers._more_descriptors()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_bodies_in_flight_are_bounded(api: FakeApi, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty of 31 MiB took 885 MB."""
    monkeypatch.setattr(connection, "_ROOM_SECONDS", 0.2)
    extender = start(body_bytes=1000)
    held = []
    for _ in range(4):
        slow = socket.create_connection(extender.address)
        slow.sendall(b"POST /scheduler/filter HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        held.append(slow)

    def refused() -> bool:
        answer = extender.client.post("/scheduler/filter", content=b"x" * 900)
        return answer.status_code == 503 and "Overloaded" in answer.json()["Error"]

    eventually(refused)  # once all four have been begun to be read
    for slow in held:
        slow.close()
    eventually(lambda: extender.client.post("/scheduler/filter", content=b"x" * 900).status_code == 400)


def test_explanations_on_the_probe_port_are_for_whom_kubernetes_allows(
    api: FakeApi, tmp_path: Path, pairs: dict[str, Pair]
) -> None:
    """Through the API server's proxy nobody can show a client certificate; names of pods are no page for all."""
    api.put("nodes", node("a", cards("a", 1)))
    api.put("pods", pod("p", 100, None, uid="u"))
    reviewed: list[tuple[str, Any]] = []

    def review(request: Request) -> Fault | None:
        if not request.path.endswith("reviews"):
            return None
        spec = request.body["spec"]
        reviewed.append((request.path, spec.get("nonResourceAttributes")))
        status = {
            "authenticated": spec.get("token") in ("reader", "jane"),
            "user": {"username": spec.get("token")},
            "allowed": spec.get("user") == "reader",
        }
        return Fault(201, body=json.dumps({"status": status}).encode())

    api.hook = review
    path = "/explain/default/p"
    with serving(api, tmp_path, pairs, "--probe-port", "0", "--query-auth", "kubernetes") as served:
        assert served.process.stderr is not None
        said = iter(served.process.stderr.readline, "")  # other lines may come in between
        found = next(match for match in (re.search(r"probes on (http://\S+)", line) for line in said) if match)
        with client(served, pairs, "scheduler") as scheduler, web.Client(base_url=found[1], timeout=20) as probes:
            eventually(lambda: probes.get("/readyz").status_code == 200)
            body = {"Pod": api.find("pods", "default/p"), "NodeNames": ["a"]}
            assert scheduler.post("/scheduler/filter", json=body).json()["NodeNames"] == ["a"]
            tokens = ("", "forged", "jane", "reader")
            answers = [probes.get(path, headers={"X-Vcuda-Token": token}) for token in tokens]
            assert [answer.status_code for answer in answers] == [401, 401, 403, 200]
            assert "is assumed on node a" in answers[-1].json()["summary"] and "see --query-auth" in answers[0].text
            assert reviewed[-1][1] == {"path": path, "verb": "get"}
            page = probes.get("/")
            assert (
                page.status_code == 200 and "Content-Security-Policy" in page.headers and "default/p" not in page.text
            )
            for where in ("/cluster", "/cluster?node=a"):
                answers = [probes.get(where, headers={"X-Vcuda-Token": token}) for token in tokens]
                assert [answer.status_code for answer in answers] == [401, 401, 403, 200]
                assert reviewed[-1][1] == {"path": "/cluster", "verb": "get"}
            with client(served, pairs) as anybody:
                assert anybody.get("/cluster").status_code == anybody.get("/").status_code == 403
            assert probes.get("/scheduler/defrag").status_code == 404
            assert probes.get("/metrics").status_code == 200
