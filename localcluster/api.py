"""A small client of the API server for the stand-ins: JSON in and out, a connection per request, watches iterate."""

from __future__ import annotations

import contextlib
import datetime
import http.client
import json
import ssl
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import websocket
import yaml

JsonObject = dict[str, Any]
PATCH = "application/strategic-merge-patch+json"  # as kubelet and kubectl: what others wrote into a list stays


class ApiFailure(Exception):
    """The API server refused or could not be reached. `code` is the HTTP status, 0 if there was no answer."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


class Api:
    """Requests to the API server that a kubeconfig names. Safe to use from several threads."""

    def __init__(self, kubeconfig: Path) -> None:
        document = yaml.safe_load(kubeconfig.read_text(encoding="utf-8"))
        cluster = document["clusters"][0]["cluster"]
        address = urllib.parse.urlsplit(cluster["server"])
        self._host, self._port = address.hostname or "", address.port
        self._headers = {"Authorization": f"Bearer {document['users'][0]['user']['token']}"}
        self._tls = (
            ssl.create_default_context(cafile=cluster["certificate-authority"]) if address.scheme == "https" else None
        )

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        if self._tls is not None:
            return http.client.HTTPSConnection(self._host, self._port, timeout=timeout, context=self._tls)
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout)

    def _open(
        self, method: str, path: str, body: object, kind: str, timeout: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._connect(timeout)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {**self._headers, "Content-Type": kind})
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ApiFailure(0, "Unreachable", f"the API server does not answer: {error}") from error
        if response.status >= 400:
            text = response.read().decode(errors="replace")
            connection.close()
            try:
                status = json.loads(text)
            except ValueError:
                status = {}
            raise ApiFailure(response.status, str(status.get("reason", "")), str(status.get("message", text[:200])))
        return connection, response

    def text(self, method: str, path: str, body: object = None, kind: str = "application/json") -> str:
        """The answer's body. Raises ApiFailure."""
        connection, response = self._open(method, path, body, kind, 15)
        try:
            return response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise ApiFailure(0, "Unreachable", f"the API server's answer broke off: {error}") from error
        finally:
            connection.close()

    def call(self, method: str, path: str, body: object = None, kind: str = "application/json") -> JsonObject:
        result: JsonObject = json.loads(self.text(method, path, body, kind))
        return result

    def websocket(self, path: str) -> websocket.WebSocket:
        """A command's streams (`localcluster.kubelet.execution`). Raises ApiFailure."""
        scheme = "wss" if self._tls is not None else "ws"
        try:
            return websocket.create_connection(
                f"{scheme}://{self._host}:{self._port}{path}", header=self._headers, sslopt={"context": self._tls},
                subprotocols=["v5.channel.k8s.io"], timeout=None,
            )  # fmt: skip
        except websocket.WebSocketBadStatusException as error:
            body = error.resp_body or b""
            text = body.decode(errors="replace") if isinstance(body, bytes) else str(body)
            with contextlib.suppress(ValueError):
                text = str(json.loads(text).get("message", text))
            raise ApiFailure(error.status_code, "BadRequest", text or str(error)) from error
        except (OSError, websocket.WebSocketException) as error:
            raise ApiFailure(0, "Unreachable", f"the API server does not answer: {error}") from error

    def patch(self, path: str, body: JsonObject) -> JsonObject:
        return self.call("PATCH", path, body, PATCH)

    def watch(self, path: str, version: str, seconds: int = 60) -> Iterator[JsonObject]:
        """Events after `version` for at most `seconds`. Raises ApiFailure, with code 410 if `version` is too old."""
        separator = "&" if "?" in path else "?"
        query = f"{path}{separator}watch=1&resourceVersion={version}&timeoutSeconds={seconds}"
        connection, response = self._open("GET", query, None, "application/json", seconds + 15)
        try:
            for line in response:
                event: JsonObject = json.loads(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise ApiFailure(status.get("code", 0), status.get("reason", ""), status.get("message", ""))
                yield event
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ApiFailure(0, "Unreachable", f"the watch broke off: {error}") from error
        finally:
            connection.close()

    def event(self, pod: JsonObject, kind: str, reason: str, message: str, component: str) -> None:
        """Record an event on a pod. A failure to do so is nobody's error: events are best effort."""
        metadata = pod["metadata"]
        namespace = metadata.get("namespace", "default")
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = {
            "metadata": {"generateName": f"{metadata['name']}.", "namespace": namespace},
            "involvedObject": {
                "kind": "Pod", "apiVersion": "v1", "name": metadata["name"], "namespace": namespace,
                "uid": metadata.get("uid", ""),
            },
            "type": kind, "reason": reason, "message": message, "source": {"component": component},
            "count": 1, "firstTimestamp": now, "lastTimestamp": now,
        }  # fmt: skip
        try:
            self.call("POST", f"/api/v1/namespaces/{namespace}/events", body)
        except ApiFailure:
            return


def pod_path(pod: JsonObject, subresource: str = "") -> str:
    """The path of a pod, or of one of its subresources."""
    metadata = pod["metadata"]
    tail = f"/{subresource}" if subresource else ""
    return f"/api/v1/namespaces/{metadata.get('namespace', 'default')}/pods/{metadata['name']}{tail}"
