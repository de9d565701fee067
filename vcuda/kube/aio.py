"""The API server's verbs for an event loop: a write costs no thread, and many may be under way over kept connections."""

from __future__ import annotations

import asyncio
import math
import socket

import aiohttp

from vcuda.kube.endpoint import Endpoint, excerpt, keep_alive
from vcuda.kube.errors import ApiError, ApiUnreachable

_UNAUTHORIZED = 401
_IDLE_SECONDS = 60.0  # that a connection is kept; API servers close theirs after 90 s or later
_LOGIN_SECONDS = 10.0  # that request headers are used again: to renew a token may take a file or a program


class AsyncClient:
    """Used by one event loop. Calls raise KubeError alone; nothing is sent twice.

    The whole request has `timeout` seconds, so that none arrives later than the caller knows of.
    """

    def __init__(self, endpoint: Endpoint, *, timeout: float = 10.0) -> None:
        self._endpoint, self._timeout = endpoint, timeout
        self._session: aiohttp.ClientSession | None = None
        self._headers: dict[str, str] = {}
        self._headers_until = -math.inf

    async def post(self, path: str, body: bytes) -> None:
        """Create an object from JSON."""
        headers = await self._login()
        session = self._session or self._connect()
        login = self._endpoint.login
        try:
            async with session.post(
                self._endpoint.url + path, data=body, headers=headers, allow_redirects=False,
                server_hostname=login.server_name, proxy=login.proxy,
            ) as response:  # fmt: skip
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if isinstance(error, aiohttp.ClientConnectorSSLError | aiohttp.ClientConnectorCertificateError):
                await self._forget(session)
            raise ApiUnreachable(
                f"no answer from {self._endpoint.url}: {str(error) or type(error).__name__:.200}"
            ) from error
        if response.status == _UNAUTHORIZED:
            await self._forget(session)
        if response.status >= 300:
            raise ApiError(response.status, excerpt(answer))

    async def _login(self) -> dict[str, str]:
        now = asyncio.get_running_loop().time()
        if now >= self._headers_until:
            self._headers = await asyncio.to_thread(self._endpoint.headers, "application/json")
            self._headers_until = now + _LOGIN_SECONDS
        return self._headers

    def _connect(self) -> aiohttp.ClientSession:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                ssl=self._endpoint.tls() or True,
                keepalive_timeout=_IDLE_SECONDS,
                socket_factory=_socket,
            ),
            timeout=aiohttp.ClientTimeout(total=self._timeout, ceil_threshold=math.inf),
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


def _socket(address: tuple[object, ...]) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)  # type: ignore[arg-type]
    keep_alive(made)
    return made
