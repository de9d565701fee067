"""A small API server over HTTP for the extender's tests: nodes, pods, list, watch, Binding, and faults on demand."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vcuda.spec import inventory
from vcuda.spec.inventory import Card
from vcuda.spec.names import Names
from vcuda.spec.units import BLOCK_BYTES

NAMES = Names()
BLOCKS = 40


def cards(node: str, count: int = 2, blocks: int = BLOCKS, **fields: Any) -> tuple[Card, ...]:
    return tuple(
        Card(f"GPU-{node}-{index}", index, fields.get("model", "A100"), blocks * BLOCK_BYTES)
        for index in range(count)
    )


def node(
    name: str, its_cards: tuple[Card, ...] | None, cpu: str = "64", memory: str = "256Gi"
) -> dict[str, Any]:
    annotations = {} if its_cards is None else {NAMES.inventory: inventory.encode(its_cards)}
    return {
        "metadata": {"name": name, "annotations": annotations},
        "status": {"allocatable": {"cpu": cpu, "memory": memory}},
    }


def container(name: str, cores: object, blocks: object, **fields: Any) -> dict[str, Any]:
    limits = {key: value for key, value in ((NAMES.core, cores), (NAMES.memory, blocks)) if value is not None}
    return {"name": name, "resources": {"limits": limits}, **fields}


def pod(
    name: str, cores: object = 30, blocks: object = 10, *, uid: str | None = None, **fields: Any
) -> dict[str, Any]:
    """A pod with one container; `annotations`, `containers`, `init` and `node` may be given."""
    spec: dict[str, Any] = {"containers": fields.get("containers", [container("main", cores, blocks)])}
    if "init" in fields:
        spec["initContainers"] = fields["init"]
    if "node" in fields:
        spec["nodeName"] = fields["node"]
    metadata = {"name": name, "namespace": "default", "uid": uid or str(uuid.uuid4())}
    if "annotations" in fields:
        metadata["annotations"] = fields["annotations"]
    return {"metadata": metadata, "spec": spec, "status": {"phase": "Pending"}}


def plain_pod(name: str, **fields: Any) -> dict[str, Any]:
    return pod(name, containers=[{"name": "main", "resources": {}}], **fields)


def eventually(check: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Poll until `check` gives something true."""
    deadline = time.monotonic() + seconds
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < deadline, f"not true within {seconds} s"
        time.sleep(0.01)


class FakeApi:
    """Objects with resource versions, an event log that watches follow, and faults.

    `binding_faults`: taken one per Binding: an HTTP status to answer before doing anything, "lost" (do it, then
    cut the connection) or "cut" (cut it without doing anything).
    """

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.version = 100
        self.oldest = 0
        self.objects: dict[str, dict[str, dict[str, Any]]] = {
            kind: {} for kind in ("nodes", "pods", "leases", "configmaps")
        }
        self.log: list[tuple[int, str, str, dict[str, Any]]] = []
        self.bindings: list[dict[str, Any]] = []
        self.binding_faults: list[int | str] = []
        self.list_faults = 0
        self.generation = 0
        self.closed = False
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                outer._get(self)

            def do_POST(self) -> None:
                if "/leases" in self.path:
                    outer._put_lease(self)
                else:
                    outer._post(self)

            def do_PUT(self) -> None:
                outer._put_lease(self)

            def do_PATCH(self) -> None:
                outer._label(self)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def kubeconfig(self, directory: Path) -> str:
        path = directory / "kubeconfig"
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "c",
                    "clusters": [{"name": "c", "cluster": {"server": self.url}}],
                    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                    "users": [{"name": "u", "user": {"token": "secret"}}],
                }
            )
        )
        return str(path)

    def close(self) -> None:
        with self.lock:
            self.closed = True
            self.lock.notify_all()
        self.server.shutdown()
        self.server.server_close()

    # --- what a test does ---

    @staticmethod
    def _key(thing: dict[str, Any]) -> str:
        metadata = thing["metadata"]
        return (
            f"{metadata['namespace']}/{metadata['name']}"
            if "namespace" in metadata
            else str(metadata["name"])
        )

    def put(self, resource: str, *things: dict[str, Any]) -> None:
        with self.lock:
            for thing in things:
                kind = "MODIFIED" if self._key(thing) in self.objects[resource] else "ADDED"
                self._store(resource, kind, thing)

    def _store(self, resource: str, kind: str, thing: dict[str, Any]) -> None:
        self.version += 1
        thing = json.loads(json.dumps(thing))
        thing["metadata"]["resourceVersion"] = str(self.version)
        if kind == "DELETED":
            del self.objects[resource][self._key(thing)]
        else:
            self.objects[resource][self._key(thing)] = thing
        self.log.append((self.version, resource, kind, thing))
        self.lock.notify_all()

    def delete(self, resource: str, key: str) -> None:
        with self.lock:
            self._store(resource, "DELETED", self.objects[resource][key])

    def get(self, resource: str, key: str) -> dict[str, Any]:
        with self.lock:
            return self.objects[resource][key]

    def set_phase(self, key: str, phase: str) -> None:
        thing = json.loads(json.dumps(self.get("pods", key)))
        thing["status"]["phase"] = phase
        self.put("pods", thing)

    def break_watches(self, *, forget: bool = False) -> None:
        """End all watches; with `forget`, their old versions are gone afterwards (410)."""
        with self.lock:
            self.generation += 1
            if forget:
                self.version += 10
                self.oldest = self.version
                self.log.clear()
            self.lock.notify_all()

    @contextlib.contextmanager
    def deaf(self) -> Iterator[None]:
        """What happens inside is never shown by a watch: only a new list shows it."""
        yield
        self.break_watches(forget=True)

    # --- what it answers ---

    def _answer(self, request: http.server.BaseHTTPRequestHandler, status: int, data: dict[str, Any]) -> None:
        body = json.dumps(data).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def _get(self, request: http.server.BaseHTTPRequestHandler) -> None:
        url = urllib.parse.urlsplit(request.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        if "/leases/" in url.path:
            with self.lock:
                found = self.objects["leases"].get(self._lease_key(url.path))
            self._answer(request, 200 if found else 404, found or {"message": "not found"})
            return
        parts = url.path.removeprefix("/api/v1/").split("/")
        if parts[-1] == "configmaps":
            assert query["fieldSelector"] == "metadata.name=quotas"
            parts = ["configmaps"]
        if len(parts) == 1 and query.get("watch"):
            self._watch(request, parts[0], int(query["resourceVersion"]))
        elif len(parts) == 1:
            with self.lock:
                if self.list_faults:
                    self.list_faults -= 1
                    self._answer(request, 500, {"message": "no list today"})
                    return
                every, version = list(self.objects[parts[0]].values()), self.version
            start, limit = int(query.get("continue", "0")), int(query.get("limit", "500"))
            metadata = {"resourceVersion": str(version)}
            if start + limit < len(every):
                metadata["continue"] = str(start + limit)
            self._answer(request, 200, {"metadata": metadata, "items": every[start : start + limit]})
        else:
            found = self.objects["pods"].get(f"{parts[1]}/{parts[3]}")
            self._answer(request, 200 if found else 404, found or {"message": "not found"})

    @staticmethod
    def _lease_key(path: str) -> str:
        parts = path.split("/namespaces/")[1].split("/")
        return f"{parts[0]}/{parts[2]}"

    def _put_lease(self, request: http.server.BaseHTTPRequestHandler) -> None:
        wanted = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        with self.lock:
            old = self.objects["leases"].get(self._key(wanted))
            version = old["metadata"]["resourceVersion"] if old else None
            if wanted["metadata"].get("resourceVersion") != version:
                self._answer(request, 409, {"message": "changed"})
                return
            self._store("leases", "MODIFIED" if old else "ADDED", wanted)
        self._answer(request, 200, wanted)

    def _label(self, request: http.server.BaseHTTPRequestHandler) -> None:
        patch = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        assert request.headers["Content-Type"] == "application/merge-patch+json"
        parts = request.path.removeprefix("/api/v1/").split("/")
        with self.lock:
            found = self.objects["pods"].get(f"{parts[1]}/{parts[3]}")
            if found is not None:
                thing = json.loads(json.dumps(found))
                thing["metadata"].setdefault("labels", {}).update(patch["metadata"]["labels"])
                self._store("pods", "MODIFIED", thing)
        self._answer(request, 200 if found else 404, {})

    def _watch(self, request: http.server.BaseHTTPRequestHandler, resource: str, version: int) -> None:
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Connection", "close")
        request.end_headers()
        request.close_connection = True
        with self.lock:
            generation = self.generation
            if version < self.oldest:
                event = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}
                request.wfile.write(json.dumps(event).encode() + b"\n")
                return
            sent = version
            while not self.closed and generation == self.generation:
                news = [entry for entry in self.log if entry[0] > sent and entry[1] == resource]
                try:
                    for number, _, kind, thing in news:
                        request.wfile.write(json.dumps({"type": kind, "object": thing}).encode() + b"\n")
                        sent = number
                    request.wfile.flush()
                except OSError:
                    return
                self.lock.wait(0.5)

    def _post(self, request: http.server.BaseHTTPRequestHandler) -> None:
        binding = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        parts = request.path.removeprefix("/api/v1/").split("/")
        key = f"{parts[1]}/{parts[3]}"
        with self.lock:
            self.bindings.append(binding)
            fault = self.binding_faults.pop(0) if self.binding_faults else None
            if isinstance(fault, int):
                self._answer(request, fault, {"message": "injected"})
                return
            status, message = self._bind(key, binding) if fault != "cut" else (0, "")
        if fault:
            request.close_connection = True
            return
        self._answer(request, status, {"message": message})

    def _bind(self, key: str, binding: dict[str, Any]) -> tuple[int, str]:
        found = self.objects["pods"].get(key)
        if found is None:
            return 404, "not found"
        if binding["metadata"].get("uid", found["metadata"]["uid"]) != found["metadata"]["uid"]:
            return 409, "another UID"
        if found["spec"].get("nodeName"):
            return 409, "already assigned"
        thing = json.loads(json.dumps(found))
        thing["spec"]["nodeName"] = binding["target"]["name"]
        thing["metadata"].setdefault("annotations", {}).update(binding["metadata"].get("annotations", {}))
        self._store("pods", "MODIFIED", thing)
        return 201, "bound"


class Served:
    """The command in a process of its own."""

    def __init__(self, *options: str) -> None:
        arguments = [
            sys.executable,
            "-m",
            "scheduler_ext.main",
            "--bind-address",
            "127.0.0.1",
            "--port",
            "0",
            "--assume-seconds",
            "0.4",
            *options,
        ]
        self.process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.log: list[str] = []
        while not (found := re.search(r"serving on (https?://[^,]+),", "".join(self.log[-1:]))):
            line = self.process.stderr.readline()
            assert line, "".join(self.log)
            self.log.append(line)
        self.url = found[1]

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        _, rest = self.process.communicate(timeout=20)
        self.log.append(rest)
        return self.process.returncode
