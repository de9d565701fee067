"""A small HTTP server for the daemon's tests."""

from __future__ import annotations

import http.server
import json
from typing import Any


class QuietHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else every answer on a kept connection takes 40 ms

    def log_message(self, *_: object) -> None:
        return

    def reply(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, *_: object) -> None:
        return  # clients that end their watch

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"
