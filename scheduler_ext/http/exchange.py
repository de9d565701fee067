"""What a server and what it serves say to each other, whichever version of HTTP carries it."""

from __future__ import annotations

import email.utils
from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

import orjson

from vcuda.kube.access import TOKEN_HEADER
from vcuda.printable import told

_T = TypeVar("_T")
TOKEN = TOKEN_HEADER.lower().encode()
MOST_HEAD_BYTES = 16 * 1024
HEAD_SECONDS = 10.0  # that a request's head may take once it has begun
SILENT_SECONDS = 30.0  # before the first one: Go opens connections ahead; each costs a descriptor
IDLE_SECONDS = 75.0  # between two requests: kube-scheduler keeps its connections
UNREAD_SECONDS = 30.0  # that a client may take before it reads more of an answer
END_SECONDS = 5.0  # that answers under way have at the end
BODILESS = ("GET", "HEAD")  # whose requests have no body


def date(second: int) -> bytes:
    """As heads of answers have it."""
    return email.utils.formatdate(second, usegmt=True).encode()


class Request(NamedTuple):
    """`client`: the verified common name of the peer ("" if its certificate has none), or None.

    `token`: what it sent in `vcuda.kube.access.TOKEN_HEADER`. `gzip`: whether it reads answers packed so.
    """

    method: str
    path: str
    query: str
    body: bytes
    client: str | None
    token: str = ""
    gzip: bool = False


class Answer(NamedTuple):
    """`close`: the connection ends with it, because the rest of a body may still be coming. `headers`: more of them."""

    status: int
    body: bytes
    kind: str = "application/json"
    close: bool = False
    headers: bytes = b""


class Later(Generic[_T]):
    """What is given later, once, from the loop; without a task, which would be one more turn of it."""

    def __init__(self) -> None:
        self.given: _T | None = None
        self._wanted: Callable[[_T], None] | None = None

    def give(self, what: _T) -> None:
        self.given = what
        if self._wanted is not None:
            self._wanted(what)

    def then(self, wanted: Callable[[_T], None]) -> None:
        """Who is told; at once, if it is there."""
        self._wanted = wanted
        if self.given is not None:
            wanted(self.given)


def error(status: int, message: str, *, close: bool = False) -> Answer:
    """An answer whose body is {"Error": message}, as kube-scheduler expects it."""
    return Answer(status, orjson.dumps({"Error": told(message)}), close=close)


class Application(Protocol):
    """What is served. A body has at most `body_bytes` and arrives within `body_seconds`."""

    body_bytes: int
    body_seconds: float

    def refuse(self, method: str, path: str, client: str | None) -> Answer | None:
        """Why a request is not even read, or None."""

    def too_long(self, size: int | None) -> Answer:
        """What is said of a body of `size` bytes, None if it is not known."""

    def too_slow(self) -> Answer:
        """What is said of a body that did not arrive in time."""

    def overloaded(self) -> Answer:
        """What is said when there was no room for a body for too long."""

    def answer(self, request: Request) -> Answer | Awaitable[Answer] | Later[Answer]: ...


def too_long(application: Application, method: str, path: str, size: int | None) -> Answer:
    """What is said of a body of `size` bytes that is not read; None if that is not known."""
    if method in BODILESS:
        return error(400, f"{method} {path:.80} takes no body", close=True)
    return application.too_long(size)
