"""The cards that this node has had, on disk: one that is lost while no daemon runs is missed by the next."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from manager.cards.driver import NodeCard
from vcuda import plain_file
from vcuda.spec.inventory import Card

NAME = "cards.json"
_VERSION = 1
_FRESH_S = 3600.0  # a daemon that is killed knows no better when it last saw its cards

log = logging.getLogger(__name__)


class SeenCards:
    """Single-threaded. A damaged file counts as none; a disk that is full costs the memory of a restart, no more."""

    def __init__(self, folder: Path) -> None:
        """The file lies in `folder`, which need not exist yet."""
        self._file = folder / NAME
        self._seen = self._load()
        self._present: set[str] = set()
        self._written: tuple[dict[str, NodeCard], set[str], float] = ({}, set(), 0.0)

    @property
    def cards(self) -> dict[str, NodeCard]:
        """By UUID."""
        return {uuid: card for uuid, (card, _) in self._seen.items()}

    def since(self, uuid: str) -> str:
        """When the driver last showed the card, in words."""
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self._seen[uuid][1]))

    def keep(self, present: Collection[NodeCard], known: Collection[str]) -> None:
        """The driver shows `present` now; of all others those in `known` are missed. Never raises."""
        now = time.time()
        self._seen = {uuid: item for uuid, item in self._seen.items() if uuid in known}
        self._seen.update({item.card.uuid: (item, now) for item in present})
        self._present = {item.card.uuid for item in present}
        *before, written = self._written
        if before != [self.cards, self._present] or abs(now - written) >= _FRESH_S:
            self.save()

    def save(self) -> None:
        """Write it. Never raises."""
        rows = [dataclasses.asdict(card) | {"seen": round(when)} for card, when in self._seen.values()]
        new = self._file.with_suffix(".new")
        try:
            new.write_text(json.dumps({"version": _VERSION, "cards": rows}))
            new.replace(self._file)
        except OSError as error:
            log.warning("%s can't be written: %s; a card lost while no daemon runs would not be missed", new, error)
        self._written = self.cards, self._present, time.time()

    def _load(self) -> dict[str, tuple[NodeCard, float]]:
        try:
            document = json.loads(plain_file.read(self._file))
            if document["version"] != _VERSION:
                return {}
            return {row["card"]["uuid"]: _card(row) for row in document["cards"]}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            log.warning("%s can't be read: %s; a card lost while no daemon ran is not missed", self._file, error)
            return {}


def _card(row: dict[str, Any]) -> tuple[NodeCard, float]:
    """Raises KeyError, TypeError, ValueError."""
    when = float(row.pop("seen"))
    time.gmtime(when)
    card = Card(**row.pop("card"))
    links = tuple((str(uuid), int(rank)) for uuid, rank in card.links)
    kept = dataclasses.replace(card, links=links, healthy=True, why="")
    return NodeCard(kept, **row | {"capability_minors": tuple(row["capability_minors"])}), when
