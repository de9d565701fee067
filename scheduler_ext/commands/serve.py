"""Runs the extender: watches, sweeper and HTTP server, until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from scheduler_ext.engine.core import Engine
from scheduler_ext.http import app
from scheduler_ext.http.certificate import ServerCertificate
from scheduler_ext.lab.recording import Recorder
from scheduler_ext.settings import MIB, Settings
from scheduler_ext.sync import feed
from scheduler_ext.sync.api import ApiServer
from scheduler_ext.sync.binder import Binder
from scheduler_ext.sync.election import Election, Place
from vcuda.kube.worker import Worker
from vcuda.spec.names import Names

_log = logging.getLogger(__name__)
_READ_THREADS = 8
_BACKLOG = 512
_LONGEST_SWEEP = 5.0


class CannotServe(Exception):
    """The server can't start; the message names what and why."""


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.bind_address else socket.AF_INET
    # asyncio switches Nagle's delay (40 ms per answer) off only on sockets whose protocol is given.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.bind_address, settings.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise CannotServe(
            f"cannot listen on {settings.bind_address} port {settings.port}: {error.strerror}; choose another by --port"
        ) from error
    return listener


class LostLease(Exception):
    """Another replica leads now, so that this process had to end."""


def _election(
    settings: Settings,
    api: ApiServer,
    *,
    gained: Callable[[], None],
    lost: Callable[[], None],
    ready: Callable[[], bool],
    failed: Callable[[], object],
) -> Election | None:
    if settings.lease is None:
        return None
    pod = Place(*settings.pod.split("/")) if settings.pod else None
    identity = f"{pod.name if pod else socket.gethostname()}_{uuid.uuid4().hex[:8]}"
    return Election(
        api, Place(*settings.lease.split("/")), identity, gained=gained, lost=lost, ready=ready, pod=pod, failed=failed,
        label=f"{settings.resource_domain}/vcuda-extender-role",
        lease_seconds=settings.lease_seconds, margin_seconds=settings.api_timeout_seconds,
    )  # fmt: skip


def _recorder(settings: Settings) -> Recorder | None:
    if settings.record is None:
        return None
    header = {
        "domain": settings.resource_domain, "policy": settings.policy, "gang_seconds": settings.gang_seconds
    }  # fmt: skip
    recorder = Recorder(
        Path(settings.record), header, Names(settings.resource_domain), most_bytes=settings.record_mib * MIB
    )
    try:
        recorder.start()
    except OSError as error:
        raise CannotServe(
            f"cannot record to {settings.record}: {error.strerror}; choose another file by --record"
        ) from error
    return recorder


def _always() -> None:
    return None


def _sweep(engine: Engine, binder: Binder) -> None:
    """Expire assumptions and settle uncertain writes."""
    expired = engine.expire()
    if expired:
        _log.info("%d assumed placements expired: their Bind never came", expired)
    binder.settle()


def _server(application: ASGIApp, certificate: ServerCertificate | None) -> uvicorn.Server:
    configuration = uvicorn.Config(
        application, http="httptools", loop="asyncio", ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, proxy_headers=False, timeout_keep_alive=75, timeout_graceful_shutdown=5,
    )  # fmt: skip
    configuration.load()
    configuration.ssl = certificate.context if certificate else None
    return uvicorn.Server(configuration)


async def _answer(
    server: uvicorn.Server, listener: socket.socket, certificate: ServerCertificate | None, binder: Binder
) -> None:
    renewal = asyncio.create_task(certificate.keep_fresh()) if certificate else None
    try:
        await server.serve([listener])
    finally:
        # The lease is given back after this: no write of ours may be under way then.
        await binder.close()
    if renewal is not None:
        renewal.cancel()


def _engine(settings: Settings, recorder: Recorder | None) -> Engine:
    return Engine(
        Names(settings.resource_domain),
        settings.policy,
        expiry_seconds=settings.assume_seconds,
        gang_seconds=settings.gang_seconds,
        journal=recorder,
    )


def run(settings: Settings, api: ApiServer) -> None:
    """Serve until SIGTERM or SIGINT. Raises CannotServe and BadCertificate, and LostLease."""
    recorder = _recorder(settings)
    try:
        _serve(settings, api, _engine(settings, recorder))
    finally:
        if recorder is not None:
            recorder.close()


def _serve(settings: Settings, api: ApiServer, engine: Engine) -> None:
    certificate = None
    if settings.tls_cert and settings.tls_key:
        certificate = ServerCertificate(settings.tls_cert, settings.tls_key)
    listener = _listen(settings)
    followed = [*feed.handlers(engine)]
    if settings.quotas:
        engine.expect_quotas()
        followed.append(feed.quota_handlers(engine, *settings.quotas.split("/")))
    informers = [feed.informer(api, engine, how) for how in followed]
    servers: list[uvicorn.Server] = []
    lost = threading.Event()

    def follow() -> None:
        # A leader lists everything after it got the lease: what the last one wrote is in that list.
        for informer in informers:
            informer.start()

    def end() -> None:
        lost.set()
        for server in servers:
            server.should_exit = True

    failed = engine.metrics.worker_failures.labels("election").inc
    election = _election(
        settings, api, gained=follow, lost=end, ready=lambda: engine.not_ready() is None, failed=failed
    )
    stands_by = election.stands_by if election else _always
    with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="read") as executor:
        binder = Binder(api, engine, executor, stands_by)

        sweeper = Worker(
            "sweeper", lambda: _sweep(engine, binder), failed=engine.metrics.worker_failures.labels("sweeper").inc,
            pause=min(_LONGEST_SWEEP, settings.assume_seconds / 4, settings.gang_seconds / 4),
        )  # fmt: skip
        workers = [sweeper, *(informer.worker for informer in informers)]
        if election is not None:
            workers.append(election.worker)

        def sick() -> str | None:
            return "; ".join(problem for worker in workers if (problem := worker.problem())) or None

        application = app.create(
            engine,
            binder,
            body_bytes=settings.body_mib * MIB,
            body_seconds=settings.body_seconds,
            sick=sick,
            stands_by=stands_by,
        )
        servers.append(_server(application, certificate))
        sweeper.start()
        if election is None:
            follow()
        else:
            election.worker.start()
        scheme = "https" if certificate else "http"
        host, port = listener.getsockname()[:2]
        _log.info("serving on %s://%s:%d, API server %s, %s", scheme, host, port, api.address, settings)
        # uvicorn shuts down on SIGTERM and then raises it once more for whoever was there before: nobody.
        signal.signal(signal.SIGTERM, lambda _number, _frame: None)
        try:
            asyncio.run(_answer(servers[0], listener, certificate, binder))
        finally:
            for informer in informers:
                informer.stop()
            sweeper.stop()
            if election is not None:
                election.stop()
    if election is not None:
        election.release()
    if lost.is_set():
        raise LostLease("another replica has taken the lease; this one ends, to start again as a standby")
