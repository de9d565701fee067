"""An API server for the daemon's tests: pods of the node, patches and events over real HTTP, faults on demand."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path
from typing import Any

from tests.manager.manager_http import QuietHandler, Server


class FakeApi:
    """Pods of the node, patches and events, over real HTTP."""

    def __init__(self) -> None:
        self.pods: list[dict[str, Any]] = []
        self.patches: list[tuple[str, dict[str, Any]]] = []
        self.events: list[dict[str, Any]] = []
        self.deletions: list[tuple[str, dict[str, Any]]] = []
        self.failing = False
        self.delay_s = 0.0
        self._changed = threading.Condition()
        self._log: list[dict[str, Any]] = []
        fake = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                if fake.failing:
                    return self.reply(500, {"message": "the store is away"})
                if "watch=true" in self.path:
                    return fake._stream(self)
                time.sleep(fake.delay_s)
                return self.reply(200, {"metadata": {"resourceVersion": "1"}, "items": fake.pods})

            def _body(self) -> dict[str, Any]:
                return json.loads(self.rfile.read(int(self.headers["Content-Length"])))  # type: ignore[no-any-return]

            def do_PATCH(self) -> None:
                body = self._body()
                if fake.failing:
                    return self.reply(500, {"message": "the store is away"})
                fake.patches.append((self.path, body))
                return self.reply(200, {})

            def do_DELETE(self) -> None:
                fake.deletions.append((self.path, self._body()))
                return self.reply(200, {})

            def do_POST(self) -> None:
                body = self._body()
                if fake.failing:
                    return self.reply(500, {"message": "the store is away"})
                fake.events.append(body)
                return self.reply(201, {})

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = self._server.url
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def _stream(self, handler: QuietHandler) -> None:
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        seen = len(self._log)
        with contextlib.suppress(OSError):
            while True:
                with self._changed:
                    if len(self._log) == seen:
                        self._changed.wait(0.5)
                    new, seen = self._log[seen:], len(self._log)
                for event in new or [{"type": "BOOKMARK", "object": {}}]:
                    handler.wfile.write(json.dumps(event).encode() + b"\n")
                handler.wfile.flush()

    def delete(self, item: dict[str, Any]) -> None:
        with self._changed:
            self.pods.remove(item)
            self._log.append({"type": "DELETED", "object": item})
            self._changed.notify_all()

    def kubeconfig(self, directory: Path) -> Path:
        path = directory / "kubeconfig"
        path.write_text(
            json.dumps(
                {
                    "current-context": "c",
                    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                    "clusters": [{"name": "c", "cluster": {"server": self.url}}],
                    "users": [{"name": "u", "user": {"token": "secret"}}],
                }
            )
        )
        return path

    def node(self) -> dict[str, Any]:
        """The last patch of the node."""
        found = [body for path, body in self.patches if "/nodes/" in path]
        return found[-1]["metadata"] if found else {}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
