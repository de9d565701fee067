"""The stand-in API server's HTTP face on loopback: paths, tokens, watches, errors as Status, and its kubeconfig."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import select
import socket
import ssl
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from localcluster import web
from localcluster.apiserver import errors, proxy, resources, selectors, table
from localcluster.apiserver.faults import Fault, Hook, Request
from localcluster.apiserver.logs import exec_path, fetch_log
from localcluster.apiserver.operations import Operations
from localcluster.apiserver.pages import Pages
from localcluster.apiserver.resources import Target
from localcluster.apiserver.store import Store
from localcluster.certificates import Certificate

JsonObject = dict[str, Any]
_OPEN_PATHS = ("/healthz", "/livez", "/readyz")
_MAX_BODY_BYTES = 3 * 1024 * 1024  # the real server's limit


class ServerFailure(Exception):
    """The server can't start; the message says why."""


@dataclass(frozen=True)
class Answer:
    """What is sent for a request that is no watch."""

    status: int
    data: bytes
    kind: str = "application/json"


@dataclass(frozen=True)
class Tunnel:
    """A request that kubelet answers, on the same connection from then on: its port, its path, and our token for it."""

    port: int
    path: str
    token: str


def _json(content: Any, status: int = 200) -> Answer:
    return Answer(status, orjson.dumps(content))


def _refusal(error: errors.ApiError) -> Answer:
    return _json(error.status(), error.code)


def _since(query: Mapping[str, str]) -> int | None:
    """The version that a watch follows; None: it begins with what is there."""
    version = query.get("resourceVersion", "")
    try:
        float(query.get("timeoutSeconds") or 0)
        return int(version) if version not in ("", "0") else None
    except ValueError:
        raise errors.bad_request("resourceVersion and timeoutSeconds must be numbers") from None


def _number(words: str | None) -> int:
    if words and not words.isdecimal():
        raise errors.bad_request("limit must be a number")
    return int(words or 0)


class Server:
    """The API server as the other parts see it: a URL and a kubeconfig. With `certificate` it speaks TLS.

    `hook` sees every request first, and what it answers is what happens. `control` answers paths
    that no API server has. `kubelet_token` is what the server shows
    kubelet to read logs.
    """

    def __init__(
        self, directory: Path | None = None, *, port: int = 0, certificate: Certificate | None = None,
        kubelet_token: str = "", history: int = 2048, token: str = "",
    ) -> None:  # fmt: skip
        self.token = token or secrets.token_urlsafe(24)
        self._kubelet_token = kubelet_token
        self.hook: Hook = lambda _: None
        self.control: Callable[[Request], JsonObject | None] = lambda _: None
        self.operations = Operations(history)
        self._pages = Pages()
        self._directory = directory
        self._certificate: Certificate | None = None
        try:
            self._listener = web.Listener(port, type("Handler", (_Handler,), {"outer": self}), "apiserver")
        except OSError as error:
            raise ServerFailure(f"port {port} on 127.0.0.1 can't be used: {error.strerror}; choose another") from error
        self.url = f"http://127.0.0.1:{self._listener.port}"
        if certificate is not None:
            self.serve_tls(certificate)
        self.stopping = False

    @property
    def kubeconfig(self) -> Path:
        assert self._directory is not None
        return self._directory / "kubeconfig"

    def start(self) -> None:
        """Serve, and write the kubeconfig if there is a folder for it (0600)."""
        self._listener.start()
        if self._directory is not None:
            self.write_kubeconfig(self.kubeconfig)

    def serve_tls(self, certificate: Certificate) -> None:
        """From now on every connection is TLS."""
        self._certificate = certificate
        self.url = self.url.replace("http:", "https:")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.certificate, certificate.key)
        # The handshake is the first read of the connection's own thread: a slow client holds up nobody.
        self._listener.socket = context.wrap_socket(
            self._listener.socket, server_side=True, do_handshake_on_connect=False
        )

    def stop(self) -> None:
        """End the server and every connection to it."""
        self.stopping = True
        with self.operations.lock:
            self.operations.lock.notify_all()
        self._listener.stop()

    # --- what a test does past HTTP: nothing is validated, as what another version of the API server may hold ---
    def store(self, plural: str) -> Store:
        return next(store for store in self.operations.stores.values() if store.resource == plural)

    def put(self, plural: str, *items: JsonObject) -> None:
        for item in items:
            self.store(plural).put(item)

    def find(self, plural: str, key: str) -> JsonObject:
        """A copy of the object "namespace/name" (or "name"). Raises ApiError."""
        namespace, _, name = key.rpartition("/")
        return self.store(plural).get(namespace, name)

    def remove(self, plural: str, key: str) -> None:
        """Delete an object at once. Raises KeyError."""
        namespace, _, name = key.rpartition("/")
        self.store(plural).delete(namespace, name)

    def restore(self, version: int) -> None:
        """All that is stored goes back to an earlier version, as far as the history reaches; watches end."""
        with self.operations.lock:
            for store in self.operations.stores.values():
                store.restore(version)
            self.operations.clock.version = version

    def break_watches(self, *plurals: str, forget: bool = False) -> None:
        """End the open watches of these resources, by default of all; with `forget`, their versions are gone (410)."""
        for resource, store in self.operations.stores.items():
            if not plurals or resource.plural in plurals:
                store.break_watches(forget=forget)

    def answer(
        self, request: Request, words: str = "", asked: int | None = None
    ) -> Answer | Tunnel | Iterator[JsonObject | None]:
        """Carry a request out: the answer, or the events of a watch (None: nothing happened for a while).

        `words` is its query as it came, where names may be repeated; `asked`: how often watches had been broken when
        it came.
        """
        try:
            if request.path in _OPEN_PATHS:
                return Answer(200, b"ok", "text/plain")
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
                raise errors.ApiError(401, "Unauthorized", "the bearer token is missing or wrong; use the kubeconfig's")
            own = self.control(request)
            if own is not None:
                return _json(own)
            document = resources.discovery(request.path) if request.method == "GET" else None
            if document is not None:
                return _json(document)
            passed_on = proxy.forward(self.operations, request)
            if passed_on is not None:
                return Answer(*passed_on)
            target = resources.parse_path(request.path)
            if target.subresource == "exec":
                return Tunnel(*exec_path(self.operations, target, request.query, words), self._kubelet_token)
            if request.query.get("dryRun"):
                raise errors.bad_request("dryRun is not supported by this stand-in API server")
            if request.method == "GET":
                return self._read(request, target, asked)
            with self.operations.lock:
                return self._write(request, target)
        except errors.ApiError as error:
            return _refusal(error)

    def _read(self, request: Request, target: Target, asked: int | None) -> Answer | Iterator[JsonObject | None]:
        query = request.query
        if target.subresource == "log":
            text = fetch_log(self.operations, target, query, self._kubelet_token)
            return Answer(200, text.encode(), "text/plain")
        as_table = "as=Table" in request.headers.get("accept", "")
        if target.name:
            item = self.operations.get(target)
            return _json(table.render([item], "", target.resource) if as_table else item)
        selector = selectors.compile_selectors(query.get("labelSelector", ""), query.get("fieldSelector", ""))
        store = self.operations.stores[target.resource]
        if request.watches:
            bookmarks = query.get("allowWatchBookmarks") == "true" and not as_table
            found = store.watch(_since(query), target.namespace, selector, bookmarks=bookmarks, asked=asked)
            return self._events(found, target, as_table)
        limit, begun = _number(query.get("limit")), query.get("continue", "")
        with self.operations.lock:
            if begun and not as_table:
                items, metadata = self._pages.go_on(begun, limit)
            else:
                present, version = store.list(target.namespace, selector), str(store.version)
                items, metadata = self._pages.begin(present, version, 0 if as_table else limit)
        if as_table:
            return _json(table.render(list(items), metadata["resourceVersion"], target.resource))
        return _json({
            "kind": f"{target.resource.kind}List", "apiVersion": target.resource.api_version,
            "metadata": metadata, "items": items,
        })  # fmt: skip

    @staticmethod
    def _events(found: Iterator[JsonObject | None], target: Target, as_table: bool) -> Iterator[JsonObject | None]:
        try:
            for event in found:
                if event is not None and event["type"] == "BOOKMARK":
                    kind = {"kind": target.resource.kind, "apiVersion": target.resource.api_version}
                    yield {**event, "object": {**kind, **event["object"]}}
                elif as_table and event is not None:
                    yield {**event, "object": table.render([event["object"]], "", target.resource)}
                else:
                    yield event
        except errors.ApiError as error:
            yield {"type": "ERROR", "object": error.status()}

    def _write(self, request: Request, target: Target) -> Answer:
        operations, body = self.operations, request.body
        if request.method == "POST":
            if target.subresource == "binding":
                return _json(operations.bind(target, body), 201)
            if target.subresource == "eviction":
                operations.evict(target, body or {})
                return _json({"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201}, 201)
            if not target.name:
                return _json(operations.create(target, body), 201)
        elif target.name and request.method == "PUT":
            return _json(operations.replace(target, body))
        elif target.name and request.method == "PATCH":
            return _json(operations.patch(target, body, request.headers.get("content-type", "")))
        elif target.name and request.method == "DELETE" and not target.subresource:
            options = dict(body) if isinstance(body, dict) else {}
            grace = request.query.get("gracePeriodSeconds")
            if grace is not None and "gracePeriodSeconds" not in options:
                options["gracePeriodSeconds"] = int(grace) if grace.isdigit() else grace
            return _json(operations.delete(target, options))
        raise errors.ApiError(405, "MethodNotAllowed", f"{request.method} is not allowed on {request.path}")

    def write_kubeconfig(self, path: Path) -> None:
        """As JSON, which is YAML."""
        cluster: dict[str, str] = {"server": self.url}
        if self._certificate is not None:
            cluster["certificate-authority"] = str(self._certificate.certificate)
        document = {
            "apiVersion": "v1", "kind": "Config", "current-context": "local",
            "clusters": [{"name": "local", "cluster": cluster}],
            "users": [{"name": "local", "user": {"token": self.token}}],
            "contexts": [{"name": "local", "context": {"cluster": "local", "user": "local", "namespace": "default"}}],
        }  # fmt: skip
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)


class _Handler(web.Handler):
    outer: Server

    def do_GET(self) -> None:  # noqa: N802  # the library's name
        outer = self.outer
        try:
            request = self._request()
        except errors.ApiError as error:
            self._send(_refusal(error))
            return
        asked = outer.operations.clock.breaks  # what is broken from here on began too early to know of the new hook
        fault = outer.hook(request) or Fault()
        time.sleep(min(fault.stalled_s, request.timeout_s))
        if fault.stalled_s >= request.timeout_s:
            fault = Fault(504, message="the request's timeout is over")
        words = urllib.parse.urlsplit(self.path).query
        answer = outer.answer(request, words, asked) if fault.status is None or fault.done else None
        time.sleep(fault.late_s)
        if fault.status == 0:
            self.close_connection = True
        elif fault.status is not None:
            injected = _refusal(errors.ApiError(fault.status, "Injected", fault.message))
            self._send(injected if fault.body is None else Answer(fault.status, fault.body))
        elif isinstance(answer, Answer):
            self._send(answer)
        elif isinstance(answer, Tunnel):
            self._tunnel(answer)
        elif answer is not None:
            self._stream(answer, request)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815  # the library's names

    def _request(self) -> Request:
        """Raises ApiError for a body that is too long or no JSON."""
        url = urllib.parse.urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        data = self.rfile.read(length)
        if length > _MAX_BODY_BYTES:
            raise errors.ApiError(413, "RequestEntityTooLarge", f"the body exceeds {_MAX_BODY_BYTES} bytes")
        try:
            body = orjson.loads(data) if data else None
        except orjson.JSONDecodeError as error:
            raise errors.bad_request(f"the body is not JSON: {error}") from None
        query = dict(urllib.parse.parse_qsl(url.query))
        path = urllib.parse.unquote(url.path)
        return Request(self.command, path, query, self.headers, self.client_address[1], body)

    def _send(self, answer: Answer) -> None:
        self.reply(answer.status, answer.kind, answer.data)

    def _tunnel(self, tunnel: Tunnel) -> None:
        """Pass the request on to kubelet with our token, then bytes both ways until one side has ended."""
        kept = {name: value for name, value in self.headers.items() if name.lower() not in ("authorization", "host")}
        head = [f"GET {tunnel.path} HTTP/1.1", "Host: kubelet", f"Authorization: Bearer {tunnel.token}"]
        head += [f"{name}: {value}" for name, value in kept.items()]
        self.close_connection = True
        try:
            with socket.create_connection(("127.0.0.1", tunnel.port), timeout=10) as kubelet:
                kubelet.settimeout(None)
                kubelet.sendall("\r\n".join([*head, "", ""]).encode("latin-1"))
                _pass_on(self.connection, kubelet, lambda: self.outer.stopping)
        except OSError as error:
            self._send(_refusal(errors.ApiError(502, "BadGateway", f"kubelet does not answer: {error}")))

    def _stream(self, events: Iterator[JsonObject | None], request: Request) -> None:
        """Send a watch's events until it ends, its time is over, the client goes or the server stops."""
        deadline = time.monotonic() + float(request.query.get("timeoutSeconds") or 1800)
        try:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.flush()
            for event in events:
                if event is not None:
                    data = orjson.dumps(event) + b"\n"
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                    self.wfile.flush()
                gone = event is None and select.select([self.connection], [], [], 0)[0]
                if gone or self.outer.stopping or time.monotonic() > deadline:
                    break
            self.wfile.write(b"0\r\n\r\n")
            self.wfile.flush()
        except OSError:
            self.close_connection = True


def _pass_on(one: socket.socket, other: socket.socket, stopping: Callable[[], bool]) -> None:
    """Bytes both ways, in one thread: a TLS connection must not be read and written by two at once."""
    peers = {one: other, other: one}
    while not stopping():
        ready = select.select([one, other], [], [], 0.5)[0]
        if isinstance(one, ssl.SSLSocket) and one.pending() and one not in ready:
            ready.append(one)
        for source in ready:
            if isinstance(source, ssl.SSLSocket):
                source.setblocking(False)  # what is there may be no whole record yet
            try:
                data = source.recv(65536)
            except ssl.SSLWantReadError:
                continue
            finally:
                source.setblocking(True)
            if not data:
                return
            peers[source].sendall(data)
