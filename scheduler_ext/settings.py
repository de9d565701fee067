"""The settings of `serve`, each with its default and meaning; the command line is their only source."""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, fields

from vcuda.kube.errors import BadName
from vcuda.kube.objects import checked
from vcuda.spec.names import DEFAULT_DOMAIN
from vcuda.spec.request import Policy

MIB = 2**20


@dataclass(frozen=True)
class Settings:
    """Everything that can be set. Times in seconds; docs/extender.md explains each."""

    kubeconfig: str | None = None
    bind_address: str = "0.0.0.0"
    port: int = 3456
    resource_domain: str = DEFAULT_DOMAIN
    policy: Policy = Policy.FGD
    tls_cert: str | None = None
    tls_key: str | None = None
    client_ca: str | None = None
    client_name: str | None = None
    allow_anyone: bool = False
    probe_port: int | None = None
    assume_seconds: float = 300.0
    gang_seconds: float = 120.0
    body_mib: int = 32
    body_seconds: float = 10.0
    api_timeout_seconds: float = 10.0
    lease: str | None = None
    lease_seconds: float = 30.0
    pod: str | None = None
    quotas: str | None = None
    record: str | None = None
    record_mib: int = 256
    log_level: str = "info"

    def __str__(self) -> str:
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


def _number(least: float, most: float, what: str) -> Callable[[str], int]:
    """A parser of whole numbers, whose message says what is wrong."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= 12 and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(
                f"invalid: {text!r:.40} is not {what} from {least:g} to {most:g}"
            )
        return int(text)

    return parse


_port = _number(0, 65535, "a port number")


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(
            f"invalid: {text!r:.40} is not a number of seconds above 0 and below 1000000"
        )
    return number


def _place(text: str) -> str:
    namespace, slash, name = text.partition("/")
    try:
        if slash:
            checked(namespace), checked(name)
            return text
    except BadName:
        pass
    raise argparse.ArgumentTypeError(f"invalid: {text!r:.80} is not NAMESPACE/NAME")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `serve`. Their defaults are those of `Settings`."""
    default = Settings()
    add = parser.add_argument
    add("--kubeconfig", help="file to log in with; without it the pod's service account is used")
    add("--bind-address", default=default.bind_address, help="address to listen on (default %(default)s)")
    add(
        "--port",
        type=_port,
        default=default.port,
        help="port to listen on, 0 for a free one (default %(default)s)",
    )
    add(
        "--resource-domain",
        default=default.resource_domain,
        help="domain of all resource and annotation names (default %(default)s)",
    )
    add(
        "--policy",
        type=Policy,
        choices=list(Policy),
        default=default.policy,
        help="default policy; a pod's annotation overrides it",
    )
    add(
        "--tls-cert",
        help="certificate chain file (PEM); with --tls-key the extender serves HTTPS; reloaded when it changes",
    )
    add("--tls-key", help="private key file (PEM)")
    add(
        "--client-ca",
        metavar="FILE",
        help="certificates (PEM) that sign kube-scheduler's; others than its holder may decide, bind and ask nothing",
    )
    add(
        "--client-name",
        metavar="NAME",
        help="only a client certificate with this common name counts (default: any)",
    )
    add(
        "--allow-anyone",
        action="store_true",
        help="listen beyond this machine without --client-ca: everybody who reaches the port may book and bind",
    )
    add(
        "--probe-port",
        type=_port,
        default=default.probe_port,
        help="port of its own, plain HTTP, for /healthz, /readyz, /metrics and /version (default: none)",
    )
    add(
        "--assume-seconds",
        type=_seconds,
        default=default.assume_seconds,
        help="how long a decision waits for its Bind (default %(default)s)",
    )
    add(
        "--gang-seconds",
        type=_seconds,
        default=default.gang_seconds,
        help="how long the places of an incomplete gang stay reserved (default %(default)s)",
    )
    add(
        "--body-mib",
        type=_number(1, 1024, "a number of MiB"),
        default=default.body_mib,
        help="largest request body in MiB (default %(default)s)",
    )
    add(
        "--body-seconds",
        type=_seconds,
        default=default.body_seconds,
        help="how long a request body may take (default %(default)s)",
    )
    add(
        "--api-timeout-seconds",
        type=_seconds,
        default=default.api_timeout_seconds,
        help="how long an API call may take (default %(default)s)",
    )
    add(
        "--lease",
        type=_place,
        metavar="NAMESPACE/NAME",
        help="Lease whose holder serves while other replicas stand by; without it this is the only replica",
    )
    add(
        "--lease-seconds",
        type=_seconds,
        default=default.lease_seconds,
        help="how long the lease lasts; at least twice --api-timeout-seconds (default %(default)s)",
    )
    add(
        "--pod",
        type=_place,
        metavar="NAMESPACE/NAME",
        help="our own pod, whose label DOMAIN/vcuda-extender-role says leader or standby (with --lease)",
    )
    add(
        "--quotas",
        type=_place,
        metavar="NAMESPACE/NAME",
        help="ConfigMap whose key `quotas` limits namespaces; watched, so changes count at once",
    )
    add(
        "--record",
        metavar="FILE",
        help="write decisions with their inputs there, for `simulate --recording`; FILE.1 is the part before",
    )
    add(
        "--record-mib",
        type=_number(1, 2**20, "a number of MiB"),
        default=default.record_mib,
        help="size of both parts of the recording together in MiB (default %(default)s)",
    )
    add("--log-level", choices=("debug", "info", "warning", "error"), default=default.log_level)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def from_arguments(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> Settings:
    """The settings of a parsed command line; ends the program with a usage message if they contradict each other."""
    values = vars(arguments)
    settings = Settings(**{field.name: values[field.name] for field in fields(Settings)})
    if (settings.tls_cert is None) != (settings.tls_key is None):
        parser.error("--tls-cert and --tls-key belong together; give both or neither")
    if settings.client_ca and not settings.tls_cert:
        parser.error("--client-ca asks for certificates by TLS; give --tls-cert and --tls-key too")
    if settings.client_name and not settings.client_ca:
        parser.error("--client-name is a name in a certificate; give --client-ca too")
    if settings.lease and settings.lease_seconds < 2 * settings.api_timeout_seconds:
        parser.error("--lease-seconds must be at least twice --api-timeout-seconds")
    if settings.pod and not settings.lease:
        parser.error("--pod is for the role label of replicas; give --lease too")
    if not settings.resource_domain or "/" in settings.resource_domain:
        parser.error(f"--resource-domain {settings.resource_domain!r} is not a domain")
    if not (settings.client_ca or settings.allow_anyone or _is_loopback(settings.bind_address)):
        parser.error(
            f"on {settings.bind_address} everybody who reaches the port could book cards and bind pods; give --client-ca "
            "(kube-scheduler sends its certificate by tlsConfig.certFile), --bind-address 127.0.0.1 or --allow-anyone"
        )
    return settings
