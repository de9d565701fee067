"""The subresources log and exec of pods: the API server asks the kubelet of the pod's node, as the real one does."""

from __future__ import annotations

import http.client
import urllib.parse
from collections.abc import Mapping

from localcluster.apiserver import errors
from localcluster.apiserver import resources as kinds
from localcluster.apiserver.operations import Operations
from localcluster.apiserver.resources import Target


def _container(operations: Operations, target: Target, query: Mapping[str, str]) -> tuple[int, str]:
    """The port of the pod's kubelet, and the container's name. Raises ApiError."""
    pod = operations.get(Target(kinds.PODS, target.namespace, target.name))
    node_name = pod["spec"].get("nodeName")
    if not node_name:
        raise errors.bad_request(f"pod {target.name} is not on a node yet: nothing of it runs")
    names = [container["name"] for key in ("containers", "initContainers") for container in pod["spec"].get(key) or []]
    name = query.get("container") or names[0]
    if name not in names:
        raise errors.bad_request(
            f"container {name} is not valid for pod {target.name}; choose one of {', '.join(names)}"
        )
    if not query.get("container") and len(pod["spec"]["containers"]) > 1:
        raise errors.bad_request(f"a container name must be specified for pod {target.name}, one of {', '.join(names)}")
    node = operations.get(Target(kinds.NODES, None, node_name))
    port = ((node.get("status") or {}).get("daemonEndpoints") or {}).get("kubeletEndpoint", {}).get("Port")
    if not port:
        raise errors.ApiError(503, "ServiceUnavailable", f"the kubelet of node {node_name} has no endpoint")
    return int(port), str(name)


def exec_path(operations: Operations, target: Target, query: Mapping[str, str], words: str) -> tuple[int, str]:
    """Port and path of kubelet's for a command in a container; `words` is the request's query as it came."""
    port, name = _container(operations, target, query)
    return port, f"/exec/{target.namespace}/{target.name}/{name}?{words}"


def fetch_log(operations: Operations, target: Target, query: Mapping[str, str], token: str) -> str:
    """The log of one container (the only one, if none is named). Raises ApiError if there is none to read."""
    port, name = _container(operations, target, query)
    wanted = {key: query[key] for key in ("tailLines", "previous") if key in query}
    path = f"/containerLogs/{target.namespace}/{target.name}/{name}?{urllib.parse.urlencode(wanted)}"
    code, text = _ask(port, path, token)
    if code != 200:
        raise errors.ApiError(code, "BadRequest", text.strip())
    return text


def _ask(port: int, path: str, token: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    except OSError as error:
        return 502, f"kubelet does not answer: {error}"
    finally:
        connection.close()
