"""`gpu-scheduler-extender webhook`: answers the API server's admission reviews, until a signal ends it."""

from __future__ import annotations

import logging

from scheduler_ext.admission import app
from scheduler_ext.admission.settings import Settings
from scheduler_ext.commands.serve import listen
from scheduler_ext.http.certificate import ServerCertificate
from scheduler_ext.http.server import Server
from vcuda import addresses, heap

_log = logging.getLogger(__name__)


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Raises CannotServe and BadCertificate."""
    assert settings.tls_cert and settings.tls_key, "settings.read sees to it"
    heap.give_back_what_was_large()
    certificate = ServerCertificate(settings.tls_cert, settings.tls_key)
    listener = listen(settings.bind_address, settings.port, "--port")
    metrics = app.Metrics()
    probes = None
    if settings.probe_port is not None:
        probes = app.Probes(metrics), listen(settings.bind_address, settings.probe_port, "--probe-port")
    server = Server(app.App(settings.rules(), metrics), listener, certificate, probes)
    _log.info("serving on https://%s%s, %s", addresses.with_port(*listener.getsockname()[:2]), app.PATH, settings)
    if probes is not None:
        _log.info("probes on http://%s", addresses.with_port(*probes[1].getsockname()[:2]))
    server.run()
