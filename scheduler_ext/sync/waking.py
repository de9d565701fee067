"""Wakes refused pods whose reason has passed without any API event: one annotation on the pod, on which kube-scheduler
takes it out of those that it has put aside.
"""

from __future__ import annotations

import logging
import time
from functools import partial

from scheduler_ext.engine.core import Engine
from scheduler_ext.state.unschedulable import Unschedulable
from scheduler_ext.sync.api import ApiServer
from scheduler_ext.sync.lanes import Lanes, Task
from vcuda.kube.client import MERGE
from vcuda.kube.errors import BadName, KubeError
from vcuda.kube.objects import path
from vcuda.logs import fields

MOST = 16  # a second
_GONE, _CONFLICT = 404, 409  # another one of that name, or somebody writes it at this moment
_FORBIDDEN = (401, 403)
_FORBIDDEN_REST = 300.0  # seconds: only an administrator can change that
_ASKED_OFTEN, _SERVER_FAILED = 429, 500
_log = logging.getLogger(__name__)


class Waker:
    """For one thread; the writes are the lanes'."""

    def __init__(self, api: ApiServer, engine: Engine, lanes: Lanes) -> None:
        self._api, self._engine, self._lanes = api, engine, lanes
        self._told = False

    def wake(self) -> None:
        """Begin to wake some of those who would pass now, once each; none of a namespace whose writes are not taken."""
        self._lanes.offer(
            [
                Task(
                    one.namespace,
                    (one.uid, one.since),
                    f"the waking of pod {one.namespace}/{one.name}",
                    partial(self._write, one),
                    partial(self._engine.not_woken, one, None),
                )
                for one in self._engine.to_wake(MOST, self._lanes.closed())
            ]
        )

    def _write(self, one: Unschedulable) -> None:
        # By the status, which we may write already: what spec says is nobody's to change by this right. With its UID in
        # the patch a namesake is refused (409).
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        body = {"metadata": {"uid": one.uid, "annotations": {self._engine.names.retry: now}}}
        try:
            where = path("pods", one.namespace, one.name, "status")
            self._api.client.call("PATCH", where, body, content_type=MERGE)
        except BadName:
            return
        except KubeError as error:
            self._not_taken(one, error)
            if error.status in (_GONE, _CONFLICT):  # says nothing of its namespace, whose others are not to wait for it
                return
            raise
        self._engine.metrics.woken.labels(one.reason).inc()

    def _not_taken(self, one: Unschedulable, error: KubeError) -> None:
        if error.status == _GONE:
            return
        passing = error.status is None or error.status == _ASKED_OFTEN or error.status >= _SERVER_FAILED
        if error.status in _FORBIDDEN:
            self._engine.not_woken(one, _FORBIDDEN_REST)
        elif passing or error.status == _CONFLICT:  # what is gone the watch takes away
            self._engine.not_woken(one)
        if error.status != _CONFLICT and not self._told:
            self._told = True
            known = fields(pod=f"{one.namespace}/{one.name}", uid=one.uid)
            _log.warning(
                "a refused pod that would fit now could not be woken by an annotation: %s; kube-scheduler looks at it "
                "minutes later by itself (said once)", error, extra=known,
            )  # fmt: skip
