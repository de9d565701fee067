"""Pages of pods through the API server (`pods/NAME:PORT/proxy/…`): the caller's login never reaches the pod."""

from __future__ import annotations

import http.client
import re
import urllib.parse

from localcluster.apiserver import errors
from localcluster.apiserver import resources as kinds
from localcluster.apiserver.faults import Request
from localcluster.apiserver.operations import Operations
from localcluster.apiserver.resources import Target

_PATH = re.compile(
    r"/api/v1/namespaces/(?P<namespace>[^/]+)/pods/(?:http:)?(?P<name>[^/:]+)(?::(?P<port>\d+))?/proxy(?P<rest>/.*)?"
)
# What ends with each connection, and what the API server deletes (apiserver pkg/endpoints/filters/authentication.go).
_KEPT_BACK = {"authorization", "host", "connection", "content-length"}
_TIMEOUT_S = 60


def forward(operations: Operations, request: Request) -> tuple[int, bytes, str] | None:
    """Status, body and content type of a pod's answer; None where the path is no proxy's. Raises ApiError."""
    found = _PATH.fullmatch(request.path)
    if found is None:
        return None
    if request.method != "GET":
        raise errors.ApiError(405, "MethodNotAllowed", "this stand-in API server passes only GET on to pods")
    pod = operations.get(Target(kinds.PODS, found["namespace"], found["name"]))
    address = (pod.get("status") or {}).get("podIP")
    if not address:
        raise errors.ApiError(503, "ServiceUnavailable", f"address not allowed: pod {found['name']} has none")
    query = f"?{urllib.parse.urlencode(request.query)}" if request.query else ""
    headers = {name: value for name, value in request.headers.items() if name.lower() not in _KEPT_BACK}
    connection = http.client.HTTPConnection(address, int(found["port"] or 80), timeout=_TIMEOUT_S)
    try:
        connection.request("GET", urllib.parse.quote(found["rest"] or "/") + query, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.getheader("Content-Type", "text/plain")
    except OSError as error:
        raise errors.ApiError(503, "ServiceUnavailable", f"error trying to reach service: {error}") from error
    finally:
        connection.close()
