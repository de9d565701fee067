"""The webhook's HTTP face: one route for reviews, and what is open to all."""

from __future__ import annotations

import asyncio
import logging
import time

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import scheduler_ext
from scheduler_ext.admission.rules import Rules, decide
from scheduler_ext.http.bodies import Bodies, NotReady
from scheduler_ext.protocol import admission_v1
from scheduler_ext.protocol.extender_v1 import BadInput

PATH = "/admission/pods"
_MOST_BODY_BYTES = 8 * 2**20  # two pods of the largest size that etcd takes (1.5 MiB each), with room
_BODY_SECONDS = 5.0
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.5)
_log = logging.getLogger(__name__)


class Metrics:
    """One registry per webhook, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reviews = Counter(
            "vcuda_webhook_reviews", "Pods that were reviewed: untouched, changed, refused; requests that made no sense: bad",
            ["result"], registry=self.registry,
        )  # fmt: skip
        self.seconds = Histogram(
            "vcuda_webhook_review_seconds", "Time to answer a review, its body read", buckets=_BUCKETS, registry=self.registry
        )  # fmt: skip
        for result in ("untouched", "changed", "refused", "bad"):
            self.reviews.labels(result)


def probes(metrics: Metrics) -> Starlette:
    """Without state there is nothing to wait for: who answers is ready."""

    async def well(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def version(_: Request) -> Response:
        return JSONResponse({"version": scheduler_ext.__version__, "name": "gpu-admission-webhook"})

    async def figures(_: Request) -> Response:
        return Response(generate_latest(metrics.registry), media_type=_METRICS_TYPE)

    pages = {"/healthz": well, "/readyz": well, "/version": version, "/metrics": figures}
    return Starlette(routes=[Route(path, page, methods=["GET"]) for path, page in pages.items()])


def create(rules: Rules, metrics: Metrics) -> Starlette:
    """The application that the API server calls. A request that is no review of a pod gets 400 and a message."""
    bodies = Bodies(_MOST_BODY_BYTES, "; a review of a pod is smaller")

    async def review(request: Request) -> Response:
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                body = await bodies.read(request.scope, request.receive)
            begin = time.perf_counter()
            asked = admission_v1.read(body)
        except (BadInput, NotReady, TimeoutError) as error:
            metrics.reviews.labels("bad").inc()
            words = str(error) or f"the body did not arrive within {_BODY_SECONDS:g} s"
            status = 503 if isinstance(error, NotReady) else 400
            return PlainTextResponse(f"{words}\n", status, headers={"connection": "close"})
        answer, result = _answered(asked, rules)
        metrics.reviews.labels(result).inc()
        metrics.seconds.observe(time.perf_counter() - begin)
        return Response(answer, media_type="application/json")

    application = probes(metrics)
    application.routes.append(Route(PATH, review, methods=["POST"]))
    return application


def _answered(asked: admission_v1.Review, rules: Rules) -> tuple[bytes, str]:
    verdict = decide(asked, rules)
    if verdict.refusal is not None:
        _log.info("refused a pod of %.200r in %.80r: %s", asked.user, asked.namespace, verdict.refusal)
        return admission_v1.refused(asked.uid, verdict.refusal.reason, verdict.refusal.message), "refused"
    for warning in verdict.warnings:
        _log.info("a pod of %.200r in %.80r: %.400r", asked.user, asked.namespace, warning)
    return admission_v1.allowed(
        asked.uid, verdict.patch, verdict.warnings
    ), "changed" if verdict.patch else "untouched"
