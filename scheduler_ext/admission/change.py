"""What becomes of a reviewed pod: a copy that is changed, and the JSON patch that makes it of the original."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler_ext.protocol.admission_v1 import Patch, pointer

_MOST_WARNINGS = 8


class Change:
    """What becomes of a pod, the patch that makes it of the original, and why.

    Only what changes is copied: pods may be large.
    """

    def __init__(self, pod: Mapping[str, Any]) -> None:
        self.pod: dict[str, Any] = dict(pod)
        self._own: dict[int, Any] = {id(self.pod): self.pod}
        self._patch: list[Patch] = []
        self._warnings: list[str] = []

    @property
    def patch(self) -> tuple[Patch, ...]:
        return tuple(self._patch)

    @property
    def warnings(self) -> tuple[str, ...]:
        told = self._warnings[:_MOST_WARNINGS]
        if more := len(self._warnings) - len(told):
            told.append(f"and {more} more of this kind")
        return tuple(told)

    def warn(self, words: str) -> None:
        self._warnings.append(words)

    def put(self, value: object, *path: str | int) -> None:
        """Set a field; what holds it is made where it is missing."""
        place: Any = self.pod
        for depth, part in enumerate(path[:-1]):
            if not isinstance(path[depth + 1], int) and not isinstance(_member(place, part), dict):
                place[part] = {}
                self._add({}, *path[: depth + 1])
            place = self._mine(place, part)
        place[path[-1]] = value
        self._add(value, *path)

    def _mine(self, place: Any, part: str | int) -> Any:
        """The member, as a copy of ours that may be changed."""
        found = place[part]
        if id(found) not in self._own:
            found = place[part] = found.copy()
            self._own[id(found)] = found
        return found

    def drop(self, *path: str | int) -> None:
        place: Any = self.pod
        for part in path[:-1]:
            place = self._mine(place, part)
        del place[path[-1]]
        self._patch.append({"op": "remove", "path": pointer(*map(str, path))})

    def _add(self, value: object, *path: str | int) -> None:
        # To "add" a member that is there replaces it (RFC 6902, 4.1).
        self._patch.append({"op": "add", "path": pointer(*map(str, path)), "value": value})


def _member(place: Any, part: str | int) -> Any:
    return place.get(part) if isinstance(place, dict) else place[part]
