"""Writes the answers to resizes into the status of their pods."""

from __future__ import annotations

import time
from functools import partial

from scheduler_ext.engine.core import Engine
from scheduler_ext.engine.resizes import Unanswered
from scheduler_ext.sync.api import ApiServer
from scheduler_ext.sync.lanes import Lanes, Task
from scheduler_ext.sync.late import LateWrites
from vcuda.kube.client import STRATEGIC_MERGE
from vcuda.kube.errors import BadName, KubeError
from vcuda.kube.objects import path
from vcuda.spec import resize

# The pod is gone, or is another one of that name.
_GONE = (404, 409)


def send(api: ApiServer, engine: Engine, lanes: Lanes, late: LateWrites) -> None:
    """Begin to write all that wait, once, but not yet those that were just refused.

    `late`: who leads next must not decide before it knows what each of them grants.
    """
    waiting = engine.unanswered()
    lanes.keep([one.uid for one in waiting])
    lanes.offer(
        [
            Task(
                one.namespace,
                one.uid,
                f"the answer to the resize of pod {one.namespace}/{one.name}",
                partial(_write, api, engine, one, late),
            )
            for one in waiting
        ]
    )


def _write(api: ApiServer, engine: Engine, one: Unanswered, late: LateWrites) -> None:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    said = resize.condition(one.answer, engine.names, now)
    # With its UID in the patch a namesake is refused (409); the strategic merge leaves other conditions alone.
    body = {"metadata": {"uid": one.uid}, "status": {"conditions": [said]}}
    try:
        where = path("pods", one.namespace, one.name, "status") + api.deadline
        if not late.write(partial(api.client.call, "PATCH", where, body, content_type=STRATEGIC_MERGE)):
            return
    except BadName:
        pass
    except KubeError as error:
        if error.status not in _GONE:
            raise
    engine.answered(one)
