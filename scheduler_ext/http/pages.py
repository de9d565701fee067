"""What is served by path: pages that are read, those that are sent a body, and what is said of bodies not taken."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable

import orjson

import scheduler_ext
from scheduler_ext.http.exchange import Answer, Later, Request, error
from scheduler_ext.protocol.reasons import ExtenderReason

TEXT = "text/plain; charset=utf-8"
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MADE_IN = 0.05  # seconds of processor in each second

Page = Callable[[Request], Answer | Awaitable[Answer] | Later[Answer]]


class MetricsPage:
    """A twentieth of the time makes texts: who asks beyond that is sent the last one, at most a second old.

    Anybody may ask, from many addresses at once, and a text takes a millisecond or more.
    """

    def __init__(self, render: Callable[[], bytes]) -> None:
        self._render = render
        self._text, self._made_in, self._since = b"", 0.0, -math.inf

    def __call__(self, _: Request) -> Answer:
        now = time.monotonic()
        if now >= self._since + 1:
            self._since, self._made_in = now, 0.0
        if self._made_in < _MADE_IN:
            began = time.thread_time()
            self._text = self._render()
            self._made_in += time.thread_time() - began
        return Answer(200, self._text, _METRICS_TYPE)


class Pages:
    """An `Application` of the server.

    `gets` and `posts`: by path; `larger` and `slower` say what a client can do about its body.
    """

    body_bytes, body_seconds = 4096, 10.0
    larger = slower = ""

    def __init__(self, name: str) -> None:
        self._version = orjson.dumps({"version": scheduler_ext.__version__, "name": name})
        self.gets: dict[str, Page] = {"/version": lambda _: Answer(200, self._version)}
        self.posts: dict[str, Page] = {}

    def bad(self) -> None:
        """Told of every request that was refused as malformed."""

    def page(self, path: str) -> Page | None:
        """What answers GET."""
        return self.gets.get(path)

    def refuse(self, method: str, path: str, _client: str | None) -> Answer | None:
        takes = "POST" if path in self.posts else "GET"
        if takes == "GET" and self.page(path) is None:
            return error(404, f"there is no {path:.80}", close=True)
        return None if method == takes else error(405, f"{path:.80} takes {takes}", close=True)

    def too_long(self, size: int | None) -> Answer:
        self.bad()
        long = "is too long" if size is None else f"has {size} bytes"
        return error(400, f"the body {long}; at most {self.body_bytes} are read{self.larger}", close=True)

    def too_slow(self) -> Answer:
        self.bad()
        message = f"the body did not arrive within {self.body_seconds:g} s{self.slower}"
        return error(400, message, close=True)

    def overloaded(self) -> Answer:
        message = f"{ExtenderReason.OVERLOADED}: too many bytes of other requests are being read"
        return error(503, message, close=True)

    def answer(self, request: Request) -> Answer | Awaitable[Answer] | Later[Answer]:
        found = self.posts.get(request.path) or self.page(request.path)
        assert found is not None, "refused before"
        return found(request)
