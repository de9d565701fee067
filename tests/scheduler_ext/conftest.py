"""Fixtures: a fake API server, and a whole extender in front of it, over loopback HTTP."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvloop

from scheduler_ext.engine.core import Engine
from scheduler_ext.http.app import App
from scheduler_ext.http.server import Server
from scheduler_ext.sync import feed
from scheduler_ext.sync.api import ApiServer
from scheduler_ext.sync.binder import Binder
from scheduler_ext.sync.followers import Followers
from tests.scheduler_ext.extender_support import NAMES, FakeApi, eventually
from tests.support import web


@pytest.fixture
def api() -> Iterator[FakeApi]:
    fake = FakeApi()
    yield fake
    fake.stop()


class Running:
    """An extender under test: its engine for looking inside, `client` for talking to it."""

    def __init__(self, server: ApiServer, **options: Any) -> None:
        self.body_bytes = options.pop("body_bytes", 2**20)
        claims = options.pop("claims", False)
        gang_wait = options.pop("gang_wait_seconds", 3.0)
        self.engine = Engine(NAMES, **options)
        self.api, self.executor = server, ThreadPoolExecutor(8)
        self.binder = Binder(server, self.engine, self.executor, gang_wait_seconds=gang_wait)
        followed = [*feed.handlers(self.engine)]
        if claims:
            self.engine.expect_claims()
            followed += feed.claim_handlers(self.engine)
        self.followers = Followers(feed.REST_SECONDS)
        on_the_loop = {"pods": self.followers.follow}
        self.watchers = [
            feed.informer(server, self.engine, how, follow=on_the_loop.get(how.kind), longest_wait=0.3)
            for how in followed
        ]
        application = App(self.engine, self.binder, body_bytes=self.body_bytes, body_seconds=1.0)
        listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = listener.getsockname()
        self.server = Server(application, listener)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.client = web.Client(base_url=f"http://127.0.0.1:{self.address[1]}", timeout=20)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.followers.begin()
        await self.server.run_until_stopped(catch_signals=False)
        self.followers.end()
        await self.binder.close()

    def follow(self, *, wait: bool = True) -> None:
        for watcher in self.watchers:
            watcher.start()
        if wait:
            eventually(lambda: self.engine.not_ready() is None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def filter(self, pod: dict[str, Any], names: list[str]) -> Any:
        return self.post("/scheduler/filter", {"Pod": pod, "NodeNames": names})

    def bind(self, pod: dict[str, Any], node: str) -> str:
        metadata = pod["metadata"]
        args = {
            "PodName": metadata["name"],
            "PodNamespace": "default",
            "PodUID": metadata["uid"],
            "Node": node,
        }
        return str(self.post("/scheduler/bind", args)["Error"])

    def close(self) -> None:
        for watcher in self.watchers:
            watcher.stop()
        self.client.close()
        self.server.stop()
        self.thread.join(10)
        self.executor.shutdown(wait=False)
        self.api.client.endpoint.close()


@pytest.fixture
def start(api: FakeApi, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts extenders; `follow=False` leaves the watches off."""
    running: list[Running] = []

    def begin(*, follow: bool = True, **options: Any) -> Running:
        one = Running(ApiServer.connect(api.kubeconfig(tmp_path), timeout_seconds=3), **options)
        running.append(one)
        if follow:
            one.follow()
        return one

    yield begin
    for one in running:
        one.close()
