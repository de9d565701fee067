"""Lines of log that owners of pods cause: a few in a minute for each namespace, then how many were left out."""

from __future__ import annotations

import collections
from collections.abc import Callable

_AT_ONCE = 10
_SECONDS = 60.0
_MOST = 1024  # namespaces; of one that is forgotten nothing was left out


class Lines:
    """Not locked: one thread at a time asks."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # By namespace: since when, how many lines were asked for, and how many of these before were left out.
        self._asked: collections.OrderedDict[str, tuple[float, int, int]] = collections.OrderedDict()

    def may(self, namespace: str) -> str | None:
        """What is to stand behind a line, "" or how many were left out before it; None: it is left out, too."""
        now = self._clock()
        since, count, left_out = self._asked.pop(namespace, (now, 0, 0))
        if now - since >= _SECONDS:
            since, count, left_out = now, 0, max(0, count - _AT_ONCE)
        self._asked[namespace] = since, count + 1, left_out
        if len(self._asked) > _MOST:
            self._asked.popitem(last=False)
        if count >= _AT_ONCE:
            return None
        return "" if count or not left_out else f" ({left_out} such lines of its namespace were left out)"
