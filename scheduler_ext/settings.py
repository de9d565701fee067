"""Every setting of `serve` with its default and meaning; `vcuda.settings` reads them."""

# ruff: noqa: RUF009  (option only wraps dataclasses.field)
from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vcuda import logs
from vcuda import settings as reading
from vcuda.kube.errors import BadName
from vcuda.kube.objects import checked
from vcuda.settings import (
    InvalidSettings,
    choice,
    domain,
    member_of,
    number,
    option,
    optional_path,
    optional_text,
    seconds,
    switch,
)  # fmt: skip
from vcuda.spec.names import DEFAULT_DOMAIN
from vcuda.spec.request import Policy

MIB = 2**20
ENV_PREFIX = "GPU_SCHEDULER_EXTENDER_"
_TIME = seconds(0.001, 1e6)
_PLACE = "NAMESPACE/NAME"


def _place(value: str) -> str | None:
    namespace, slash, name = value.partition("/")
    try:
        if slash:
            checked(namespace), checked(name)
            return value
    except BadName:
        pass
    raise ValueError("it is not NAMESPACE/NAME")


@dataclass(frozen=True)
class Settings:
    """Everything that can be set; docs/extender.md explains each. Times in seconds."""

    config: Path | None = option(
        None, optional_path, "YAML file with any of these settings, flag names as keys", metavar="FILE"
    )
    kubeconfig: str | None = option(
        None,
        optional_text,
        "file to log in with; without it the pod's service account is used",
        metavar="FILE",
    )
    bind_address: str = option("0.0.0.0", reading.host, "address to listen on")
    port: int = option(3456, reading.port, "port to listen on, 0 for a free one")
    resource_domain: str = option(DEFAULT_DOMAIN, domain, "domain of all resource and annotation names")
    policy: Policy = option(Policy.FGD, member_of(Policy), "default policy; a pod's annotation overrides it")
    tls_cert: str | None = option(
        None,
        optional_text,
        "certificate chain file (PEM); with --tls-key the extender serves HTTPS; reloaded when it changes",
        metavar="FILE",
    )
    tls_key: str | None = option(None, optional_text, "private key file (PEM)", metavar="FILE")
    client_ca: str | None = option(
        None,
        optional_text,
        "certificates (PEM) that sign kube-scheduler's; others than its holder may decide, bind and ask nothing",
        metavar="FILE",
    )
    client_name: str | None = option(
        None, optional_text, "only a client certificate with this common name counts", metavar="NAME"
    )
    allow_anyone: bool = option(
        False,
        switch,
        "listen beyond this machine without --client-ca: everybody who reaches the port may book and bind",
    )
    probe_port: int | None = option(
        None, reading.port, "port of its own, plain HTTP, for /healthz, /readyz, /metrics and /version"
    )
    query_auth: str = option(
        "off",
        choice("off", "kubernetes"),
        "kubernetes: /explain, /cluster and the page at / on --probe-port too, for tokens that Kubernetes allows them",
    )
    http2: bool = option(
        True, switch, "with --client-ca: HTTP/2 for clients with a certificate that offer it; else HTTP/1.1 alone"
    )
    assume_seconds: float = option(300.0, _TIME, "how long a decision waits for its Bind")
    gang_seconds: float = option(120.0, _TIME, "how long what a gang holds that is not bound stays reserved")
    body_mib: int = option(32, number(1, 1024), "largest request body in MiB")
    body_seconds: float = option(10.0, _TIME, "how long a request body may take")
    api_timeout_seconds: float = option(10.0, _TIME, "how long an API call may take")
    lease: str | None = option(
        None,
        _place,
        "Lease whose holder serves while other replicas stand by; without it this is the only replica",
        metavar=_PLACE,
    )
    lease_seconds: float = option(30.0, _TIME, "how long the lease lasts; at least twice --api-timeout-seconds")
    pod: str | None = option(
        None,
        _place,
        "our own pod, whose label DOMAIN/vcuda-extender-role says leader or standby (with --lease)",
        metavar=_PLACE,
    )
    quotas: str | None = option(
        None,
        _place,
        "ConfigMap whose key `quotas` limits namespaces; watched, so changes count at once",
        metavar=_PLACE,
    )
    claims: bool = option(
        False,
        switch,
        "choose nodes for claims, too (DRA, Kubernetes 1.34 and later), and make the templates that the webhook names",
    )
    record: str | None = option(
        None,
        optional_text,
        "write decisions with their inputs there, for `simulate --recording`; FILE.1 is the part before",
        metavar="FILE",
    )
    record_mib: int = option(256, number(1, 2**20), "size of both parts of the recording together in MiB")
    log_level: str = option("info", choice("debug", "info", "warning", "error"), "what is logged")
    log_format: str = option("text", choice(*logs.FORMATS), logs.FORMAT_HELP)

    def __str__(self) -> str:
        return ", ".join(reading.describe(self))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def read(given: Mapping[str, Any], environment: Mapping[str, str]) -> Settings:
    """The settings of a parsed command line. Raises InvalidSettings, too if they contradict each other."""
    settings = reading.read(Settings, given, environment, ENV_PREFIX)
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise InvalidSettings("--tls-cert and --tls-key belong together; give both or neither")
    if settings.client_ca and not settings.tls_cert:
        raise InvalidSettings("--client-ca asks for certificates by TLS; give --tls-cert and --tls-key too")
    if settings.client_name and not settings.client_ca:
        raise InvalidSettings("--client-name is a name in a certificate; give --client-ca too")
    if settings.lease and settings.lease_seconds < 2 * settings.api_timeout_seconds:
        raise InvalidSettings("--lease-seconds must be at least twice --api-timeout-seconds")
    if settings.pod and not settings.lease:
        raise InvalidSettings("--pod is for the role label of replicas; give --lease too")
    if not (settings.client_ca or settings.allow_anyone or _is_loopback(settings.bind_address)):
        raise InvalidSettings(
            f"on {settings.bind_address} everybody who reaches the port could book cards and bind pods; give "
            "--client-ca "
            "(kube-scheduler sends its certificate by tlsConfig.certFile), --bind-address 127.0.0.1 or --allow-anyone"
        )
    return settings
