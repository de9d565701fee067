"""Runs the extender: watches, sweeper and HTTP server, until a signal ends it."""

from __future__ import annotations

import logging
import signal
import socket
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scheduler_ext.engine import garbage
from scheduler_ext.engine.core import Engine
from scheduler_ext.http import app
from scheduler_ext.http.certificate import ServerCertificate
from scheduler_ext.http.server import Server
from scheduler_ext.lab.recording import Recorder
from scheduler_ext.settings import MIB, Settings
from scheduler_ext.state import history
from scheduler_ext.sync import events, feed, resizes, templates
from scheduler_ext.sync.api import ApiServer
from scheduler_ext.sync.binder import Binder
from scheduler_ext.sync.election import Election, Place
from scheduler_ext.sync.followers import Followers
from scheduler_ext.sync.lanes import Lanes
from scheduler_ext.sync.late import LateWrites
from scheduler_ext.sync.waking import Waker
from vcuda import addresses
from vcuda.kube.access import Access
from vcuda.kube.errors import KubeError
from vcuda.kube.events import Correlator
from vcuda.kube.informer import Informer
from vcuda.kube.worker import Worker
from vcuda.spec.names import Names

_log = logging.getLogger(__name__)
_READ_THREADS = 8
_BACKLOG = 512
_LONGEST_SWEEP = 5.0
_TOLD_EVERY = 2.0
_ANSWERED_EVERY = 0.5
_WOKEN_EVERY = 1.0
_ASKED_EVERY = 1.0  # whether it is to end, by a thread that waits for work
_MOST_SILENT = 120.0  # a watch that says nothing for 90 s is begun anew, and that is an answer
_ON_THE_WAY = 1.0  # seconds in which a request that was sent has reached the API server


class CannotServe(Exception):
    """The server can't start; the message names what and why."""


def listen(address: str, port: int, option: str) -> socket.socket:
    """A listening socket. Raises the program's own error, which names `option`, the flag to change."""
    try:
        listener = addresses.listen(address, port, _BACKLOG)
    except OSError as error:
        raise CannotServe(
            f"cannot listen on {address} port {port}: {error.strerror}; choose another by {option}"
        ) from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # its connections have it too
    return listener


class LostLease(Exception):
    """Another replica leads now, or may, so that this process had to end."""


def silent_reason(informers: Sequence[Informer]) -> str | None:
    """Why one that follows these is not ready: nobody answers any of them."""
    silent = min(one.unanswered_seconds() for one in informers)
    if silent <= _MOST_SILENT:
        return None
    return f"the API server has answered nothing for {silent:.0f} s; what is known of nodes and pods is as old"


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
        label=Names(settings.resource_domain).role_label,
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


def _sweep(engine: Engine, binder: Binder) -> None:
    """Expire assumptions and settle uncertain writes."""
    expired = engine.expire()
    if expired:
        _log.info("%d assumed placements expired: their Bind never came", expired)
    binder.settle()


def _late_seconds(settings: Settings) -> float:
    """After it was begun the API server may still carry out a write."""
    return settings.api_timeout_seconds + _ON_THE_WAY


def _engine(settings: Settings, recorder: Recorder | None) -> Engine:
    return Engine(
        Names(settings.resource_domain),
        settings.policy,
        expiry_seconds=settings.assume_seconds,
        gang_seconds=settings.gang_seconds,
        late_seconds=_late_seconds(settings),
        journal=recorder,
    )


def run(settings: Settings, api: ApiServer) -> None:
    """Serve until SIGTERM or SIGINT. Raises CannotServe and BadCertificate, and LostLease."""
    garbage.begin()
    recorder = _recorder(settings)
    try:
        _Replica(settings, api, recorder).run()
    finally:
        if recorder is not None:
            recorder.close()


class _Replica:
    """The parts of one replica and their threads."""

    def __init__(self, settings: Settings, api: ApiServer, recorder: Recorder | None) -> None:
        self._settings, self._api = settings, api
        self._engine = engine = _engine(settings, recorder)
        self._certificate = None
        if settings.tls_cert and settings.tls_key:
            self._certificate = ServerCertificate(
                settings.tls_cert, settings.tls_key, settings.client_ca, http2=settings.http2
            )
        self._listener = listen(settings.bind_address, settings.port, "--port")
        self._probes = None
        if settings.probe_port is not None:
            self._probes = listen(settings.bind_address, settings.probe_port, "--probe-port")
        followed = [*feed.handlers(engine)]
        if settings.quotas:
            engine.expect_quotas()
            followed.append(feed.quota_handlers(engine, *settings.quotas.split("/")))
        if settings.claims:
            engine.expect_claims()
            followed += feed.claim_handlers(engine)
        # Pods come with each decision; what else comes is rare, or heavy.
        self._followers = Followers(feed.REST_SECONDS)
        on_the_loop = {"pods": self._followers.follow}
        self._informers = [feed.informer(api, engine, how, follow=on_the_loop.get(how.kind)) for how in followed]
        self._lost = False
        self._election = _election(
            settings, api, gained=self._follow, lost=self._lose, ready=lambda: engine.not_ready() is None,
            failed=engine.metrics.worker_failures.labels("election").inc,
        )  # fmt: skip
        self._reads = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="read")
        self._binder = Binder(api, engine, self._reads, self._standby_reason, late_seconds=_late_seconds(settings))
        self._sweeper = Worker(
            "sweeper", lambda: _sweep(engine, self._binder),
            failed=engine.metrics.worker_failures.labels("sweeper").inc,
            pause=min(_LONGEST_SWEEP, settings.assume_seconds / 4, settings.gang_seconds / 4),
        )  # fmt: skip
        self._correlator = Correlator()
        self._event_lanes = Lanes(quiet=True)
        self._teller = Worker(
            "events",
            self._tell,
            failed=engine.metrics.worker_failures.labels("events").inc,
            pause=_TOLD_EVERY,
        )
        self._scorer = Worker(
            "scoring ahead",
            lambda: engine.score_next(_ASKED_EVERY),
            failed=engine.metrics.worker_failures.labels("scoring ahead").inc,
        )
        self._answer_lanes = Lanes(engine.metrics.worker_failures.labels("resizes").inc, may=self._leads)
        self._late_answers = LateWrites(_late_seconds(settings))
        self._answerer = Worker(
            "resizes",
            self._answer,
            failed=engine.metrics.worker_failures.labels("resizes").inc,
            pause=_ANSWERED_EVERY,
            expected=KubeError,
        )
        self._historian = Worker(
            "history",
            engine.remember,
            failed=engine.metrics.worker_failures.labels("history").inc,
            pause=history.SECONDS,
        )
        self._template_lanes = Lanes(engine.metrics.worker_failures.labels("templates").inc, may=self._leads)
        self._templates = Worker(
            "templates",
            self._keep_templates,
            failed=engine.metrics.worker_failures.labels("templates").inc,
            pause=_ANSWERED_EVERY,
            expected=KubeError,
        )
        waking_failed = engine.metrics.worker_failures.labels("waking").inc
        self._waker = Waker(api, engine, Lanes(waking_failed, may=self._leads, quiet=True))
        self._waking = Worker("waking", self._wake, failed=waking_failed, pause=_WOKEN_EVERY, expected=KubeError)
        self._workers = [
            self._waking,
            self._sweeper,
            self._teller,
            self._answerer,
            self._historian,
            self._scorer,
            self._templates,
            *(informer.worker for informer in self._informers),
        ]
        if recorder is not None:
            self._workers.append(recorder.worker)
        if self._election is not None:
            self._workers.append(self._election.worker)
        self._server = self._built()

    def _built(self) -> Server:
        settings = self._settings
        application = app.App(
            self._engine, self._binder, body_bytes=settings.body_mib * MIB, body_seconds=settings.body_seconds,
            unhealthy_reason=self._unhealthy_reason, standby_reason=self._standby_reason,
            unready_reason=self._unready_reason, authenticate=settings.client_ca is not None,
            client_name=settings.client_name,
        )  # fmt: skip
        refusal = Access(self._api.client).refusal if settings.query_auth == "kubernetes" else None
        open_to_all = app.Probes(
            self._engine, self._unhealthy_reason, self._standby_reason, refusal, unready_reason=self._unready_reason
        )
        probes = (open_to_all, self._probes) if self._probes else None
        return Server(application, self._listener, self._certificate, probes)

    def _tell(self) -> None:
        self._engine.compare()
        events.send(self._api, self._engine, self._correlator, self._event_lanes)

    def _answer(self) -> None:
        if self._standby_reason() is None:
            resizes.send(self._api, self._engine, self._answer_lanes, self._late_answers)

    def _keep_templates(self) -> None:
        if self._standby_reason() is None:
            templates.keep(self._api, self._engine, self._template_lanes)

    def _wake(self) -> None:
        self._engine.read_late()
        if self._standby_reason() is None:
            self._waker.wake()

    def _standby_reason(self) -> str | None:
        return self._election.standby_reason() if self._election is not None else None

    def _leads(self) -> bool:
        return self._standby_reason() is None

    def _unhealthy_reason(self) -> str | None:
        return "; ".join(problem for worker in self._workers if (problem := worker.problem())) or None

    def _unready_reason(self) -> str | None:
        return silent_reason(self._informers)

    def _follow(self) -> None:
        # A leader lists everything after it got the lease: what the last one wrote is in that list.
        for informer in self._informers:
            informer.start()
            self._engine.metrics.unheard.labels(informer.kind).set_function(informer.unheard_seconds)

    def _lose(self) -> None:
        self._lost = True
        self._server.stop()

    def _end(self, *_: object) -> None:
        self._server.stop()

    async def _disconnect(self) -> None:
        self._followers.end()
        self._late_answers.close()
        await self._binder.close()
        if self._election is not None and not self._lost:
            await self._binder.outlive()  # the lease is ours until then; without one, who comes next waits
            await self._late_answers.outlive()

    def run(self) -> None:
        """Serve until a signal, or until the lease is not its own any more. Raises LostLease."""
        signal.signal(signal.SIGTERM, self._end)  # until the server catches it
        self._sweeper.start()
        self._teller.start()
        self._answerer.start()
        self._waking.start()
        self._historian.start()
        self._scorer.start()
        if self._settings.claims:
            self._templates.start()
        if self._election is None:
            self._engine.expect_late_writes(_late_seconds(self._settings))
            self._follow()
        else:
            self._election.worker.start()
        host, port = self._listener.getsockname()[:2]
        scheme = "https" if self._certificate else "http"
        _log.info(
            "serving on %s://%s, API server %s, %s",
            scheme,
            addresses.with_port(host, port),
            self._api.address,
            self._settings,
        )
        if self._probes is not None:
            _log.info("probes on http://%s", addresses.with_port(*self._probes.getsockname()[:2]))
        try:
            # The lease is given back after this: no write of ours may be under way then, or be carried out later.
            self._server.run(self._followers.begin, self._disconnect)
        finally:
            for informer in self._informers:
                informer.stop()
            self._sweeper.stop()
            self._teller.stop()
            self._answerer.stop()
            self._waking.stop()
            self._historian.stop()
            self._scorer.stop()
            self._templates.stop()
            if self._election is not None:
                self._election.stop()
            self._reads.shutdown()
        if self._election is not None:
            self._election.release()
        self._api.client.endpoint.close()
        if self._lost:
            raise LostLease("the lease is gone or another replica's; this one ends, to start again as a standby")
