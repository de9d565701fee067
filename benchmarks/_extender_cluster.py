"""A cluster for the extender's benchmark: nodes, pods that run there, and the API server that lists them."""

from __future__ import annotations

import copy
import http.server
import json
import queue
import random
import ssl
import threading
import urllib.parse
from typing import Any

import orjson

from localcluster.certificates import Certificate
from vcuda.spec import inventory
from vcuda.spec.inventory import Card
from vcuda.spec.names import Names
from vcuda.spec.units import BLOCK_BYTES

NAMES = Names()
CARD_BLOCKS = 320


def running_pods(names: list[str], cards: int, count: int) -> list[dict[str, Any]]:
    """`count` pods that hold 5 cores each, spread over all cards."""
    pods = []
    for number in range(count):
        name = names[number % len(names)]
        card = f"GPU-{name}-{number // len(names) % cards}"
        limits = {NAMES.core: "5", NAMES.memory: "8"}
        placement = json.dumps({"version": 1, "containers": {"main": [[card, 5, 8]]}})
        pods.append(
            {
                "metadata": {
                    "name": f"running-{number}", "namespace": "default", "uid": f"running-{number}",
                    "annotations": {NAMES.placement: placement},
                },
                "spec": {"nodeName": name, "containers": [{"name": "main", "resources": {"limits": limits}}]},
                "status": {"phase": "Running"},
            }
        )  # fmt: skip
    return pods


def node(name: str, dice: random.Random, count: int) -> dict[str, Any]:
    model = dice.choice(("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA L40S"))
    uuids = [f"GPU-{name}-{index}" for index in range(count)]
    cards = tuple(
        Card(
            uuid,
            index,
            model,
            CARD_BLOCKS * BLOCK_BYTES,
            index // 4,
            True,
            tuple((peer, 4) for peer in uuids if peer != uuid),
        )
        for index, uuid in enumerate(uuids)
    )
    return {
        "metadata": {"name": name, "annotations": {NAMES.inventory: inventory.encode(cards)}},
        "status": {"allocatable": {"cpu": "128", "memory": "1024Gi"}},
    }


def waiting_pod(name: str, limits: dict[str, str], requests: dict[str, str]) -> dict[str, Any]:
    """A pod of a Deployment as kube-scheduler sends it: 2 KB, most of which is nobody's business here."""
    token = f"kube-api-access-{name[-5:]}"
    container = {
        "name": "main", "image": "registry.example/team/trainer:2026.11", "command": ["python", "-m", "trainer"],
        "env": [{"name": f"SETTING_{number}", "value": f"value-{number}"} for number in range(8)],
        "resources": {"limits": limits, "requests": requests}, "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File", "imagePullPolicy": "IfNotPresent",
        "volumeMounts": [{"name": token, "readOnly": True, "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}],
    }  # fmt: skip
    sources = [
        {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {
            "downwardAPI": {
                "items": [{"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}]
            }
        },
    ]
    owner = {
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "trainer-7d4b9c6f5", "uid": "1b2c3d4e-0000-4000-8000-000000000000",
        "controller": True, "blockOwnerDeletion": True,
    }  # fmt: skip
    return {
        "metadata": {
            "name": name, "generateName": "trainer-7d4b9c6f5-", "namespace": "default", "uid": name, "resourceVersion": "1000",
            "creationTimestamp": "2026-01-01T00:00:00Z", "labels": {"app": "trainer", "pod-template-hash": "7d4b9c6f5"},
            "ownerReferences": [owner],
        },
        "spec": {
            "volumes": [{"name": token, "projected": {"sources": sources, "defaultMode": 420}}], "containers": [container],
            "restartPolicy": "Always", "terminationGracePeriodSeconds": 30, "dnsPolicy": "ClusterFirst", "serviceAccountName": "default",
            "serviceAccount": "default", "securityContext": {}, "schedulerName": "default-scheduler", "priority": 0,
            "tolerations": [
                {"key": f"node.kubernetes.io/{what}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
                for what in ("not-ready", "unreachable")
            ],
            "enableServiceLinks": True, "preemptionPolicy": "PreemptLowerPriority",
        },
        "status": {"phase": "Pending", "qosClass": "Burstable"},
    }  # fmt: skip


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, handler: type, certificate: Certificate) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificate.certificate, certificate.key)

    def get_request(self) -> tuple[Any, Any]:
        connection, address = super().get_request()
        return self._context.wrap_socket(connection, server_side=True), address


class Feed:
    """An API server with TLS that lists nodes and pods, shows pods that are created and bound, and counts what is written to it."""

    def __init__(self, nodes: list[dict[str, Any]], pods: list[dict[str, Any]], certificate: Certificate) -> None:
        feed = self
        self.stop = threading.Event()
        self.writes = self.lists = 0
        self._version = 1000
        self._certificate = certificate
        self._shown: dict[str, dict[str, Any]] = {}
        self._events: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def _watch(self, kind: str) -> None:
                self.send_response(200)
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.flush()
                self.close_connection = True
                if kind != "pods":
                    feed.stop.wait()
                while (event := feed._events.get()) is not None:
                    self.wfile.write(event)

            def do_GET(self) -> None:
                url = urllib.parse.urlsplit(self.path)
                query = dict(urllib.parse.parse_qsl(url.query))
                kind = url.path.rpartition("/")[2]
                if "watch" in query:
                    self._watch(kind)
                    return
                start, limit = int(query.get("continue", 0)), int(query["limit"])
                every = nodes if kind == "nodes" else pods
                feed.lists += start + limit >= len(every)
                metadata = {"resourceVersion": str(feed._version)} | (
                    {"continue": str(start + limit)} if start + limit < len(every) else {}
                )
                self._answer(200, orjson.dumps({"metadata": metadata, "items": every[start : start + limit]}))

            def _answer(self, status: int, body: bytes) -> None:
                # In one piece, as an API server sends it.
                head = f"HTTP/1.1 {status} x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                self.wfile.write(head.encode() + body)

            def do_POST(self) -> None:
                binding = orjson.loads(self.rfile.read(int(self.headers["Content-Length"])))
                feed.writes += 1
                self._answer(201, b'{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Success","code":201}')
                pod = feed._shown.get(binding["metadata"].get("uid"))
                if pod is not None:
                    pod = copy.deepcopy(pod)
                    pod["metadata"]["annotations"] = binding["metadata"].get("annotations", {})
                    pod["spec"]["nodeName"] = binding["target"]["name"]
                    feed.show("MODIFIED", pod)

        self.server = _Server(Handler, certificate)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def show(self, event: str, pod: dict[str, Any]) -> None:
        """Send a pod down the watch, at the next version: an older one than the last is an etcd that was restored."""
        self._version += 1
        pod["metadata"]["resourceVersion"] = str(self._version)
        self._shown[pod["metadata"]["uid"]] = pod
        self._events.put(orjson.dumps({"type": event, "object": pod}) + b"\n")

    def close(self) -> None:
        self.stop.set()
        self._events.put(None)
        self.server.shutdown()
        self.server.server_close()

    @property
    def port(self) -> int:
        return int(self.server.server_address[1])

    def kubeconfig(self) -> dict[str, Any]:
        cluster = {
            "server": f"https://127.0.0.1:{self.port}",
            "certificate-authority": str(self._certificate.certificate),
        }
        return {
            "apiVersion": "v1", "kind": "Config", "current-context": "c", "users": [{"name": "u", "user": {}}],
            "clusters": [{"name": "c", "cluster": cluster}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }  # fmt: skip
