"""Sends the engine's notices as Kubernetes events; which of them, and how often, is said in state/notices.py."""

from __future__ import annotations

import logging

from scheduler_ext.engine.core import Engine
from scheduler_ext.sync.api import ApiServer
from vcuda.kube.errors import KubeError
from vcuda.kube.events import Correlator
from vcuda.logs import fields

_SOURCE = {"component": "gpu-scheduler-extender"}
_log = logging.getLogger(__name__)


def send(api: ApiServer, engine: Engine, correlator: Correlator) -> None:
    """Some of those that wait, once: what does not arrive is in the log, and no decision waits for it."""
    for notice in engine.notices():
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
