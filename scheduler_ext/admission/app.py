"""The webhook's HTTP face: one route for reviews, and what is open to all."""

from __future__ import annotations

import logging
import time

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from scheduler_ext.admission.rules import Rules, decide
from scheduler_ext.http.pages import METRICS, TEXT, Pages
from scheduler_ext.http.server import Answer, Request
from scheduler_ext.protocol import admission_v1
from scheduler_ext.protocol.extender_v1 import BadInput

PATH = "/admission/pods"
_MOST_BODY_BYTES = 8 * 2**20  # two pods of the largest size that etcd takes (1.5 MiB each), with room
_BODY_SECONDS = 5.0
_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.5)
_log = logging.getLogger(__name__)


class Metrics:
    """One registry per webhook, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reviews = Counter(
            "vcuda_webhook_reviews",
            "Pods that were reviewed: untouched, changed, refused; requests that made no sense: bad",
            ["result"], registry=self.registry,
        )  # fmt: skip
        self.seconds = Histogram(
            "vcuda_webhook_review_seconds", "Time to answer a review, its body read",
            buckets=_BUCKETS, registry=self.registry,
        )  # fmt: skip
        for result in ("untouched", "changed", "refused", "bad"):
            self.reviews.labels(result)


class Probes(Pages):
    """Without state there is nothing to wait for: who answers is ready."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__("gpu-admission-webhook")
        self._metrics = metrics
        well = Answer(200, b"ok\n", TEXT)
        self.gets |= {
            "/healthz": lambda _: well, "/readyz": lambda _: well,
            "/metrics": lambda _: Answer(200, generate_latest(metrics.registry), METRICS),
        }  # fmt: skip


class App(Probes):
    """The application that the API server calls. A request that is no review of a pod gets 400 and a message."""

    body_bytes, body_seconds = _MOST_BODY_BYTES, _BODY_SECONDS
    larger = "; a review of a pod is smaller"

    def __init__(self, rules: Rules, metrics: Metrics) -> None:
        super().__init__(metrics)
        self._rules = rules
        self.posts[PATH] = self._review

    def bad(self) -> None:
        self._metrics.reviews.labels("bad").inc()

    def _review(self, request: Request) -> Answer:
        begin = time.perf_counter()
        try:
            answer, result = _answered(admission_v1.read(request.body), self._rules)
        except (BadInput, RecursionError) as problem:
            self.bad()
            words = (
                problem if isinstance(problem, BadInput) else "the pod's annotations or resources are nested too deep"
            )
            return Answer(400, f"{words}\n".encode(), TEXT, close=True)
        self._metrics.reviews.labels(result).inc()
        self._metrics.seconds.observe(time.perf_counter() - begin)
        return Answer(200, answer)


def _answered(asked: admission_v1.Review, rules: Rules) -> tuple[bytes, str]:
    verdict = decide(asked, rules)
    if verdict.refusal is not None:
        _log.info("refused a pod of %.200r in %.80r: %s", asked.user, asked.namespace, verdict.refusal)
        return admission_v1.refused(asked.uid, verdict.refusal.reason, verdict.refusal.message), "refused"
    for warning in verdict.warnings:
        _log.info("a pod of %.200r in %.80r: %.400r", asked.user, asked.namespace, warning)
    return admission_v1.allowed(asked.uid, verdict.patch, verdict.warnings), "changed" if verdict.patch else "untouched"
