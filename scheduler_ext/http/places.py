"""Whose handshake is next, and whose makes room: by what an address did before, and by how many it has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from scheduler_ext.http.strangers import ByPeer

GOOD, UNKNOWN, BAD = range(3)
_MOST_KNOWN = 4096  # addresses
UNDISTURBED = 160  # that an address may have before it makes room for those of worse ones
AT_ONCE = 192  # handshakes: each may hold 0.6 MB, as OpenSSL takes messages of 100 KB in any number of records
# What a handshake has before others may end it: three round trips, or more among few addresses that come to their ends.
LEAST_SECONDS, _MOST_SECONDS = 0.3, 1.5
_LATELY = 16  # handshakes


class FromRanked(Protocol):
    """What comes from an address, `peer`, that had this rank then."""

    peer: str
    rank: int


_One = TypeVar("_One", bound=FromRanked)


class Repute:
    """Whether an address's last handshakes came to nothing, or it has shown a certificate since.

    Where none is asked for, a request proves as much. Handshakes alone prove nothing: who ends them at once could go on
    for ever.
    """

    def __init__(self) -> None:
        self._good: dict[str, bool] = {}  # the one that was heard of last is the last

    def note(self, peer: str, *, good: bool) -> None:
        """A handshake that comes to nothing takes what was known: who is pushed out in a crowd is not bad for that."""
        if self._good.pop(peer, None) and not good:
            return
        self._good[peer] = good
        if len(self._good) > _MOST_KNOWN:
            del self._good[next(iter(self._good))]

    def give_up(self, peer: str) -> None:
        """It ended a handshake itself, and so keeps nobody out: who is known for good stays so."""
        if not self._good.get(peer):
            self.note(peer, good=False)

    def rank(self, peer: str) -> int:
        return {True: GOOD, False: BAD, None: UNKNOWN}[self._good.get(peer)]


class Patience:
    """For how long a handshake is left alone though others wait: honest ones with long ways have time among each other.

    Longer by the part of those of its rank that came to their ends lately, of those that took long enough to tell; and
    not so long that an address would wait for its turn for more than the least behind all others that wait.
    """

    def __init__(self) -> None:
        self._ended = [1.0, 1.0, 0.0]  # who is bad has no more

    def note(self, rank: int, seconds: float, *, ended: bool) -> None:
        """A handshake is over."""
        if rank != BAD and seconds >= LEAST_SECONDS:
            self._ended[rank] += (ended - self._ended[rank]) / _LATELY

    def seconds(self, rank: int, addresses: int) -> float:
        """What one of this rank has while so many addresses wait."""
        more = min(_MOST_SECONDS, AT_ONCE * LEAST_SECONDS / max(1, addresses)) - LEAST_SECONDS
        return LEAST_SECONDS + max(0.0, more) * self._ended[rank]


class Ranked(Generic[_One]):
    """Newcomers by rank, and in each by address."""

    def __init__(self) -> None:
        self._of = [ByPeer[_One]() for _ in range(3)]
        self._sizes = [0, 0, 0]
        self._turns, self._served = 0, [0, 0, 0]

    def add(self, one: _One) -> None:
        self._of[one.rank].add(one)
        self._sizes[one.rank] += 1

    def discard(self, one: _One) -> None:
        self._sizes[one.rank] -= self._of[one.rank].discard(one)

    def size(self, *, bad: bool) -> int:
        """How many there are; or those alone that are not bad."""
        return sum(self._sizes if bad else self._sizes[:BAD])

    def count(self, peer: str) -> int:
        """Those of an address."""
        return sum(by.count(peer) for by in self._of)

    def addresses(self, rank: int) -> int:
        """Those that have some of this rank, or of better ones."""
        return sum(len(by.peers()) for by in self._of[: rank + 1])

    def next(self) -> _One:
        """Take out one of the best rank, or, every fourth time, of the rank that had no turn for longest."""
        there = [rank for rank in (GOOD, UNKNOWN, BAD) if self._of[rank]]
        self._turns += 1
        rank = there[0] if self._turns % 4 else min(there, key=self._served.__getitem__)
        self._served[rank] = self._turns
        self._sizes[rank] -= 1
        return self._of[rank].next()

    def oldest_of_most(self) -> Iterator[_One]:
        """Of each rank, the worst first, the oldest of the address that has the most."""
        return (by.oldest_of_most() for by in reversed(self._of) if by)

    def oldest_of_many(self) -> _One | None:
        """The oldest of an address that has many, of the worst rank that has such."""
        return next(filter(None, (by.oldest_of_many() for by in reversed(self._of))), None)

    def crowded(self) -> int:
        """The rank of which there are the most, of equals the worst."""
        return max((BAD, UNKNOWN, GOOD), key=self._sizes.__getitem__)

    def comes_before(self, other: _One, among: Ranked[_One]) -> bool:
        """Whether somebody here has a better claim to the place of `other`."""
        most = among.count(other.peer)
        for rank, by in enumerate(self._of):
            if by and rank < BAD == other.rank:
                return True
            if rank > other.rank and most <= UNDISTURBED:
                continue
            # Who is bad would only take turns with others as bad, and each turn takes the loop 1 ms.
            more = most - (rank == BAD)
            if by and more > 0 and any(among.count(peer) < more for peer in by.peers()):
                return True
        return False
