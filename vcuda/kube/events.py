"""Events: what a daemon tells people about an object, where `kubectl describe` shows it."""

from __future__ import annotations

import time
from collections.abc import Mapping

from vcuda.kube.client import Client
from vcuda.kube.objects import path

_MOST_MESSAGE = 1024


def event_name(about: str) -> str:
    """A name of its own for an event, of at most 253 characters (DNS subdomain), however long its object's is."""
    suffix = f".{time.time_ns():x}"
    return about[: 253 - len(suffix)].rstrip("-.") + suffix


def post(
    client: Client,
    source: Mapping[str, str],
    about: Mapping[str, str],
    kind: str,
    reason: str,
    message: str,
    timeout: float | None = None,
) -> None:
    """Create one. `source`: component, perhaps host; `about`: kind, namespace, name, uid; `kind`: Normal or Warning.

    Raises KubeError.
    """
    namespace = about.get("namespace") or "default"
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    body = {
        "metadata": {"name": event_name(about["name"]), "namespace": namespace},
        "involvedObject": {"apiVersion": "v1", **about},
        "type": kind,
        "reason": reason,
        "message": message[:_MOST_MESSAGE],
        "source": dict(source),
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
    client.call("POST", path("events", namespace), body, timeout=timeout)
