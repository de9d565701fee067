"""What heads of requests mean that have come before, and how those of answers are written."""

from __future__ import annotations

import functools
import time
from http import HTTPStatus
from typing import NamedTuple

from scheduler_ext.http import exchange
from scheduler_ext.http.exchange import Answer

_LONGEST_KNOWN, _MOST_KNOWN = 1024, 256  # bytes of a head that is kept with its meaning, and how many are


class Head(NamedTuple):
    """What a head meant to the parser, of a request after which the connection is for more."""

    method: str
    path: str
    query: str
    size: int
    gzip: bool


def whole_at(data: memoryview) -> bytes:
    """The head with which it begins; nothing if that is not all here, or longer than any that is known."""
    start = bytes(data[:_LONGEST_KNOWN])
    end = start.find(b"\r\n\r\n") + 4
    return start[:end] if end >= 4 else b""


def learn(known: dict[bytes, Head], head: bytes, meaning: Head) -> None:
    """If a parser sees it end where it ends, and nowhere before, and learns from it how long the body is."""
    lines = head.count(b"\r\n")
    plain = head[:1].isalpha() and head.count(b"\n") == head.count(b"\r") == lines
    if plain and b"transfer-encoding" not in head.lower():
        if len(known) >= _MOST_KNOWN:
            known.clear()
        known[head] = meaning


@functools.lru_cache(maxsize=64)
def _opening(status: int, kind: str, close: bool, more: bytes) -> bytes:
    phrase = HTTPStatus(status).phrase
    ends = "connection: close\r\n" if close else ""
    return f"HTTP/1.1 {status} {phrase}\r\ncontent-type: {kind}\r\n{ends}".encode() + more


@functools.lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    return b"date: %b\r\n" % exchange.date(second)


def of_answer(answer: Answer, *, close: bool) -> bytes:
    """`close`: the connection ends with it."""
    opening = _opening(answer.status, answer.kind, close, answer.headers)
    return b"%b%bcontent-length: %d\r\n\r\n" % (opening, _date(int(time.time())), len(answer.body))
