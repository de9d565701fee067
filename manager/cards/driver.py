"""The driver behind an interface: what the daemon needs to know of cards, whoever provides them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vcuda.driver.memory_limits import CannotLimit, MemoryLimit
from vcuda.spec.inventory import Card


class DriverError(Exception):
    """The driver is absent or does not answer; the message says which call and how it failed."""


@dataclass(frozen=True)
class NodeCard:
    """A card or MIG instance with what only its own node needs to know.

    `device_minor` is N of /dev/nvidiaN (the parent's for an instance); `parent_uuid` is set for instances;
    `capability_minors` are the N of /dev/nvidia-caps/nvidia-capN that grant an instance. `compute_capability` and
    `pcie_root` (such as "pci0000:17"): "" where they are not known.
    """

    card: Card
    device_minor: int
    parent_uuid: str = ""
    capability_minors: tuple[int, ...] = ()
    compute_capability: str = ""
    pcie_root: str = ""

    @property
    def physical_uuid(self) -> str:
        """The card's own UUID, or that of the card that a MIG instance is part of."""
        return self.parent_uuid or self.card.uuid


@dataclass(frozen=True)
class Probe:
    """All cards the driver shows now. `failed` maps the UUID or bus id of a card that did not answer to the reason.

    `physical`: the UUIDs of those that answered, of a card in MIG mode its own.
    """

    driver_version: str
    cards: tuple[NodeCard, ...]
    failed: tuple[tuple[str, str], ...] = ()
    cuda_version: str = ""
    physical: tuple[str, ...] = ()


@dataclass(frozen=True)
class XidEvent:
    """An error the driver reported for a physical card (Xid numbers: NVIDIA's "XID Errors" documentation)."""

    uuid: str
    xid: int


@dataclass(frozen=True)
class CardSample:
    """What a card does now.

    `gpu_percent` is the driver's utilization over its own sample window, 0 to 100; None if it says none (MIG).
    """

    gpu_percent: int | None
    memory_used_bytes: int


@dataclass(frozen=True)
class CardProcess:
    """A process on a card, by the driver: its PID on the host and its bytes; None where the driver does not say."""

    pid: int
    memory_bytes: int | None


@dataclass(frozen=True)
class ProcessUtilization:
    """How much of a recent sample period a process kept the card busy, by the driver: host PID, 0 to 100."""

    pid: int
    percent: int


class Driver(Protocol):
    """One opened driver. Methods raise DriverError when it is gone; then the caller closes it and opens another."""

    name: str

    def probe(self) -> Probe: ...

    def wait_xid(self, timeout_s: float) -> XidEvent | None:
        """Block at most `timeout_s`; None if nothing happened or there are no events (then perhaps at once)."""

    @property
    def has_events(self) -> bool: ...

    def sample(self, uuid: str) -> CardSample | None:
        """None if this card does not say."""

    def processes(self, uuid: str) -> tuple[CardProcess, ...] | None:
        """Who computes on a card or MIG instance, of a card in MIG mode on all its instances; None if unsaid."""

    def utilization(self, uuid: str, since_us: int) -> tuple[ProcessUtilization, ...] | None:
        """Samples newer than `since_us` (Unix time); idle processes may be left out.

        None if the card does not say (MIG).
        """

    def limit_memory(self, uuid: str, group: Path, hard_bytes: int | None) -> None:
        """Let the processes of a control group hold no more of a card; None: all there is. Raises CannotLimit."""

    def memory_limit(self, uuid: str, group: Path) -> MemoryLimit | None:
        """The limit that counts for a control group. Raises CannotLimit."""

    def close(self) -> None: ...


class NullDriver:
    """No driver: a node without cards, which serves all the same."""

    name = "none"
    has_events = False

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def probe(self) -> Probe:
        return Probe("", ())

    def wait_xid(self, timeout_s: float) -> XidEvent | None:  # noqa: ARG002
        return None

    def sample(self, uuid: str) -> CardSample | None:  # noqa: ARG002
        return None

    def processes(self, uuid: str) -> tuple[CardProcess, ...] | None:  # noqa: ARG002
        return None

    def utilization(self, uuid: str, since_us: int) -> tuple[ProcessUtilization, ...] | None:  # noqa: ARG002
        return None

    def limit_memory(self, uuid: str, group: Path, hard_bytes: int | None) -> None:  # noqa: ARG002
        raise CannotLimit(f"there is no driver: {self.reason}")

    def memory_limit(self, uuid: str, group: Path) -> MemoryLimit | None:  # noqa: ARG002
        raise CannotLimit(f"there is no driver: {self.reason}")

    def close(self) -> None:
        return
