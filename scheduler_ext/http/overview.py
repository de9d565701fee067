"""What the page of the cluster reads: one answer for all who look at it, made anew at most every few seconds."""

from __future__ import annotations

import asyncio
import time
import urllib.parse
import zlib

import orjson

from scheduler_ext.engine.core import Engine
from scheduler_ext.http.exchange import Answer, Request, error
from scheduler_ext.planning import overview
from vcuda import page
from vcuda.quoted import quoted

_SECONDS = 5.0
_GZIP = 16 + zlib.MAX_WBITS
_PIECE = 64 * 1024
_BETWEEN = 0.001  # seconds
_FRESH = b"cache-control: no-store\r\nvary: accept-encoding\r\n"
_PACKED = _FRESH + b"content-encoding: gzip\r\n"


def html(_: Request) -> Answer:
    """The page itself, which names nobody."""
    found = page.of_cluster()
    lines = "".join(f"{name.lower()}: {value}\r\n" for name, value in found.headers)
    return Answer(200, found.body, found.kind, headers=lines.encode())


class OverviewData:
    """The overview as JSON, plain and packed. Who asks while it is being made waits for the same one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._made: asyncio.Task[tuple[bytes, bytes]] | None = None
        self._until = 0.0  # monotonic seconds

    async def answer(self, request: Request) -> Answer:
        """The whole cluster, or with `?node=NAME` one node with its pods' names."""
        name = dict(urllib.parse.parse_qsl(request.query)).get("node")
        if name is not None:
            found = self._engine.node_detail(name)
            if found is None:
                return error(404, f"node {quoted(name, 80)} is not known here")
            return Answer(200, orjson.dumps(overview.encode_detail(found)), headers=_FRESH)
        # Shielded: who goes away meanwhile must not let the next one begin another.
        plain, packed = await asyncio.shield(self._current())
        return Answer(200, packed, headers=_PACKED) if request.gzip else Answer(200, plain, headers=_FRESH)

    def _current(self) -> asyncio.Task[tuple[bytes, bytes]]:
        old = self._made
        if old is None or (old.done() and (time.monotonic() >= self._until or old.exception() is not None)):
            self._made = old = asyncio.create_task(asyncio.to_thread(self._make))
            old.add_done_callback(self._note)
        return old

    def _note(self, _: object) -> None:
        self._until = time.monotonic() + _SECONDS

    def _make(self) -> tuple[bytes, bytes]:
        plain = orjson.dumps(overview.encode(self._engine.overview(), lambda: time.sleep(_BETWEEN)))
        packer = zlib.compressobj(6, wbits=_GZIP)
        packed = [packer.compress(plain[at : at + _PIECE]) for at in range(0, len(plain), _PIECE)]
        return plain, b"".join([*packed, packer.flush()])
