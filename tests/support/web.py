"""httpx without TLS, for tests that ask over plain HTTP, and often: by itself it reads the machine's authorities for each request, 27 ms of a processor."""

from __future__ import annotations

import functools
import ssl

import httpx

_TRUSTING_NOBODY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

Client = functools.partial(httpx.Client, verify=_TRUSTING_NOBODY)
get = functools.partial(httpx.get, verify=_TRUSTING_NOBODY)
post = functools.partial(httpx.post, verify=_TRUSTING_NOBODY)
