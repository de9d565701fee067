"""The last decisions with their inputs, in bounded memory, for explaining them."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_ext.protocol.reasons import ROW_CODES, AnyReason, ExtenderReason
from scheduler_ext.state.cluster import Ints
from scheduler_ext.state.shape import Shape
from vcuda.spec.request import PodRequest

_MOST = 2048  # at 5,000 nodes a refusal keeps 1 KiB
_FOR_ONE_POD = 5


class Decision(NamedTuple):
    """One answer to filter. A tuple: one is made for each request, and a frozen dataclass costs three times as much.

    `at_ns`: since the epoch. `clock`: the cluster's at that time. `asked` and `shape` are None for a pod that asks for
    the impossible. `counts`: nodes by reason, None if not worked out. `offered`: rows that kube-scheduler offered, as
    packed bits; only of refusals. `refusal`: one reason and message for all nodes. `quota`: the one that
    closed nodes that would have fitted.
    """

    uid: str
    namespace: str
    name: str
    at_ns: int
    clock: int
    candidates: int
    node: str | None = None
    asked: PodRequest | None = None
    shape: Shape | None = None
    counts: Mapping[AnyReason, int] | None = None
    offered: npt.NDArray[np.uint8] | None = None
    refusal: tuple[AnyReason, str] | None = None
    quota: str = ""


def counted(codes: Ints) -> dict[AnyReason, int]:
    """How many nodes gave each reason, most frequent first; nodes where the pod fits count as not chosen."""
    numbers = np.bincount(codes, minlength=len(ROW_CODES)).tolist()
    pairs = [(reason or ExtenderReason.NOT_CHOSEN, count) for reason, count in zip(ROW_CODES, numbers, strict=True)]
    return {reason: count for reason, count in sorted(pairs, key=lambda pair: -pair[1]) if count}


def packed(rows: Ints, size: int) -> npt.NDArray[np.uint8]:
    """Known rows (those >= 0) as packed bits."""
    bits = np.zeros(size, np.bool_)
    bits[rows[rows >= 0]] = True
    return np.packbits(bits)


def unpacked(offered: npt.NDArray[np.uint8]) -> Ints:
    """The rows in packed bits."""
    return np.flatnonzero(np.unpackbits(offered))


class Decisions:
    """A ring. Not locked: the engine's lock covers it."""

    def __init__(self, most: int = _MOST) -> None:
        self._ring: collections.deque[Decision] = collections.deque(maxlen=most)

    def add(self, decision: Decision) -> None:
        self._ring.append(decision)

    def of(self, *, uid: str | None = None, namespace: str = "", name: str = "") -> list[Decision]:
        """The last decisions about a pod, newest first, all of the newest UID."""
        found: list[Decision] = []
        for one in reversed(self._ring):
            if one.uid == uid if uid is not None else (one.namespace, one.name) == (namespace, name):
                uid = one.uid
                found.append(one)
                if len(found) == _FOR_ONE_POD:
                    break
        return found

    def latest(self) -> dict[str, Decision]:
        """By UID the last decision about each pod that is still remembered."""
        return {one.uid: one for one in self._ring}
