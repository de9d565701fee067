"""Every setting of `webhook` with its default and meaning; `vcuda.settings` reads them."""

# ruff: noqa: RUF009  (option only wraps dataclasses.field)
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler_ext.admission.rules import Rules
from vcuda import logs
from vcuda import settings as reading
from vcuda.settings import (
    InvalidSettings,
    choice,
    domain,
    member_of,
    number,
    option,
    optional_path,
    optional_text,
)
from vcuda.spec.names import DEFAULT_DOMAIN, Names
from vcuda.spec.request import Policy, Priority
from vcuda.spec.units import CORES_PER_CARD

ENV_PREFIX = "GPU_ADMISSION_WEBHOOK_"
_MOST_BLOCKS = 2**20


def _words(value: str) -> frozenset[str]:
    return frozenset(word.strip() for word in value.split(",") if word.strip())


@dataclass(frozen=True)
class Settings:
    """Everything that can be set; docs/admission.md explains each."""

    config: Path | None = option(
        None, optional_path, "YAML file with any of these settings, flag names as keys", metavar="FILE"
    )
    bind_address: str = option("0.0.0.0", reading.host, "address to listen on")
    port: int = option(8443, reading.port, "port to listen on, 0 for a free one")
    probe_port: int | None = option(
        None, reading.port, "port of its own, plain HTTP, for /healthz, /readyz, /metrics and /version"
    )
    tls_cert: str | None = option(
        None, optional_text, "certificate chain file (PEM); reloaded when it changes", metavar="FILE"
    )
    tls_key: str | None = option(None, optional_text, "private key file (PEM)", metavar="FILE")
    resource_domain: str = option(DEFAULT_DOMAIN, domain, "domain of all resource and annotation names")
    scheduler_name: str | None = option(
        None, optional_text, "scheduler of pods with a share whose author chose none", metavar="NAME"
    )
    trusted_users: frozenset[str] = option(
        frozenset(),
        _words,
        "users that may write placements, comma-separated; others' are undone",
        separated=True,
        metavar="USERS",
    )
    exempt_namespaces: frozenset[str] = option(
        frozenset({"kube-system"}),
        _words,
        "namespaces whose pods pass as they are, comma-separated",
        separated=True,
        metavar="NAMESPACES",
    )
    default_cores: int = option(
        0, number(0, CORES_PER_CARD), "cores of a container that asks for memory only; 0: it is refused"
    )
    default_memory_blocks: int = option(
        0,
        number(0, _MOST_BLOCKS),
        "blocks of 256 MiB of a container that asks for a part of a card without memory; 0: it is refused",
    )
    default_core_limit: int = option(
        0, number(0, CORES_PER_CARD), "elastic limit in cores of pods that say none; 0: none is written"
    )
    default_priority: Priority | None = option(
        None, member_of(Priority), "priority of pods that say none: low, normal or high"
    )
    default_policy: Policy | None = option(None, member_of(Policy), "placement policy of pods that say none")
    log_level: str = option("info", choice("debug", "info", "warning", "error"), "what is logged")
    log_format: str = option("text", choice(*logs.FORMATS), logs.FORMAT_HELP)

    def __str__(self) -> str:
        return ", ".join(reading.describe(self))

    def rules(self) -> Rules:
        names = Names(self.resource_domain)
        given = {
            names.core_limit: str(self.default_core_limit or ""),
            names.priority: self.default_priority or "",
            names.policy: self.default_policy or "",
        }
        return Rules(
            names=names,
            scheduler_name=self.scheduler_name,
            annotations={name: str(value) for name, value in given.items() if value},
            cores=self.default_cores,
            memory_blocks=self.default_memory_blocks,
            trusted=self.trusted_users,
            exempt=self.exempt_namespaces,
        )


def read(given: Mapping[str, Any], environment: Mapping[str, str]) -> Settings:
    """The settings of a parsed command line. Raises InvalidSettings."""
    settings = reading.read(Settings, given, environment, ENV_PREFIX)
    if not (settings.tls_cert and settings.tls_key):
        raise InvalidSettings("the API server speaks to webhooks by TLS only; give --tls-cert and --tls-key")
    return settings
