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
_log = logging.getLogger(__name__)
_GONE = 410
_PAUSE = 0.1  # between two watches
_SHORTEST = 1.0  # a watch that ends sooner without a word is a failure: asking again at once would make us spin
_WATCH_SECONDS = 300.0
# API servers send a bookmark every minute. A server that sends none only costs a new watch from the same version.
SILENCE_SECONDS = 90.0


class Handlers(NamedTuple):
    """What to do with the objects of one kind; `selector` is a field selector, such as "metadata.name=quotas".

    `seen` returns an object's key. `listed` gets all keys of a complete list and when the list began (monotonic
    seconds): whatever else was known has gone. They may raise KeyError, TypeError and their like for an object that is
    malformed. `read` gives an event, its object and that one's version where it can read a line faster than a parser.
    """

    kind: str
    seen: Callable[[Object], str]
    lost: Callable[[Object], None]
    listed: Callable[[Collection[str], float], None]
    namespace: str = ""
    selector: str = ""
    read: Callable[[bytes], tuple[str, Object, str] | None] = lambda _line: None


Follow = Callable[[Stream, Callable[[bytes], None]], None]


def resting(seconds: float = 0.0) -> Follow:
    """Follows a stream in the thread that calls: gives each line, and rests after what has come; see Stream.lines."""

    def follow(stream: Stream, take: Callable[[bytes], None]) -> None:
        for line in stream.lines(seconds):
            take(line)

    return follow


class Informer:
    """One supervised thread that follows one kind. `failed`: told of every failure and every malformed object.

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
        self._stream: Stream | None = None
        self._heard = time.monotonic()
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
        self._heard = time.monotonic()
        self.worker.start()

    def stop(self) -> None:
        """Ask the thread to end, and wake it where it waits for the server."""
        self.worker.stop()
        if self._stream is not None:
            self._stream.close()

    def unheard_seconds(self) -> float:
        """How long nothing has come from the server: how old what is known may be."""
        return time.monotonic() - self._heard

    def once(self) -> None:
        """List if need be, and follow one watch to its end. Raises KubeError."""
        try:
            if self._version:
                self._check(self._client.version(self.kind, self._handlers.namespace, self._handlers.selector))
            else:
                self._list()
            self._follow()
        except KubeError as error:
            if not isinstance(error, ApiError) or error.status != _GONE:
                self.cut = True
                raise
            _log.info("%s: the watch can't go on, listing again: %s", self.kind, error)
            self._version = ""

    def _check(self, version: str) -> None:
        """Raise ApiError 410 where the server is at an older version than it has shown.

        Its etcd was restored then. It would say nothing of that: a watch from its future is silent until that has come
        (apiserver, storage/cacher: older events and bookmarks are left out), and what has changed till then is lost.
        """
        if version.isdecimal() and self._version.isdecimal() and int(version) < int(self._version):
            raise ApiError(_GONE, f"the server went back from version {self._version} to {version}")

    def _list(self) -> None:
        began, version = time.monotonic(), ""
        how = self._handlers
        keys: set[str] = set()
        for items, version in self._client.pages(self.kind, how.namespace, how.selector):  # noqa: B007 - the last one counts
            keys.update(self._take(how.seen, item) or "" for item in items)
        how.listed(keys, began)
        self._version, self._heard, self.cut = version, time.monotonic(), False
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
        try:
            self._follow_stream(self._stream, self._line)
        finally:
            self._stream = None
        if self._heard <= began and time.monotonic() - began < _SHORTEST:
            raise ApiUnreachable(f"the watch of {self.kind} ended at once")

    def _line(self, line: bytes) -> None:
        if self.worker.stopped:
            return
        self._heard = time.monotonic()
        kind, thing, version = self._handlers.read(line) or self._parsed(line)
        version = version or self._version
        self._check(version)
        if kind == "DELETED":
            self._take(self._handlers.lost, thing)
        elif kind in ("ADDED", "MODIFIED"):
            self._take(self._handlers.seen, thing)
        self._version = version

    def _parsed(self, line: bytes) -> tuple[object, Object, str]:
        event = self._client.parsed(line)
        kind, thing = event.get("type"), event.get("object")
        if not isinstance(thing, dict):
            raise ApiUnreachable(f"a watch event without an object: {event!s:.100}")
        if kind == "ERROR":
            code = thing.get("code")
            raise ApiError(code if isinstance(code, int) and code else 500, str(thing.get("message", "")))
        metadata = thing.get("metadata")
        if not isinstance(metadata, dict):
            raise ApiUnreachable(f"a watch event without metadata: {event!s:.100}")
        return kind, thing, str(metadata.get("resourceVersion") or "")

    def _take(self, handle: Callable[[Object], _T], thing: Object) -> _T | None:
        """One malformed object must not end the watch of all others."""
        try:
            return handle(thing)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            self._failed()
            _log.warning("%s: an object was skipped: %.200r in %.200s", self.kind, error, reprlib.repr(thing))
            return None
