"""Tables for `kubectl get`: the columns that the real server prints for pods, name and age for the rest."""

from __future__ import annotations

import datetime
from typing import Any

from deploy.local.apiserver import resources

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


def render(items: list[JsonObject], version: str, resource: resources.Resource) -> JsonObject:
    """The objects as a meta.k8s.io/v1 Table."""
    columns = [_NAME, _column("Age")]
    if resource is resources.PODS:
        columns = [_NAME, _column("Ready"), _column("Status"), _column("Restarts", "integer"), _column("Age")]
    rows = []
    for item in items:
        metadata = item["metadata"]
        cells: list[Any] = [metadata["name"]]
        if resource is resources.PODS:
            containers = item.get("status", {}).get("containerStatuses", [])
            ready = sum(bool(container.get("ready")) for container in containers)
            cells.append(f"{ready}/{len(item['spec']['containers'])}")
            cells += [pod_state(item), sum(container.get("restartCount", 0) for container in containers)]
        cells.append(_age(metadata["creationTimestamp"]))
        rows.append({"cells": cells, "object": {
            "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata,
        }})  # fmt: skip
    return {
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": {"resourceVersion": version},
        "columnDefinitions": columns, "rows": rows,
    }  # fmt: skip
