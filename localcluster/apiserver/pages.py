"""Lists that are asked for page by page: all pages are of one moment, that of the first, as etcd's are."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from typing import Any

from localcluster.apiserver import errors

JsonObject = dict[str, Any]
_MOST = 64  # lists of which a page is still to come; beyond that the oldest is too old


class Pages:
    """Who holds the stores' lock asks. An object that was stored is never changed, so a list costs its references."""

    def __init__(self) -> None:
        self._unfinished: collections.OrderedDict[str, tuple[str, Sequence[JsonObject]]] = collections.OrderedDict()
        self._numbers = itertools.count(1)

    def begin(self, items: Sequence[JsonObject], version: str, limit: int) -> tuple[Sequence[JsonObject], JsonObject]:
        """The first page of what is there now, and the list's metadata."""
        if not 0 < limit < len(items):
            return items, {"resourceVersion": version}
        token = str(next(self._numbers))
        self._unfinished[token] = version, items
        if len(self._unfinished) > _MOST:
            self._unfinished.popitem(last=False)
        return self._page(token, 0, limit)

    def go_on(self, words: str, limit: int) -> tuple[Sequence[JsonObject], JsonObject]:
        """The page that `continue` names. Raises ApiError."""
        token, _, begin = words.partition(".")
        if not (token.isdecimal() and begin.isdecimal()):
            raise errors.bad_request(f"continue key is not valid: {words!r}")
        if token not in self._unfinished:
            raise errors.ApiError(410, "Expired", "The provided continue parameter is too old: list again without it")
        return self._page(token, int(begin), limit)

    def _page(self, token: str, begin: int, limit: int) -> tuple[Sequence[JsonObject], JsonObject]:
        version, items = self._unfinished[token]
        end = begin + limit if limit else len(items)
        if end >= len(items):
            del self._unfinished[token]
            return items[begin:], {"resourceVersion": version}
        return items[begin:end], {"resourceVersion": version, "continue": f"{token}.{end}"}
