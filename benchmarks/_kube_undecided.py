"""Answers kube-scheduler without any decision: `python -m benchmarks._kube_undecided KUBECONFIG CERTIFICATE KEY CLIENT_CA`.

The extender's own server and client (TLS, HTTP/2, its connection for Bindings) around the shortest answers: each pod goes to
the next of the nodes that are offered, with an annotation as long as a placement. What kube-scheduler's throughput (T33) loses
with it is lost by asking any program. The first line that it prints is its port.
"""

from __future__ import annotations

import itertools
import socket
import sys
from collections.abc import Awaitable
from typing import Any

import orjson

from scheduler_ext.http.certificate import ServerCertificate
from scheduler_ext.http.exchange import Answer, Later, Request
from scheduler_ext.http.pages import Pages
from scheduler_ext.http.server import Server
from scheduler_ext.sync.api import ApiServer, Writer

_ANNOTATIONS = {"example.com/placement": 200 * "x"}


class _Undecided(Pages):
    body_bytes = 32 << 20

    def __init__(self, api: ApiServer) -> None:
        super().__init__("undecided")
        self._api, self._count = api, itertools.count()
        self._writer: Writer | None = None  # of the loop that serves
        self.posts |= {"/scheduler/filter": self._filter, "/scheduler/bind": self._bind}

    def _filter(self, request: Request) -> Answer:
        names = orjson.loads(request.body)["NodeNames"]
        return Answer(200, orjson.dumps({"NodeNames": [names[next(self._count) % len(names)]], "Error": ""}))

    def _bind(self, request: Request) -> Awaitable[Answer] | Later[Answer]:
        asked = orjson.loads(request.body)
        pod = (asked["PodNamespace"], asked["PodName"], asked["PodUID"], asked["Node"], _ANNOTATIONS)
        self._writer = writer = self._writer or Writer(self._api)
        later: Later[Answer] = Later()
        begun = writer.begin(*pod, lambda problem: later.give(_bound("" if problem is None else str(problem))))
        return later if begun else _bind_later(writer, *pod)


def _bound(problem: str) -> Answer:
    return Answer(200, orjson.dumps({"Error": problem}))


async def _bind_later(writer: Writer, *pod: Any) -> Answer:
    """There is no connection yet."""
    await writer.bind(*pod)
    return _bound("")


def main(kubeconfig: str, certificate: str, key: str, client_ca: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    application = _Undecided(ApiServer.connect(kubeconfig))
    Server(application, listener, ServerCertificate(certificate, key, client_ca, http2=True)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
