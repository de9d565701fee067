"""The HTTP face: routes of the extender protocol as a raw ASGI application, the rest through starlette."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import scheduler_ext
from scheduler_ext.engine.core import Engine
from scheduler_ext.http.bodies import Bodies, NotReady
from scheduler_ext.planning import defrag, explain
from scheduler_ext.protocol import extender_v1
from scheduler_ext.protocol.extender_v1 import BadInput
from scheduler_ext.protocol.reasons import ExtenderReason
from scheduler_ext.sync.binder import Binder
from vcuda.spec import request as pod_request

_JSON = [(b"content-type", b"application/json")]
_OPEN = ("/healthz", "/readyz", "/version", "/scheduler/version")  # to clients without a certificate
_LIGHT = 3  # containers; scoring more for all nodes at once would hold up other requests
_LARGER = " (--body-mib); with nodeCacheCapable: true kube-scheduler sends names instead of whole nodes"
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Answerer = Callable[[bytes], Awaitable[bytes]]


class Extender:
    """The verbs: each turns a request body into an answer, or raises BadInput or NotReady."""

    def __init__(self, engine: Engine, binder: Binder) -> None:
        self._engine, self._binder = engine, binder

    def _asks(self, pod: Mapping[str, Any]) -> bool:
        """Whether a pod is our business; then it must have a UID, and we must be ready."""
        if not pod_request.asks_for_share(pod, self._engine.names):
            return False
        self._require_uid(pod)
        self._require_ready()
        return True

    @staticmethod
    def _require_uid(pod: Mapping[str, Any]) -> None:
        uid = pod["metadata"].get("uid")
        if not isinstance(uid, str) or not uid:
            raise BadInput("Pod.metadata.uid is missing; a placement is kept by UID")

    def _require_ready(self) -> None:
        problem = self._engine.not_ready()
        if problem is not None:
            raise NotReady(f"{ExtenderReason.NOT_SYNCED}: {problem}")

    async def filter(self, body: bytes) -> bytes:
        args = extender_v1.read_args(body)
        verdicts = self._engine.metrics.verdicts
        if not self._asks(args.pod):
            verdicts.labels("untouched").inc()
            return extender_v1.untouched(args)
        if len(args.pod["spec"].get("containers") or ()) > _LIGHT:
            await asyncio.to_thread(self._engine.prepare, args.pod)
        verdict = self._engine.filter(args.pod, args.names)
        verdicts.labels("chosen" if verdict.chosen is not None else "refused").inc()
        return extender_v1.filter_answer(args, verdict)

    async def prioritize(self, body: bytes) -> bytes:
        args = extender_v1.read_args(body)
        self._asks(args.pod)
        scores = self._engine.prioritize(args.pod, args.names)
        return extender_v1.priorities(list(zip(args.names, scores, strict=True)))

    async def prioritize_cpu_only(self, body: bytes) -> bytes:
        args = extender_v1.read_args(body)
        if self._asks(args.pod):
            scores = [0] * len(args.names)
        else:
            self._require_ready()
            scores = self._engine.prioritize_cpu_only(args.names)
        return extender_v1.priorities(list(zip(args.names, scores, strict=True)))

    async def preempt(self, body: bytes) -> bytes:
        args = extender_v1.read_preemption(body)
        if not self._asks(args.pod):
            return extender_v1.preemption_answer(args.victims)
        # The search may take long; it works on a copy.
        found = await asyncio.to_thread(self._engine.preempt, args.pod, args.victims)
        return extender_v1.preemption_answer(found)

    async def bind(self, body: bytes) -> bytes:
        args = extender_v1.read_binding(body)
        self._require_ready()
        refused = await self._binder.bind(args)
        self._engine.metrics.binds.labels("bound" if refused is None else str(refused.reason)).inc()
        return extender_v1.binding_answer("" if refused is None else str(refused))


async def _respond(send: Send, status: int, body: bytes, *, close: bool = False) -> None:
    headers = [*_JSON, (b"content-length", str(len(body)).encode())]
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def probes(
    engine: Engine, unhealthy_reason: Callable[[], str | None], standby_reason: Callable[[], str | None]
) -> Starlette:
    """What is open to all: probes, metrics and the version; on a port of its own if there is one."""

    async def version(_: Request) -> Response:
        return JSONResponse({"version": scheduler_ext.__version__, "name": "gpu-scheduler-extender"})

    async def healthz(_: Request) -> Response:
        problem = unhealthy_reason()
        return PlainTextResponse(
            "ok\n" if problem is None else f"{problem}\n", 200 if problem is None else 500
        )

    async def readyz(_: Request) -> Response:
        idle = standby_reason()
        if idle is not None:
            return PlainTextResponse(f"ok: {idle}\n")
        problem = engine.not_ready()
        return PlainTextResponse(
            "ok\n" if problem is None else f"{problem}\n", 200 if problem is None else 503
        )

    async def metrics(_: Request) -> Response:
        return Response(engine.metrics.render(), media_type=_METRICS_TYPE)

    pages = {
        "/version": version, "/scheduler/version": version, "/healthz": healthz, "/readyz": readyz, "/metrics": metrics,
    }  # fmt: skip
    return Starlette(routes=[Route(path, page, methods=["GET"]) for path, page in pages.items()])


def _answers(engine: Engine, standby_reason: Callable[[], str | None]) -> list[Route]:
    """What people ask: explanations and plans."""

    async def explained(request: Request) -> Response:
        idle = standby_reason()
        if idle is not None:
            return JSONResponse({"Error": f"{ExtenderReason.NOT_LEADER}: {idle}"}, 503)
        where = request.path_params
        evidence = engine.evidence(
            uid=where.get("uid"), namespace=where.get("namespace", ""), name=where.get("name", "")
        )
        found = await asyncio.to_thread(explain.explanation, evidence)
        if found is not None:
            return JSONResponse(found)
        missing = f"nothing is known about pod {'/'.join(where.values())}: kube-scheduler has not asked about it lately"
        return JSONResponse({"Error": f"{missing}; see its events (kubectl describe pod)"}, 404)

    planning = asyncio.Lock()

    async def defragmentation(request: Request) -> Response:
        idle, problem = standby_reason(), engine.not_ready()
        if idle is not None or problem is not None:
            reason = ExtenderReason.NOT_LEADER if idle is not None else ExtenderReason.NOT_SYNCED
            return JSONResponse({"Error": f"{reason}: {idle or problem}"}, 503)
        text = request.query_params.get("moves", str(defrag.DEFAULT_MOVES))
        if not (text.isascii() and text.isdigit() and len(text) <= 6 and 1 <= int(text) <= defrag.MOST_MOVES):
            return JSONResponse(
                {"Error": f"moves is {text!r:.40}, not a number from 1 to {defrag.MOST_MOVES}"}, 400
            )
        if planning.locked():
            return JSONResponse({"Error": "a plan is being made; ask again when it is done"}, 503)
        async with planning:
            found = await asyncio.to_thread(lambda: defrag.plan(engine.snapshot(), int(text)))
        return Response(
            orjson.dumps(found.as_json(), option=orjson.OPT_NON_STR_KEYS), media_type="application/json"
        )

    pages = {"/defrag": defragmentation, "/scheduler/defrag": defragmentation} | {
        f"{prefix}/explain/{which}": explained
        for prefix in ("", "/scheduler")
        for which in ("{uid}", "{namespace}/{name}")
    }
    return [Route(path, page, methods=["GET"]) for path, page in pages.items()]


def _well() -> None:
    return None


def create(
    engine: Engine,
    binder: Binder,
    *,
    body_bytes: int,
    body_seconds: float,
    unhealthy_reason: Callable[[], str | None] = _well,
    standby_reason: Callable[[], str | None] = _well,
    authenticate: bool = False,
    client_name: str | None = None,
) -> ASGIApp:
    """The ASGI application. Bodies are bounded in size and time; malformed requests get 400 and do nothing.

    `authenticate`: whoever has shown no certificate (of `client_name`, if one is given) gets 403 before anything of his
    is read, except for the probes. `unhealthy_reason` says why only a restart can help, for /healthz. `standby_reason` says why another replica has to be asked: then
    every verb gets 503, and nothing is decided.
    """
    extender = Extender(engine, binder)
    verbs: dict[str, tuple[str, Answerer]] = {
        "/scheduler/filter": ("filter", extender.filter),
        "/scheduler/predicates": ("filter", extender.filter),  # the old system's route
        "/scheduler/prioritize": ("prioritize", extender.prioritize),
        "/scheduler/cpu/prioritize": ("cpu-prioritize", extender.prioritize_cpu_only),
        "/scheduler/preempt": ("preempt", extender.preempt),
        "/scheduler/bind": ("bind", extender.bind),
    }
    pages = probes(engine, unhealthy_reason, standby_reason)
    pages.routes.extend(_answers(engine, standby_reason))
    bodies = Bodies(body_bytes, _LARGER)

    def stranger(scope: Scope) -> str | None:
        """Why this client may ask nothing, or None."""
        name = scope.get("state", {}).get("client")
        if not authenticate or (name is not None and client_name in (None, name)) or scope["path"] in _OPEN:
            return None
        shown = "no client certificate was sent" if name is None else f"the certificate is of {name!r:.80}"
        return f"{ExtenderReason.UNAUTHENTICATED}: {shown}; kube-scheduler sends its own by tlsConfig.certFile and keyFile"

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        unknown = stranger(scope) if scope["type"] == "http" else None
        if unknown is not None:
            engine.metrics.strangers.inc()
            await _respond(send, 403, extender_v1.binding_answer(unknown), close=True)
            return
        known = verbs.get(scope["path"]) if scope["type"] == "http" else None
        if known is None:
            await pages(scope, receive, send)
            return
        verb, answer = known
        if scope["method"] != "POST":
            await _respond(send, 405, extender_v1.binding_answer(f"{scope['path']} takes POST"))
            return
        try:
            async with asyncio.timeout(body_seconds):
                body = await bodies.read(scope, receive)
        except TimeoutError:
            await _bad(send, engine, f"the body did not arrive within {body_seconds:g} s (--body-seconds)")
            return
        except BadInput as error:
            await _bad(send, engine, str(error))
            return
        except NotReady as error:
            await _respond(send, 503, extender_v1.binding_answer(str(error)), close=True)
            return
        start = time.perf_counter()
        idle = standby_reason()
        if idle is not None:
            await _respond(send, 503, extender_v1.binding_answer(f"{ExtenderReason.NOT_LEADER}: {idle}"))
            return
        try:
            result = await answer(body)
        except BadInput as error:
            await _bad(send, engine, str(error))
        except NotReady as error:
            await _respond(send, 503, extender_v1.binding_answer(str(error)))
        else:
            engine.metrics.requests.labels(verb).observe(time.perf_counter() - start)
            await _respond(send, 200, result)

    return app


async def _bad(send: Send, engine: Engine, message: str) -> None:
    """Refuse a request; the connection closes, because an unread body may still be coming."""
    engine.metrics.bad_input.inc()
    await _respond(send, 400, extender_v1.binding_answer(message), close=True)
