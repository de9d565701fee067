"""A cluster for the extender's benchmark: nodes, pods that run there, and the API server that lists them."""

from __future__ import annotations

import http.server
import json
import random
import threading
import urllib.parse
from typing import Any

import orjson

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


class Feed:
    """An API server that lists nodes and pods, whose watches stay silent, and that counts what is written to it."""

    def __init__(self, nodes: list[dict[str, Any]], pods: list[dict[str, Any]]) -> None:
        feed = self
        self.stop = threading.Event()
        self.writes = 0

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                url = urllib.parse.urlsplit(self.path)
                query = dict(urllib.parse.parse_qsl(url.query))
                if "watch" in query:
                    self.send_response(200)
                    self.send_header("Connection", "close")
                    self.end_headers()
                    self.wfile.flush()
                    feed.stop.wait()
                    self.close_connection = True
                    return
                start, limit = int(query.get("continue", 0)), int(query["limit"])
                every = nodes if url.path.endswith("/nodes") else pods
                metadata = {"resourceVersion": "1"} | (
                    {"continue": str(start + limit)} if start + limit < len(every) else {}
                )
                body = orjson.dumps({"metadata": metadata, "items": every[start : start + limit]})
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                feed.writes += 1
                self.send_response(201)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.stop.set()
        self.server.shutdown()
        self.server.server_close()

    def kubeconfig(self) -> dict[str, Any]:
        return {
            "apiVersion": "v1", "kind": "Config", "current-context": "c", "users": [{"name": "u", "user": {}}],
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.server.server_address[1]}"}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }  # fmt: skip
