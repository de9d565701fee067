"""Where victims were looked for, for a class of pods: the next request goes on with the other nodes.

What was found holds for as long as nothing on the node has changed, and kube-scheduler proposes the same pods there.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from scheduler_ext.state.cluster import Cluster, Ints

_MOST = 256  # classes; at 5,000 nodes each keeps 160 KB

UNSURE, HELPS, IN_VAIN = range(3)  # UNSURE: never tried, or it has changed, or would help if no quota were in the way


class Stamp(NamedTuple):
    """Of a node: when it changed, by the cluster's clock; what changed of its pods beside; what is proposed there."""

    changed: int
    stirred: int
    proposal: int

    @classmethod
    def of(cls, cluster: Cluster, row: int, proposal: int) -> Stamp:
        return cls(int(cluster.changed[row]), int(cluster.stirred[row]), proposal)


class Tried:
    """Of one class."""

    def __init__(self) -> None:
        self._stamps: Ints = np.zeros((0, 3), np.int64)
        self._verdicts: Ints = np.zeros(0, np.int64)
        self._turns: Ints = np.zeros(0, np.int64)
        self._turn = 0

    def known(self, cluster: Cluster, rows: Ints, proposals: Ints) -> tuple[Ints, Ints]:
        """What was found on these rows, where nothing has changed since; and in which turn they were tried, from 1."""
        self._grow(len(cluster))
        now = np.stack([cluster.changed[rows], cluster.stirred[rows], proposals], axis=1)
        same = (self._stamps[rows] == now).all(axis=1)
        return np.where(same, self._verdicts[rows], UNSURE), self._turns[rows]

    def learn(self, cluster: Cluster, found: Sequence[tuple[int, Stamp, int]]) -> None:
        """Rows with their stamps, as they were when they were copied, and verdicts."""
        self._grow(len(cluster))
        self._turn += 1
        for row, stamp, verdict in found:
            self._stamps[row], self._verdicts[row], self._turns[row] = stamp, verdict, self._turn

    def _grow(self, rows: int) -> None:
        more = rows - len(self._verdicts)
        if more > 0:
            self._stamps = np.concatenate([self._stamps, np.zeros((more, 3), np.int64)])
            self._verdicts, self._turns = (
                np.concatenate([array, np.zeros(more, np.int64)]) for array in (self._verdicts, self._turns)
            )


class TriedNodes:
    """By namespace and class. Not locked: the engine's lock covers it."""

    def __init__(self) -> None:
        self._tried: collections.OrderedDict[tuple[str, Hashable], Tried] = collections.OrderedDict()
        self._in_namespace: collections.Counter[str] = collections.Counter()

    def of(self, namespace: str, kind: Hashable) -> Tried:
        key = namespace, kind
        if key not in self._tried:
            self._tried[key] = Tried()
            self._in_namespace[namespace] += 1
            if len(self._tried) > _MOST:  # who has many classes makes us forget its own, nobody else's
                crowd, _ = self._in_namespace.most_common(1)[0]
                self._forget(next(one for one in self._tried if one[0] == crowd))
        self._tried.move_to_end(key)
        return self._tried[key]

    def _forget(self, key: tuple[str, Hashable]) -> None:
        del self._tried[key]
        self._in_namespace[key[0]] -= 1
        if not self._in_namespace[key[0]]:
            del self._in_namespace[key[0]]
