"""Follows one kind of objects: lists them, then watches; lists again only when the watch can't go on."""

from __future__ import annotations

import logging
import reprlib
import time
from collections.abc import Callable, Collection
from typing import NamedTuple, TypeVar

from vcuda.kube.client import Client
from vcuda.kube.endpoint import Stream
from vcuda.kube.errors import ApiError, ApiUnreachable, KubeError
from vcuda.kube.objects import Object
from vcuda.kube.worker import Worker

_T = TypeVar("_T")


class _Unreadable(Exception):
    """An event of a shape that no API server sends; the message says what is wrong. What it tells is not known."""


_log = logging.getLogger(__name__)
_GONE = 410
_PAUSE = 0.1  # between two watches
_SHORTEST = 1.0  # a watch that ends sooner without a word is a failure: asking again at once would make us spin
_STOOD = 5.0  # seconds that a watch went on: what cuts it then begins a new row of failures
_WATCH_SECONDS = 300.0
_BETWEEN_LISTS = 60.0  # seconds, of lists that events ask for which can't be read
_BETWEEN_LINES = 60.0  # of the log, about such events and objects
_LONGEST_NUMBER = 20  # digits of a version that is a number: etcd's have 64 bits
# API servers send a bookmark every minute. A server that sends none only costs a new watch from the same version.
SILENCE_SECONDS = 90.0
_LATE_SECONDS = 75.0  # of silence, behind which what a watch tells may be late


class Handlers(NamedTuple):
    """What to do with the objects of one kind; `selector` is a field selector, such as "metadata.name=quotas".

    `seen` returns an object's key. `listed` gets all keys of a complete list and when the list began (monotonic
    seconds): whatever else was known has gone. They may raise KeyError, TypeError and their like for an object that is
    malformed. `relisted`: as `listed`, where the server has gone back to before what it had shown; None: the same.
    `read` gives an event, its object and that one's version where it can read a line faster than a parser. `cut`: from
    now on nothing is heard, and what comes next may be long known to others; `follows`: a watch has begun again, or
    goes on behind a silence that is longer than the pause between two bookmarks.
    """

    kind: str
    seen: Callable[[Object], str]
    lost: Callable[[Object], None]
    listed: Callable[[Collection[str], float], None]
    namespace: str = ""
    selector: str = ""
    read: Callable[[bytes], tuple[str, Object, str] | None] = lambda _line: None
    relisted: Callable[[Collection[str], float], None] | None = None
    cut: Callable[[], None] = lambda: None
    follows: Callable[[], None] = lambda: None


Follow = Callable[[Stream, Callable[[bytes], None]], None]


def resting(seconds: float = 0.0) -> Follow:
    """Follows a stream in the thread that calls: gives each line, and rests after what has come; see Stream.lines."""

    def follow(stream: Stream, take: Callable[[bytes], None]) -> None:
        for line in stream.lines(seconds):
            take(line)

    return follow


class Informer:
    """One supervised thread that follows one kind. `failed`: told of every failure and every malformed object.

    A malformed event is skipped: what it told is in a new list, at once, but no sooner than a minute after the last.

    `follow`: gives it the lines of a watch to that one's end, one after the other, in whatever thread.
    """

    def __init__(
        self,
        client: Client,
        handlers: Handlers,
        *,
        failed: Callable[[], object] = lambda: None,
        longest_wait: float = 30.0,
        silence: float = SILENCE_SECONDS,
        follow: Follow = resting(),  # noqa: B008 - keeps nothing
    ) -> None:
        self.kind = handlers.kind
        self._client, self._handlers, self._failed = client, handlers, failed
        self._silence, self._follow_stream = silence, follow
        self._version = ""
        self._latest: int | None = None  # version that was shown before the list to come, if that is a number
        self._went_back = False  # since the last list
        self._stream: Stream | None = None
        self._heard = self._answered = time.monotonic()
        self._listed_at = self._told_at = float("-inf")
        self._missed = False  # events, since the last list
        self._skipped = self._told = 0  # of events and objects; how many the log knows of
        self.cut = False  # the last try failed: nothing is heard until one succeeds
        self.worker = Worker(
            handlers.kind,
            self.once,
            pause=_PAUSE,
            longest_wait=longest_wait,
            expected=KubeError,
            failed=failed,
        )

    def start(self) -> None:
        self._heard = self._answered = time.monotonic()
        self.worker.start()

    def stop(self) -> None:
        """Ask the thread to end, and wake it where it waits for the server."""
        self.worker.stop()
        if self._stream is not None:
            self._stream.close()

    def unheard_seconds(self) -> float:
        """How long nothing has come from the server: how old what is known may be."""
        return time.monotonic() - self._heard

    def unanswered_seconds(self) -> float:
        """How long the server has not even answered; of a quiet watch it does, whenever one is begun anew."""
        return time.monotonic() - max(self._heard, self._answered)

    def once(self) -> None:
        """List if need be, and follow one watch to its end. Raises KubeError."""
        try:
            if self._version:
                self._check(self._client.version(self.kind, self._handlers.namespace, self._handlers.selector))
                self._answered = time.monotonic()
            else:
                self._list()
            self._follow()
            self._catch_up()
        except KubeError as error:
            if not isinstance(error, ApiError) or error.status != _GONE:
                self.cut = True
                raise
            _log.info("%s: the watch can't go on, listing again: %s", self.kind, error)
            self._version, self._latest = "", _number(self._version)
        finally:
            self._handlers.cut()

    def _check(self, version: str) -> None:
        """Raise ApiError 410 where the server is at an older version than it has shown.

        Its etcd was restored then. It would say nothing of that: a watch from its future is silent until that has come
        (apiserver, storage/cacher: older events and bookmarks are left out), and what has changed till then is lost.
        """
        new, old = _number(version), _number(self._version)
        if new is not None and old is not None and new < old:
            self._went_back = True
            raise ApiError(_GONE, f"the server went back from version {self._version} to {version}")

    def _list(self) -> None:
        began, version = time.monotonic(), ""
        how = self._handlers
        keys: set[str] = set()
        for items, version in self._client.pages(self.kind, how.namespace, how.selector):  # noqa: B007 - the last one counts
            self._answered = time.monotonic()
            keys.update(self._take(how.seen, item) or "" for item in items)
        new = _number(version)
        if self._latest is not None and new is not None and new < self._latest:
            self._went_back = True
        (how.relisted if self._went_back and how.relisted is not None else how.listed)(keys, began)
        self._went_back = False
        self._version, self._heard, self.cut = version, time.monotonic(), False
        self._listed_at, self._missed = began, False
        _log.info("%s: listed %d at version %s", self.kind, len(keys), version)

    def _follow(self) -> None:
        began, how = time.monotonic(), self._handlers
        self._stream = self._client.watch(
            self.kind,
            how.namespace,
            self._version,
            how.selector,
            seconds=_WATCH_SECONDS,
            silence=self._silence,
        )
        self.cut = False
        how.follows()
        if self.worker.stopped:  # `stop` may have found nothing to close
            self._stream.close()
        try:
            self._follow_stream(self._stream, self._line)
        finally:
            self._stream = None
            if time.monotonic() - began >= _STOOD:
                self.worker.went_well()
        if self._heard <= began and time.monotonic() - began < _SHORTEST:
            raise ApiUnreachable(f"the watch of {self.kind} ended at once")

    def _line(self, line: bytes) -> None:
        if self.worker.stopped:
            return
        try:
            kind, thing, version = self._handlers.read(line) or self._parsed(line)
        except _Unreadable as error:
            self._missed = True
            self._skip("an event", error, line)
        else:
            before, self._heard = self._heard, time.monotonic()
            if self._heard - before > _LATE_SECONDS:
                self._handlers.follows()
            version = version or self._version
            self._check(version)
            if kind == "DELETED":
                skipped = self._skipped
                self._take(self._handlers.lost, thing)
                self._missed |= self._skipped != skipped
            elif kind in ("ADDED", "MODIFIED"):
                self._take(self._handlers.seen, thing)
            self._version = version
        self._catch_up()

    def _parsed(self, line: bytes) -> tuple[object, Object, str]:
        event = self._client.parsed(line)
        if not isinstance(event, dict):
            raise _Unreadable("it is no object")
        kind, thing = event.get("type"), event.get("object")
        if kind == "ERROR":
            status = thing if isinstance(thing, dict) else {}
            code = status.get("code")
            raise ApiError(code if isinstance(code, int) and code else 500, str(status.get("message", "")))
        if not isinstance(thing, dict):
            raise _Unreadable("it has no object")
        metadata = thing.get("metadata")
        if not isinstance(metadata, dict):
            raise _Unreadable("its object has no metadata")
        return kind, thing, str(metadata.get("resourceVersion") or "")

    def _catch_up(self) -> None:
        """Raise ApiError 410, which is followed by a list, where events were missed and the last list is old enough."""
        if self._missed and time.monotonic() - self._listed_at >= _BETWEEN_LISTS:
            raise ApiError(_GONE, "events that could not be read were skipped")

    def _skip(self, what: str, why: Exception, data: object) -> None:
        self._failed()
        self._skipped += 1
        now, before = time.monotonic(), self._skipped - self._told - 1
        if now - self._told_at >= _BETWEEN_LINES:
            more = f"; so were {before} since the last such line" if before else ""
            _log.warning("%s: %s was skipped: %.200r in %.200s%s", self.kind, what, why, reprlib.repr(data), more)
            self._told_at, self._told = now, self._skipped

    def _take(self, handle: Callable[[Object], _T], thing: Object) -> _T | None:
        """One malformed object must not end the watch of all others."""
        try:
            return handle(thing)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            self._skip("an object", error, thing)
            return None


def _number(version: str) -> int | None:
    return int(version) if len(version) <= _LONGEST_NUMBER and version.isdecimal() else None
