"""How shares of claims may be used: the opaque parameters that a claim, or a class of devices, has for our driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vcuda.quoted import quoted
from vcuda.spec.errors import InvalidRequest, Reason
from vcuda.spec.names import Names
from vcuda.spec.request import Priority
from vcuda.spec.units import BLOCK_BYTES, CORES_PER_CARD, parse_quantity

CONFIG_KIND = "ShareConfig"
_CONFIG_FIELDS = ("coreLimit", "priority", "oversell")
_MOST_BYTES = 2**63 - 1  # what Kubernetes' quantities say, and a region's 64 bits hold
_DEFAULT_NAMES = Names()


@dataclass(frozen=True)
class ShareConfig:
    """How a request's shares may be used; None: not said.

    `core_limit`: most hundredths of each card; `oversell`: bytes that a share may hold of each card in all, beyond its
    own as managed memory; True: twice its own.
    """

    core_limit: int | None = None
    priority: Priority | None = None
    oversell: bool | int | None = None

    def over(self, earlier: ShareConfig) -> ShareConfig:
        """What both say together; where both say something, this one counts."""
        return ShareConfig(
            earlier.core_limit if self.core_limit is None else self.core_limit,
            earlier.priority if self.priority is None else self.priority,
            earlier.oversell if self.oversell is None else self.oversell,
        )

    def limit(self, request: str, cores: int) -> int:
        """The elastic limit of a share of `cores`. Raises InvalidRequest."""
        if self.core_limit is None or cores == CORES_PER_CARD:
            return cores
        if self.core_limit < cores:
            raise _bad_config(
                f"coreLimit is {self.core_limit}, below the {cores} cores of request {request!r}; the elastic limit "
                "must be at least the request"
            )
        return self.core_limit

    def oversell_blocks(self, request: str, blocks: int) -> int:
        """Blocks that a share of `blocks` may hold in all; 0: no more than these. Raises InvalidRequest."""
        if not self.oversell:
            return 0
        wanted = 2 * blocks if self.oversell is True else self.oversell // BLOCK_BYTES
        if wanted < blocks:
            raise _bad_config(
                f"oversell gives request {request!r} {wanted} blocks of 256 MiB in all, fewer than the {blocks} that "
                "it asks for"
            )
        return wanted if wanted > blocks else 0


def bad_claim(message: str) -> InvalidRequest:
    return InvalidRequest(Reason.INVALID_CLAIM, message)


def _bad_config(message: str) -> InvalidRequest:
    return InvalidRequest(Reason.INVALID_SHARE_CONFIG, f"{CONFIG_KIND}: {message}")


def objects(value: object, what: str) -> Sequence[Mapping[str, Any]]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise bad_claim(f"{what} is not a list of objects")
    return value


def object_at(value: object, what: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise bad_claim(f"{what} is not an object")
    return value


def parse_config(parameters: object, names: Names = _DEFAULT_NAMES) -> ShareConfig:
    """The opaque parameters of a claim or class for our driver.

    Raises InvalidRequest (InvalidShareConfig) for what is unknown or wrong: nothing is passed over in silence.
    """
    if not isinstance(parameters, Mapping):
        raise _bad_config(f"the parameters are {quoted(parameters)}; they must be an object")
    given = {str(name): value for name, value in parameters.items()}
    said = given.pop("apiVersion", None), given.pop("kind", None)
    if said != (names.config_version, CONFIG_KIND):
        raise _bad_config(
            f"it is a {quoted(said[1])} of {quoted(said[0])}; write apiVersion: {names.config_version}, "
            f"kind: {CONFIG_KIND}"
        )
    unknown = sorted(given.keys() - set(_CONFIG_FIELDS))
    if unknown:
        raise _bad_config(f"unknown field {quoted(unknown[0])}; there are {', '.join(_CONFIG_FIELDS)}")
    return ShareConfig(
        _core_limit(given.get("coreLimit")), _priority(given.get("priority")), _oversell(given.get("oversell"))
    )


def _core_limit(value: object) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 1 <= value <= CORES_PER_CARD:
        raise _bad_config(f"coreLimit is {quoted(value)}; it must be a number from 1 to {CORES_PER_CARD}")
    return value


def _priority(value: object) -> Priority | None:
    if value is None:
        return None
    if not isinstance(value, str) or value not in set(Priority):
        raise _bad_config(f"priority is {quoted(value)}; it must be one of {', '.join(Priority)}")
    return Priority(value)


def _oversell(value: object) -> bool | int | None:
    if value is None or isinstance(value, bool):
        return value
    found = parse_quantity(value)
    if found is None or found[0] <= 0:
        raise _bad_config(f'oversell is {quoted(value)}; it must be true, false or an amount of memory such as "4Gi"')
    size = max(1, found[0] // found[1])
    if size > _MOST_BYTES:
        raise _bad_config(f"oversell is {quoted(value)}; no card has more than 2^63 - 1 bytes")
    return size


def configs_of(entries: object, what: str, names: Names) -> list[tuple[frozenset[str], ShareConfig]]:
    found = []
    for entry in objects(entries, what):
        opaque = object_at(entry.get("opaque"), f"{what}.opaque")
        if opaque.get("driver") != names.driver:
            continue
        requests = entry.get("requests") or []
        if not isinstance(requests, list):
            raise bad_claim(f"{what}.requests is not a list")
        try:
            given = parse_config(opaque.get("parameters"), names)
        except RecursionError:  # to say what they are
            raise _bad_config("the parameters are nested too deep") from None
        found.append((frozenset(map(str, requests)), given))
    return found
