"""Replays a recording through the engine that serves requests, as it was decided or under another policy."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson

from scheduler_ext.engine.core import Engine
from scheduler_ext.lab.recording import FORMAT, VERSION, Event
from vcuda import plain_file
from vcuda.quoted import quoted
from vcuda.spec.names import Names
from vcuda.spec.request import Policy

_KINDS = {"header", "node", "node_gone", "pod", "gone", "quotas_changed", "filter", "bind", "lost"}
_POINTS = 200  # of the curves
_RETRY_NS = 1_000_000_000


class RecordingError(Exception):
    """A recording can't be used; the message names the file, the line and the reason."""


@dataclass
class Recording:
    """A whole recording. `cut`: what is wrong with its last line, which was left out; None if nothing is."""

    path: Path
    header: Event
    events: list[tuple[int, Event]]  # line numbers and events
    cut: str | None = None

    @property
    def lost(self) -> int:
        """How many events could not be recorded."""
        return sum(int(event["events"]) for _, event in self.events if event["kind"] == "lost")


@dataclass(frozen=True)
class Point:
    """The cluster after some decisions: parts of all usable cards."""

    decisions: int
    allocated: float
    fragmented: float


@dataclass
class Outcome:
    """What one policy, or the recording itself (`policy` None), made of the recording.

    `waited`: pods that were refused at least once; `unplaced`: those that never got a place. `seconds`: per decision.
    `nodes`: the first node of each pod, by UID.
    """

    policy: Policy | None
    decisions: int = 0
    waited: int = 0
    unplaced: int = 0
    seconds: list[float] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    nodes: dict[str, str | None] = field(default_factory=dict)

    @property
    def allocated(self) -> float:
        """The mean part of all cards that was allocated, over the decisions."""
        return float(np.mean([point.allocated for point in self.points])) if self.points else 0.0

    @property
    def fragmented(self) -> float:
        return float(np.mean([point.fragmented for point in self.points])) if self.points else 0.0


def _event(line: bytes, first: bool) -> Event:
    event = orjson.loads(line)
    if not isinstance(event, dict) or event.get("kind") not in _KINDS:
        raise ValueError("it is not an event of a recording")
    if first:
        if event["kind"] != "header" or event.get("format") != FORMAT:
            raise ValueError(f"it is not the header of a {FORMAT}")
        if event.get("version") != VERSION:
            raise ValueError(f"its version is {quoted(event.get('version'), 20)}, and this program reads {VERSION}")
    return event


def read(path: Path) -> Recording:
    """Read a recording. Raises RecordingError; only a last line that is cut off is left out instead."""
    events: list[tuple[int, Event]] = []
    cut = None
    try:
        with plain_file.opened(path) as file:
            for number, line in enumerate(file, start=1):
                try:
                    events.append((number, _event(line, number == 1)))
                except ValueError as error:
                    if number > 1 and not line.endswith(b"\n"):
                        cut = f"line {number} is cut off and was left out"
                        break
                    raise RecordingError(f"{path}, line {number}: {str(error)[:200]}") from None
    except OSError as error:
        raise RecordingError(f"cannot read {path}: {error.strerror}") from error
    if not events:
        raise RecordingError(f"{path}, line 1: the file is empty; a recording begins with its header")
    return Recording(path, events[0][1], events[1:], cut)


class Replay:
    """One pass over a recording. `policy` None follows the recorded choices: pods go where they were really bound."""

    def __init__(self, recording: Recording, policy: Policy | None) -> None:
        self._recording = recording
        self._names = Names(str(recording.header.get("domain") or Names().domain))
        self._now_ns = 0
        recorded = Policy(recording.header["policy"]) if recording.header.get("policy") in list(Policy) else Policy.FGD
        self.engine = Engine(
            self._names,
            policy or recorded,
            expiry_seconds=float("inf"),
            gang_seconds=float(recording.header.get("gang_seconds") or 120.0),
            clock=lambda: self._now_ns / 1e9,
            wall_clock=lambda: self._now_ns,
        )
        self.outcome = Outcome(policy)
        self._numbers: dict[int, str] = {}
        self._present: dict[str, None] = {}
        self._refused: dict[str, tuple[Event, int]] = {}
        self._waited: set[str] = set()
        self._filters = sum(event["kind"] == "filter" for _, event in recording.events)

    def run(self) -> Outcome:
        """Replay everything. Raises RecordingError that names the line."""
        for number, event in self._recording.events:
            self._now_ns = max(self._now_ns, int(event.get("at_ns") or 0))
            try:
                getattr(self, f"_{event['kind']}")(event)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                what = f"its field {error} is missing" if isinstance(error, KeyError) else str(error)
                raise RecordingError(f"{self._recording.path}, line {number}: {event['kind']}: {what[:200]}") from None
        self.outcome.waited = len(self._waited)
        self.outcome.unplaced = sum(node is None for node in self.outcome.nodes.values())
        return self.outcome

    # --- events ---

    def _header(self, _: Event) -> None:
        raise ValueError("a second header; give one recording at a time")

    def _lost(self, _: Event) -> None: ...

    def _bind(self, _: Event) -> None: ...

    def _node(self, event: Event) -> None:
        name = self.engine.see_node(event["node"])
        self._numbers[int(event["number"])] = name
        self._present[name] = None
        self._again()

    def _node_gone(self, event: Event) -> None:
        self.engine.lose_node(event["name"])
        self._present.pop(event["name"], None)

    def _quotas_changed(self, event: Event) -> None:
        data = event["data"]
        self.engine.see_quotas(None if data is None else {"data": data})

    def _pod(self, event: Event) -> None:
        uid = event["pod"]["metadata"]["uid"]
        if self.outcome.policy is None or uid not in self.outcome.nodes:
            self.engine.see_pod(event["pod"])

    def _gone(self, event: Event) -> None:
        if self.outcome.policy is not None and event["why"] != "deleted":
            return  # the same pod, filtered again, is decided again
        self.engine.lose_pod(event["uid"])
        if event["why"] != "deleted":
            self.engine.cache.stay(event["uid"])  # its assumption has expired: it may be decided again
        self._refused.pop(event["uid"], None)
        self._again()

    def _filter(self, event: Event) -> None:
        uid = event["pod"]["metadata"]["uid"]
        if self.outcome.policy is None:
            node = event["node"]
            self.outcome.seconds.append(float(event["seconds"]))
            if node is None:
                self._waited.add(uid)
        elif self.outcome.nodes.get(uid) and self.engine.holds(uid):
            node = self.outcome.nodes[uid]  # asked again only because the recorded decision came to nothing
        else:
            node = self._decide(event)
        if self.outcome.nodes.get(uid) is None:
            self.outcome.nodes[uid] = node
        self.outcome.decisions += 1
        if self.outcome.decisions % max(1, self._filters // _POINTS) == 0:
            self.outcome.points.append(self._point())

    def _decide(self, event: Event) -> str | None:
        uid = event["pod"]["metadata"]["uid"]
        names = self._offered(event["offered"])
        start = time.perf_counter()
        node = self.engine.filter(event["pod"], names).chosen
        self.outcome.seconds.append(time.perf_counter() - start)
        if node is None:
            self._refused[uid] = (event, self._now_ns)
            self._waited.add(uid)
        else:
            self._refused.pop(uid, None)
            self.outcome.nodes[uid] = node
        return node

    def _again(self) -> None:
        """Something is free: pods that were refused are tried again, as kube-scheduler would, at most once a second."""
        if self.outcome.policy is None:
            return
        for event, last in list(self._refused.values()):
            if self._now_ns - last >= _RETRY_NS:
                self._decide(event)

    def _offered(self, text: str) -> Sequence[str]:
        if text == "all":
            return list(self._present)
        try:
            bits = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
        except binascii.Error as error:
            raise ValueError(f"offered is not base64: {error}") from None
        return [self._numbers[number] for number in np.flatnonzero(np.unpackbits(bits)).tolist()]

    def _point(self) -> Point:
        allocated, fragmented = self.engine.use(rest=0.0)
        return Point(self.outcome.decisions, allocated, fragmented)


def differences(recorded: Outcome, other: Outcome) -> Iterator[tuple[str, str | None, str | None]]:
    """(UID, recorded node, other node) of each pod that would have gone elsewhere; None: nowhere."""
    for uid, node in recorded.nodes.items():
        if other.nodes.get(uid) != node:
            yield uid, node, other.nodes.get(uid)


def percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    ordered = sorted(seconds)
    return (ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]) if ordered else (0.0, 0.0)
