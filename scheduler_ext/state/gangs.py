"""The gangs that are known: their pods, and the places that are reserved for those who have not come yet."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from scheduler_ext.state.pods import PodCache, Record, State
from scheduler_ext.state.shape import Shape
from vcuda.printable import printable
from vcuda.spec.request import PodRequest

PLACE = "gang:"  # how the UID of a reserved place begins; a pod's never does


@dataclass(slots=True)
class Member:
    """A live pod.

    `since`: monotonic seconds when it was first seen; `shown`: by the API server, not only by a request.
    """

    shape: Shape
    since: float
    size: int  # of its gang, as its own label says
    shown: bool = False


@dataclass(frozen=True, slots=True)
class GangStatus:
    """How far a gang is: live pods, those with a node, places reserved for others, seconds until these are given up.

    `lapsed`: its deadline has passed, and what was not bound was given back.
    """

    name: str
    size: int
    pods: int
    placed: int
    reserved: int
    seconds_left: float | None
    lapsed: bool

    def __str__(self) -> str:
        text = f"gang {printable(self.name)}: {self.placed} of {self.size} pods have a place"
        if self.reserved and self.seconds_left is not None:
            text += f", {self.reserved} more are reserved for {self.seconds_left:.0f} s"
        if self.lapsed:
            text += "; its deadline has passed, and what was not bound then was given back"
        return text


@dataclass(slots=True)
class Gang:
    """`places`: shapes of reserved places by their UID in the pods. `until`: monotonic deadline of what is not bound.

    `over`: it has passed, and what is left may be being written. `lapsed`: it has passed once; nothing is reserved
    again before all members exist. `refused`: what did not fit when it was planned last, and what was said. `planned`:
    monotonic seconds of then; None: it never was. `guessed`: places were reserved for pods that nobody had seen yet.
    """

    namespace: str
    name: str
    members: dict[str, Member] = field(default_factory=dict)
    places: dict[str, Shape] = field(default_factory=dict)
    until: float | None = None
    over: bool = False
    lapsed: bool = False
    refused: tuple[object, str] | None = None
    planned: float | None = None
    guessed: bool = False

    @property
    def size(self) -> int:
        """The largest that a live member names: one made with a wrong size counts until it is deleted."""
        return max((member.size for member in self.members.values()), default=0)

    def placed(self, pods: PodCache) -> list[str]:
        """Members that have a node."""
        records = ((uid, pods.get(uid)) for uid in self.members)
        return [uid for uid, record in records if record is not None and record.state is not State.NOMINATED]

    def running(self, pods: PodCache) -> bool:
        """Whether a member is bound for good: then all had a place once, and later members are placed one by one."""
        records = (pods.get(uid) for uid in self.members)
        return any(
            record is not None and record.state in (State.BOUND, State.CONFIRMED) and not record.leaving
            for record in records
        )

    def waiting(self, pods: PodCache) -> list[Record]:
        """What members hold whose Bind has not begun, or has failed."""
        records = (pods.get(uid) for uid in self.members)
        return [record for record in records if record is not None and record.state is State.ASSUMED]

    def being_bound(self, pods: PodCache) -> bool:
        records = (pods.get(uid) for uid in self.members)
        return any(record is not None and record.state in (State.BINDING, State.UNCERTAIN) for record in records)

    def no_deadline(self) -> None:
        self.until, self.over = None, False

    def status(self, pods: PodCache, now: float) -> GangStatus:
        left = None if self.until is None or self.over else max(0.0, self.until - now)
        return GangStatus(
            self.name, self.size, len(self.members), len(self.placed(pods)), len(self.places), left, self.lapsed
        )

    def __str__(self) -> str:
        return f"gang {printable(f'{self.namespace}/{self.name}')}"


class Gangs:
    """Gangs by namespace and name. Not locked: the engine's lock covers it."""

    def __init__(self) -> None:
        self._gangs: dict[tuple[str, str], Gang] = {}
        self._of: dict[str, Gang] = {}
        self._count = 0

    def join(self, asked: PodRequest, shape: Shape, now: float, *, shown: bool = False) -> Gang | None:
        """Count a pod as a live member of its gang; None if it names none."""
        wanted = asked.gang
        if wanted is None or wanted.size == 1:
            return None
        gang = self._gangs.get((asked.namespace, wanted.name))
        if gang is None:
            gang = self._gangs[asked.namespace, wanted.name] = Gang(asked.namespace, wanted.name)
        if asked.uid not in gang.members:
            gang.members[asked.uid] = Member(shape, now, wanted.size)
            self._of[asked.uid] = gang
        member = gang.members[asked.uid]
        member.shape, member.size = shape, wanted.size
        member.shown |= shown
        return gang

    def named(self, namespace: str, name: str) -> Gang | None:
        return self._gangs.get((namespace, name))

    def of(self, uid: str) -> Gang | None:
        return self._of.get(uid)

    def leave(self, uid: str) -> Gang | None:
        """A pod is gone. Returns its gang if it was the last member: then nothing of it is known any more."""
        gang = self._of.pop(uid, None)
        if gang is None:
            return None
        del gang.members[uid]
        if gang.members:
            return None
        del self._gangs[gang.namespace, gang.name]
        return gang

    def missing(self, known: Collection[str], since: float) -> list[str]:
        """Members seen before `since` that are not among the pods known now."""
        return [uid for uid, gang in self._of.items() if uid not in known and gang.members[uid].since < since]

    def unseen(self, since: float, pods: PodCache) -> list[str]:
        """Members known only by requests before `since` that hold nothing: deleted before they were asked for."""
        return [
            uid
            for uid, gang in self._of.items()
            if not gang.members[uid].shown and gang.members[uid].since < since and pods.get(uid) is None
        ]

    def new_place(self, gang: Gang, shape: Shape) -> str:
        """The UID of a new place."""
        self._count += 1
        uid = f"{PLACE}{gang.namespace}/{gang.name}:{self._count}"
        gang.places[uid] = shape
        return uid

    def __iter__(self) -> Iterator[Gang]:
        return iter(list(self._gangs.values()))
