"""Objects in memory with resource versions, optimistic concurrency and watches. Safe to use from several threads."""

from __future__ import annotations

import datetime
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from localcluster.apiserver import errors

JsonObject = dict[str, Any]
Selector = Callable[[JsonObject], bool]
Key = tuple[str, str]


def now() -> str:
    """The present in the API's form, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def copied(item: JsonObject) -> JsonObject:
    """A copy of a JSON object, several times as fast as `copy.deepcopy`."""
    result: JsonObject = orjson.loads(orjson.dumps(item))
    return result


@dataclass(frozen=True)
class Change:
    """One version of one object. `before` is None for a creation, `after` is None for a deletion."""

    version: int
    before: JsonObject | None
    after: JsonObject | None
    last: JsonObject

    def as_seen_through(self, selector: Selector) -> str | None:
        """The watch event of a client that selects: an object may enter or leave its view without being created."""
        was = self.before is not None and selector(self.before)
        is_now = self.after is not None and selector(self.after)
        if was and is_now:
            return "MODIFIED"
        if is_now:
            return "ADDED"
        return "DELETED" if was else None


# The real server's come about every minute; here what is stale should be seen sooner.
_BOOKMARK_SECONDS = 5.0


class Clock:
    """The one counter of versions; who holds `changed` reads and writes alone, its waiters hear of changes."""

    def __init__(self) -> None:
        self.version = 0
        self.breaks = 0  # how often watches were ended on purpose
        self.changed = threading.Condition()  # reentrant: a request's verbs are several steps

    def tick(self) -> int:
        self.version += 1
        return self.version


class Store:
    """The objects of one resource. `history` is how many changes a watch may lag behind before it gets 410.

    An object that was stored is never changed, but replaced by another. `on_change` is told of every change, in their
    order.
    """

    def __init__(self, resource: str, clock: Clock, history: int = 2048) -> None:
        self.resource = resource
        self._clock = clock
        self._objects: dict[Key, JsonObject] = {}
        self._history: deque[Change] = deque(maxlen=history)
        self._forgotten = 0
        self._broken = 0  # which of the clock's breaks ended the watches here last
        self._restored = False
        self.on_change: Callable[[Change], None] = lambda _: None

    @property
    def version(self) -> int:
        return self._clock.version

    def get(self, namespace: str, name: str) -> JsonObject:
        found = self._objects.get((namespace, name))
        if found is None:
            raise errors.not_found(self.resource, name)
        return copied(found)

    def list(self, namespace: str | None, selector: Selector = lambda _: True) -> list[JsonObject]:
        """What is there, in the order of names. To be read only."""
        with self._clock.changed:
            present = sorted(self._objects.items())
        return [item for (space, _), item in present if namespace in (None, space) and selector(item)]

    def create(self, item: JsonObject) -> JsonObject:
        metadata = item["metadata"]
        with self._clock.changed:
            key = _key(item)
            if key in self._objects:
                raise errors.already_exists(self.resource, metadata["name"])
            metadata.update(uid=str(uuid.uuid4()), creationTimestamp=now())
            return self._commit(key, None, item)

    def put(self, item: JsonObject) -> JsonObject:
        """Store an object as it is, unchecked: what another API server may hold. One without a UID gets one."""
        item = copied(item)
        item["metadata"].setdefault("uid", str(uuid.uuid4()))
        item["metadata"].setdefault("creationTimestamp", now())
        with self._clock.changed:
            return self._commit(_key(item), self._objects.get(_key(item)), item)

    def update(self, item: JsonObject, expected_version: str | None = None) -> JsonObject:
        """Replace an object that is there. With `expected_version`, 409 unless that is the present one."""
        with self._clock.changed:
            key = _key(item)
            before = self._objects[key]
            if expected_version and expected_version != before["metadata"]["resourceVersion"]:
                raise errors.conflict(
                    self.resource, item["metadata"]["name"],
                    "the object has been modified; please apply your changes to the latest version and try again",
                )  # fmt: skip
            if item == before:
                return copied(before)
            return self._commit(key, before, item)

    def delete(self, namespace: str, name: str) -> JsonObject:
        """Remove an object that is there."""
        with self._clock.changed:
            return self._commit((namespace, name), self._objects[(namespace, name)], None)

    def _commit(self, key: Key, before: JsonObject | None, after: JsonObject | None) -> JsonObject:
        version = self._clock.tick()
        last = copied(after if after is not None else before or {})
        last["metadata"]["resourceVersion"] = str(version)
        if after is None:
            self._objects.pop(key)
        else:
            self._objects[key] = last
        if len(self._history) == self._history.maxlen:
            self._forgotten = self._history[0].version
        change = Change(version, before, last if after is not None else None, last)
        self._history.append(change)
        self.on_change(change)
        self._clock.changed.notify_all()
        return copied(last)

    def break_watches(self, *, forget: bool = False) -> None:
        """End all open watches; with `forget`, whoever comes back with a version from before gets 410."""
        with self._clock.changed:
            self._break()
            if forget:
                self._history.clear()
                self._forgotten = self._clock.tick()

    def _break(self) -> None:
        self._clock.breaks += 1
        self._broken = self._clock.breaks
        self._clock.changed.notify_all()

    def restore(self, version: int) -> None:
        """Go back to an earlier state, as etcd does when an old backup is restored; what is forgotten stays.

        The versions after it are given anew, and who watches from one of them hears nothing until it has come again, as
        of a real API server (storage/cacher). Who holds the clock sets that back, too.
        """
        with self._clock.changed:
            while self._history and self._history[-1].version > version:
                change = self._history.pop()
                if change.before is None:
                    del self._objects[_key(change.last)]
                else:
                    self._objects[_key(change.last)] = change.before
            self._restored = True
            self._break()

    def watch(
        self,
        since: int | None,
        namespace: str | None,
        selector: Selector,
        idle_s: float = 0.5,
        *,
        bookmarks: bool = False,
        asked: int | None = None,
    ) -> Iterator[JsonObject | None]:
        """Events after version `since`; None begins with every present object.

        Gives None whenever nothing happened for `idle_s`, so that the caller may end it, and with `bookmarks` now and
        then the version alone. `asked`: the clock's breaks when the request came, since when one ends it; default: now.
        Raises ApiError 410 when too old.
        """

        def selected(item: JsonObject) -> bool:
            return namespace in (None, item["metadata"].get("namespace", "")) and selector(item)

        with self._clock.changed:
            asked = self._clock.breaks if asked is None else asked
            present = self.list(namespace, selector) if since is None else []
            since = self.version if since is None else since
        for item in present:
            yield {"type": "ADDED", "object": item}
        marked = time.monotonic()
        while True:
            with self._clock.changed:
                news = self._after(since)
                if not news and self._broken <= asked:
                    self._clock.changed.wait(idle_s)
                    news = self._after(since)
                if not news and self._broken > asked:
                    return
            if not news:
                yield None
                if bookmarks and since <= self.version and time.monotonic() - marked > _BOOKMARK_SECONDS:
                    marked = time.monotonic()
                    yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(since)}}}
            for change in news:
                since = change.version
                event = change.as_seen_through(selected)
                if event is not None:
                    yield {"type": event, "object": change.last}

    def _after(self, since: int) -> deque[Change]:
        if since < self._forgotten or (since > self.version and not self._restored):
            raise errors.expired(since)
        news: deque[Change] = deque()
        for change in reversed(self._history):
            if change.version <= since:
                break
            news.appendleft(change)
        return news


def _key(item: JsonObject) -> Key:
    metadata = item["metadata"]
    return metadata.get("namespace", ""), metadata["name"]
