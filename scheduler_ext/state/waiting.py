"""Pods that ask for a share and have no node yet, as the API server shows them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from scheduler_ext.state.pods import PodCache, State
from vcuda.spec.errors import InvalidRequest
from vcuda.spec.request import PodRequest

_MOST = 50_000  # pods of which we know that they wait
_LONGEST = 400  # characters of what is said of one
_LONGEST_TIME = 40  # of a timestamp


class WaitingPod(NamedTuple):
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
        if isinstance(asked, InvalidRequest):
            self._show(pod, "", str(asked)[:_LONGEST])
        else:
            self._show(pod, _asks(asked), "")

    def show_claims(self, pod: Mapping[str, Any], names: Sequence[str]) -> None:
        """The API server shows it without a node, and with these claims."""
        self._show(pod, f"claims {', '.join(names)}"[:_LONGEST] if names else "claims that are not made yet", "")

    def show_new(self, uid: str, namespace: str, name: str, created: str, asked: PodRequest) -> None:
        """One that is not here yet."""
        self._put(uid, namespace, name, created, _asks(asked), "")

    def _show(self, pod: Mapping[str, Any], asks: str, impossible: str) -> None:
        metadata = pod["metadata"]
        namespace, name = str(metadata.get("namespace") or ""), str(metadata.get("name") or "")
        created = str(metadata.get("creationTimestamp") or "")
        self._put(str(metadata["uid"]), namespace, name, created, asks, impossible)

    def _put(self, uid: str, namespace: str, name: str, created: str, asks: str, impossible: str) -> None:
        if uid in self._pods or len(self._pods) < _MOST:
            created = created[:_LONGEST_TIME]
            self._pods[uid] = WaitingPod(uid, namespace or "default", name, created, asks, impossible)

    def drop(self, uid: str) -> None:
        """It has a node, or is gone."""
        self._pods.pop(uid, None)

    def keep(self, uids: Collection[str]) -> None:
        """A complete list was seen: drop all others."""
        for uid in [uid for uid in self._pods if uid not in uids]:
            del self._pods[uid]

    def differs(self, asked: PodRequest) -> bool:
        """Whether the API server shows a pod with other amounts under this UID: they never change."""
        shown = self._pods.get(asked.uid)
        # Of one with claims, or that can't be, these are not told.
        return shown is not None and shown.asks[:1].isdecimal() and shown.asks != _asks(asked)

    def get(self, uid: str) -> WaitingPod | None:
        return self._pods.get(uid)

    def __contains__(self, uid: str) -> bool:
        return uid in self._pods

    def __iter__(self) -> Iterator[WaitingPod]:
        """Those that have been seen first come first."""
        return iter(self._pods.values())

    def without_place(self, pods: PodCache, expected: Collection[str]) -> int:
        """How many have no booking either, nor are `expected` anywhere; what a preemption frees is nobody's yet."""
        placed = {one.uid for one in pods.pending() if one.state is not State.NOMINATED}.union(expected)
        return len(self._pods) - sum(uid in self._pods for uid in placed)


def _asks(asked: PodRequest) -> str:
    said = []
    for container in asked.containers:
        if container.whole:
            said.append(f"{container.card_count} whole card{'s' if container.card_count > 1 else ''}")
        else:
            said.append(f"{container.cores} cores {container.memory_blocks} blocks")
    return ", ".join(said)[:_LONGEST]
