"""Which resources exist, and how a request's path names one; also the discovery documents that clients ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from localcluster.apiserver import errors

JsonObject = dict[str, Any]
_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


@dataclass(frozen=True)
class Resource:
    """One kind of object. `group` is empty for the core group."""

    plural: str
    kind: str
    group: str = ""
    namespaced: bool = True
    short_names: tuple[str, ...] = ()

    @property
    def api_version(self) -> str:
        return f"{self.group}/v1" if self.group else "v1"


PODS = Resource("pods", "Pod", short_names=("po",))
NODES = Resource("nodes", "Node", namespaced=False, short_names=("no",))
NAMESPACES = Resource("namespaces", "Namespace", namespaced=False, short_names=("ns",))
EVENTS = Resource("events", "Event", short_names=("ev",))
CONFIG_MAPS = Resource("configmaps", "ConfigMap", short_names=("cm",))
LEASES = Resource("leases", "Lease", "coordination.k8s.io")
RESOURCE_CLAIMS = Resource("resourceclaims", "ResourceClaim", "resource.k8s.io")
RESOURCE_CLAIM_TEMPLATES = Resource("resourceclaimtemplates", "ResourceClaimTemplate", "resource.k8s.io")
DEVICE_CLASSES = Resource("deviceclasses", "DeviceClass", "resource.k8s.io", namespaced=False)
RESOURCE_SLICES = Resource("resourceslices", "ResourceSlice", "resource.k8s.io", namespaced=False)
BUDGETS = Resource("poddisruptionbudgets", "PodDisruptionBudget", "policy", short_names=("pdb",))
ALL = (
    PODS, NODES, NAMESPACES, EVENTS, CONFIG_MAPS, LEASES, RESOURCE_CLAIMS, RESOURCE_CLAIM_TEMPLATES, RESOURCE_SLICES,
    DEVICE_CLASSES, BUDGETS,
)  # fmt: skip
_GROUPS = tuple(dict.fromkeys(resource.group for resource in ALL if resource.group))
_SUBRESOURCES = {
    PODS: ("status", "binding", "eviction", "log", "exec"), NODES: ("status",), NAMESPACES: ("status",),
    RESOURCE_CLAIMS: ("status",), BUDGETS: ("status",),
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """What a path names: a collection if `name` is empty, an object, or a subresource of it."""

    resource: Resource
    namespace: str | None
    name: str = ""
    subresource: str = ""


def parse_path(path: str) -> Target:
    """Raises ApiError 404 for a path that names nothing we serve."""
    parts = path.strip("/").split("/")
    missing = errors.ApiError(404, "NotFound", f"the server could not find the requested resource ({path:.200})")
    if parts[:2] == ["api", "v1"]:
        group, rest = "", parts[2:]
    elif parts[:1] == ["apis"] and len(parts) > 3 and parts[2] == "v1":
        group, rest = parts[1], parts[3:]
    else:
        raise missing
    namespace = None
    if rest[:1] == ["namespaces"] and len(rest) > 2 and rest[2] != "status":
        namespace, rest = rest[1], rest[2:]
    elif rest[:1] == ["bindings"]:
        raise missing
    if not rest or len(rest) > 3 or not all(rest):
        raise missing
    if rest[0] == "bindings" and namespace and len(rest) == 1:
        return Target(PODS, namespace, subresource="binding")
    resource = next((r for r in ALL if (r.plural, r.group) == (rest[0], group)), None)
    name, subresource = [*rest, "", ""][1:3]
    known = resource is not None and (not subresource or subresource in _SUBRESOURCES.get(resource, ()))
    if resource is None or not known or (not resource.namespaced and namespace is not None):
        raise missing
    if resource.namespaced and namespace is None and name:
        raise missing
    return Target(resource, namespace, name, subresource)


def discovery(path: str) -> JsonObject | None:
    """The document for a discovery path, None for any other path."""
    path = path.rstrip("/")
    if path == "/version":
        return {"major": "1", "minor": "36", "gitVersion": "v1.36.0-local", "platform": "linux/amd64"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = []
        for name in _GROUPS:
            version = {"groupVersion": f"{name}/v1", "version": "v1"}
            groups.append({"name": name, "versions": [version], "preferredVersion": version})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    for prefix, group_name in (("/api/v1", ""), *((f"/apis/{name}/v1", name) for name in _GROUPS)):
        if path == prefix:
            return {
                "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{group_name}/v1".lstrip("/"),
                "resources": [row for resource in ALL if resource.group == group_name for row in _rows(resource)],
            }  # fmt: skip
        if path == f"/openapi/v3{prefix}":
            return _openapi(prefix, group_name)
    if path == "/openapi/v3":
        documents = ("api/v1", *(f"apis/{name}/v1" for name in _GROUPS))
        return {"paths": {name: {"serverRelativeURL": f"/openapi/v3/{name}"} for name in documents}}
    return None


def _openapi(prefix: str, group: str) -> JsonObject:
    """Just enough for kubectl to see that the server checks fields itself, so that it does not insist on a schema."""
    parameters = [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}]
    paths = {}
    for resource in ALL:
        if resource.group == group:
            scope = "/namespaces/{namespace}" if resource.namespaced else ""
            kind = {"group": group, "version": "v1", "kind": resource.kind}
            operation = {"parameters": parameters, "x-kubernetes-group-version-kind": kind, "responses": {}}
            paths[f"{prefix}{scope}/{resource.plural}/{{name}}"] = {"patch": operation}
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1.36.0-local"}, "paths": paths}


def _rows(resource: Resource) -> list[JsonObject]:
    row = {
        "name": resource.plural, "singularName": resource.kind.lower(), "namespaced": resource.namespaced,
        "kind": resource.kind, "verbs": _VERBS, "shortNames": list(resource.short_names),
    }  # fmt: skip
    below = _SUBRESOURCES.get(resource, ())
    return [row, *({**row, "name": f"{resource.plural}/{name}", "shortNames": []} for name in below)]
