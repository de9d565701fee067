"""Long JSON documents of which little is new each time: known items are passed over, new ones parsed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import orjson

T = TypeVar("T")
_COMMA = ord(",")


@dataclass(frozen=True)
class Form:
    """How a document without spaces is written: its items stand between the first `begin` and the last `end` ("]…").

    `between` is the end of one item and the beginning of the next. `key` gives what an item that begins at a place is
    known by; `without` says whether a document is the whole one with an empty list.
    """

    begin: bytes
    end: bytes
    between: bytes
    key: Callable[[bytes, int], bytes]
    without: Callable[[Any], bool]


class Pieces(Generic[T]):
    """The items of one document after another, each made of its JSON once while its bytes stay the same.

    A known item ends where its text ends, for that is a whole JSON value; a new one where the next begins. A cut in a
    wrong place leaves what is no JSON.
    """

    def __init__(self, form: Form, make: Callable[[Any], T]) -> None:
        self._form = form
        self._make = make
        self._lock = threading.Lock()
        self._known: dict[bytes, tuple[bytes, T]] = {}
        self._last: list[T] = []

    def parse(self, data: bytes) -> list[T]:
        """`_parse`, one thread after another: an admission and garbage collection may ask at the same time."""
        with self._lock:
            return self._parse(data)

    def _parse(self, data: bytes) -> list[T]:
        """All items; the same list while all are the same, in whatever order.

        Raises ValueError for another form, and what `make` raises.
        """
        form = self._form
        place, end = data.find(form.begin) + len(form.begin), data.rfind(form.end)
        if place < len(form.begin) or end < place:
            raise ValueError("no items")
        if not form.without(orjson.loads(data[:place] + data[end:])):
            raise ValueError("the items are not those of the list")
        known: dict[bytes, tuple[bytes, T]] = {}
        found = []
        changed = False
        while place < end:
            key = form.key(data, place)
            item = self._known.get(key)
            after = place + len(item[0]) if item is not None else end + 1
            if item is None or not data.startswith(item[0], place) or (after != end and data[after] != _COMMA):
                after = data.find(form.between, place, end) + 1 or end
                text = data[place:after]
                item = (text, self._make(orjson.loads(text)))
                changed = True
            known[key] = item
            found.append(item[1])
            place = after + 1
            if place == end:
                raise ValueError("a comma and no item")
        if not changed and len(found) == len(self._last) == len(known):
            return self._last
        self._known, self._last = known, found
        return found
