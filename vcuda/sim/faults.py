"""Faults that a simulated machine can be given, as typed values; each knows its text for the driver's simInject."""

from __future__ import annotations

from dataclasses import dataclass

CUDA_ERROR_OUT_OF_MEMORY = 2


@dataclass(frozen=True)
class CardLost:
    """The card falls off the bus: calls on it fail, NVML says GPU_IS_LOST, Xid 79 is delivered if `xid`."""

    card: int
    xid: bool = True

    def commands(self) -> tuple[str, ...]:
        lost = f"lost {self.card} 1"
        return (lost, f"xid {self.card} 79") if self.xid else (lost,)


@dataclass(frozen=True)
class CardRecovered:
    """The card is there again."""

    card: int

    def commands(self) -> tuple[str, ...]:
        return (f"lost {self.card} 0",)


@dataclass(frozen=True)
class Xid:
    """The driver reports an Xid; by itself it breaks nothing."""

    card: int
    code: int

    def commands(self) -> tuple[str, ...]:
        return (f"xid {self.card} {self.code}",)


@dataclass(frozen=True)
class AllocationError:
    """The next `count` allocations on the card fail (-1: all), with a CUresult."""

    card: int
    count: int = 1
    result: int = CUDA_ERROR_OUT_OF_MEMORY

    def commands(self) -> tuple[str, ...]:
        return (f"fail_alloc {self.card} {self.count} {self.result}",)


@dataclass(frozen=True)
class SlowCall:
    """Every driver call on the card takes that much longer; 0 ends it."""

    card: int
    microseconds: int

    def commands(self) -> tuple[str, ...]:
        return (f"slow {self.card} {self.microseconds}",)


@dataclass(frozen=True)
class LaunchFault:
    """The next launch on the card ends in CUDA_ERROR_ILLEGAL_ADDRESS, which sticks to its process."""

    card: int

    def commands(self) -> tuple[str, ...]:
        return (f"fault_launch {self.card}",)


@dataclass(frozen=True)
class Cleared:
    """All injected faults of the card end."""

    card: int

    def commands(self) -> tuple[str, ...]:
        return (f"clear {self.card}",)


Fault = CardLost | CardRecovered | Xid | AllocationError | SlowCall | LaunchFault | Cleared
