"""A node's cards as the manager publishes them and the extender reads them, with the annotation's codec."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vcuda.spec.errors import InvalidInventory, Reason, what_is_wrong
from vcuda.spec.units import blocks_on_card

VERSION = 1
NVLINK_RANK = 100  # links of this rank and closer are NVLinks; below it PCIe
MOST_CARDS = 128  # of a node: 16 cards in 7 MIG instances each are 112; the extender has room for links between all
_LONGEST = 256 * 1024  # characters; all annotations of an object have as many bytes (TotalAnnotationSizeLimitB)
_NO_LABEL = re.compile(r"[^A-Za-z0-9_.-]+")
_LONGEST_LABEL = 63
_LONGEST_WHY = 200


@dataclass(frozen=True)
class Card:
    """One card (or MIG instance), identified by UUID; minor and model are for display and compatibility.

    `links` maps the UUID of a peer card to a rank of closeness (higher is closer; 0: only the system bus).
    `why`: of an unhealthy one, for everybody who may read nodes and pods' events: it names nobody.
    """

    uuid: str
    minor: int
    model: str
    memory_bytes: int
    numa_node: int | None = None
    healthy: bool = True
    links: tuple[tuple[str, int], ...] = ()
    why: str = ""

    @property
    def memory_blocks(self) -> int:
        return blocks_on_card(self.memory_bytes)


def label_value(model: str) -> str:
    """A card model as the value of a label, which may have no space and 63 characters."""
    return _NO_LABEL.sub("-", model)[:_LONGEST_LABEL].strip("-_.")


def encode(cards: tuple[Card, ...]) -> str:
    """Render the annotation: compact JSON, stable order, so that an unchanged inventory is an unchanged string."""
    rows = []
    for card in cards:
        row: dict[str, Any] = {
            "uuid": card.uuid,
            "minor": card.minor,
            "model": card.model,
            "bytes": card.memory_bytes,
        }
        if card.numa_node is not None:
            row["numa"] = card.numa_node
        if not card.healthy:
            row["healthy"] = False
            if card.why:
                row["why"] = card.why[:_LONGEST_WHY]
        if card.links:
            row["links"] = dict(card.links)
        rows.append(row)
    return json.dumps({"version": VERSION, "cards": rows}, separators=(",", ":"))


def _card(row: Mapping[str, Any]) -> Card:
    uuid, minor, size = row["uuid"], row["minor"], row["bytes"]
    numa, links = row.get("numa"), row.get("links", {})
    healthy, why = row.get("healthy", True) is not False, row.get("why", "")
    valid = (
        isinstance(uuid, str)
        and uuid
        and type(minor) is int
        and type(size) is int
        and 0 <= size < 2**63
        and (numa is None or type(numa) is int)
        and isinstance(links, dict)
        and all(type(rank) is int for rank in links.values())
    )
    if not valid:
        raise ValueError("a card needs uuid (text), minor and bytes (whole numbers)")
    return Card(
        uuid,
        minor,
        str(row.get("model", "")),
        size,
        numa,
        healthy,
        tuple(links.items()),
        why[:_LONGEST_WHY] if isinstance(why, str) and not healthy else "",
    )


def decode(text: str) -> tuple[Card, ...]:
    """Parse the annotation. Raises InvalidInventory; unknown fields of newer versions are ignored."""
    try:
        if len(text) > _LONGEST:
            raise ValueError(f"{len(text)} characters, at most {_LONGEST}")
        rows = json.loads(text)["cards"]
        if len(rows) > MOST_CARDS:
            raise ValueError(f"{len(rows)} cards, at most {MOST_CARDS}")
        cards = tuple(_card(row) for row in rows)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInventory(
            Reason.INVALID_INVENTORY,
            f"the inventory annotation is malformed ({what_is_wrong(error)}); gpu-manager rewrites it",
        ) from error
    if len({card.uuid for card in cards}) != len(cards):
        raise InvalidInventory(Reason.INVALID_INVENTORY, "the inventory annotation lists a card twice")
    return cards
