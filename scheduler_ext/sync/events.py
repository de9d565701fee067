"""Sends the engine's notices as Kubernetes events; which of them, and how often, is said in state/notices.py."""

from __future__ import annotations

import logging
from functools import partial

from scheduler_ext.engine.core import Engine
from scheduler_ext.state.notices import Notice
from scheduler_ext.sync.api import ApiServer
from scheduler_ext.sync.lanes import Lanes, Task
from vcuda.kube.errors import KubeError
from vcuda.kube.events import Correlator
from vcuda.logs import fields

_SOURCE = {"component": "gpu-scheduler-extender"}
_log = logging.getLogger(__name__)


def send(api: ApiServer, engine: Engine, correlator: Correlator, lanes: Lanes) -> None:
    """Begin to send some of those that wait, once: what does not arrive is in the log; no decision waits for it."""
    tasks = []
    for notice in engine.notices(closed=lanes.closed()):
        write = partial(_send, api, correlator, notice)
        left = partial(engine.not_told, notice)
        tasks.append(Task(notice.place, object(), f"the event {notice.reason}", write, left))
    lanes.offer(tasks)


def _send(api: ApiServer, correlator: Correlator, notice: Notice) -> None:
    about = {"kind": notice.kind, "name": notice.name, "uid": notice.uid}
    if notice.namespace:
        about["namespace"] = notice.namespace
    if notice.kind == "ResourceClaim":
        about["apiVersion"] = "resource.k8s.io/v1"
    try:
        said = correlator.note(about, "Warning", notice.reason, notice.message, notice.times)
        correlator.send(api.client, _SOURCE, said)
    except KubeError as error:
        pod = {"pod": f"{notice.namespace}/{notice.name}", "uid": notice.uid} if notice.kind == "Pod" else {}
        known = fields(pod, node=notice.name if notice.kind == "Node" else "", reason=notice.reason)
        _log.warning(
            "the event %s on %s %s was not taken: %s", notice.reason, notice.kind, notice.name, error, extra=known
        )
        raise
