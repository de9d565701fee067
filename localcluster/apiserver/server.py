"""Runs the stand-in API server on a loopback port in a thread of its own, and writes its kubeconfig."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import ssl
import threading
from pathlib import Path

import uvicorn
import yaml

from localcluster.apiserver.app import ApiServer
from localcluster.apiserver.operations import Operations
from localcluster.certificates import Certificate

_START_SECONDS = 15.0


class ServerFailure(Exception):
    """The server can't start; the message says why."""


class Server:
    """The API server as the other parts see it: a URL and a kubeconfig. With `certificate` it speaks TLS."""

    def __init__(
        self, directory: Path, *, port: int = 0, certificate: Certificate | None = None, kubelet_token: str = "",
        history: int = 2048,
    ) -> None:  # fmt: skip
        self.token = secrets.token_urlsafe(24)
        self.kubeconfig = directory / "kubeconfig"
        self._certificate = certificate
        # The protocol by name, else asyncio leaves TCP_NODELAY off and answers wait for delayed acknowledgements.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(("127.0.0.1", port))
        except OSError as error:
            raise ServerFailure(
                f"port {port} on 127.0.0.1 can't be used: {error.strerror}; choose another"
            ) from error
        self.url = f"{'https' if certificate else 'http'}://127.0.0.1:{self._socket.getsockname()[1]}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._api = ApiServer(Operations(history), self.token, kubelet_token)
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=self._run, name="apiserver", daemon=True)
        self._ready = threading.Event()

    def start(self) -> None:
        """Serve, and write the kubeconfig (0600). Raises ServerFailure."""
        self._thread.start()
        if not self._ready.wait(_START_SECONDS):
            raise ServerFailure(f"the API server did not start within {_START_SECONDS:.0f} s")
        self._write_kubeconfig()

    def stop(self) -> None:
        if self._loop is not None and self._server is not None:
            self._server.should_exit = True
            self._loop.call_soon_threadsafe(self._api.stop_watches)
            self._thread.join(timeout=10)
        self._socket.close()

    def _run(self) -> None:
        config = uvicorn.Config(
            self._api.app, log_level="critical", access_log=False, lifespan="off", timeout_graceful_shutdown=1,
            ssl_certfile=str(self._certificate.certificate) if self._certificate else None,
            ssl_keyfile=str(self._certificate.key) if self._certificate else None,
            ssl_version=ssl.PROTOCOL_TLS_SERVER, ws="none",
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        asyncio.run(self._serve(self._server))

    async def _serve(self, server: uvicorn.Server) -> None:
        self._loop = asyncio.get_running_loop()
        serving = asyncio.ensure_future(server.serve(sockets=[self._socket]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        self._ready.set()
        await serving

    def _write_kubeconfig(self) -> None:
        cluster: dict[str, str] = {"server": self.url}
        if self._certificate is not None:
            cluster["certificate-authority"] = str(self._certificate.certificate)
        document = {
            "apiVersion": "v1", "kind": "Config", "current-context": "local",
            "clusters": [{"name": "local", "cluster": cluster}],
            "users": [{"name": "local", "user": {"token": self.token}}],
            "contexts": [{"name": "local", "context": {"cluster": "local", "user": "local", "namespace": "default"}}],
        }  # fmt: skip
        descriptor = os.open(self.kubeconfig, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            yaml.safe_dump(document, file, sort_keys=False)
