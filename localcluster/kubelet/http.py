"""Kubelet's HTTP endpoint on loopback: /pods and container logs for who holds the token, /healthz for all."""

from __future__ import annotations

import hmac
import json
import urllib.parse
from collections.abc import Callable
from typing import Any

from localcluster import web
from localcluster.kubelet import execution

JsonObject = dict[str, Any]
LogReader = Callable[[str, str, str, bool], str | None]
# Namespace, pod, container and command; raises LookupError with a message. How to start it, and whether it must end.
Executor = Callable[[str, str, str, list[str]], tuple[execution.Start, Callable[[], bool]]]


class KubeletHttp:
    """Serves on an ephemeral port, or on `port` so that a restarted kubelet keeps its address."""

    def __init__(
        self, token: str, pods: Callable[[], list[JsonObject]], read_log: LogReader, execute: Executor, port: int = 0
    ) -> None:
        outer = self
        self._token = token
        self._pods = pods
        self._read_log = read_log
        self._executor = execute

        class Handler(web.Handler):
            def do_GET(self) -> None:  # noqa: N802  # the library's name
                if outer._execute(self):
                    return
                self.reply(*outer._answer(self.path, self.headers.get("Authorization", "")))

        self._listener = web.Listener(port, Handler, "kubelet http")
        self.port = self._listener.port
        self.start, self.stop = self._listener.start, self._listener.stop

    def _execute(self, handler: web.Handler) -> bool:
        """Whether the request was for a command in a container, which is over then."""
        address = urllib.parse.urlsplit(handler.path)
        parts = address.path.strip("/").split("/")
        if len(parts) != 4 or parts[0] != "exec" or not self._knows(handler.headers.get("Authorization", "")):
            return False
        found = urllib.parse.parse_qs(address.query)
        try:
            start, over = self._executor(parts[1], parts[2], parts[3], found.get("command", []))
            headers = execution.accept(handler.headers)
        except (LookupError, execution.NoWebSocket) as error:
            handler.reply(400, "text/plain", str(error.args[0]).encode())
            return True
        handler.close_connection = True
        handler.send_response(101)
        for name, value in headers:
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.flush()
        query = {name: values[0] for name, values in found.items()}
        execution.Session(handler.connection, query, over).run(start)
        return True

    def _knows(self, authorization: str) -> bool:
        return hmac.compare_digest(authorization.encode(), f"Bearer {self._token}".encode())

    def _answer(self, path: str, authorization: str) -> tuple[int, str, bytes]:
        address = urllib.parse.urlsplit(path)
        if address.path == "/healthz":
            return 200, "text/plain", b"ok"
        if not self._knows(authorization):
            return 401, "text/plain", b"Unauthorized"
        if address.path == "/pods":
            document = {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": self._pods()}
            return 200, "application/json", json.dumps(document).encode()
        parts = address.path.strip("/").split("/")
        if len(parts) == 4 and parts[0] == "containerLogs":
            query = dict(urllib.parse.parse_qsl(address.query))
            text = self._read_log(parts[1], parts[2], parts[3], query.get("previous") == "true")
            if text is None:
                return 404, "text/plain", f"container {parts[3]} of pod {parts[2]} has no log".encode()
            if query.get("tailLines", "").isdigit():
                count = int(query["tailLines"])
                text = "".join(text.splitlines(keepends=True)[-count:]) if count else ""
            return 200, "text/plain", text.encode()
        return 404, "text/plain", b"404 page not found"
