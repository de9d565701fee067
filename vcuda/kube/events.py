"""Events: what a daemon tells people about an object, where `kubectl describe` shows it.

They are those of core/v1, counted as client-go's correlator counts: what is said again raises `count` of the event that
is there. A daemon that starts anew begins others: to find its old ones it would need the right to read events.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vcuda.kube.client import MERGE, Client
from vcuda.kube.errors import ApiError
from vcuda.kube.objects import path
from vcuda.printable import told

_MOST_MESSAGE = 1024
BETWEEN_REPEATS_S = 10.0  # one event is written no oftener
_MOST_CLASSES = 8  # of one reason about one object; the rest is one event: a tenant may cause as many as it likes
_MOST_SERIES = 512
_COMBINED = "(combined from similar events): "
_NOT_FOUND, _CONFLICT = 404, 409
# An amount: a number that stands alone, but for one that names a thing: card 0, Xid 79.
_NUMBER = re.compile(r"(?<!\bcard )(?<!\bXid )(?<!\bcontainer )(?<![\w.:/-])\d+(?:\.\d+)?(?: [KMGT]iB\b)?(?![\w/-])")


def event_name(about: str) -> str:
    """A name of its own for an event, of at most 253 characters (DNS subdomain), however long its object's is."""
    suffix = f".{time.time_ns():x}"
    return about[: 253 - len(suffix)].rstrip("-.") + suffix


@dataclass
class Said:
    """One event: what was said of an object, how often and last in which words. `name`: "" before it is first sent.

    `key` is the same for what is the same event. `sent_at`: of the correlator's clock, -inf before it was sent.
    """

    key: str
    about: Mapping[str, str]
    kind: str
    reason: str
    message: str = ""
    count: int = 0
    first: float = 0.0  # seconds since the epoch, as `last`
    last: float = 0.0
    sent: int = 0
    sent_at: float = float("-inf")
    name: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)


class Correlator:
    """Which event is said again. Thread-safe; keeps what was said of the last 512 objects and reasons.

    Warnings that differ in amounts alone are the same event, with the words of the last one. Of the ninth class of one
    reason about one object on there is one event for all.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._series: OrderedDict[str, dict[str, Said]] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, about: Mapping[str, str], kind: str, reason: str, message: str, times: int = 1) -> Said:
        """It is said, `times` times. `about`: kind, namespace, name, uid of the object; `kind`: Normal or Warning."""
        message = told(message, _MOST_MESSAGE)
        words = _NUMBER.sub("#", message) if kind == "Warning" else message
        with self._lock:
            series = " ".join((about.get("uid", ""), about.get("namespace", ""), about.get("name", ""), kind, reason))
            classes = self._series.setdefault(series, {})
            self._series.move_to_end(series)
            while len(self._series) > _MOST_SERIES:
                self._series.popitem(last=False)
            if words not in classes and len(classes) >= _MOST_CLASSES:
                words, message = "", _COMBINED + message
            said = classes.get(words)
            if said is None:
                digest = hashlib.blake2b(words.encode(errors="replace"), digest_size=16).hexdigest()
                said = classes[words] = Said(f"{series} {digest}", dict(about), kind, reason)
        now = time.time()
        with said.lock:
            said.message, said.last, said.first = message[:_MOST_MESSAGE], now, said.first or now
            said.count += times
        return said

    def send(self, client: Client, source: Mapping[str, str], said: Said, timeout: float | None = None) -> None:
        """Make the event, or write how often it was said by now. `source`: component, perhaps host.

        May be tried again: the count that is written is no increment. One that is there no more (Kubernetes keeps them
        for an hour) is made anew, and counts from what was not told yet. Raises KubeError.
        """
        with said.lock:
            if not said.name:
                said.name = event_name(said.about["name"])
            count, body = said.count, _body(said, source)
        namespace = body["metadata"]["namespace"]
        if not said.sent:
            try:
                client.call("POST", path("events", namespace), body, timeout=timeout)
            except ApiError as error:
                if error.status != _CONFLICT:
                    raise
                # Its answer was lost: it is there, perhaps with a smaller count.
                self._patch(client, namespace, said.name, body, timeout)
        elif count > said.sent:
            try:
                self._patch(client, namespace, said.name, body, timeout)
            except ApiError as error:
                if error.status != _NOT_FOUND:
                    raise
                with said.lock:
                    said.count, said.sent, said.first, said.name = said.count - said.sent, 0, said.last, ""
                self.send(client, source, said, timeout)
                return
        said.sent, said.sent_at = count, self.clock()

    @staticmethod
    def _patch(client: Client, namespace: str, name: str, body: Mapping[str, object], timeout: float | None) -> None:
        changes = {key: body[key] for key in ("count", "lastTimestamp", "message")}
        client.call("PATCH", path("events", namespace, name), changes, content_type=MERGE, timeout=timeout)


def _body(said: Said, source: Mapping[str, str]) -> dict[str, Any]:
    return {
        "metadata": {"name": said.name, "namespace": said.about.get("namespace") or "default"},
        "involvedObject": {"apiVersion": "v1", **said.about},
        "type": said.kind,
        "reason": said.reason,
        "message": said.message,
        "source": dict(source),
        "firstTimestamp": _time(said.first),
        "lastTimestamp": _time(said.last),
        "count": said.count,
    }


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
