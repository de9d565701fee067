"""Pods that ask for a share and have no node yet, as the API server shows them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scheduler_ext.state.pods import PodCache, State
from vcuda.spec.errors import InvalidRequest
from vcuda.spec.request import PodRequest

_MOST = 50_000  # pods of which we know that they wait
_LONGEST = 400  # characters of what is said of one
_LONGEST_TIME = 40  # of a timestamp


@dataclass(frozen=True, slots=True)
class WaitingPod:
    """`created`: as the API server says it. `asks`: for people. `impossible`: why no card can ever give that, or ""."""

    uid: str
    namespace: str
    name: str
    created: str
    asks: str
    impossible: str


class WaitingPods:
    """By UID. Not locked: the engine's lock covers it.

    Texts, not requests, are kept: a pod's owner chooses how large those are.
    """

    def __init__(self) -> None:
        self._pods: dict[str, WaitingPod] = {}

    def show(self, pod: Mapping[str, Any], asked: PodRequest | InvalidRequest) -> None:
        """The API server shows it without a node."""
        metadata = pod["metadata"]
        uid = str(metadata["uid"])
        if uid not in self._pods and len(self._pods) >= _MOST:
            return
        self._pods[uid] = WaitingPod(
            uid,
            str(metadata.get("namespace") or "default"),
            str(metadata.get("name") or ""),
            str(metadata.get("creationTimestamp") or "")[:_LONGEST_TIME],
            "" if isinstance(asked, InvalidRequest) else _asks(asked),
            str(asked)[:_LONGEST] if isinstance(asked, InvalidRequest) else "",
        )

    def drop(self, uid: str) -> None:
        """It has a node, or is gone."""
        self._pods.pop(uid, None)

    def keep(self, uids: Collection[str]) -> None:
        """A complete list was seen: drop all others."""
        for uid in self._pods.keys() - set(uids):
            del self._pods[uid]

    def __iter__(self) -> Iterator[WaitingPod]:
        """Those that have been seen first come first."""
        return iter(self._pods.values())

    def without_place(self, pods: PodCache) -> int:
        """How many have no booking either; what a preemption frees for a pod is not his yet."""
        placed = (one for one in pods.pending() if one.state is not State.NOMINATED)
        return len(self._pods) - sum(one.uid in self._pods for one in placed)


def _asks(asked: PodRequest) -> str:
    said = []
    for container in asked.containers:
        if container.whole:
            said.append(f"{container.card_count} whole card{'s' if container.card_count > 1 else ''}")
        else:
            said.append(f"{container.cores} cores {container.memory_blocks} blocks")
    return ", ".join(said)[:_LONGEST]
