"""Takes in what watches bring on the loop that serves: there it and the decisions do not change threads.

Lists stay in the informer's thread, and so does each line that may take long.
"""

from __future__ import annotations

import asyncio
import collections
import threading
import time
from collections.abc import Callable
from concurrent import futures

from vcuda.kube.endpoint import Stream
from vcuda.kube.errors import ApiUnreachable

_TURN_SECONDS = 0.001  # after which requests have their turn
_MOST_BYTES = 16 * 1024  # of a line that the loop takes in: a pod of a new class, with 64 containers, is 1.6 ms
_SHORTEST_WAIT = 0.1


class Followers:
    """The watches that one event loop follows. `begin` and `end` belong to the loop, `follow` to any other thread.

    `rest`: seconds after what has come, in which more gathers; each look is a turn of the loop.
    """

    def __init__(self, rest: float) -> None:
        self.rest = rest
        self.loop: asyncio.AbstractEventLoop | None = None
        self._begun = threading.Event()
        self._all: set[_Followed] = set()

    def begin(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._begun.set()

    def end(self) -> None:
        """Nothing is followed any more, whoever asks."""
        self.loop = None
        for one in list(self._all):
            one.fail(_ended())

    def follow(self, stream: Stream, take: Callable[[bytes], None]) -> None:
        """Give each line of a stream to `take`, to its end. Raises what `take` raises, and ApiUnreachable."""
        self._begun.wait()
        one = _Followed(self, stream, take)
        self._all.add(one)
        try:
            while (line := one.heavy()) is not None:
                take(line)
        finally:
            self._all.discard(one)
            stream.finish()


def _ended() -> ApiUnreachable:
    return ApiUnreachable("the loop that follows watches has ended")


class _Followed:
    """One watch. Belongs to the loop, but for `heavy`."""

    def __init__(self, followers: Followers, stream: Stream, take: Callable[[bytes], None]) -> None:
        self._followers, self._stream, self._take = followers, stream, take
        self._lines: collections.deque[bytes] = collections.deque()
        self._waits = False  # for more to come
        self._handed = futures.Future[bytes | None]()

    def heavy(self) -> bytes | None:
        """Have the loop go on; the next line that may take long, None at the end."""
        self._handed = handed = futures.Future[bytes | None]()
        loop = self._followers.loop
        if loop is None:  # `end` fails the last one that it sees
            raise _ended()
        try:
            loop.call_soon_threadsafe(self._go_on)
            while not futures.wait([handed], max(_SHORTEST_WAIT, self._stream.until - time.monotonic())).done:
                loop.call_soon_threadsafe(self._woken)  # it finds that the stream was silent for too long
        except RuntimeError as error:  # the loop is closed
            raise _ended() from error
        return handed.result()

    def fail(self, error: Exception) -> None:
        self._stop_waiting()
        if not self._handed.done():
            self._handed.set_exception(error)

    def _stop_waiting(self) -> bool:
        waited, self._waits = self._waits, False
        if waited:
            asyncio.get_running_loop().remove_reader(self._stream.fileno())
        return waited

    def _woken(self) -> None:
        if self._stop_waiting():
            self._go_on()

    def _go_on(self) -> None:
        if self._handed.done():
            return
        try:
            self._take_some()
        except Exception as error:  # noqa: BLE001 - the informer's thread judges it
            self.fail(error)

    def _take_some(self) -> None:
        loop, lines = asyncio.get_running_loop(), self._lines
        if not lines:
            came = self._stream.arrived()
            if came is None:
                self._handed.set_result(None)
                return
            lines.extend(came)
            if not (came or self._stream.more):
                self._waits = True
                loop.add_reader(self._stream.fileno(), self._woken)
                return
        until = time.monotonic() + _TURN_SECONDS
        while lines:
            if len(lines[0]) > _MOST_BYTES:
                self._handed.set_result(lines.popleft())
                return
            self._take(lines.popleft())
            if time.monotonic() >= until:
                break
        if lines or self._stream.more:
            loop.call_soon(self._go_on)
        else:
            loop.call_later(self._followers.rest, self._go_on)
