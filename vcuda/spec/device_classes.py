"""DeviceClasses: whether what one selects are cards of ours, and how their shares may be used.

Operators write classes of their own over our driver; nothing in one names a driver but its selectors and its
configuration. The scheduler puts a class's selectors and configuration before a request's own: all selectors have to
hold, and each field of a later configuration goes over an earlier one's. Source: Kubernetes' API resource.k8s.io/v1.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vcuda.quoted import quoted
from vcuda.spec import selectors
from vcuda.spec.errors import InvalidRequest, Reason
from vcuda.spec.names import Names
from vcuda.spec.selectors import MISSING, UNKNOWN, Device, Fields, Other
from vcuda.spec.share_config import ShareConfig, configs_of, object_at, objects

MOST_SELECTORS = 32  # of a class or a request (api/resource/v1, DeviceSelectorsMaxSize)
EXTENDED_PREFIX = "deviceclass.resource.kubernetes.io/"  # before its name: an extended resource (KEP-5004)
_LONGEST_NAME = 253
_KUBERNETES = "kubernetes.io/"  # the end of domains whose resources are no extended ones (apis/core/helper)
_OF_A_QUOTA = "requests."  # the prefix of a resource in a ResourceQuota; no extended resource begins so
_STANDARD = "resource.kubernetes.io"  # the domain of attributes that any driver may give


class Whose(enum.Enum):
    """Whose devices some selectors select."""

    OURS = enum.auto()
    OTHERS = enum.auto()
    UNDECIDED = enum.auto()


class Undecided(InvalidRequest):
    """A class that may select cards of ours: what a claim of it asks of them is not known."""


_SAYS_NOTHING = ShareConfig()


@dataclass(frozen=True)
class DeviceClass:
    """`selectors`: of a class that means our devices alone those that choose among them.

    `problem`: why its configuration for our driver counts for nothing.
    `doubt`: why nobody knows here what it selects, with the way out; `extended`: the extended resource by which pods
    may ask for its devices; "": none.
    """

    name: str
    whose: Whose
    selectors: tuple[str, ...] = ()
    config: ShareConfig = _SAYS_NOTHING
    problem: InvalidRequest | None = None
    doubt: str = ""
    extended: str = ""

    def of_request(self, name: str, own: tuple[str, ...], names: Names) -> bool:
        """Whether a request of this class, with selectors of its `own`, gets cards of ours.

        Raises Undecided where that can't be told, and InvalidRequest for a configuration that is wrong.
        """
        whose = self.whose if self.whose is not Whose.UNDECIDED else whose_are((*self.selectors, *own), names)
        if whose is Whose.OTHERS:
            return False
        called = f"DeviceClass {quoted(self.name)} of request {quoted(name)}"
        if self.doubt or whose is Whose.UNDECIDED:
            raise Undecided(Reason.UNDECIDED_CLASS, f"{called}: {self.undecided(names)}")
        if self.problem is not None:
            raise InvalidRequest(self.problem.reason, f"{called}: {self.problem.message}")
        return True

    def undecided(self, names: Names) -> str:
        """Why it can't be told by this class alone what a claim of it asks, and the way out; "": it can."""
        if self.doubt or self.whose is not Whose.UNDECIDED:
            return self.doubt
        return (
            f"its selectors do not say whose devices it means; add device.driver == '{names.driver}', or "
            f"device.driver != '{names.driver}' where it is not for our cards"
        )


def own(names: Names) -> DeviceClass:
    """The class of our driver's name, as far as it is known without being seen."""
    return DeviceClass(names.driver, Whose.OURS)


def unseen(name: str, names: Names) -> DeviceClass:
    """A class that a claim names and nobody has shown."""
    doubt = "the API server has shown no such class; make it, or correct the claim's deviceClassName"
    return own(names) if name == names.driver else DeviceClass(name, Whose.UNDECIDED, doubt=doubt)


def device(names: Names, known: Mapping[str, Any] | None = None, rest: selectors.Gap = UNKNOWN) -> Device:
    """One of our devices, of which so much is known; `rest`: what other attributes of ours are."""
    standard = Fields({}, UNKNOWN)
    domains = {names.driver: Fields(known or {}, rest), _STANDARD: standard}
    return Device(names.driver, True, domains, Fields({}, MISSING))


def whose_are(expressions: Iterable[str], names: Names) -> Whose:
    """Whose devices all of these selectors select."""
    listed = tuple(expressions)
    if selectors.matches(listed, device(names)) is False:
        return Whose.OTHERS
    foreign = Device(Other(names.driver), UNKNOWN, {names.driver: Fields({}, MISSING)}, Fields())
    return Whose.OURS if selectors.matches(listed, foreign) is False else Whose.UNDECIDED


def expressions(listed: object, what: str) -> tuple[str, ...]:
    """What a class's or a request's selectors say. Raises InvalidRequest (InvalidClaim) for another form."""
    found = []
    for one in objects(listed, what)[:MOST_SELECTORS]:
        found.append(object_at(one.get("cel"), f"{what}.cel").get("expression"))
    return tuple(one[: selectors.LONGEST + 1] if isinstance(one, str) else "" for one in found)


def parse_class(data: Mapping[str, Any], names: Names) -> DeviceClass:
    """Read a DeviceClass. Raises ValueError for one without a name; what else is wrong stands in what it returns."""
    metadata = data.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
        raise ValueError(f"a DeviceClass whose name is {quoted(name)}")
    try:
        spec = object_at(data.get("spec"), "spec")
        listed = expressions(spec.get("selectors"), "spec.selectors")
    except InvalidRequest as error:
        return DeviceClass(name, Whose.UNDECIDED, doubt=f"{error.message}; correct the class")
    whose = whose_are(listed, names)
    extended = spec.get("extendedResourceName")
    extended = extended if isinstance(extended, str) and len(extended) <= 2 * _LONGEST_NAME else ""
    if whose is Whose.OTHERS:
        return DeviceClass(name, whose, extended=extended)
    odd = next((one for one in listed if selectors.read(one).unread), None)
    doubt = (
        ""
        if odd is None
        else f"its selector {quoted(odd)} has {selectors.read(odd).unread}, which is not read here; write it in "
        f"a form of docs/dra.md, or leave device.driver == '{names.driver}' to the class and the rest to its claims"
    )
    if whose is Whose.OURS:  # what chooses among ours
        ours = device(names)
        listed = tuple(one for one in listed if selectors.matches((one,), ours) is not True)
    config, problem = _SAYS_NOTHING, None
    try:
        for _, later in configs_of(spec.get("config"), "spec.config", names):
            config = later.over(config)
    except InvalidRequest as error:
        problem = error.with_traceback(None)
    return DeviceClass(name, whose, listed, config, problem, doubt, extended)


def resources_of(its: DeviceClass, names: Names) -> list[str]:
    """The extended resources by which pods may ask for devices of a class, where these may be ours (KEP-5004)."""
    if its.whose is Whose.OTHERS:
        return []
    # The two that count shares are the device plugin's, whatever a class says.
    return [EXTENDED_PREFIX + its.name, *([its.extended] if its.extended not in ("", names.core, names.memory) else [])]


def may_be_of_class(resource: object, names: Names) -> bool:
    """Whether a resource can be the `extendedResourceName` of some class, as far as its name goes."""
    if not isinstance(resource, str) or resource in (names.core, names.memory):
        return False
    return "/" in resource and _KUBERNETES not in resource and not resource.startswith(_OF_A_QUOTA)
