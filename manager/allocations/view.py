"""What readers of the allocations need of the allocator."""

from __future__ import annotations

from typing import Protocol

from manager.allocations.record import Allocation


class AllocationView(Protocol):
    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """All allocations in the order in which they were made; a snapshot."""
