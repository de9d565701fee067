"""Defaults and checks of new and changed objects, as far as a stand-in needs: what is wrong is refused with 422.

Source of the rules: pkg/apis/core/validation of Kubernetes, for the fields that pods of ours use.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

from localcluster.apiserver import errors

JsonObject = dict[str, Any]
Causes = list[tuple[str, str]]

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUANTITY = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([KMGTPE]i|[munkMGTPE]|[eE][+-]?\d+)?")
_STANDARD_RESOURCES = ("cpu", "memory", "ephemeral-storage")
_RESTART_POLICIES = ("Always", "OnFailure", "Never")
# The only fields of a pod's spec that an update may change.
_MUTABLE = ("activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds")


def check_shape(body: Any) -> JsonObject:
    """The body as it is; refused with 400 if it is no object with metadata."""
    if not isinstance(body, dict) or not isinstance(body.get("metadata"), dict):
        raise errors.bad_request("the body is not an object with metadata")
    return body


def check_metadata(kind: str, body: Any, *, namespaced: bool, namespace: str) -> JsonObject:
    """Name, namespace, labels and annotations; completes generateName. Returns the object with clean metadata."""
    item = check_shape(body)
    metadata = item["metadata"]
    if not metadata.get("name") and metadata.get("generateName"):
        metadata["name"] = str(metadata["generateName"])[:58] + secrets.token_hex(3)[:5]
    name = metadata.get("name")
    causes: Causes = []
    if not name:
        causes.append(("metadata.name", "Required value: name or generateName is required"))
    elif not isinstance(name, str) or len(name) > 253 or not _SUBDOMAIN.fullmatch(name):
        causes.append(("metadata.name", f"Invalid value: {name!r}: a lowercase RFC 1123 subdomain is needed"))
    if namespaced:
        if metadata.setdefault("namespace", namespace) != namespace:
            raise errors.bad_request("the namespace of the object does not match the namespace of the request")
    else:
        metadata.pop("namespace", None)
    for field in ("labels", "annotations"):
        value = metadata.get(field)
        if value is not None and not (
            isinstance(value, dict) and all(isinstance(text, str) for pair in value.items() for text in pair)
        ):
            raise errors.bad_request(f"metadata.{field} must map strings to strings; quote numbers and booleans")
    if causes:
        raise errors.invalid(kind, str(name or ""), causes)
    for field in (
        "uid",
        "resourceVersion",
        "creationTimestamp",
        "deletionTimestamp",
        "managedFields",
        "selfLink",
    ):
        metadata.pop(field, None)
    return item


def _check_resources(container: JsonObject, path: str, causes: Causes) -> None:
    resources = container.get("resources") or {}
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for field, table in (("limits", limits), ("requests", requests)):
        for name, value in table.items():
            where = f"{path}.resources.{field}[{name}]"
            text = str(value)
            if isinstance(value, bool) or not _QUANTITY.fullmatch(text):
                causes.append((where, f"Invalid value: {text!r}: quantities must look like 1, 500m or 2Gi"))
            elif text.startswith("-"):
                causes.append((where, f"Invalid value: {text!r}: must be greater than or equal to 0"))
            elif name not in _STANDARD_RESOURCES and not name.startswith("hugepages-"):
                if "/" not in name:
                    causes.append(
                        (where, f"Invalid value: {name!r}: must be a standard resource or be fully qualified")
                    )
                elif not re.fullmatch(r"\+?\d+([kMGTPE]i?)?", text) and not re.fullmatch(r"\d+e\d+", text):
                    causes.append((where, f"Invalid value: {text!r}: must be an integer"))
            table[name] = text
    for name, value in limits.items():
        if name not in _STANDARD_RESOURCES and requests.get(name, value) != value:
            causes.append(
                (
                    f"{path}.resources.requests",
                    f"Invalid value: {requests[name]!r}: must be equal to {name} limit {value}",
                )
            )
    for name in requests:
        if name not in _STANDARD_RESOURCES and name not in limits:
            causes.append(
                (
                    f"{path}.resources.limits",
                    f"Required value: limit must be set for non overcommitable {name}",
                )
            )
    if limits:
        container["resources"]["requests"] = {**limits, **requests}


def _check_container(container: Any, path: str, seen: set[str], volumes: set[str], causes: Causes) -> None:
    if not isinstance(container, dict):
        raise errors.bad_request(f"{path} is not an object")
    name = container.get("name")
    if not isinstance(name, str) or not _LABEL.fullmatch(name):
        causes.append((f"{path}.name", f"Invalid value: {name!r}: a lowercase RFC 1123 label is needed"))
    elif name in seen:
        causes.append((f"{path}.name", f"Duplicate value: {name!r}"))
    seen.add(str(name))
    if not container.get("image"):
        causes.append((f"{path}.image", "Required value"))
    for field in ("command", "args"):
        value = container.get(field)
        if value is not None and not (isinstance(value, list) and all(isinstance(part, str) for part in value)):
            raise errors.bad_request(f"{path}.{field} must be a list of strings; quote numbers")
    for index, variable in enumerate(container.get("env") or []):
        if not isinstance(variable, dict) or not variable.get("name"):
            causes.append((f"{path}.env[{index}].name", "Required value"))
        elif not isinstance(variable.get("value", ""), str):
            raise errors.bad_request(f"{path}.env[{index}].value must be a string; quote numbers and booleans")
    for index, mount in enumerate(container.get("volumeMounts") or []):
        if mount.get("name") not in volumes:
            causes.append((f"{path}.volumeMounts[{index}].name", f"Not found: {mount.get('name')!r}"))
        if not mount.get("mountPath"):
            causes.append((f"{path}.volumeMounts[{index}].mountPath", "Required value"))
    _check_resources(container, path, causes)


def check_new_pod(pod: JsonObject) -> JsonObject:
    """Fill in the defaults that kubelet relies on, and refuse an invalid pod with 422."""
    spec = pod.get("spec")
    if not isinstance(spec, dict):
        raise errors.invalid("Pod", pod["metadata"]["name"], [("spec", "Required value")])
    causes: Causes = []
    if not spec.get("containers"):
        causes.append(("spec.containers", "Required value"))
    volumes = {str(volume.get("name")) for volume in spec.get("volumes") or []}
    seen: set[str] = set()
    for field in ("initContainers", "containers"):
        value = spec.get(field) or []
        if not isinstance(value, list):
            raise errors.bad_request(f"spec.{field} is not a list")
        for index, container in enumerate(value):
            _check_container(container, f"spec.{field}[{index}]", seen, volumes, causes)
    for field, default in (
        ("restartPolicy", "Always"), ("terminationGracePeriodSeconds", 30), ("schedulerName", "default-scheduler"),
        ("dnsPolicy", "ClusterFirst"), ("serviceAccountName", "default"), ("enableServiceLinks", True),
    ):  # fmt: skip
        spec.setdefault(field, default)
    if spec["restartPolicy"] not in _RESTART_POLICIES:
        causes.append(("spec.restartPolicy", f"Unsupported value: {spec['restartPolicy']!r}"))
    grace = spec["terminationGracePeriodSeconds"]
    if type(grace) is not int or grace < 0:
        causes.append(
            (
                "spec.terminationGracePeriodSeconds",
                f"Invalid value: {grace!r}: must be a non-negative integer",
            )
        )
    if causes:
        raise errors.invalid("Pod", pod["metadata"]["name"], causes)
    pod["status"] = {"phase": "Pending", "qosClass": _quality(spec)}
    return pod


def _quality(spec: JsonObject) -> str:
    """The QoS class by cpu and memory of all containers; extended resources do not count."""
    rows = [
        container.get("resources") or {} for container in [*(spec.get("initContainers") or []), *spec["containers"]]
    ]
    standard = [
        ({n: row.get(f, {}).get(n) for n in ("cpu", "memory")} if row else {"cpu": None, "memory": None})
        for row in rows
        for f in ("limits",)
    ]
    if (
        rows
        and all(row["cpu"] and row["memory"] for row in standard)
        and all(row["requests"].get(n) == row["limits"].get(n) for row in rows for n in ("cpu", "memory"))
    ):
        return "Guaranteed"
    asks = any(row.get(f, {}).get(n) for row in rows for f in ("limits", "requests") for n in ("cpu", "memory"))
    return "Burstable" if asks else "BestEffort"


def check_pod_update(old: JsonObject, new: JsonObject) -> None:
    """Refuse with 422 what the real API server refuses: nearly all of a pod's spec can't be changed."""

    if not isinstance(new.get("spec"), dict):
        raise errors.invalid("Pod", new["metadata"]["name"], [("spec", "Required value")])

    def fixed(pod: JsonObject) -> JsonObject:
        spec = {name: value for name, value in pod["spec"].items() if name not in _MUTABLE}
        for field in ("containers", "initContainers"):
            if field in spec:
                spec[field] = [{n: v for n, v in c.items() if n != "image"} for c in spec[field]]
        return spec

    if fixed(old) != fixed(new):
        message = "Forbidden: pod updates may not change fields other than the containers' image, " + ", ".join(
            _MUTABLE
        )
        raise errors.invalid("Pod", new["metadata"]["name"], [("spec", message)])
