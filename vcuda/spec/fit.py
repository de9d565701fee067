"""Whether a share fits a card, for who decides one container at a time: the manager.

The extender has the same rule over arrays (`scheduler_ext.scoring`).
"""

from __future__ import annotations

from dataclasses import dataclass

from vcuda.spec.errors import DoesNotFit, Reason
from vcuda.spec.inventory import Card
from vcuda.spec.request import ContainerRequest
from vcuda.spec.units import CORES_PER_CARD


@dataclass(frozen=True)
class CardState:
    """A card and what is left of it: `free_cores` of 100, `free_blocks` of the card's own."""

    card: Card
    free_cores: int
    free_blocks: int

    @property
    def untouched(self) -> bool:
        return self.free_cores == CORES_PER_CARD and self.free_blocks == self.card.memory_blocks


def why_not(state: CardState, container: ContainerRequest) -> Reason | None:
    """The reason for which one card can't take (one card of) the container's request now, or None if it can."""
    if not state.card.healthy:
        return Reason.UNHEALTHY_CARD
    if container.whole:
        return None if state.untouched else Reason.INSUFFICIENT_WHOLE_CARDS
    if container.cores > state.free_cores:
        return Reason.INSUFFICIENT_CORES
    if container.memory_blocks > state.free_blocks:
        return Reason.INSUFFICIENT_MEMORY
    return None


def require(state: CardState, container: ContainerRequest) -> None:
    """Raise DoesNotFit, naming the card and what is free, if the card can't take the request."""
    reason = why_not(state, container)
    if reason is not None:
        raise DoesNotFit(
            reason,
            f"card {state.card.uuid} has {state.free_cores} cores and {state.free_blocks} blocks free; container "
            f"{container.name!r} asks for {container.cores_per_card} and {container.memory_blocks}",
        )
