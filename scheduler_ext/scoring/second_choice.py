"""Other cards of a node for a pod whose best choice there a quota closes: of another model, or fewer whole cards.

A table keeps one choice of cards for each node, the policy's best, for all namespaces. Only where quotas leave a pod no
node its other choices are looked for: by the exact search, which knows what each quota leaves.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from scheduler_ext.scoring import exact_search, placing
from scheduler_ext.scoring.exact_search import Budget, Limits
from scheduler_ext.scoring.quotas import Quotas
from scheduler_ext.scoring.scores import Table
from scheduler_ext.scoring.typical_pods import Typical
from scheduler_ext.state.cluster import Cluster, Ints
from scheduler_ext.state.shape import Shape
from vcuda.spec.units import CORES_PER_CARD

_EACH = 100  # choices that a node costs beside those that are tried: about 10 us
_MOST_BYTES = 8 * 2**20  # of what is remembered


class Second(NamedTuple):
    """Rows of the same cards that are open to the pod so, by these picks, and what that costs on the first of them."""

    rows: Ints
    picks: list[int]
    cost: float


class SecondChoices:
    """Remembers what was searched, so that a pod that is refused again and again costs little, and gets further where
    its bound was over. Not locked: for who keeps it.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Shape, bytes, bytes], list[int] | None] = {}
        self._bytes = 0

    def look(
        self, cluster: Cluster, quotas: Quotas, namespace: str, table: Table, rows: Ints, typical: Typical,
    ) -> tuple[list[Second], bool]:  # fmt: skip
        """Of rows that a quota closes those with another choice, and whether all were searched.

        At most what one request may try.
        """
        shape, budget, found = table.shape, Budget(), list[Second]()
        rooms = quotas.rooms(namespace)
        if not len(rows) or len(rooms) > exact_search.MOST_LIMITS:
            return found, True
        rows = rows[np.argsort(cluster.order[rows], kind="stable")]
        accepted = table.accepted(cluster, rows)
        usable = cluster.usable[rows] if accepted is None else cluster.usable[rows] & accepted
        bits, hopeless, least = np.zeros(usable.shape, np.int64), np.zeros(len(rows), np.bool_), _least(shape)
        for number, counted in enumerate(quotas.counting(namespace, rows)):
            bits |= (counted & usable).astype(np.int64) << number
            if ((least > 0) & (least > rooms[number])).any():
                hopeless |= (counted | ~usable).all(axis=1)
        rows, usable, bits = rows[~hopeless], usable[~hopeless], bits[~hopeless]
        if not len(rows):
            return found, True
        free = (np.maximum(cluster.free_cores[rows], 0), np.maximum(cluster.free_blocks[rows], 0))
        cards = np.stack((*(np.where(usable, amount, 0) for amount in (*free, cluster.total_blocks[rows])), bits), 2)
        alike: dict[bytes, list[int]] = {}
        for at, row in enumerate(cards):
            alike.setdefault(row.tobytes(), []).append(at)
        sure, limits = True, tuple(rooms.ravel().tolist())
        for key, places in alike.items():
            picks, known = self._picks(shape, key, cards[places[0]], limits, budget)
            sure &= known
            if picks is not None:
                its = rows[places]
                found.append(Second(its, picks, placing.cost_of(shape, cluster, int(its[0]), picks, typical)))
        return found, sure

    def best(
        self, cluster: Cluster, quotas: Quotas, namespace: str, table: Table, rows: Ints, typical: Typical,
    ) -> tuple[int | None, list[int] | None, bool]:  # fmt: skip
        """The row of least cost with its picks, if there is any, and whether all were searched."""
        found, sure = self.look(cluster, quotas, namespace, table, rows, typical)
        if not found:
            return None, None, sure
        least = min(found, key=lambda one: (one.cost, cluster.order[one.rows[0]]))
        return int(least.rows[0]), least.picks, sure

    def _picks(
        self, shape: Shape, cards: bytes, each: Ints, limits: tuple[int, ...], budget: Budget
    ) -> tuple[list[int] | None, bool]:
        key = shape, np.array(limits, np.int64).tobytes(), cards
        if key in self._known:
            return self._known[key], True
        budget.left -= _EACH
        if budget.left <= 0:
            return None, False
        free = [(cores, blocks, total) for cores, blocks, total, _ in each.tolist()]
        picks, sure = exact_search.search_within(shape, free, Limits(limits, each[:, 3].tolist()), budget)
        if sure:
            self._bytes += sum(map(len, key[1:])) + 8 * shape.columns + shape.filter_bytes
            if self._bytes > _MOST_BYTES:
                self._known.clear()
                self._bytes = 0
            self._known[key] = picks
        return picks, sure


def _least(shape: Shape) -> Ints:
    """What any choice of cards asks for: cores, blocks, whole cards."""
    standing = [step for step in shape.steps if not step.init]
    whole = sum(step.cards for step in standing if step.whole)
    cores = sum((CORES_PER_CARD if step.whole else step.cores) * step.cards for step in standing)
    return np.array([cores, sum(step.blocks * step.cards for step in standing if not step.whole), whole], np.int64)
