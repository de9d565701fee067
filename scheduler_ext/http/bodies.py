"""Reads request bodies, bounded in size and in memory."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope

from scheduler_ext.protocol.extender_v1 import BadInput
from scheduler_ext.protocol.reasons import ExtenderReason

_ROOM_SECONDS = 5.0
_AT_ONCE = 4  # bodies of the largest size in memory at once


class NotReady(Exception):
    """Nothing can be decided yet; the message says why."""


class Bodies:
    """Reads bodies, each of at most `most` bytes, and of all together no more than `_AT_ONCE` times as many in memory.

    `way_out`: what a client is told that sends more.
    """

    def __init__(self, most: int, way_out: str) -> None:
        self._most = most
        self._allowed = f"at most {most} are read{way_out}"
        self._left = _AT_ONCE * most
        self._freed = asyncio.Condition()

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """Raises BadInput and NotReady. Waits before the first byte until there is room for the body that is announced."""
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        size = int(announced) if announced.isdigit() else self._most
        if size > self._most:
            raise BadInput(f"the body has {size} bytes; {self._allowed}")
        try:
            async with asyncio.timeout(_ROOM_SECONDS), self._freed:
                await self._freed.wait_for(lambda: self._left >= size)
                self._left -= size
        except TimeoutError:
            raise NotReady(
                f"{ExtenderReason.OVERLOADED}: too many bytes of other requests are being read"
            ) from None
        try:
            return await self._whole(receive)
        finally:
            async with self._freed:
                self._left += size
                self._freed.notify_all()

    async def _whole(self, receive: Receive) -> bytes:
        chunks, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise BadInput("the connection ended before the body did")
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > self._most:
                raise BadInput(f"the body is too long; {self._allowed}")
            chunks.append(chunk)
            if not message.get("more_body"):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)
