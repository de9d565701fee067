"""What heads of requests mean, and how those of answers are written."""

from __future__ import annotations

import functools
import time
import urllib.parse
from typing import NamedTuple

from scheduler_ext.http import exchange
from scheduler_ext.http.exchange import Answer
from scheduler_ext.http.http2 import frames, hpack
from scheduler_ext.http.http2.allowance import Allowance

MOST_BYTES = exchange.MOST_HEAD_BYTES  # of a request, packed or not
_MOST_URL_BYTES, _MOST_TOKEN_BYTES = 1024, 4096
_LONGEST_KNOWN, _MOST_KNOWN = 256, 64  # bytes of a head that is kept with its meaning, and how many are
_FOR_CONNECTIONS = (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
_NO_NAME = bytes(range(0x21)) + bytes(range(0x41, 0x5B)) + b":" + bytes(range(0x7F, 0x100))
_NO_VALUE = b"\0\r\n"
CONTINUE = hpack.encoded(b":status", b"100")


class Head(NamedTuple):
    """What the fields of a head mean."""

    method: str
    path: str
    query: str
    size: int | None
    token: str
    gzip: bool
    continues: bool = False  # the body comes when we say so
    cost: int = 0  # bytes of it that are kept

    def too_large(self) -> bool:
        return self.cost - len(self.token) > _MOST_URL_BYTES or len(self.token) > _MOST_TOKEN_BYTES


def _meaning(fields: list[hpack.Field]) -> Head | None:
    """None for what is no request."""
    pseudo: dict[bytes, bytes] = {}
    size, token, gzip, continues, regular = None, "", False, False, False
    for name, value in fields:
        if value.translate(None, _NO_VALUE) != value:
            return None
        if name[:1] == b":":
            if regular or name in pseudo or name not in (b":method", b":path", b":scheme", b":authority"):
                return None
            pseudo[name] = value
            continue
        regular = True
        if not name or name.translate(None, _NO_NAME) != name or name in _FOR_CONNECTIONS:
            return None
        if name == b"content-length":
            if not value.isdigit() or len(value) > 15 or size not in (None, int(value)):
                return None
            size = int(value)
        elif name == exchange.TOKEN:
            token = value.decode("latin-1")
        elif name == b"accept-encoding":
            gzip = b"gzip" in value
        elif name == b"expect":
            continues = value.lower() == b"100-continue"
        elif name == b"te" and value != b"trailers":
            return None
    method, url = pseudo.get(b":method"), pseudo.get(b":path")
    if not method or not url or b":scheme" not in pseudo:
        return None
    path, _, query = url.partition(b"?")
    shown = path.decode("latin-1") if b"%" not in path else urllib.parse.unquote(path)
    cost = len(method) + len(url) + len(token)
    return Head(method.decode("latin-1"), shown, query.decode("latin-1"), size, token, gzip, continues, cost)


class Heads:
    """Those that a connection's peer sends: each may refer to fields of those before it."""

    __slots__ = ("_allowance", "_decoder", "_known", "_version", "part")

    def __init__(self, allowance: Allowance) -> None:
        self._allowance, self._decoder = allowance, hpack.Decoder(MOST_BYTES)
        self._known: dict[bytes, Head] = {}  # what heads mean while the decoder's version is this
        self._version = 0
        self.part: tuple[int, bool, bytes] | None = None  # of one that goes on: its stream, whether that ends, so far

    def known(self, block: bytes) -> Head | None:
        """What it means, if it has come before."""
        return self._known.get(block) if self._version == self._decoder.version else None

    def read(self, block: bytes) -> Head | None:
        """What it means; None for what is no request. Nearly each refers to those before it alone, and is known."""
        known = self.known(block)
        if known is not None:
            return known
        head = _meaning(self.fields(block))
        if self._version != self._decoder.version or len(self._known) >= _MOST_KNOWN:
            # This one may have changed what it means itself, when it comes again.
            self._version = self._decoder.version
            self._known.clear()
        elif head is not None and len(block) <= _LONGEST_KNOWN and head.cost <= _LONGEST_KNOWN:
            self._known[block] = head
        return head

    def fields(self, block: bytes) -> list[hpack.Field]:
        self._allowance.work += len(block) >> 1
        try:
            return self._decoder.decode(block)
        except hpack.BadHead as problem:
            raise frames.Broken(frames.COMPRESSION_ERROR, str(problem)) from problem

    def begin(self, number: int, ends: bool, part: bytes) -> None:
        self.part = number, ends, part

    def go_on(self, flags: int, part: bytes) -> tuple[int, bool, bytes] | None:
        """Stream, whether that ends, and all of it, when it is here."""
        if self.part is None:
            raise frames.Broken(frames.PROTOCOL_ERROR, "nothing goes on here")
        number, ends, block = self.part
        block += part
        if len(block) > MOST_BYTES:
            raise frames.Broken(frames.ENHANCE_YOUR_CALM, f"the head has more than {MOST_BYTES} bytes")
        whole = number, ends, block
        if flags & frames.END_HEADERS:
            self.part = None
            return whole
        self.part = whole
        return None

    def forget(self) -> None:
        self._known.clear()
        self.part, self._decoder = None, hpack.Decoder(0)


@functools.lru_cache(maxsize=64)
def _opening(status: int, kind: str, more: bytes) -> bytes:
    """The fields of an answer's head that others have, too. `more`: lines as HTTP/1.1 has them."""
    fields = [(b":status", b"%d" % status), (b"content-type", kind.encode())]
    for line in more.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name:
            fields.append((name.strip().lower(), value.strip()))
    return b"".join(hpack.encoded(*field) for field in fields)


@functools.lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    return hpack.encoded(b"date", exchange.date(second))


@functools.lru_cache(maxsize=256)
def _length(size: int) -> bytes:
    return hpack.encoded(b"content-length", b"%d" % size)


def of_answer(answer: Answer) -> bytes:
    return _opening(answer.status, answer.kind, answer.headers) + _date(int(time.time())) + _length(len(answer.body))
