"""A watch that is followed on the loop that serves: what is taken in there, what is not, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import uvloop

from scheduler_ext.sync import followers as module
from scheduler_ext.sync.followers import Followers
from tests.scheduler_ext.extender_support import eventually
from vcuda.kube.config import Login
from vcuda.kube.endpoint import Endpoint, Stream
from vcuda.kube.errors import ApiError, ApiUnreachable

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Watched:
    """A loop with its followers, and a watch whose server sends what `send` is given."""

    def __init__(self, silence: float = 60.0) -> None:
        self.followers, self.ended = Followers(rest=0.001), asyncio.Event()
        self.loop: Any = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        listener = socket.create_server(("127.0.0.1", 0))
        client = Endpoint(Login(f"http://127.0.0.1:{listener.getsockname()[1]}"), agent="test")
        self.pool = ThreadPoolExecutor(2)
        coming: Future[Stream] = self.pool.submit(client.stream, "/api/v1/pods", {}, silence=silence)
        self.peer, _ = listener.accept()
        listener.close()
        self.peer.sendall(HEAD)
        self.stream = coming.result()
        self.taken: list[tuple[bytes, int]] = []

    def _run(self) -> None:
        async def served() -> None:
            self.loop = asyncio.get_running_loop()
            self.followers.begin()
            await self.ended.wait()
            self.followers.end()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(served())

    def follow(self, take: Callable[[bytes], None] = lambda _: None) -> Future[None]:
        def taking(line: bytes) -> None:
            self.taken.append((line, threading.get_ident()))
            take(line)

        return self.pool.submit(self.followers.follow, self.stream, taking)

    def send(self, *lines: bytes) -> None:
        data = b"".join(line + b"\n" for line in lines)
        self.peer.sendall(b"%x\r\n%b\r\n" % (len(data), data))

    def lines(self) -> list[bytes]:
        return [line for line, _ in self.taken]

    def end(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.ended.set)
        self.thread.join(10)


@pytest.fixture
def watched() -> Iterator[Watched]:
    one = Watched()
    yield one
    one.stream.close()
    one.end()
    one.pool.shutdown()
    one.peer.close()


def test_lines_are_taken_in_order_on_the_loop_and_those_that_may_take_long_beside_it(watched: Watched) -> None:
    long = b"x" * (module._MOST_BYTES + 1)
    following = watched.follow()
    watched.send(b"1", b"2")
    eventually(lambda: len(watched.taken) == 2)
    watched.send(b"3", long, b"4", long)
    watched.send(b"5")
    eventually(lambda: len(watched.taken) == 7)
    assert watched.lines() == [b"1", b"2", b"3", long, b"4", long, b"5"]
    on_the_loop = [thread == watched.thread.ident for _, thread in watched.taken]
    assert on_the_loop == [True, True, True, False, True, False, True]
    watched.peer.sendall(b"0\r\n\r\n")
    assert following.result(10) is None
    assert watched.stream.fileno() == -1, "its connection is left open"


def test_requests_have_their_turn_while_much_comes(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TURN_SECONDS", 0.0)
    turns, between = [0], list[int]()

    def turn() -> None:
        turns[0] += 1
        watched.loop.call_soon(turn)

    watched.loop.call_soon_threadsafe(turn)
    watched.follow(lambda _: between.append(turns[0]))
    watched.send(*[b"%d" % number for number in range(100)])
    eventually(lambda: len(watched.taken) == 100)
    assert len(set(between)) == 100, "several lines were taken in one turn"


@pytest.mark.parametrize("line", [b"small", b"x" * (module._MOST_BYTES + 1)])
def test_what_taking_a_line_raises_ends_the_watch(watched: Watched, line: bytes) -> None:
    def refuse(_: bytes) -> None:
        raise ApiError(410, "too old")

    following = watched.follow(refuse)
    watched.send(line, b"never")
    with pytest.raises(ApiError, match="too old"):
        following.result(10)
    assert watched.lines() == [line]


def test_a_silent_watch_ends_in_bounded_time() -> None:
    one = Watched(silence=0.2)
    following = one.follow()
    one.send(b"1")
    with pytest.raises(ApiUnreachable, match="the watch of /api/v1/pods broke off: timed out"):
        following.result(10)
    assert one.lines() == [b"1"]
    one.end()
    one.pool.shutdown()
    one.peer.close()


def test_one_that_is_closed_ends_and_so_do_all_with_the_loop(watched: Watched) -> None:
    following = watched.follow()
    watched.send(b"1")
    eventually(lambda: watched.taken)
    watched.stream.close()
    with pytest.raises(ApiUnreachable, match="cut off"):
        following.result(10)
    watched.end()
    with pytest.raises(ApiUnreachable, match="the loop that follows watches has ended"):
        watched.follow().result(10)


def test_the_end_of_the_loop_ends_a_watch_that_waits(watched: Watched) -> None:
    following = watched.follow()
    watched.send(b"1")
    eventually(lambda: watched.taken)
    watched.end()
    with pytest.raises(ApiUnreachable, match="the loop that follows watches has ended"):
        following.result(10)
