"""What the cluster benchmark asks of a real API server, kubelet and scheduler: fast writes, a watch of pods, histograms."""

from __future__ import annotations

import http.client
import json
import re
import ssl
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WRITERS = 8
QUIET_SECONDS = 3.0
PODS = "/api/v1/namespaces/default/pods"


class Api:
    """One server, with a kept connection per thread. Any answer above 299 raises RuntimeError."""

    def __init__(self, host: str, port: int, ca: Path, token: str) -> None:
        self._host, self._port = host, port
        self._context = ssl.create_default_context(cafile=str(ca))
        self._context.check_hostname = False  # kubelab's address is in its certificates, other labs' may not be
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._local = threading.local()

    def _connect(self, timeout: float) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(self._host, self._port, context=self._context, timeout=timeout)

    def send(self, method: str, path: str, body: Any = None) -> bytes:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._connect(60)
        payload = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, payload, self._headers)
            answer = connection.getresponse()
        except http.client.RemoteDisconnected:  # it was idle for too long; what was sent has not been read
            connection.close()
            connection.request(method, path, payload, self._headers)
            answer = connection.getresponse()
        data = bytes(answer.read())
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {data[:300].decode(errors='replace')}")
        return data

    def get(self, path: str) -> Any:
        return json.loads(self.send("GET", path))

    def requests(self) -> Counter[str]:
        """How many requests the server has answered, such as "PATCH pods/status", without watches."""
        found: Counter[str] = Counter()
        for name, labels, value in _samples(self.send("GET", "/metrics").decode(), "apiserver_request_total"):
            if name == "apiserver_request_total" and labels["verb"] not in ("WATCH", "CONNECT"):
                of = "/".join(filter(None, (labels["resource"], labels["subresource"])))
                found[f"{labels['verb']} {of}"] += int(value)
        return found

    def create_all(self, path: str, items: Iterable[Mapping[str, Any]]) -> None:
        """Create from several connections at once: kubectl would be the slowest part of the measurement."""
        with ThreadPoolExecutor(_WRITERS) as pool:
            list(pool.map(lambda item: self.send("POST", path, item), items))

    def delete_pods(self) -> None:
        """All pods of the default namespace, by one request, and wait until they are gone."""
        self.send("DELETE", f"{PODS}?gracePeriodSeconds=0")
        while self.get(f"{PODS}?limit=1")["items"]:
            time.sleep(0.2)

    def watch_pods(self) -> PodWatch:
        """Watch from now on."""
        version = self.get(f"{PODS}?limit=1")["metadata"]["resourceVersion"]

        def connect(since: str) -> http.client.HTTPSConnection:
            connection = self._connect(600)
            connection.request("GET", f"{PODS}?watch=1&resourceVersion={since}", headers=self._headers)
            return connection

        return PodWatch(connect, version)


class PodWatch:
    """Notes when each pod was first seen bound, and first seen running or failed, on this process's monotonic clock (seconds).

    A server that finds us too slow ends a watch: it goes on from the last event.
    """

    def __init__(self, connect: Callable[[str], http.client.HTTPSConnection], version: str) -> None:
        self.bound: dict[str, float] = {}
        self.running: dict[str, float] = {}
        self.failed: dict[str, float] = {}
        self._connect, self._version = connect, version
        self._connection = connect(version)
        self._closed = False
        self._changed = threading.Condition()
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def _follow(self) -> None:
        while not self._closed:
            try:
                for line in self._connection.getresponse():
                    self._note(line, time.monotonic())
            except (OSError, http.client.HTTPException, ValueError, AttributeError):
                pass  # closed by us, or broken
            if not self._closed:
                self._connection = self._connect(self._version)

    def _note(self, line: bytes, now: float) -> None:
        event = json.loads(line)
        if event["type"] == "ERROR":  # events are lost: whoever waits runs into its deadline and says so
            self._closed = True
            return
        pod = event["object"]
        self._version = pod["metadata"]["resourceVersion"]
        name = pod["metadata"]["name"]
        with self._changed:
            if pod["spec"].get("nodeName"):
                self.bound.setdefault(name, now)
            if pod["status"].get("phase") == "Running":
                self.running.setdefault(name, now)
            if pod["status"].get("phase") == "Failed":
                self.failed.setdefault(name, now)
            self._changed.notify_all()

    def wait(self, what: str, done: Callable[[], bool], seconds: float) -> None:
        with self._changed:
            if not self._changed.wait_for(done, seconds):
                raise RuntimeError(
                    f"not within {seconds:.0f} s: {what}; {len(self.bound)} are bound, {len(self.running)} run"
                )

    def close(self) -> None:
        self._closed = True
        if self._connection.sock is not None:
            self._connection.sock.close()


@dataclass(frozen=True)
class Histogram:
    """A Prometheus histogram, or the difference of two readings. Bounds in seconds, cumulative counts."""

    buckets: tuple[tuple[float, float], ...]
    total: float

    @property
    def count(self) -> int:
        return int(self.buckets[-1][1]) if self.buckets else 0

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def quantile(self, part: float) -> float:
        """As PromQL's histogram_quantile: straight between a bucket's bounds; its lower one beyond the last bound."""
        rank, lower, below = part * self.count, 0.0, 0.0
        for bound, cumulative in self.buckets:
            if cumulative >= rank and cumulative > below:
                if bound == float("inf"):
                    return lower
                return lower + (bound - lower) * (rank - below) / (cumulative - below)
            lower, below = bound, cumulative
        return lower

    def since(self, before: Histogram) -> Histogram:
        earlier = dict(before.buckets)
        rest = tuple((bound, count - earlier.get(bound, 0.0)) for bound, count in self.buckets)
        return Histogram(rest, self.total - before.total)


_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")


def _samples(text: str, wanted: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for line in text.splitlines():
        match = _SAMPLE.match(line) if line.startswith(wanted) else None
        if match:
            yield match[1], dict(re.findall(r'(\w+)="([^"]*)"', match[2] or "")), float(match[3])


def histogram(text: str, name: str, **labels: str) -> Histogram:
    """The histogram `name` in an exposition, summed over all series that have these labels."""
    buckets: dict[float, float] = {}
    total = 0.0
    for sample, found, value in _samples(text, name):
        if not labels.items() <= found.items():
            continue
        if sample == f"{name}_bucket":
            bound = float(found["le"])
            buckets[bound] = buckets.get(bound, 0.0) + value
        elif sample == f"{name}_sum":
            total += value
    return Histogram(tuple(sorted(buckets.items())), total)


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: bytes = answer.read()
    return text.decode()


def wait_quiet(kubelet: Api, seconds: float = 120.0) -> None:
    """Until kubelet has stopped no container for QUIET_SECONDS: it is at that long after pods are gone from the API server,
    and whatever is started meanwhile pays for it. Raises RuntimeError after `seconds`.
    """

    def stopped() -> int:
        text = kubelet.send("GET", "/metrics").decode()
        name = "kubelet_runtime_operations_duration_seconds"
        kinds = ("stop_container", "stop_podsandbox")
        return sum(histogram(text, name, operation_type=kind).count for kind in kinds)

    began = since = time.monotonic()
    before = stopped()
    while time.monotonic() < since + QUIET_SECONDS:
        if time.monotonic() > began + seconds:
            raise RuntimeError(f"kubelet still stops containers after {seconds:.0f} s")
        time.sleep(0.5)
        now = stopped()
        if now != before:
            before, since = now, time.monotonic()
