"""The webhook's HTTP face: one route for reviews, and what is open to all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from scheduler_ext.admission.rules import (
    CLAIM,
    CLAIM_TEMPLATE,
    DEVICE_CLASS,
    Rules,
    Verdict,
    decide,
    decide_claim,
    decide_class,
)
from scheduler_ext.http.exchange import Answer, Request
from scheduler_ext.http.pages import TEXT, MetricsPage, Pages
from scheduler_ext.protocol import admission_v1
from scheduler_ext.protocol.admission_v1 import Review
from scheduler_ext.protocol.extender_v1 import BadInput
from scheduler_ext.state.lines import Lines
from vcuda.logs import fields

PATH = "/admission/pods"
TO_CLAIMS_PATH = "/admission/pods/to-claims"  # the same, for namespaces whose pods get their shares by claims
CLAIMS_PATH = "/admission/claims"
_MOST_BODY_BYTES = 8 * 2**20  # two pods of the largest size that etcd takes (1.5 MiB each), with room
_BODY_SECONDS = 5.0
_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.5)
_log = logging.getLogger(__name__)


Judge = Callable[[bytes], tuple[Review, Verdict]]


class Metrics:
    """One registry per webhook, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reviews = Counter(
            "vcuda_webhook_reviews",
            "Pods, claims, classes that were reviewed: untouched, changed, refused; requests that made no sense: bad",
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
            "/metrics": MetricsPage(partial(generate_latest, metrics.registry)),
        }  # fmt: skip


class App(Probes):
    """The application that the API server calls. What is no review of a pod, claim or class gets 400 and a message."""

    body_bytes, body_seconds = _MOST_BODY_BYTES, _BODY_SECONDS
    larger = "; a review of a pod is smaller"

    def __init__(self, rules: Rules, metrics: Metrics) -> None:
        super().__init__(metrics)
        self._lines = Lines(time.monotonic)
        self.posts[PATH] = partial(self._review, partial(_of_pod, rules=rules))
        self.posts[TO_CLAIMS_PATH] = partial(self._review, partial(_of_pod, rules=replace(rules, claims=True)))
        self.posts[CLAIMS_PATH] = partial(self._review, partial(_of_claim, rules=rules))

    def bad(self) -> None:
        self._metrics.reviews.labels("bad").inc()

    def _review(self, judge: Judge, request: Request) -> Answer:
        begin = time.perf_counter()
        try:
            answer, result = self._answered(*judge(request.body))
        except (BadInput, RecursionError) as problem:
            self.bad()
            # Not the problem itself: it and this frame would keep each other, and the body, for long.
            words = (
                str(problem)
                if isinstance(problem, BadInput)
                else "the pod's annotations or resources are nested too deep"
            )
            return Answer(400, f"{words}\n".encode(), TEXT, close=True)
        self._metrics.reviews.labels(result).inc()
        self._metrics.seconds.observe(time.perf_counter() - begin)
        return Answer(200, answer)

    def _answered(self, asked: Review, verdict: Verdict) -> tuple[bytes, str]:
        if verdict.refusal is not None:
            reason, message = verdict.refusal.reason, verdict.refusal.message
            self._tell(asked, "refused a %s of %.200r in %.80r: %s%s", verdict.refusal, fields(reason=reason))
            return admission_v1.refused(asked.uid, reason, message), "refused"
        for warning in verdict.warnings:
            self._tell(asked, "a %s of %.200r in %.80r: %.400r%s", warning)
        result = "changed" if verdict.patch else "untouched"
        return admission_v1.allowed(asked.uid, verdict.patch, verdict.warnings), result

    def _tell(self, asked: Review, line: str, what: object, known: Mapping[str, object] | None = None) -> None:
        """As often as a namespace may have lines: whoever may make pods there could fill the disk."""
        if (left_out := self._lines.may(asked.namespace)) is not None:
            _log.info(line, asked.kind, asked.user, asked.namespace, what, left_out, extra=known)


def _of_pod(body: bytes, rules: Rules) -> tuple[Review, Verdict]:
    asked = admission_v1.read(body)
    return asked, decide(asked, rules)


def _of_claim(body: bytes, rules: Rules) -> tuple[Review, Verdict]:
    asked = admission_v1.read(body, (CLAIM, CLAIM_TEMPLATE, DEVICE_CLASS))
    return asked, (decide_class if asked.kind == DEVICE_CLASS else decide_claim)(asked, rules)
