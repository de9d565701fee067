"""A cluster as the plugin sees it: the API server's objects, and our pods' pages through its proxy, as the user."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vcuda.kube import config
from vcuda.kube.access import TOKEN_HEADER
from vcuda.kube.client import MERGE, Client, listed
from vcuda.kube.endpoint import Endpoint
from vcuda.kube.errors import ApiError, KubeError
from vcuda.kube.objects import Object, checked, path
from vcuda.kubectl.errors import PluginError
from vcuda.spec.names import NODE_SELECTOR_LABEL, NODE_SELECTOR_VALUE, Names

READER = "vcuda-reader"  # the ServiceAccount whose tokens the pages believe; who may make one may read them
ROLE = "vcuda-user"  # the Role that holds what this plugin needs in our namespace
_TOKEN_S = 600  # the shortest that the API server gives (TokenRequest)
_PAGE_S = 40.0
_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND = 401, 403, 404
_AWAY = (502, 503, 504)

DAEMON, EXTENDER = "gpu-manager", "gpu-scheduler-extender"

_T = TypeVar("_T")


@dataclass
class Cluster:
    """`system`: the namespace that our programs run in. All methods raise PluginError and KubeError."""

    client: Client
    namespace: str
    system: str
    names: Names
    _token: str | None = field(default=None, repr=False)

    @classmethod
    def connect(cls, context: config.Context, namespace: str | None, system: str, names: Names) -> Cluster:
        client = Client(Endpoint(context.login, agent="kubectl-vcuda"), timeout=20.0)
        return cls(client, namespace or context.namespace, system, names)

    def pod(self, name: str) -> dict[str, Any]:
        try:
            return _understood(self.client.get("pods", self.namespace, name))
        except ApiError as error:
            if error.status != _NOT_FOUND:
                raise
            raise PluginError(
                f"there is no pod {name} in namespace {self.namespace}; `kubectl get pods -A` lists all, "
                "-n names the namespace"
            ) from None

    def node(self, name: str) -> dict[str, Any]:
        try:
            return _understood(self.client.get("nodes", "", name))
        except ApiError as error:
            if error.status != _NOT_FOUND:
                raise
            raise PluginError(f"there is no node {name}; `kubectl get nodes` lists them") from None

    def nodes(self) -> list[dict[str, Any]]:
        return self.all("nodes")

    def all(self, kind: str, namespace: str = "", selector: str = "") -> list[dict[str, Any]]:
        """Every object of a kind. `selector`: a field selector."""
        return [_understood(item) for page, _ in self.client.pages(kind, namespace, selector) for item in page]

    def annotate(self, pod: Object, annotations: Mapping[str, str]) -> None:
        """Write annotations of this very pod, not of another that has taken its name (409)."""
        metadata = pod["metadata"]
        body = {"metadata": {"uid": metadata["uid"], "annotations": dict(annotations)}}
        self.client.call("PATCH", path("pods", metadata["namespace"], metadata["name"]), body, content_type=MERGE)

    def events(self, pod: Object) -> list[dict[str, Any]]:
        """Of one pod, the oldest first."""
        metadata = pod["metadata"]
        found = self.all("events", metadata.get("namespace", self.namespace), f"involvedObject.name={metadata['name']}")
        mine = [item for item in found if (item.get("involvedObject") or {}).get("uid") == metadata.get("uid")]
        return sorted(mine, key=told_at)

    # Our own pods.

    def daemons(self) -> dict[str, dict[str, Any]]:
        """The daemons' pods by node; of several the eldest that is ready, as others stand by; else the youngest."""
        found: dict[str, dict[str, Any]] = {}
        for item in sorted(self._ours(DAEMON), key=lambda item: str(item["metadata"].get("creationTimestamp", ""))):
            node = str((item.get("spec") or {}).get("nodeName", ""))
            if node not in found or not ready(found[node]):
                found[node] = item
        return found

    def daemon(self, node: str) -> dict[str, Any]:
        """The daemon's pod of a node. Raises PluginError that says why there is none."""
        found = self.daemons().get(node)
        if found is None:
            raise PluginError(self._no_daemon(node))
        return found

    def _no_daemon(self, node: str) -> str:
        labels = self.node(node)["metadata"].get("labels") or {}
        if labels.get(NODE_SELECTOR_LABEL) != NODE_SELECTOR_VALUE:
            label = f"{NODE_SELECTOR_LABEL}={NODE_SELECTOR_VALUE}"
            why = f"it has no label {label}; `kubectl label node {node} {label}` starts one"
            return f"no {DAEMON} runs on node {node}: {why}"
        return (
            f"no {DAEMON} runs on node {node}, which has its label: see "
            f"`kubectl -n {self.system} describe daemonset {DAEMON}`; "
            "where it was installed in another namespace, name that by --system-namespace"
        )

    def leader(self) -> dict[str, Any]:
        """The extender's replica that serves."""
        found = [item for item in self._ours(EXTENDER) if ready(item)]
        leading = [
            item for item in found if (item["metadata"].get("labels") or {}).get(self.names.role_label) == "leader"
        ]
        for item in leading or (found if len(found) == 1 else ()):
            return item
        raise PluginError(
            f"no replica of {EXTENDER} serves in namespace {self.system}: see `kubectl -n {self.system} get pods`; "
            "where it was installed in another namespace, name that by --system-namespace"
        )

    def _ours(self, program: str) -> list[dict[str, Any]]:
        query = {"labelSelector": f"app.kubernetes.io/name={program}"}
        found = self.client.call("GET", path("pods", self.system), query=query)
        return [_understood(item) for item in listed(found)]

    def page(self, pod: Object, port: str, where: str, read: Callable[[Any], _T]) -> _T:
        """What `read` makes of a JSON page of one of our pods, through the API server. `port`: the name of its port.

        Raises PluginError, also where the page has not the form that `read` expects: a node may have another version.
        """
        metadata, number = pod["metadata"], _port(pod, port)
        base = f"{path('pods', self.system)}/{checked(metadata['name'])}:{number}/proxy"
        who = f"{metadata['name']} on node {(pod.get('spec') or {}).get('nodeName', '?')}"
        try:
            data = json.loads(self._read(base + where))
        except ApiError as error:
            raise PluginError(self._refused(error, who, where)) from error
        except (ValueError, RecursionError):
            raise PluginError(
                f"{who} answered {where} with something that is not JSON: is it of our version?"
            ) from None
        try:
            return read(data)
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError):
            raise PluginError(f"{who} answered {where} with JSON of another form: is it of our version?") from None

    def _read(self, where: str) -> bytes:
        try:
            return self._raw(where)
        except ApiError as error:
            if error.status != _UNAUTHORIZED or self._token is not None:
                raise
        self._token = self._made_token()
        return self._raw(where)

    def _raw(self, where: str) -> bytes:
        more = {TOKEN_HEADER: self._token} if self._token else {}
        return self.client.endpoint.raw("GET", where, timeout=_PAGE_S, more=more)

    def _made_token(self) -> str:
        """Of the one ServiceAccount that our pages believe: the user's own login is never shown to a pod."""
        where = path("serviceaccounts", self.system, READER, "token")
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": _TOKEN_S},
        }
        try:
            return str(self.client.call("POST", where, body)["status"]["token"])
        except ApiError as error:
            raise PluginError(
                f"no token of the ServiceAccount {self.system}/{READER} can be had, which our pages ask for: {error}; "
                + self._way_in()
            ) from error
        except (KeyError, TypeError):
            raise PluginError("the API server made no token: it is older than Kubernetes 1.20") from None

    def _way_in(self) -> str:
        return f"ask for `kubectl -n {self.system} create rolebinding vcuda-YOU --role={ROLE} --user=YOU`"

    def _refused(self, error: KubeError, who: str, where: str) -> str:
        if error.status == _FORBIDDEN:
            return f"{who} can't be asked: {error}; {self._way_in()}"
        if error.status == _NOT_FOUND and where.startswith("/explain/"):
            return str(error)
        if error.status == _NOT_FOUND:
            return f"{who} has no page {where}: it is of an older version; upgrade it"
        if error.status in _AWAY:
            see = f"see `kubectl -n {self.system} logs`, and whether a NetworkPolicy keeps the API server out"
            return f"{who} does not answer: {error}; {see}"
        return f"{who}: {error}"


def _understood(thing: dict[str, Any]) -> dict[str, Any]:
    """An object whose parts are what Kubernetes says they are. Raises PluginError: an odd proxy may answer anything."""
    metadata = thing.get("metadata") if isinstance(thing, dict) else None
    if isinstance(metadata, dict) and isinstance(metadata.get("name"), str):
        maps = (thing.get("spec"), thing.get("status"), metadata.get("labels"), metadata.get("annotations"))
        if all(each is None or isinstance(each, dict) for each in maps):
            return thing
    raise PluginError("the API server answered with something that is no Kubernetes object: does `kubectl get` work?")


def ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    going = pod["metadata"].get("deletionTimestamp")
    return not going and any(item.get("type") == "Ready" and item.get("status") == "True" for item in conditions)


def told_at(event: Object) -> str:
    """When an event was told last; those of newer components have a time of another name."""
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


def _port(pod: Object, name: str) -> int:
    for container in (pod.get("spec") or {}).get("containers") or ():
        for port in container.get("ports") or ():
            if port.get("name") == name:
                return int(port["containerPort"])
    raise PluginError(f"pod {pod['metadata']['name']} has no port {name!r}: it is not of our chart")
