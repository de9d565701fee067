"""Objects in memory with resource versions, optimistic concurrency and watches. Used from one event loop only."""

from __future__ import annotations

import asyncio
import copy
import datetime
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from localcluster.apiserver import errors

JsonObject = dict[str, Any]
Selector = Callable[[JsonObject], bool]
Key = tuple[str, str]


def now() -> str:
    """The present in the API's form, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


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


class Clock:
    """The one counter of versions that all resources share."""

    def __init__(self) -> None:
        self.version = 0

    def tick(self) -> int:
        self.version += 1
        return self.version


class Store:
    """The objects of one resource. `history` is how many changes a watch may lag behind before it gets 410."""

    def __init__(self, resource: str, clock: Clock, history: int = 2048) -> None:
        self.resource = resource
        self._clock = clock
        self._objects: dict[Key, JsonObject] = {}
        self._history: deque[Change] = deque(maxlen=history)
        self._forgotten = 0
        self._changed = asyncio.Event()

    @property
    def version(self) -> int:
        return self._clock.version

    def get(self, namespace: str, name: str) -> JsonObject:
        try:
            return copy.deepcopy(self._objects[(namespace, name)])
        except KeyError:
            raise errors.not_found(self.resource, name) from None

    def list(self, namespace: str | None, selector: Selector) -> list[JsonObject]:
        found = [
            o for (space, _), o in sorted(self._objects.items()) if namespace in (None, space) and selector(o)
        ]
        return copy.deepcopy(found)

    def create(self, item: JsonObject) -> JsonObject:
        metadata = item["metadata"]
        key = (metadata.get("namespace", ""), metadata["name"])
        if key in self._objects:
            raise errors.already_exists(self.resource, metadata["name"])
        metadata.update(uid=str(uuid.uuid4()), creationTimestamp=now())
        return self._commit(key, None, item)

    def update(self, item: JsonObject, expected_version: str | None = None) -> JsonObject:
        """Replace an object that is there. With `expected_version`, 409 unless that is the present one."""
        metadata = item["metadata"]
        key = (metadata.get("namespace", ""), metadata["name"])
        before = self._objects[key]
        if expected_version and expected_version != before["metadata"]["resourceVersion"]:
            raise errors.conflict(
                self.resource, metadata["name"],
                "the object has been modified; please apply your changes to the latest version and try again",
            )  # fmt: skip
        if item == before:
            return copy.deepcopy(before)
        return self._commit(key, before, item)

    def delete(self, namespace: str, name: str) -> JsonObject:
        """Remove an object that is there."""
        return self._commit((namespace, name), self._objects[(namespace, name)], None)

    def _commit(self, key: Key, before: JsonObject | None, after: JsonObject | None) -> JsonObject:
        version = self._clock.tick()
        last = copy.deepcopy(after if after is not None else before) or {}
        last["metadata"]["resourceVersion"] = str(version)
        if after is None:
            self._objects.pop(key)
        else:
            self._objects[key] = last
        if len(self._history) == self._history.maxlen:
            self._forgotten = self._history[0].version
        self._history.append(Change(version, before, last if after is not None else None, last))
        self._changed.set()
        self._changed = asyncio.Event()
        return copy.deepcopy(last)

    async def watch(
        self, since: int | None, namespace: str | None, selector: Selector
    ) -> AsyncIterator[JsonObject]:
        """Events after version `since`; None begins with every present object. Raises ApiError 410 when too old."""

        def selected(item: JsonObject) -> bool:
            return namespace in (None, item["metadata"].get("namespace", "")) and selector(item)

        if since is None:
            since = self.version
            for item in self.list(namespace, selector):
                yield {"type": "ADDED", "object": item}
        while True:
            if since < self._forgotten or since > self.version:
                raise errors.expired(since)
            changed = self._changed
            for change in [change for change in self._history if change.version > since]:
                since = change.version
                event = change.as_seen_through(selected)
                if event is not None:
                    yield {"type": event, "object": change.last}
            await changed.wait()
