"""What each request does to the stores: the semantics of create, update, patch, delete, bind and status."""

from __future__ import annotations

import threading
from typing import Any

from localcluster.apiserver import errors, patch, validation
from localcluster.apiserver import resources as kinds
from localcluster.apiserver.resources import Resource, Target
from localcluster.apiserver.store import Clock, Store, copied, now

JsonObject = dict[str, Any]
# What only the server writes: a client's value is replaced by the present one.
_SERVER_METADATA = (
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "name",
    "namespace",
)


class Operations:
    """The API's verbs on in-memory stores; every refusal is an ApiError.

    Hold `lock` around a verb: it reads before it writes.
    """

    def __init__(self, history: int = 2048) -> None:
        self.clock = clock = Clock()
        self.lock: threading.Condition = clock.changed
        self.stores: dict[Resource, Store] = {
            resource: Store(resource.plural, clock, history) for resource in kinds.ALL
        }
        for name in ("default", "kube-system"):
            self.create(Target(kinds.NAMESPACES, None), {"metadata": {"name": name}})

    def get(self, target: Target) -> JsonObject:
        return self.stores[target.resource].get(target.namespace or "", target.name)

    def create(self, target: Target, body: Any) -> JsonObject:
        resource, namespace = target.resource, target.namespace or ""
        if resource.namespaced and not namespace:
            raise errors.bad_request("a namespace is needed in the path")
        item = validation.check_metadata(resource.kind, body, namespaced=resource.namespaced, namespace=namespace)
        self._check_kind(resource, item)
        if resource.namespaced:
            self.stores[kinds.NAMESPACES].get("", namespace)
        if resource is kinds.PODS:
            item = validation.check_new_pod(item)
        elif resource is kinds.NAMESPACES:
            item["status"] = {"phase": "Active"}
        return self.stores[resource].create(item)

    @staticmethod
    def _check_kind(resource: Resource, item: JsonObject) -> None:
        given = (item.setdefault("apiVersion", resource.api_version), item.setdefault("kind", resource.kind))
        if given != (resource.api_version, resource.kind):
            raise errors.bad_request(
                f"the object is a {given[0]} {given[1]}, the request's path is for {resource.kind}"
            )

    def replace(self, target: Target, body: Any) -> JsonObject:
        """PUT: the whole object, or its status; 409 if it carries a resourceVersion that is not the present one."""
        validation.check_shape(body)
        old = self.get(target)
        metadata = body["metadata"]
        if metadata.get("name", target.name) != target.name:
            raise errors.bad_request("the name of the object does not match the name on the URL")
        if metadata.get("uid", old["metadata"]["uid"]) != old["metadata"]["uid"]:
            raise errors.conflict(target.resource.plural, target.name, "the UID in the object is not the stored one")
        return self._write(target, old, body, metadata.get("resourceVersion"))

    def patch(self, target: Target, body: Any, content_type: str) -> JsonObject:
        old = self.get(target)
        new = patch.apply(old, body, content_type)
        validation.check_shape(new)
        metadata = body.get("metadata") or {}
        if metadata.get("uid", old["metadata"]["uid"]) != old["metadata"]["uid"]:
            raise errors.conflict(target.resource.plural, target.name, "the UID in the patch is not the stored one")
        expected = metadata.get("resourceVersion")
        return self._write(target, old, new, expected)

    def _write(self, target: Target, old: JsonObject, new: JsonObject, expected: str | None) -> JsonObject:
        self._check_kind(target.resource, new)
        metadata = new["metadata"]
        for field in _SERVER_METADATA:
            metadata.pop(field, None)
            if field in old["metadata"]:
                metadata[field] = old["metadata"][field]
        if target.subresource == "status":
            new = {**copied(old), "metadata": metadata, "status": new.get("status", {})}
        else:
            if target.resource in (kinds.PODS, kinds.NODES, kinds.NAMESPACES, kinds.RESOURCE_CLAIMS):
                new["status"] = old.get("status", {})
            if target.resource is kinds.PODS:
                validation.check_pod_update(old, new)
        current = old["metadata"]["resourceVersion"]
        metadata["resourceVersion"] = current
        return self.stores[target.resource].update(new, expected)

    def evict(self, target: Target, body: JsonObject) -> None:
        """Delete a pod unless a budget that selects it allows no disruption by its status, which nobody counts anew."""
        version = body.get("apiVersion", "policy/v1")
        if version != "policy/v1":
            raise errors.bad_request(f'no kind "Eviction" is registered for version "{version}"')
        pod = Target(kinds.PODS, target.namespace, target.name)
        labels = self.get(pod)["metadata"].get("labels") or {}

        def selects(budget: JsonObject) -> bool:
            wanted = (budget["spec"].get("selector") or {}).get("matchLabels") or {}
            return wanted.items() <= labels.items()

        for budget in self.stores[kinds.BUDGETS].list(target.namespace, selects):
            if budget.get("status", {}).get("disruptionsAllowed", 0) < 1:
                message = "Cannot evict pod as it would violate the pod's disruption budget."
                cause = {"reason": "DisruptionBudget", "message": f"The disruption budget {budget['metadata']['name']}"}
                raise errors.ApiError(429, "TooManyRequests", message, {"causes": [cause]})
        self.delete(pod, body.get("deleteOptions") or {})

    def delete(self, target: Target, options: JsonObject) -> JsonObject:
        """Delete at once, or mark a running pod as going: then its kubelet deletes it with grace period 0."""
        old = self.get(target)
        preconditions = options.get("preconditions") or {}
        for field in ("uid", "resourceVersion"):
            if field in preconditions and preconditions[field] != old["metadata"][field]:
                why = f"the precondition {field} does not hold"
                raise errors.conflict(target.resource.plural, target.name, why)
        store = self.stores[target.resource]
        if target.resource is not kinds.PODS:
            return store.delete(target.namespace or "", target.name)
        grace = options.get("gracePeriodSeconds")
        if grace is None:
            grace = old["spec"].get("terminationGracePeriodSeconds", 30)
        if type(grace) is not int or grace < 0:
            raise errors.bad_request(f"gracePeriodSeconds is {grace!r}; it must be a non-negative integer")
        finished = old.get("status", {}).get("phase") in ("Succeeded", "Failed")
        if grace == 0 or finished or not old["spec"].get("nodeName"):
            return store.delete(target.namespace or "", target.name)
        metadata = old["metadata"]
        if "deletionTimestamp" not in metadata or grace < metadata.get("deletionGracePeriodSeconds", 0):
            metadata.setdefault("deletionTimestamp", now())
            metadata["deletionGracePeriodSeconds"] = grace
            return store.update(old)
        return old

    def bind(self, target: Target, body: Any) -> JsonObject:
        """The Binding's node and annotations reach the pod in one write; 409 if it has a node or is going."""
        metadata = body.get("metadata") if isinstance(body, dict) else None
        node = body.get("target") if isinstance(body, dict) else None
        if not isinstance(metadata, dict) or not isinstance(node, dict) or not node.get("name"):
            raise errors.bad_request("a Binding needs metadata and target.name")
        name = target.name or metadata.get("name", "")
        pod = self.get(Target(kinds.PODS, target.namespace, name))
        if metadata.get("uid") and metadata["uid"] != pod["metadata"]["uid"]:
            raise errors.conflict("pods/binding", name, "the UID in the Binding is not the pod's")
        if "deletionTimestamp" in pod["metadata"]:
            raise errors.conflict("pods/binding", name, f"pod {name} is being deleted, cannot be assigned to a host")
        if pod["spec"].get("nodeName"):
            why = f"pod {name} is already assigned to node {pod['spec']['nodeName']!r}"
            raise errors.conflict("pods/binding", name, why)
        for field in ("annotations", "labels"):
            if metadata.get(field):
                pod["metadata"][field] = {**(pod["metadata"].get(field) or {}), **metadata[field]}
        pod["spec"]["nodeName"] = node["name"]
        pod["status"].pop("nominatedNodeName", None)  # as from Kubernetes 1.34 on
        conditions = [c for c in pod["status"].get("conditions", []) if c.get("type") != "PodScheduled"]
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": now()}
        pod["status"]["conditions"] = [*conditions, scheduled]
        self.stores[kinds.PODS].update(pod)
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}
