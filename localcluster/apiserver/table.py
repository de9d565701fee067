"""Tables for `kubectl get`: the columns that the real server prints, as far as a stand-in has something to print."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

from localcluster.apiserver import resources

JsonObject = dict[str, Any]
_NAME = {"name": "Name", "type": "string", "format": "name", "description": "", "priority": 0}


def _column(name: str, kind: str = "string") -> JsonObject:
    return {"name": name, "type": kind, "format": "", "description": "", "priority": 0}


def _age(timestamp: str) -> str:
    created = datetime.datetime.fromisoformat(timestamp)
    seconds = int((datetime.datetime.now(datetime.UTC) - created).total_seconds())
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{max(0, seconds)}s"


def pod_state(pod: JsonObject) -> str:
    """The STATUS column: the most telling of phase, reason and the containers' own reasons."""
    if "deletionTimestamp" in pod["metadata"]:
        return "Terminating"
    status = pod.get("status", {})
    if status.get("reason"):
        return str(status["reason"])
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        for state in container.get("state", {}).values():
            if state.get("reason") not in (None, "PodInitializing", "ContainerCreating", "Completed"):
                return str(state["reason"])
    phase = str(status.get("phase", "Unknown"))
    return "Completed" if phase == "Succeeded" else phase


def _pod_cells(pod: JsonObject) -> list[Any]:
    containers = pod.get("status", {}).get("containerStatuses", [])
    ready = sum(bool(container.get("ready")) for container in containers)
    restarts = sum(container.get("restartCount", 0) for container in containers)
    return [f"{ready}/{len(pod['spec']['containers'])}", pod_state(pod), restarts]


def _node_cells(node: JsonObject) -> list[Any]:
    conditions = {c["type"]: c["status"] for c in node.get("status", {}).get("conditions", [])}
    return ["Ready" if conditions.get("Ready") == "True" else "NotReady"]


def _event_cells(event: JsonObject) -> list[Any]:
    involved = event.get("involvedObject", {})
    where = f"{str(involved.get('kind', '')).lower()}/{involved.get('name', '')}"
    return [event.get("type", ""), event.get("reason", ""), where, event.get("message", "")]


_COLUMNS: dict[resources.Resource, tuple[list[JsonObject], Callable[[JsonObject], list[Any]]]] = {
    resources.PODS: ([_column("Ready"), _column("Status"), _column("Restarts", "integer")], _pod_cells),
    resources.NODES: ([_column("Status")], _node_cells),
    resources.EVENTS: (
        [_column("Type"), _column("Reason"), _column("Object"), _column("Message")],
        _event_cells,
    ),
}


def render(items: list[JsonObject], version: str, resource: resources.Resource) -> JsonObject:
    """The objects as a meta.k8s.io/v1 Table: name, what is particular to the resource, age."""
    columns, cells = _COLUMNS.get(resource, ([], lambda _: []))
    rows = [
        {
            "cells": [item["metadata"]["name"], *cells(item), _age(item["metadata"]["creationTimestamp"])],
            "object": {
                "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": item["metadata"],
            },
        }
        for item in items
    ]  # fmt: skip
    return {
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": {"resourceVersion": version},
        "columnDefinitions": [_NAME, *columns, _column("Age")], "rows": rows,
    }  # fmt: skip
