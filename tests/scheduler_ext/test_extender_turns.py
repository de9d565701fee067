"""Bindings of many namespaces: one whose Bindings, or reads, are slow holds up no other's."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from localcluster.apiserver.faults import Fault, Request
from scheduler_ext.sync.turns import Turns
from tests.scheduler_ext.extender_support import FakeApi, Served, cards, eventually, node, pod
from tests.support import web

MANY = 90


@pytest.fixture
def api() -> Iterator[FakeApi]:
    made = FakeApi()
    made.put("nodes", node("a", cards("a", 16)))
    yield made
    made.stop()


def of(namespace: str, one: dict[str, Any]) -> dict[str, Any]:
    one["metadata"]["namespace"] = namespace
    return one


def slow(request: Request) -> Fault | None:
    if request.method == "POST" and "/namespaces/bad/" in request.path and request.path.endswith("/binding"):
        return Fault(done=True, late_s=4.0)
    return None


def in_doubt(request: Request) -> Fault | None:
    if "/namespaces/bad/pods/" not in request.path:
        return None
    return Fault(0, done=True) if request.method == "POST" else Fault(late_s=5.0)


def crowded(request: Request) -> Fault | None:
    slow = request.method == "POST" and "/namespaces/bad" in request.path and request.path.endswith("/binding")
    return Fault(done=True, late_s=6.0) if slow else None


def test_many_namespaces_whose_bindings_are_slow_delay_another_ones_by_two_seconds(
    api: FakeApi, tmp_path: Path
) -> None:
    """They had all turns, once, until their own ended: 200 of them held it for 8 s."""
    api.hook, count = crowded, 140
    served = Served("--kubeconfig", api.kubeconfig(tmp_path))
    limits = httpx.Limits(max_connections=2 * count)
    try:
        with (
            web.Client(base_url=served.url, timeout=60, limits=limits) as client,
            ThreadPoolExecutor(count) as threads,
        ):
            eventually(lambda: client.get("/readyz").status_code == 200)

            def placed(namespace: str) -> dict[str, str]:
                api.put("pods", of(namespace, pod("p", 5, 1)))
                one = api.find("pods", f"{namespace}/p")
                assert client.post("/scheduler/filter", json={"Pod": one, "NodeNames": ["a"]}).json()["NodeNames"]
                return {"PodName": "p", "PodNamespace": namespace, "PodUID": one["metadata"]["uid"], "Node": "a"}

            bad, good = [placed(f"bad{number}") for number in range(count)], placed("good")
            coming = [threads.submit(client.post, "/scheduler/bind", json=one) for one in bad]
            time.sleep(0.5)
            before = time.monotonic()
            assert client.post("/scheduler/bind", json=good).json()["Error"] == ""
            assert time.monotonic() - before < 3 and not any(one.done() for one in coming)
            assert {one.result().json()["Error"] for one in coming} == {""}
    finally:
        served.stop()


@pytest.mark.parametrize("hook", [slow, in_doubt])
def test_a_namespace_whose_bindings_are_slow_or_in_doubt_delays_no_others(
    api: FakeApi, tmp_path: Path, hook: Any
) -> None:
    served = Served("--kubeconfig", api.kubeconfig(tmp_path))
    limits = httpx.Limits(max_connections=2 * MANY)
    try:
        with (
            web.Client(base_url=served.url, timeout=60, limits=limits) as client,
            ThreadPoolExecutor(MANY) as threads,
        ):
            eventually(lambda: client.get("/readyz").status_code == 200)

            def placed(namespace: str, name: str) -> dict[str, str]:
                api.put("pods", of(namespace, pod(name, 5, 1)))
                one = api.find("pods", f"{namespace}/{name}")
                body = {"Pod": one, "NodeNames": ["a"]}
                assert client.post("/scheduler/filter", json=body).json()["NodeNames"] == ["a"]
                uid = one["metadata"]["uid"]
                return {"PodName": name, "PodNamespace": namespace, "PodUID": uid, "Node": "a"}

            bad = [placed("bad", f"p{number}") for number in range(MANY)]
            good = [placed("good", f"p{number}") for number in range(5)]
            api.hook = hook
            coming = [threads.submit(client.post, "/scheduler/bind", json=one) for one in bad]
            time.sleep(0.5)
            for one in good:
                before = time.monotonic()
                assert client.post("/scheduler/bind", json=one).json()["Error"] == ""
                assert time.monotonic() - before < 2
            assert not all(one.done() for one in coming) or hook is in_doubt
    finally:
        served.stop()


def test_turns_leave_some_to_others_and_come_first_to_who_has_least() -> None:
    async def scene() -> None:
        turns = Turns(8)
        assert [turns.take("bad") for _ in range(5)] == [True] * 4 + [False]
        assert [turns.take("good") for _ in range(3)] == [True] * 2 + [False]
        assert turns.take("new") and not turns.take("new")
        order: list[str] = []

        async def waits(name: str) -> None:
            await turns.wait(name)
            order.append(name)

        tasks = [asyncio.create_task(waits(name)) for name in ("bad", "bad", "good", "new")]
        await asyncio.sleep(0)
        assert order == [] and not turns.take("bad")
        turns.give_back("bad")
        await asyncio.sleep(0.01)
        assert order == ["new"]
        for who in ("good", "bad", "bad", "new"):
            turns.give_back(who)
        await asyncio.gather(*tasks)
        assert sorted(order) == ["bad", "bad", "good", "new"]

    asyncio.run(scene())


def test_turns_of_who_is_slow_are_its_own_until_it_is_fast_again() -> None:
    async def scene() -> None:
        now = [0.0]
        turns = Turns(2, beyond=2, clock=lambda: now[0])
        assert turns.take("a") and turns.take("b") and not turns.take("c")
        waiting = [asyncio.create_task(turns.wait(name)) for name in ("c", "d", "e")]
        await asyncio.sleep(0)
        now[0] = 0.9
        turns._look()
        await asyncio.sleep(0)
        assert not any(one.done() for one in waiting)
        now[0] = 1.1
        turns._look()
        await asyncio.sleep(0)
        assert [one.done() for one in waiting] == [True, True, False]
        now[0] = 2.2
        turns._look()
        await asyncio.sleep(0)
        assert waiting[2].done() and turns._free == [1, -2], "no more than so many beyond"
        for name in "abcde":
            turns.give_back(name)
        assert turns._free == [2, 2] and set(turns._slow) == {*"abcd"} and not turns._moved
        assert turns.take("a") and turns.take("b") and not turns.take("c") and turns.take("new")
        now[0] = 2.4
        turns.give_back("a")
        assert turns.take("a") and turns._free == [0, 1], "it was fast"

    asyncio.run(scene())


def test_an_extender_that_ends_waits_for_no_binding_that_has_not_begun(api: FakeApi, tmp_path: Path) -> None:
    """Each had to look at its pod first, for five seconds, four at a time: it was killed long before."""
    served = Served("--kubeconfig", api.kubeconfig(tmp_path), "--assume-seconds", "60")
    try:
        with web.Client(base_url=served.url, timeout=60) as client, ThreadPoolExecutor(40) as threads:
            eventually(lambda: client.get("/readyz").status_code == 200)
            for number in range(40):
                api.put("pods", of("bad", pod(f"p{number}", 5, 1, uid=f"p{number}")))
            api.hook = lambda one: Fault(late_s=5.0) if one.method == "GET" and "/pods/p" in one.path else None
            body = {"PodNamespace": "bad", "Node": "a"}

            def bind(number: int) -> None:
                with contextlib.suppress(httpx.HTTPError):
                    client.post("/scheduler/bind", json=body | {"PodName": f"p{number}", "PodUID": f"p{number}"})

            for number in range(40):  # nothing is assumed for them, as after a restart
                threads.submit(bind, number)
            time.sleep(2)
            served.stop()
    finally:
        served.process.kill()


def test_who_is_cancelled_while_it_waits_takes_no_turn_with_it() -> None:
    async def scene() -> None:
        turns = Turns(2)
        assert turns.take("a") and not turns.take("a")
        one, two = (asyncio.create_task(turns.wait("a")) for _ in range(2))
        await asyncio.sleep(0)
        one.cancel()
        await asyncio.sleep(0)
        turns.give_back("a")
        await two
        two_more = asyncio.create_task(turns.wait("a"))
        await asyncio.sleep(0)
        turns.give_back("a")
        two_more.cancel()  # it has its turn, and does not know yet
        await asyncio.sleep(0)
        assert turns.take("a") and turns.take("b")

    asyncio.run(scene())
