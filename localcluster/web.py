"""What the stand-ins' HTTP servers share: a thread per connection, silence on stderr, an end that closes them all."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
from typing import Any


class Listener(http.server.ThreadingHTTPServer):
    """Serves on a loopback port from `start` to `stop`. Raises OSError for a port that can't be used."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, handler: type[Handler], name: str) -> None:
        self.connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), handler)
        self.port: int = self.server_address[1]
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Nobody is answered any more, on kept connections neither."""
        if self._thread.ident is not None:
            self.shutdown()
        self.server_close()
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that are killed leave broken pipes; nobody needs to read about them."""


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection, kept between requests."""

    server: Listener
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else answers on a kept connection wait for delayed acknowledgements
    wbufsize = 65536

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not worth a line."""

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        super().finish()

    def reply(self, status: int, kind: str, data: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            self.wfile.flush()
        except OSError:  # a client that did not wait
            self.close_connection = True
