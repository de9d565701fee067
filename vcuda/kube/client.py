"""The API server's verbs, for threads: every name checked, every answer whole and in time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vcuda.kube import nesting
from vcuda.kube.endpoint import Endpoint, Stream
from vcuda.kube.errors import ApiError, ApiUnreachable
from vcuda.kube.objects import path

MERGE = "application/merge-patch+json"
STRATEGIC_MERGE = "application/strategic-merge-patch+json"
_PAGE = 500
_NOT_FOUND = 404


class Client:
    """Thread-safe. All raise KubeError. `timeout`: seconds for a whole answer, where a call gives none."""

    def __init__(
        self, endpoint: Endpoint, *, timeout: float = 10.0, parse: Callable[[bytes], Any] = json.loads
    ) -> None:
        self.endpoint = endpoint
        self.timeout = timeout
        self._parse = parse

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Any request whose answer is an object."""
        payload = None if body is None else json.dumps(body).encode()
        data = self.endpoint.raw(
            method,
            path,
            timeout=timeout or self.timeout,
            query=query,
            body=payload,
            content_type=content_type,
        )
        found = self.parsed(data)
        if not isinstance(found, dict):
            raise ApiUnreachable("the API server sent JSON that is not an object")
        return found

    def parsed(self, data: bytes) -> Any:
        """Any JSON. Raises ApiUnreachable for what is none: half of an answer, a proxy's page."""
        try:
            return nesting.loads(data, self._parse)
        except ValueError as error:
            raise ApiUnreachable(f"the API server sent something that is not JSON: {error}") from None

    def get(self, kind: str, namespace: str, name: str, *, timeout: float | None = None) -> dict[str, Any]:
        """One object. ApiError 404 if there is none."""
        return self.call("GET", path(kind, namespace, name), timeout=timeout)

    def find(self, kind: str, namespace: str, name: str, *, timeout: float | None = None) -> dict[str, Any] | None:
        """One object; None if there is none."""
        try:
            return self.get(kind, namespace, name, timeout=timeout)
        except ApiError as error:
            if error.status != _NOT_FOUND:
                raise
            return None

    def pages(
        self, kind: str, namespace: str = "", selector: str = "", *, timeout: float | None = None
    ) -> Iterator[tuple[list[dict[str, Any]], str]]:
        """List page by page: (objects, resource version).

        `selector`: a field selector; the last page's version counts.
        """
        query, where = {"limit": str(_PAGE)} | _fields(selector), path(kind, namespace)
        while True:
            data = self.call("GET", where, query=query, timeout=timeout)
            metadata = data.get("metadata")
            metadata = metadata if isinstance(metadata, dict) else {}
            yield listed(data), str(metadata.get("resourceVersion", ""))
            if not metadata.get("continue"):
                return
            query["continue"] = str(metadata["continue"])

    def version(self, kind: str, namespace: str = "", selector: str = "") -> str:
        """The server's resource version now, from a list of one object."""
        query = {"limit": "1"} | _fields(selector)
        metadata = self.call("GET", path(kind, namespace), query=query).get("metadata") or {}
        return str(metadata.get("resourceVersion", ""))

    def watch(
        self,
        kind: str,
        namespace: str,
        version: str,
        selector: str,
        *,
        seconds: float,
        silence: float,
    ) -> Stream:
        """Begin a watch after `version`; its lines are events, one JSON object each.

        The server ends it after `seconds`. `silence`: see Endpoint.stream.
        """
        query = {
            "watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true",
            "timeoutSeconds": str(int(seconds)),
        }  # fmt: skip
        return self.endpoint.stream(path(kind, namespace), query | _fields(selector), silence=silence)


def listed(data: Mapping[str, Any]) -> list[Any]:
    """The objects of a list. Raises ApiUnreachable for what is none: taken for an empty one, all pods were gone."""
    items = data.get("items", "")
    if items is None:  # how Go writes an empty list
        return []
    if not isinstance(items, list):
        raise ApiUnreachable("the API server sent an object that is no list; ask what stands between us and it")
    return items


def _fields(selector: str) -> dict[str, str]:
    return {"fieldSelector": selector} if selector else {}
