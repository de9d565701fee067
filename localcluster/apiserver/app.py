"""The HTTP face of the stand-in API server: paths, tokens, watches, and errors as Status objects."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Mapping
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from localcluster.apiserver import errors, resources, selectors, table
from localcluster.apiserver.logs import fetch_log
from localcluster.apiserver.operations import Operations
from localcluster.apiserver.resources import Target
from localcluster.apiserver.store import Selector

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_OPEN_PATHS = ("/healthz", "/livez", "/readyz")
_MAX_BODY_BYTES = 3 * 1024 * 1024  # the real server's limit


def _json(content: Any, code: int = 200) -> Response:
    return Response(orjson.dumps(content), code, media_type="application/json")


def _watch_range(query: Mapping[str, str]) -> tuple[int | None, float]:
    """The version that a watch follows (None: begin with what is there), and for how many seconds."""
    version = query.get("resourceVersion", "")
    try:
        since = int(version) if version not in ("", "0") else None
        return since, float(query.get("timeoutSeconds") or 1800)
    except ValueError:
        raise errors.bad_request("resourceVersion and timeoutSeconds must be numbers") from None


class ApiServer:
    """Serves `operations` to whoever holds `token`; `kubelet_token` is what it shows kubelet to read logs."""

    def __init__(self, operations: Operations, token: str, kubelet_token: str = "") -> None:
        self._operations = operations
        self._token = token
        self._kubelet_token = kubelet_token
        self._stopping = asyncio.Event()
        self.app = Starlette(routes=[Route("/{path:path}", self._handle, methods=_METHODS)])

    def stop_watches(self) -> None:
        """End every open watch, so that the server can shut down. Call in its event loop."""
        self._stopping.set()

    async def _handle(self, request: Request) -> Response:
        try:
            return await self._answer(request)
        except errors.ApiError as error:
            return _json(error.status(), error.code)

    async def _answer(self, request: Request) -> Response:
        path = request.url.path
        if path in _OPEN_PATHS:
            return PlainTextResponse("ok")
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise errors.ApiError(
                401, "Unauthorized", "the bearer token is missing or wrong; use the kubeconfig's"
            )
        document = resources.discovery(path) if request.method == "GET" else None
        if document is not None:
            return _json(document)
        target = resources.parse_path(path)
        if request.query_params.get("dryRun"):
            raise errors.bad_request("dryRun is not supported by this stand-in API server")
        if request.method == "GET":
            return await self._read(request, target)
        return await self._write(request, target)

    async def _read(self, request: Request, target: Target) -> Response:
        if target.subresource == "log":
            return await fetch_log(self._operations, target, request.query_params, self._kubelet_token)
        as_table = "as=Table" in request.headers.get("accept", "")
        if target.name:
            item = self._operations.get(target)
            return _json(table.render([item], "", target.resource) if as_table else item)
        query = request.query_params
        selector = selectors.compile_selectors(query.get("labelSelector", ""), query.get("fieldSelector", ""))
        if query.get("watch", "").lower() in ("1", "true"):
            # Now: once the stream has begun, no other status can be answered.
            since, seconds = _watch_range(query)
            stream = self._watch(target, selector, since, seconds, as_table=as_table)
            return StreamingResponse(stream, media_type="application/json")
        store = self._operations.stores[target.resource]
        items = store.list(target.namespace, selector)
        version = str(store.version)
        if as_table:
            return _json(table.render(items, version, target.resource))
        return _json({
            "kind": f"{target.resource.kind}List", "apiVersion": target.resource.api_version,
            "metadata": {"resourceVersion": version}, "items": items,
        })  # fmt: skip

    async def _watch(
        self, target: Target, selector: Selector, since: int | None, seconds: float, *, as_table: bool
    ) -> AsyncIterator[bytes]:
        store = self._operations.stores[target.resource]
        events = aiter(store.watch(since, target.namespace, selector))
        deadline = asyncio.get_running_loop().time() + seconds
        stopping = asyncio.ensure_future(self._stopping.wait())
        following: asyncio.Future[dict[str, Any]] | None = None
        try:
            while True:
                following = asyncio.ensure_future(anext(events))
                left = deadline - asyncio.get_running_loop().time()
                await asyncio.wait(
                    {following, stopping}, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED
                )
                if not following.done():
                    return
                try:
                    event = following.result()
                except errors.ApiError as error:
                    event = {"type": "ERROR", "object": error.status()}
                if as_table and event["type"] != "ERROR":
                    event = {**event, "object": table.render([event["object"]], "", target.resource)}
                yield orjson.dumps(event) + b"\n"
                if event["type"] == "ERROR":
                    return
        finally:
            stopping.cancel()
            if following is not None:
                following.cancel()

    async def _write(self, request: Request, target: Target) -> Response:
        body = await self._body(request)
        operations = self._operations
        if request.method == "POST":
            if target.subresource == "binding":
                return _json(operations.bind(target, body), 201)
            if target.subresource == "eviction":
                pod = Target(target.resource, target.namespace, target.name)
                operations.delete(pod, (body or {}).get("deleteOptions") or {})
                return _json({"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201}, 201)
            if not target.name:
                return _json(operations.create(target, body), 201)
        elif target.name and request.method == "PUT":
            return _json(operations.replace(target, body))
        elif target.name and request.method == "PATCH":
            return _json(operations.patch(target, body, request.headers.get("content-type", "")))
        elif target.name and request.method == "DELETE" and not target.subresource:
            options = dict(body) if isinstance(body, dict) else {}
            grace = request.query_params.get("gracePeriodSeconds")
            if grace is not None and "gracePeriodSeconds" not in options:
                options["gracePeriodSeconds"] = int(grace) if grace.isdigit() else grace
            return _json(operations.delete(target, options))
        raise errors.ApiError(
            405, "MethodNotAllowed", f"{request.method} is not allowed on {request.url.path}"
        )

    @staticmethod
    async def _body(request: Request) -> Any:
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > _MAX_BODY_BYTES:
                raise errors.ApiError(
                    413, "RequestEntityTooLarge", f"the body exceeds {_MAX_BODY_BYTES} bytes"
                )
        if not data:
            return None
        try:
            return orjson.loads(bytes(data))
        except orjson.JSONDecodeError as error:
            raise errors.bad_request(f"the body is not JSON: {error}") from None
