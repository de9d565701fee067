"""A stand-in API server that fails on purpose and knows the truth: which cards are held, by what was really written.

It serves what the extender uses: lists and watches of nodes and pods, a pod, Bindings, labels, leases. Faults are drawn from a
seed: errors, answers that come too late or never, before or after the write was done, watches that break off or start too late.
"""

from __future__ import annotations

import collections
import http.server
import json
import random
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vcuda.spec import placement, request
from vcuda.spec.errors import SpecError
from vcuda.spec.names import Names
from vcuda.spec.units import CORES_PER_CARD

NAMES = Names()
Object = dict[str, Any]
_LOG = 4000  # events that a watch can go back


@dataclass
class Truth:
    """What the cards really hold, from what bound pods carry. Every entry of `findings` is a fault of the extender."""

    blocks: dict[str, int] = field(default_factory=dict)  # capacity by card
    nodes: dict[str, str] = field(default_factory=dict)  # card → node
    held: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)

    def bind(self, pod: Object) -> None:
        """A pod was bound: add what its placement says, and look whether any card has more than it can hold."""
        uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        try:
            asked = request.parse_pod(pod, NAMES)
            chosen = placement.decode(pod["metadata"]["annotations"][NAMES.placement])
            placement.check(chosen, asked)
        except (SpecError, KeyError) as error:
            self.findings.append(f"pod {name} was bound with a wrong placement: {error!r}")
            return
        use = placement.peak_use(asked, chosen)
        self.held[uid] = use
        for card in use:
            if self.nodes.get(card) != pod["spec"]["nodeName"]:
                self.findings.append(f"pod {name} was given card {card}, which is not on its node")
            cores, blocks = self.on(card)
            if cores > CORES_PER_CARD or blocks > self.blocks.get(card, 0):
                self.findings.append(
                    f"card {card} is booked twice: {cores} cores, {blocks} blocks with pod {name}"
                )

    def on(self, card: str) -> tuple[int, int]:
        uses = [use[card] for use in self.held.values() if card in use]
        return sum(cores for cores, _ in uses), sum(blocks for _, blocks in uses)


class Faults:
    """Draws a fault per request. `rate`: how many of a hundred requests fail while `on`."""

    KINDS = ("500", "503", "409", "late, done", "late, not done", "cut, done", "cut, not done")

    def __init__(self, seed: int, rate: float, late_s: float) -> None:
        self._dice, self._rate, self.late_s = random.Random(seed), rate, late_s
        self._lock = threading.Lock()
        self.on = False
        self.tally: collections.Counter[str] = collections.Counter()

    def draw(self) -> str:
        with self._lock:
            if not self.on or self._dice.random() >= self._rate / 100:
                return ""
            kind = self._dice.choice(self.KINDS)
            self.tally[kind] += 1
            return kind

    def watch_seconds(self) -> float:
        """How long a watch lasts if there are faults then."""
        with self._lock:
            return self._dice.uniform(0.2, 6.0)

    def forgets(self) -> bool:
        """A watch breaks: whether what it missed is gone for good (410)."""
        with self._lock:
            self.tally["watch dropped"] += 1
            forgets = self._dice.random() < 0.3
            self.tally["watch too old (410)"] += forgets
            return forgets


class _Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that are killed leave broken pipes; nobody needs to read about them."""


class Api:
    """Objects, event logs and the server. `lock` covers everything; `truth` follows each change of a pod."""

    def __init__(self, faults: Faults) -> None:
        self.faults, self.truth = faults, Truth()
        self.lock = threading.Condition()
        self.objects: dict[str, dict[str, Object]] = {"nodes": {}, "pods": {}, "leases": {}}
        self.bindings = 0
        self._version, self._oldest = 1000, {"nodes": 0, "pods": 0}
        self._log: dict[str, collections.deque[tuple[int, bytes]]] = {
            kind: collections.deque(maxlen=_LOG) for kind in ("nodes", "pods")
        }
        self._closed = False
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
        ).start()

    def kubeconfig(self, path: Path) -> str:
        url = f"http://127.0.0.1:{self._server.server_address[1]}"
        cluster = {"name": "c", "cluster": {"server": url}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        user = {"name": "u", "user": {"token": "t"}}
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "c", "clusters": [cluster],
            "contexts": [context], "users": [user],
        }  # fmt: skip
        path.write_text(json.dumps(config))
        return str(path)

    def close(self) -> None:
        with self.lock:
            self._closed = True
            self.lock.notify_all()
        self._server.shutdown()
        self._server.server_close()

    # --- what the load does ---

    @staticmethod
    def key(thing: Object) -> str:
        metadata = thing["metadata"]
        return (
            f"{metadata['namespace']}/{metadata['name']}"
            if "namespace" in metadata
            else str(metadata["name"])
        )

    def put(self, resource: str, thing: Object) -> None:
        with self.lock:
            kind = "MODIFIED" if self.key(thing) in self.objects[resource] else "ADDED"
            self._store(resource, kind, thing)

    def delete(self, resource: str, key: str) -> None:
        with self.lock:
            thing = self.objects[resource].pop(key, None)
            if thing is None:
                return
            self.truth.held.pop(thing["metadata"].get("uid", ""), None)
            self._store(resource, "DELETED", thing)

    def change(self, resource: str, key: str, edit: Any) -> None:
        """Replace an object, if it is still there, by what `edit` makes of a copy."""
        with self.lock:
            found = self.objects[resource].get(key)
            if found is None:
                return
            thing = json.loads(json.dumps(found))
            edit(thing)
            if thing.get("status", {}).get("phase") in ("Succeeded", "Failed"):
                self.truth.held.pop(thing["metadata"]["uid"], None)
            self._store(resource, "MODIFIED", thing)

    def pod(self, key: str) -> Object | None:
        with self.lock:
            return self.objects["pods"].get(key)

    def _store(self, resource: str, kind: str, thing: Object) -> None:
        self._version += 1
        thing["metadata"] = {**thing["metadata"], "resourceVersion": str(self._version)}
        if kind != "DELETED":
            self.objects[resource][self.key(thing)] = thing
        if resource in self._log:
            event = json.dumps({"type": kind, "object": thing}).encode() + b"\n"
            log = self._log[resource]
            if len(log) == _LOG:
                self._oldest[resource] = log[0][0]
            log.append((self._version, event))
        self.lock.notify_all()

    # --- what it answers ---

    def answer(self, method: str, path: str, body: Object) -> tuple[int, Object]:
        parts = path.strip("/").split("/")
        if "leases" in parts:
            return self._lease(method, parts, body)
        if parts[2] == "namespaces" and method == "GET":
            found = self.pod(f"{parts[3]}/{parts[5]}")
            return (200, found) if found else (404, {"message": "not found"})
        if method == "PATCH":
            labels = body["metadata"]["labels"]
            self.change(
                "pods",
                f"{parts[3]}/{parts[5]}",
                lambda pod: pod["metadata"].setdefault("labels", {}).update(labels),
            )
            return 200, {}
        if method == "POST":
            return self._bind(f"{parts[3]}/{parts[5]}", body)
        with self.lock:
            return 200, {
                "metadata": {"resourceVersion": str(self._version)},
                "items": list(self.objects[parts[2]].values()),
            }

    def _lease(self, method: str, parts: list[str], body: Object) -> tuple[int, Object]:
        with self.lock:
            if method == "GET":
                found = self.objects["leases"].get(f"{parts[4]}/{parts[6]}")
                return (200, found) if found else (404, {"message": "not found"})
            old = self.objects["leases"].get(self.key(body))
            if body["metadata"].get("resourceVersion") != (
                old["metadata"]["resourceVersion"] if old else None
            ):
                return 409, {"message": "changed"}
            self._store("leases", "MODIFIED", body)
            return 200, body

    def _bind(self, key: str, binding: Object) -> tuple[int, Object]:
        with self.lock:
            self.bindings += 1
            found = self.objects["pods"].get(key)
            if found is None:
                return 404, {"message": "not found"}
            if binding["metadata"].get("uid") != found["metadata"]["uid"] or found["spec"].get("nodeName"):
                return 409, {"message": "another UID, or assigned already"}
            node = binding["target"]["name"]
            metadata = found["metadata"]
            annotations = {**metadata.get("annotations", {}), **binding["metadata"].get("annotations", {})}
            status = {key: value for key, value in found["status"].items() if key != "nominatedNodeName"}
            pod = {
                **found, "metadata": {**metadata, "annotations": annotations}, "status": status,
                "spec": {**found["spec"], "nodeName": node},
            }  # fmt: skip
            self.truth.bind(pod)
            self._store("pods", "MODIFIED", pod)
            return 201, {}

    def follow(self, resource: str, version: int, write: Any) -> None:
        """Send events after `version` until the watch breaks."""
        until = time.monotonic() + self.faults.watch_seconds()
        while not self._closed:
            if self.faults.on and time.monotonic() > until:
                if self.faults.forgets():
                    with self.lock:
                        self._oldest[resource] = self._version
                return
            with self.lock:
                if version < self._oldest[resource]:
                    write(
                        json.dumps({"type": "ERROR", "object": {"code": 410, "message": "too old"}}).encode()
                        + b"\n"
                    )
                    return
                news = [(number, event) for number, event in self._log[resource] if number > version]
                if not news:
                    self.lock.wait(0.2)
                    continue
            version = news[-1][0]
            write(b"".join(event for _, event in news))


def _handler(api: Api) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = 65536

        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(url.query))
            if query.get("watch"):
                self.send_response(200)
                self.send_header("Connection", "close")
                self.end_headers()
                self.close_connection = True
                self.wfile.flush()
                try:
                    api.follow(url.path.rsplit("/", 1)[1], int(query["resourceVersion"]), self._push)
                except OSError:
                    return
            else:
                self._serve("GET", url.path, {})

        def _push(self, data: bytes) -> None:
            self.wfile.write(data)
            self.wfile.flush()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._serve(self.command, urllib.parse.urlsplit(self.path).path, body)

        def do_PUT(self) -> None:
            self.do_POST()

        def do_PATCH(self) -> None:
            self.do_POST()

        def _serve(self, method: str, path: str, body: Object) -> None:
            fault = api.faults.draw()
            done = not fault or fault.endswith(", done")
            status, data = (
                api.answer(method, path, body)
                if done
                else (int(fault) if fault.isdigit() else 504, {"message": "on purpose"})
            )
            if fault.startswith("late"):
                time.sleep(api.faults.late_s)
            if fault.startswith("cut"):
                self.close_connection = True
                return
            text = json.dumps(data).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)
                self.wfile.flush()
            except OSError:
                self.close_connection = True

    return Handler
