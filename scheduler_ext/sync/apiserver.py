"""The few calls to the Kubernetes API that the extender makes, over the `kubernetes` package's configuration and login."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from typing import Any

import kubernetes
import orjson
import urllib3
import yaml
from urllib3.util.ssl_ import create_urllib3_context

_PAGE = 500
_WATCH_SECONDS = 300
_MOST_EXCERPT = 200
_NOT_FOUND = 404
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"


class ApiError(Exception):
    """The API server answered with an error: `status` is the HTTP code."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the API server answered {status}: {message}")
        self.status = status


class ApiUnreachable(Exception):
    """No answer came: whether a request took effect is unknown."""


class NoConfiguration(Exception):
    """There is no usable kubeconfig and no service account; the message says which."""


def excerpt(body: bytes) -> str:
    """What the body of an error says, shortened."""
    try:
        data = orjson.loads(body)
        message = data.get("message") if isinstance(data, dict) else None
    except orjson.JSONDecodeError:
        message = None
    return str(message or body.decode("utf-8", "replace"))[:_MOST_EXCERPT]


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiUnreachable(f"the API server sent something that is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ApiUnreachable("the API server sent JSON that is not an object")
    return data


def _only(name: str) -> dict[str, str]:
    return {"fieldSelector": f"metadata.name%3D{name}"} if name else {}


class ApiServer:
    """Thread-safe. Calls raise ApiError or ApiUnreachable; nothing is retried here."""

    def __init__(self, client: Any, timeout_seconds: float = 10.0) -> None:
        self._client = client
        self.timeout_seconds = timeout_seconds

    @classmethod
    def connect(cls, kubeconfig: str | None, timeout_seconds: float = 10.0) -> ApiServer:
        """Log in by a kubeconfig file, or by the pod's service account if none is given. Raises NoConfiguration."""
        configuration = kubernetes.client.Configuration()
        try:
            login: Any = kubernetes.config
            if kubeconfig:
                login.load_kube_config(kubeconfig, client_configuration=configuration)
            else:
                login.load_incluster_config(client_configuration=configuration)
        except (
            kubernetes.config.ConfigException,
            yaml.YAMLError,
            OSError,
            ValueError,
            TypeError,
            AttributeError,
        ) as error:
            where = (
                f"kubeconfig {kubeconfig}"
                if kubeconfig
                else "no --kubeconfig was given and the service account"
            )
            raise NoConfiguration(f"{where} cannot be used: {str(error).splitlines()[0]:.200}") from error
        configuration.connection_pool_maxsize = 64
        configuration.retries = False
        return cls(kubernetes.client.ApiClient(configuration), timeout_seconds)

    @property
    def address(self) -> str:
        return str(self._client.configuration.host)

    @property
    def proxied(self) -> bool:
        """Whether requests go through a proxy."""
        return type(self._client.rest_client.pool_manager) is not urllib3.PoolManager

    @property
    def server_name(self) -> str | None:
        """The name that the server's certificate has to carry, if it is not that of its address."""
        pool = self._client.rest_client.pool_manager.connection_pool_kw
        return pool.get("server_hostname") or pool.get("assert_hostname") or None

    def tls_context(self) -> ssl.SSLContext | bool:
        """As the Kubernetes client's own connections, certificates read anew; True for plain HTTP. Raises ApiUnreachable."""
        if not self.address.startswith("https:"):
            return True
        pool = self._client.rest_client.pool_manager.connection_pool_kw
        context = create_urllib3_context()
        try:
            if pool.get("ca_certs") or pool.get("ca_cert_data"):
                context.load_verify_locations(pool.get("ca_certs"), cadata=pool.get("ca_cert_data"))
            else:
                context.load_default_certs()
            if pool.get("cert_file"):
                context.load_cert_chain(pool["cert_file"], pool.get("key_file"))
        except OSError as error:
            raise ApiUnreachable(f"a certificate for {self.address} cannot be read: {error}") from error
        context.check_hostname = (
            pool.get("cert_reqs") == ssl.CERT_REQUIRED and pool.get("assert_hostname") is not False
        )
        context.verify_mode = pool.get("cert_reqs", ssl.CERT_REQUIRED)
        return context

    def headers(
        self, method: str, path: str, content_type: str | None = "application/json"
    ) -> dict[str, str]:
        """The headers of a request, logged in; a token that is about to end is renewed, which may block."""
        headers = {"Accept": "application/json", "User-Agent": "gpu-scheduler-extender"}
        if content_type is not None:
            headers["Content-Type"] = content_type
        self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, None)
        return headers

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: bytes | None = None,
        *,
        stream: bool = False,
        content_type: str = "application/json",
    ) -> Any:
        headers = self.headers(method, path, content_type if body is not None else None)
        read = _WATCH_SECONDS + 30 if stream else self.timeout_seconds
        try:
            response = self._client.rest_client.pool_manager.request(
                method,
                self.address
                + path
                + ("?" + "&".join(f"{key}={value}" for key, value in query.items()) if query else ""),
                body=body,
                headers=headers,
                preload_content=not stream,
                retries=False,
                timeout=urllib3.Timeout(connect=self.timeout_seconds, read=read),
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ApiUnreachable(f"no answer from {self.address}: {error!s:.{_MOST_EXCERPT}}") from error
        if response.status >= 300:
            try:
                message = excerpt(response.read() if stream else response.data)
            except (urllib3.exceptions.HTTPError, OSError) as error:
                message = str(error)[:_MOST_EXCERPT]
            raise ApiError(response.status, message)
        return response

    def pages(self, resource: str, name: str = "") -> Iterator[tuple[list[dict[str, Any]], str]]:
        """List page by page, (objects, resource version): all "nodes", "pods" or, with `name`, one object of a kind."""
        going_on = ""
        while True:
            query = {"limit": str(_PAGE)} | ({"continue": going_on} if going_on else {}) | _only(name)
            data = _parsed(self._send("GET", f"/api/v1/{resource}", query).data)
            metadata = data.get("metadata") or {}
            yield data.get("items") or [], str(metadata.get("resourceVersion", ""))
            going_on = metadata.get("continue") or ""
            if not going_on:
                return

    def watch(self, resource: str, version: str, name: str = "") -> Iterator[dict[str, Any]]:
        """Yield watch events after `version` until the server ends the stream (at most some minutes)."""
        query = {
            "watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true", "timeoutSeconds": str(_WATCH_SECONDS),
        }  # fmt: skip
        response = self._send("GET", f"/api/v1/{resource}", query | _only(name), stream=True)
        rest = b""
        try:
            # read1: whatever is there, chunked or not; stream() would wait for a full buffer.
            while chunk := response.read1():
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (_parsed(line) for line in lines if line.strip())
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ApiUnreachable(f"the watch of {resource} broke off: {error!s:.{_MOST_EXCERPT}}") from error
        finally:
            response.close()

    def pod(self, namespace: str, name: str) -> dict[str, Any]:
        """Read one pod."""
        return _parsed(self._send("GET", f"/api/v1/namespaces/{namespace}/pods/{name}", {}).data)

    def post(self, path: str, body: bytes) -> None:
        """Create an object from JSON."""
        self._send("POST", path, {}, body)

    def lease(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Read a Lease; None if there is none."""
        try:
            return _parsed(self._send("GET", f"{_LEASES.format(namespace)}/{name}", {}).data)
        except ApiError as error:
            if error.status != _NOT_FOUND:
                raise
            return None

    def put_lease(
        self, namespace: str, name: str, old: Mapping[str, Any] | None, spec: Mapping[str, Any]
    ) -> None:
        """Write a Lease in place of `old`, or a new one. ApiError 409 if it has changed since `old` was read."""
        path = _LEASES.format(namespace)
        new = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": dict(spec)}
        if old is None:
            new["metadata"] = {"namespace": namespace, "name": name}
            self._send("POST", path, {}, orjson.dumps(new))
        else:
            new["metadata"] = old["metadata"]
            self._send("PUT", f"{path}/{name}", {}, orjson.dumps(new))

    def label_pod(self, namespace: str, name: str, labels: Mapping[str, str]) -> None:
        """Set labels of a pod."""
        patch = orjson.dumps({"metadata": {"labels": dict(labels)}})
        self._send(
            "PATCH",
            f"/api/v1/namespaces/{namespace}/pods/{name}",
            {},
            patch,
            content_type="application/merge-patch+json",
        )
