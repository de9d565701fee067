"""What strangers may take together: a part of the time, in which their addresses take turns, and connections."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from pathlib import Path
from typing import Any, cast

import pytest

from scheduler_ext.admission import app as admission
from scheduler_ext.http import server as servers
from scheduler_ext.http import strangers as module
from scheduler_ext.http.app import Probes
from scheduler_ext.http.certificate import ServerCertificate
from scheduler_ext.http.exchange import Answer, Request
from scheduler_ext.http.pages import MetricsPage
from scheduler_ext.http.strangers import Strangers
from tests.scheduler_ext.extender_engine import engine_with
from tests.scheduler_ext.test_extender_server import Application
from tests.scheduler_ext.test_extender_writing import certificate


class Fake:
    def __init__(self, peer: str, turns: list[str], seconds: float = 0.0) -> None:
        self.peer, self.turns, self.seconds, self.aborted = peer, turns, seconds, False

    def turn(self) -> bool:
        self.turns.append(self.peer)
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            pass
        return False

    def abort(self) -> None:
        self.aborted = True


def test_a_machine_that_has_a_network_of_ipv6_is_one_address() -> None:
    """1,100 addresses of one /64 were as many strangers as 1,100 machines."""
    ours = ("fd00:16::1", "fd00:16::ffff:2", "fd00:16:0:0:ffff:ffff:ffff:ffff")
    assert len({module.origin(one) for one in ours}) == 1
    others = ("fd00:16:0:1::1", "fe80::1%eth0", "::1", "10.0.0.1", "10.0.0.2", "::ffff:10.0.0.1", "::ffff:10.0.0.2", "")
    assert len({module.origin(one) for one in ours + others}) == 1 + len(others)
    assert module.origin("fe80::1%eth0") == module.origin("fe80::2")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("tls", [False, True])
def test_connections_and_newcomers_are_counted_by_their_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    seen: list[str] = []
    for where in ("http1.connection", "door"):
        monkeypatch.setattr(f"scheduler_ext.http.{where}.origin", lambda address: seen.append(address) or "net")
    served = ServerCertificate(*map(str, certificate(tmp_path, "server"))) if tls else None

    async def work() -> None:
        application = cast(Any, Application())
        application.body_bytes = 1 << 20
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
        other = socket.create_server(("::1", 0), family=socket.AF_INET6)
        server = servers.Server(application, other, None, (application, listener))
        if tls:
            other.close()
            server = servers.Server(application, listener, served)
        task = asyncio.create_task(server.run_until_stopped(catch_signals=False))
        trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusted.check_hostname, trusted.verify_mode = False, ssl.CERT_NONE
        _, writer = await asyncio.open_connection(*listener.getsockname()[:2], ssl=trusted if tls else None)
        while not server.connections:
            await asyncio.sleep(0.01)
        assert {one.peer for one in server.connections} == {"net"} and set(seen) == {"::1"} and len(seen) == 1 + tls
        writer.close()
        server.stop()
        await task

    asyncio.run(work())


def test_strangers_together_have_a_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each of them its turn, which is a small one."""
    clock = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: clock[0])
    order: list[str] = []

    class One:
        def __init__(self, name: str, turns: int) -> None:
            self.name, self.turns, self.peer = name, turns, "10.0.0.1"

        def turn(self) -> bool:
            order.append(self.name)
            clock[0] += 0.001
            self.turns -= 1
            if self.turns:
                known.wait(self)
            return False

        def abort(self) -> None: ...

    known = Strangers()

    async def work() -> None:
        began = asyncio.get_running_loop().time()
        known.begin()
        clock[0] += 60.0
        assert not known.rested()
        known._owed = 0.003
        greedy, other = One("greedy", 20), One("other", 1)
        for one in (greedy, greedy, greedy, other):
            known.wait(one)
        assert order == []
        while greedy.turns:
            await asyncio.sleep(0.001)
        assert order.index("other") == 1 and len(order) == 21
        assert asyncio.get_running_loop().time() - began > 0.06  # of processor 24 ms
        await asyncio.sleep(0.02)
        assert known.rested()

    asyncio.run(work())


def test_an_address_with_many_connections_waits_no_longer_than_one_with_one() -> None:
    turns: list[str] = []

    async def line() -> None:
        strangers = Strangers()
        for _ in range(20):
            strangers.wait(Fake("10.0.0.1", turns, 0.003))
        strangers.wait(Fake("10.0.0.2", turns, 0.003))
        while len(turns) < 4:
            await asyncio.sleep(0.001)

    asyncio.run(line())
    assert "10.0.0.2" in turns[:2]


def test_what_a_read_costs_is_known_before_the_next_one_has_its_turn() -> None:
    turns: list[str] = []
    seen: list[list[str]] = []
    strangers = Strangers()

    class Reader(Fake):
        def turn(self) -> bool:
            turns.append(self.peer)
            asyncio.get_running_loop().call_soon(self.read)
            return True

        def read(self) -> None:
            seen.append(list(turns))
            strangers.begin()
            until = time.thread_time() + 0.003
            while time.thread_time() < until:
                pass
            strangers.end()

    async def line() -> None:
        for peer in ("10.0.0.1", "10.0.0.2", "10.0.0.3"):
            strangers.wait(Reader(peer, turns))
        while len(seen) < 3:
            await asyncio.sleep(0.001)

    asyncio.run(line())
    assert seen == [["10.0.0.1"], ["10.0.0.1", "10.0.0.2"], ["10.0.0.1", "10.0.0.2", "10.0.0.3"]]


def test_the_oldest_connection_of_the_address_with_the_most_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 3)
    monkeypatch.setattr(module, "_MANY", 0)
    strangers, turns = Strangers(), list[str]()
    probe = Fake("10.0.0.2", turns)
    many = [Fake("10.0.0.1", turns) for _ in range(5)]
    for one in (probe, *many):
        strangers.enter(one)
    assert [one.aborted for one in (probe, *many)] == [False, True, True, True, False, False]
    for one in many:
        strangers.leave(one)  # an aborted one counts once
    for _ in range(2):
        strangers.enter(Fake("10.0.0.1", turns))
    assert not probe.aborted


def test_who_asks_something_keeps_its_connections_beside_many_addresses_that_say_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1,100 addresses with one silent connection each: an API server with eight had the most, and lost them."""
    monkeypatch.setattr(module, "MOST", 20)
    monkeypatch.setattr(module, "_MANY", 2)
    strangers, turns = Strangers(), list[str]()
    kept = [Fake("10.0.0.1", turns) for _ in range(2)]
    silent = [Fake(f"10.0.1.{number}", turns) for number in range(30)]
    for one in (*kept, *silent):
        for known in kept:
            strangers.asks(known)
        strangers.enter(one)
    assert [one.aborted for one in silent] == [True] * 12 + [False] * 18
    strangers.enter(Fake("10.0.0.1", turns))
    assert [one.aborted for one in kept] == [True, False]  # it has more than a tenth


def test_who_asks_for_metrics_too_often_is_sent_the_last_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text takes a millisecond: 900 addresses that took their turns kept kubelet's probes waiting for 4.5 s."""
    clock, spent = [1000.0], [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "thread_time", lambda: spent[0])

    def render() -> bytes:
        spent[0] += 0.0051
        return str(spent[0]).encode()

    page = MetricsPage(render)

    def text() -> bytes:
        return cast(Answer, page(Request("GET", "/metrics", "", b"", None))).body

    texts = [text() for _ in range(12)]
    assert len(set(texts)) == 10 and texts[9] == texts[10] == texts[11]
    clock[0] += 0.99
    assert text() == texts[9]
    clock[0] += 0.02
    assert text() not in texts


def test_so_are_the_texts_of_extender_and_webhook_made() -> None:
    for probes in (Probes(engine_with()[0]), admission.Probes(admission.Metrics())):
        assert isinstance(probes.gets["/metrics"], MetricsPage)
