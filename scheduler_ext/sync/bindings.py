"""Sends Bindings from the server's own event loop: a write costs no thread, and many may be under way over kept connections."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

import aiohttp
import orjson

from scheduler_ext.sync.apiserver import ApiError, ApiServer, ApiUnreachable, excerpt

_UNAUTHORIZED = 401
_IDLE_SECONDS = 60.0  # that a connection is kept; API servers close theirs after 90 s or later
_LOGIN_SECONDS = 10.0  # that request headers are used again: to renew a token may take a file or a program


class Writer:
    """Used by one event loop. Calls raise ApiError or ApiUnreachable; nothing is sent twice."""

    def __init__(self, api: ApiServer) -> None:
        self._api = api
        self._session: aiohttp.ClientSession | None = None
        self._headers: dict[str, str] = {}
        self._headers_until = -math.inf

    async def bind(
        self, namespace: str, name: str, uid: str, node: str, annotations: Mapping[str, str]
    ) -> None:
        """Create the pod's Binding. The API server copies its annotations to the pod in the same write."""
        metadata: dict[str, object] = {"namespace": namespace, "name": name, "uid": uid}
        if annotations:
            metadata["annotations"] = dict(annotations)
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": metadata,
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        await self._post(f"/api/v1/namespaces/{namespace}/pods/{name}/binding", orjson.dumps(binding))

    async def _post(self, path: str, body: bytes) -> None:
        if self._api.proxied:
            # Proxies of every kind are the business of the Kubernetes client's own pool.
            await asyncio.to_thread(self._api.post, path, body)
            return
        headers = await self._login(path)
        session = self._session or self._connect()
        try:
            async with session.post(
                self._api.address + path, data=body, headers=headers, allow_redirects=False,
                server_hostname=self._api.server_name,
            ) as response:  # fmt: skip
                answer = await response.read()
        except (aiohttp.ClientConnectorSSLError, aiohttp.ClientConnectorCertificateError) as error:
            await self._forget(session)
            raise self._unreachable(error) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from error
        if response.status == _UNAUTHORIZED:
            await self._forget(session)
        if response.status >= 300:
            raise ApiError(response.status, excerpt(answer))

    def _unreachable(self, error: Exception) -> ApiUnreachable:
        return ApiUnreachable(
            f"no answer from {self._api.address}: {str(error) or type(error).__name__:.200}"
        )

    async def _login(self, path: str) -> dict[str, str]:
        now = asyncio.get_running_loop().time()
        if now >= self._headers_until:
            self._headers = await asyncio.to_thread(self._api.headers, "POST", path)
            self._headers_until = now + _LOGIN_SECONDS
        return self._headers

    def _connect(self) -> aiohttp.ClientSession:
        # The whole request has this time, so that none arrives later than the lease's margin allows.
        limit = aiohttp.ClientTimeout(total=self._api.timeout_seconds, ceil_threshold=math.inf)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, ssl=self._api.tls_context(), keepalive_timeout=_IDLE_SECONDS
            ),
            timeout=limit,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self._session

    async def _forget(self, session: aiohttp.ClientSession) -> None:
        """The next write reads certificates and login anew: they may have been renewed."""
        self._headers_until = -math.inf
        if session is self._session:
            self._session = None
        await session.close()

    async def close(self) -> None:
        """Disconnect; another write would connect again."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
