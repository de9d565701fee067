"""The recording of an extender's inputs and decisions: JSON lines, written by a thread of its own, of bounded size.

One file holds everything that is needed to decide again: it begins with a header and what was known when it began, then
come events in order. Objects are cut down to what placement depends on: no image, command, environment or volume is
written. The format is docs/extender.md, "Record and replay".
"""

from __future__ import annotations

import base64
import collections
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson

from scheduler_ext.state.objects import SAFE_TO_EVICT, mapping
from vcuda.kube.worker import Worker
from vcuda.spec.names import OLD_POD_GROUP_NAME_LABEL, OLD_POD_GROUP_SIZE_LABEL, POD_GROUP_LABEL, Names

FORMAT, VERSION = "gpu-scheduler-extender recording", 1
_MOST_QUEUED = 500_000  # names and objects, about 50 MB: a slow disk must not fill our memory
_RETRY_SECONDS = 60.0
_LONGEST_ANNOTATION = 2**14
_MOST_ASKED = 100_000
_GROUP_LABELS = (POD_GROUP_LABEL, OLD_POD_GROUP_NAME_LABEL, OLD_POD_GROUP_SIZE_LABEL)
_log = logging.getLogger(__name__)

Event = dict[str, Any]


def _open(path: Path) -> IO[bytes]:
    """Names of pods and nodes are not for everybody."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=2**16)  # noqa: PTH123


def _is_ours(path: Path) -> bool:
    """Whether nothing is lost where a recording takes the place of what is there. Raises OSError."""
    if not path.exists():
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        beginning = file.read(512)
    return not beginning or FORMAT.encode() in beginning


def slim_node(node: Mapping[str, Any], names: Names) -> Event:
    """What placement depends on: name, labels (quotas use them), inventory, allocatable cpu and memory."""
    metadata = mapping(node.get("metadata"))
    annotations = mapping(metadata.get("annotations"))
    allocatable = mapping(mapping(node.get("status")).get("allocatable"))
    return {
        "metadata": {
            "name": metadata.get("name", ""),
            "labels": dict(mapping(metadata.get("labels"))),
            "annotations": {key: annotations[key] for key in (names.inventory,) if key in annotations},
        },
        "status": {"allocatable": {key: allocatable[key] for key in ("cpu", "memory") if key in allocatable}},
    }


def _slim_container(container: object, names: Names) -> Event:
    one = mapping(container)
    resources = mapping(one.get("resources"))
    limits, requests = mapping(resources.get("limits")), mapping(resources.get("requests"))
    slim: Event = {
        "name": one.get("name", ""),
        "resources": {
            "limits": {key: limits[key] for key in (names.core, names.memory) if key in limits},
            "requests": {key: requests[key] for key in ("cpu", "memory") if key in requests},
        },
    }
    return slim | ({"restartPolicy": one["restartPolicy"]} if "restartPolicy" in one else {})


def slim_pod(pod: Mapping[str, Any], names: Names) -> Event:
    """What placement depends on: identity, our annotations, a group's labels, requests, priority, node."""
    metadata, spec = mapping(pod.get("metadata")), mapping(pod.get("spec"))
    annotations, labels = mapping(metadata.get("annotations")), mapping(metadata.get("labels"))
    kept = {key: metadata[key] for key in ("uid", "namespace", "name", "deletionTimestamp") if key in metadata}
    kept["annotations"] = {
        key: text
        for key, text in annotations.items()
        if (key.startswith(f"{names.domain}/") or key == SAFE_TO_EVICT) and len(str(text)) <= _LONGEST_ANNOTATION
    }
    kept["labels"] = {key: labels[key] for key in _GROUP_LABELS if key in labels}
    slim: Event = {key: spec[key] for key in ("nodeName", "priority", "overhead") if spec.get(key)}
    for key in ("initContainers", "containers"):
        if spec.get(key):
            slim[key] = [_slim_container(one, names) for one in spec[key]]
    slimmed: Event = {"metadata": kept, "spec": slim}
    status = mapping(pod.get("status"))
    ours = [one for one in status.get("conditions") or () if isinstance(one, dict) and one.get("type") == names.resize]
    said = {"conditions": ours} if ours else {}
    if status.get("startTime"):
        said["startTime"] = status["startTime"]
    return {**slimmed, "status": said} if said else slimmed


class Recorder:
    """Takes events from any thread without waiting, and writes them in order to `path`; `path`.1 is the part before.

    Both together hold at most about `most_bytes`, or three times what is known, if that is more. What comes faster than
    it can be written is left out and counted. When the disk refuses, it warns once, leaves events out and begins again
    once it can.
    """

    def __init__(
        self,
        path: Path,
        header: Mapping[str, Any],
        names: Names,
        *,
        most_bytes: int,
        retry_seconds: float = _RETRY_SECONDS,
        open_file: Callable[[Path], IO[bytes]] = _open,
    ) -> None:
        self._path, self._names, self._open = path, names, open_file
        self._header = {"kind": "header", "format": FORMAT, "version": VERSION, **header}
        self._half, self._retry = most_bytes // 2, retry_seconds
        self._queue: collections.deque[tuple[Event, int]] = collections.deque()
        self._queued, self._lost = 0, 0
        self._wake = threading.Condition()
        self._file: IO[bytes] | None = None
        self._written, self._next_part = 0, 0
        self._broken_until: float | None = None
        self._left_out = 0
        # What a new part begins with, and the number by which a node is named in bit maps while it is there.
        self._nodes: dict[str, bytes] = {}
        self._pods: dict[str, bytes] = {}
        self._quotas: bytes | None = None
        self._numbers: dict[str, int] = {}
        self._free: list[int] = []  # numbers of nodes that are gone
        self._asked: dict[str, None] = {}
        self.worker = Worker("recorder", self._once)

    def start(self) -> None:
        """Begin the file. Raises OSError, a mistake in the settings, if it can't be written or is no recording."""
        self._begin_part()
        self.worker.start()

    def put(self, event: Event, weight: int = 1) -> None:
        """Take one event, whose objects nobody changes any more. `weight`: how many names or objects it holds."""
        with self._wake:
            if self._queued + weight > _MOST_QUEUED and self._queue:
                self._lost += 1
                return
            self._queue.append((event, weight))
            self._queued += weight
            self._wake.notify()

    def close(self) -> None:
        """Write what is queued, and end."""
        self.worker.stop()
        with self._wake:
            self._wake.notify()
        if not self.worker.join(10.0):
            return  # the disk hangs
        self._write_queued()
        if self._file is not None:
            self._file.close()

    def _once(self) -> None:
        with self._wake:
            while not self._queue and not self.worker.stopped:
                self._wake.wait()
        self._write_queued()

    def _write_queued(self) -> None:
        with self._wake:
            batch, lost = list(self._queue), self._lost
            self._queue.clear()
            self._queued, self._lost = 0, 0
        lines = [line for event, _ in batch for line in self._lines(event)]
        if lost:
            lines.append(self._encoded({"kind": "lost", "events": lost}))
        self._write(lines)

    # --- what an event becomes; nothing of this runs in the thread that decides ---

    def _encoded(self, event: Event) -> bytes:
        return orjson.dumps(event) + b"\n"

    def _lines(self, event: Event) -> list[bytes]:
        kind = event["kind"]
        try:
            line = getattr(self, f"_{kind}")(event)
        except (orjson.JSONEncodeError, AttributeError, TypeError, ValueError, KeyError) as error:
            line = self._encoded({"kind": "lost", "events": 1})
            _log.warning("recording: an event of kind %s was left out: %r", kind, error)
        return [line] if line else []

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = self._free.pop() if self._free else len(self._numbers)
        return self._numbers[name]

    def _node(self, event: Event) -> bytes | None:
        slim = slim_node(event["node"], self._names)
        name = str(slim["metadata"]["name"])
        line = self._encoded({"kind": "node", "number": self._number(name), "node": slim})
        if self._nodes.get(name) == line:
            return None  # most updates of a node change nothing that matters here
        self._nodes[name] = line
        return line

    def _node_gone(self, event: Event) -> bytes | None:
        if not self._nodes.pop(event["name"], None):
            return None
        # Whoever reads in order knows by then whom it meant: autoscaled nodes have ever new names.
        self._free.append(self._numbers.pop(event["name"]))
        return self._encoded(event)

    def _pod(self, event: Event) -> bytes:
        line = self._encoded({**event, "pod": slim_pod(event["pod"], self._names)})
        self._pods[event["pod"]["metadata"]["uid"]] = line
        return line

    def _gone(self, event: Event) -> bytes | None:
        known = self._pods.pop(event["uid"], None) is not None
        asked = event["uid"] in self._asked
        if event["why"] == "deleted":
            self._asked.pop(event["uid"], None)
        return self._encoded(event) if known or asked else None

    def _quotas_changed(self, event: Event) -> bytes:
        self._quotas = self._encoded(event)
        return self._quotas

    def _bind(self, event: Event) -> bytes:
        return self._encoded(event)

    def _filter(self, event: Event) -> bytes:
        self._asked[event["pod"]["metadata"]["uid"]] = None
        if len(self._asked) > _MOST_ASKED:  # their ends were left out
            del self._asked[next(iter(self._asked))]
        return self._encoded(
            {**event, "pod": slim_pod(event["pod"], self._names), "offered": self._offered(event["offered"])}
        )

    def _offered(self, offered: Sequence[str]) -> str:
        """ "all" known nodes, or the numbers of some as base64 of packed bits.

        Unknown nodes can't be chosen, and are left out.
        """
        if len(offered) >= len(self._nodes) and self._nodes.keys() <= set(offered):
            return "all"
        bits = np.zeros(len(self._numbers) + len(self._free), np.bool_)
        bits[[self._numbers[name] for name in offered if name in self._numbers]] = True
        return base64.b64encode(np.packbits(bits).tobytes()).decode()

    # --- files ---

    def _begin_part(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        before = self._path.with_name(self._path.name + ".1")
        for path in (self._path, before):
            if not _is_ours(path):
                raise FileExistsError(errno.EEXIST, f"what {path} holds is no recording")
        if self._path.exists() and self._path.stat().st_size:
            self._path.replace(before)
        self._file = self._open(self._path)
        self._path.chmod(0o600)
        known = [self._quotas] if self._quotas else []
        lines = [self._encoded({**self._header, "at_ns": time.time_ns()}), *known]
        lines += [*self._nodes.values(), *self._pods.values()]
        self._written = 0
        self._append(lines)
        self._next_part = max(self._half, 2 * self._written)

    def _append(self, lines: Sequence[bytes]) -> None:
        assert self._file is not None
        for line in lines:
            self._file.write(line)
            self._written += len(line)
        self._file.flush()

    def _write(self, lines: Sequence[bytes]) -> None:
        if self._broken_until is not None and time.monotonic() < self._broken_until:
            self._left_out += len(lines)  # what they say about nodes and pods is kept, and begins the next part
            return
        try:
            if self._broken_until is not None:
                self._begin_part()
                self._append([self._encoded({"kind": "lost", "events": self._left_out + len(lines)})])
                self._broken_until, self._left_out = None, 0
                _log.info("recording: %s can be written again", self._path)
                return
            self._append(lines)
            if self._written >= self._next_part:
                self._begin_part()
        except (OSError, ValueError) as error:
            if self._broken_until is None:
                _log.warning(
                    "recording: %s can't be written (%s); decisions go on, and are left out of the recording until it "
                    "can",
                    self._path,
                    error,
                )
            self._left_out += len(lines)
            self._broken_until = time.monotonic() + self._retry
            self._file = None
