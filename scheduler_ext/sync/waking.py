"""Wakes refused pods whose reason has passed without any API event: one annotation on the pod, on which kube-scheduler
takes it out of those that it has put aside.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from scheduler_ext.engine.core import Engine
from scheduler_ext.sync.api import ApiServer
from vcuda.kube.client import MERGE
from vcuda.kube.errors import ApiError, BadName, KubeError
from vcuda.kube.objects import path
from vcuda.logs import fields

MOST = 16  # a second
_GONE, _CONFLICT = 404, 409  # another one of that name, or somebody writes it at this moment
_FORBIDDEN = (401, 403)
_FORBIDDEN_REST = 300.0  # seconds: only an administrator can change that
_ASKED_OFTEN, _SERVER_FAILED = 429, 500
_log = logging.getLogger(__name__)


class Waker:
    """`failed` is told of every pod that could not be woken, for a metric. For one thread."""

    def __init__(
        self, api: ApiServer, engine: Engine, failed: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._api, self._engine, self._failed, self._clock = api, engine, failed, clock
        self._not_before = -math.inf
        self._told = False

    def wake(self) -> None:
        """Some of those who would pass now, once each. Raises KubeError where no answer came."""
        if self._clock() < self._not_before:
            return
        for one in (listed := self._engine.to_wake(MOST)):
            # By the status, which we may write already: what spec says is nobody's to change by this right. With its
            # UID in the patch a namesake is refused (409).
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            body = {"metadata": {"uid": one.uid, "annotations": {self._engine.names.retry: now}}}
            try:
                where = path("pods", one.namespace, one.name, "status")
                self._api.client.call("PATCH", where, body, content_type=MERGE)
            except BadName:
                continue
            except KubeError as error:
                self._failed()
                if error.status == _GONE:
                    continue
                if error.status == _CONFLICT:
                    self._engine.not_woken(one)  # what is gone the watch takes away
                    continue
                passing = error.status is None or error.status == _ASKED_OFTEN or error.status >= _SERVER_FAILED
                if error.status in _FORBIDDEN:
                    self._not_before = self._clock() + _FORBIDDEN_REST
                if not self._told:
                    self._told = True
                    known = fields(pod=f"{one.namespace}/{one.name}", uid=one.uid)
                    _log.warning(
                        "a refused pod that would fit now could not be woken by an annotation: %s; kube-scheduler "
                        "looks at it minutes later by itself (said once)", error, extra=known,
                    )  # fmt: skip
                if not passing and error.status not in _FORBIDDEN:
                    continue
                left = listed[listed.index(one) :]
                for other in left:
                    self._engine.not_woken(other)
                if not isinstance(error, ApiError):
                    raise
                return
            self._engine.metrics.woken.labels(one.reason).inc()
