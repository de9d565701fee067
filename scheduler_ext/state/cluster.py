"""The cluster as numpy arrays: one row per node, one column per card, kept exact by integer bookkeeping."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_ext.protocol.reasons import CODE_OF, FITS, ExtenderReason
from scheduler_ext.state.node_names import NodeNames
from vcuda.spec.errors import Reason
from vcuda.spec.inventory import Card
from vcuda.spec.units import CORES_PER_CARD

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Ranks = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]

_LONGEST_WHY = 200
_CLOSEST = 255  # of ranks; managers tell up to 118
_GONE = CODE_OF[ExtenderReason.UNKNOWN_NODE]
_UNPLACED = CODE_OF[ExtenderReason.UNPLACED_POD]
_PER_CARD: dict[str, type] = {
    "free_cores": np.int64, "free_blocks": np.int64, "total_blocks": np.int64, "model": np.int64,
    "present": np.bool_, "usable": np.bool_, "links": np.uint8,
}  # fmt: skip
_PER_NODE = ("free_cpu", "free_memory", "size", "code", "changed", "stirred", "born")
_SIZE_BITS = 5  # of an amount, that tell sizes of nodes apart: machines of one type differ by less
_MOST_SIZES = 256  # nodes describe themselves, and what is worked out of sizes must not fill our memory


class Usage(NamedTuple):
    """What one pod books on its node: UUID → (cores, memory blocks), milli-cpu, bytes.

    `unplaced`: it has a share of cards that no annotation names, so the node takes no further share until it does.
    """

    cards: Mapping[str, tuple[int, int]] = MappingProxyType({})
    cpu_milli: int = 0
    memory_bytes: int = 0
    unplaced: bool = False


class View(NamedTuple):
    """Some rows of the cluster, gathered: [k] per node, [k, cards] per card. Free amounts are never negative."""

    rows: Ints
    usable: Bools  # present and healthy
    free_cores: Ints
    free_blocks: Ints
    total_blocks: Ints
    model: Ints
    size: Ints
    free_cpu: Ints
    free_memory: Ints
    links: Ranks  # [k, cards, cards]


class Size(NamedTuple):
    """How large nodes are, when nothing is booked on them. 0 milli-cpu or bytes: not told."""

    cards: int
    cpu_milli: int
    memory_bytes: int


class Supply(NamedTuple):
    """Of usable cards: how many by size of node and model, [sizes, models], and the blocks of a model's largest one.

    `sizes` [sizes, 3]: the largest node's cards, milli-cpu and bytes.
    """

    cards: Ints
    blocks: Ints
    sizes: Ints


class Described(NamedTuple):
    """A node as it was described to the cluster. `problem`: a code of ROW_CODES."""

    name: str
    cards: tuple[Card, ...]
    cpu_milli: int
    memory_bytes: int
    problem: int


class Cluster:
    """Rows of nodes and the bookings on them. Not locked: its owner holds one lock around every call."""

    def __init__(self, rows: int = 0, columns: int = 0) -> None:
        """Room for so many nodes and cards of each; it grows where more come."""
        self.names: list[str] = []
        self.index: dict[str, int] = {}
        self.named = NodeNames()  # the same, for names in a request
        self.cards: list[tuple[Card, ...]] = []
        self.models: list[str] = []
        self.sizes: list[Size] = []
        self.clock = 0
        self._columns: list[dict[str, int]] = []
        self._unused: list[int] = []
        self._order: Ints | None = None
        self._bookings: dict[str, dict[str, Usage]] = {}
        self._capacity_cpu: list[tuple[int, int]] = []
        self._problem: list[int] = []
        self._model_ids: dict[str, int] = {}
        self._size_ids: dict[Size, int] = {}
        self._followers: list[set[str]] = []
        self._allocate(max(rows, 64), max(columns, 8))

    def frozen(self) -> Cluster:
        """A copy of the nodes as they are now, with room as it is but without the names of who has it: 2 ms at 5,000.

        What is booked on it counts there alone; no node may be added or described anew.
        """
        other = copy.copy(self)
        for name in (*_PER_CARD, *_PER_NODE):
            setattr(other, name, getattr(self, name).copy())
        other.names, other.cards, other.models = list(self.names), list(self.cards), list(self.models)
        other.sizes = list(self.sizes)
        other._columns, other._problem = list(self._columns), list(self._problem)
        other.index, other._bookings, other._followers, other.native = dict(self.index), {}, [], None
        return other

    def _allocate(self, rows: int, columns: int) -> None:
        def grown(name: str, shape: tuple[int, ...], dtype: Any) -> None:
            new = np.zeros(shape, dtype)
            old = getattr(self, name, None)
            if old is not None:
                new[tuple(slice(0, size) for size in old.shape)] = old
            setattr(self, name, new)

        for name, dtype in _PER_CARD.items():
            grown(name, (rows, columns, columns) if name == "links" else (rows, columns), dtype)
        for name in _PER_NODE:
            grown(name, (rows,), np.int64)
        self.native = None

    native: Any  # what scoring keeps of the arrays' places; None: they are new
    free_cores: Ints
    free_blocks: Ints
    total_blocks: Ints
    model: Ints
    present: Bools
    usable: Bools
    links: Ranks  # a byte each: beside one node of MIG instances these are the most of all arrays
    free_cpu: Ints
    free_memory: Ints
    size: Ints
    code: Ints
    changed: Ints
    stirred: Ints  # counts what has changed of its pods beside what they hold
    born: Ints  # the clock when the row got the name that it has

    def __len__(self) -> int:
        """How many rows are in use, those of deleted nodes included."""
        return len(self.names)

    def _row(self, name: str) -> int:
        row = self.index.get(name)
        if row is not None:
            return row
        if self._unused:
            row = self._unused.pop()
            self.names[row] = name
        else:
            row = len(self.names)
            self.names.append(name)
            self.cards.append(())
            self._columns.append({})
            self._capacity_cpu.append((0, 0))
            self._problem.append(FITS)
            if row >= len(self.code):
                self._allocate(2 * len(self.code), self.free_cores.shape[1])
        self.index[name] = row
        self.named.put(name, row)
        self.born[row] = self.clock
        self._order = None
        return row

    @property
    def order(self) -> Ints:
        """Per row the position of its name in the alphabet, for ties that must not depend on anything else."""
        if self._order is None:
            self._order = np.zeros(len(self.names), np.int64)
            self._order[sorted(range(len(self.names)), key=self.names.__getitem__)] = np.arange(len(self.names))
        return self._order

    def columns(self, row: int) -> Mapping[str, int]:
        """Of the cards of a row, by UUID."""
        return self._columns[row]

    def _touch(self, row: int) -> None:
        self.clock += 1
        self.changed[row] = self.clock
        self._tell(self.names[row])

    def stir(self, node: str) -> None:
        """A pod there is seen, or leaves: what it holds is the same."""
        row = self.index.get(node)
        if row is not None:
            self.stirred[row] += 1

    def _tell(self, node: str) -> None:
        for changed in self._followers:
            changed.add(node)

    def follow(self) -> set[str]:
        """A set into which come all nodes that change, until `unfollow`; also such as are only booked on."""
        changed: set[str] = set()
        self._followers.append(changed)
        return changed

    def unfollow(self, changed: set[str]) -> None:
        self._followers = [one for one in self._followers if one is not changed]

    def set_node(
        self,
        name: str,
        cards: tuple[Card, ...],
        cpu_milli: int,
        memory_bytes: int,
        problem: Reason | ExtenderReason | None = None,
    ) -> bool:
        """Add a node, or bring it up to date; whether anything was new.

        `problem` says why its cards are not known (then `cards` is empty).
        """
        known = self.index.get(name)
        code = CODE_OF[problem] if problem else (FITS if cards else CODE_OF[Reason.NO_CARDS])
        if (
            known is not None
            and self.cards[known] == cards
            and self._capacity_cpu[known] == (cpu_milli, memory_bytes)
            and self._problem[known] == code
        ):
            return False
        row = self._row(name)
        self.cards[row] = cards
        self._capacity_cpu[row] = (cpu_milli, memory_bytes)
        self._problem[row] = code
        self._rebuild(row)
        return True

    def remove_node(self, name: str) -> None:
        """Forget a node; the bookings on it stay until their pods are released."""
        row = self.index.pop(name, None)
        if row is None:
            return
        self.named.drop(name)
        self.cards[row], self._capacity_cpu[row], self._problem[row] = (), (0, 0), _GONE
        self._rebuild(row)
        self.names[row] = ""
        self._unused.append(row)

    def _rebuild(self, row: int) -> None:
        cards = self.cards[row]
        if len(cards) > self.free_cores.shape[1]:
            self._allocate(len(self.code), max(len(cards), 2 * self.free_cores.shape[1]))
        self._columns[row] = {card.uuid: column for column, card in enumerate(cards)}
        for name in _PER_CARD:
            getattr(self, name)[row] = 0
        for column, card in enumerate(cards):
            self.present[row, column] = True
            self.usable[row, column] = card.healthy
            self.free_cores[row, column] = CORES_PER_CARD
            self.free_blocks[row, column] = self.total_blocks[row, column] = card.memory_blocks
            self.model[row, column] = self.model_id(card.model)
            for peer, rank in card.links:
                if peer in self._columns[row]:
                    self.links[row, column, self._columns[row][peer]] = min(max(rank, 0), _CLOSEST)
        self.free_cpu[row], self.free_memory[row] = self._capacity_cpu[row]
        self.size[row] = self.size_id(Size(len(cards), *self._capacity_cpu[row])) if cards else 0
        for usage in self._bookings.get(self.names[row], {}).values():
            self._apply(row, usage, -1)
        self._settle(row)

    def _apply(self, row: int, usage: Usage, sign: int) -> None:
        columns = self._columns[row]
        for uuid, (cores, blocks) in usage.cards.items():
            column = columns.get(uuid)
            if column is not None:
                self.free_cores[row, column] += sign * cores
                self.free_blocks[row, column] += sign * blocks
        self.free_cpu[row] += sign * usage.cpu_milli
        self.free_memory[row] += sign * usage.memory_bytes

    def _settle(self, row: int) -> None:
        code = self._problem[row]
        if code == FITS and any(usage.unplaced for usage in self._bookings.get(self.names[row], {}).values()):
            code = _UNPLACED
        self.code[row] = code
        self._touch(row)

    def take_over(self, rows: Ints, free_cpu: Ints, free_memory: Ints) -> None:
        """Free cpu and memory of some rows, as another book counts them."""
        moved = (self.free_cpu[rows] != free_cpu) | (self.free_memory[rows] != free_memory)
        if moved.any():
            self.clock += 1
            self.free_cpu[rows[moved]], self.free_memory[rows[moved]] = free_cpu[moved], free_memory[moved]
            self.changed[rows[moved]] = self.clock
            for row in rows[moved].tolist() if self._followers else ():
                self._tell(self.names[row])

    def book(self, uid: str, node: str, usage: Usage) -> None:
        """Book a pod on a node (which need not be known yet).

        A second booking of the same UID there replaces the first.
        """
        self.release(uid, node)
        bookings = self._bookings.setdefault(node, {})
        bookings[uid] = usage
        row = self.index.get(node)
        if row is None:
            self._tell(node)
        else:
            self._apply(row, usage, -1)
            if usage.unplaced:
                self._settle(row)
            else:
                self._touch(row)

    def release(self, uid: str, node: str) -> None:
        """Take a booking back; nothing happens if there is none."""
        bookings = self._bookings.get(node)
        usage = bookings.pop(uid, None) if bookings else None
        if usage is None:
            return
        if not bookings:
            del self._bookings[node]
        row = self.index.get(node)
        if row is None:
            self._tell(node)
        else:
            self._apply(row, usage, 1)
            if usage.unplaced:
                self._settle(row)
            else:
                self._touch(row)

    @contextlib.contextmanager
    def without(self, bookings: Collection[tuple[str, Usage]]) -> Iterator[None]:
        """Meanwhile some bookings, by node, do not count. All at once: a thousand one by one are 20 ms.

        Nodes may not be described anew meanwhile. Nobody who follows is told: it is as before once the lock is free.
        """
        cards, rows = [], []
        for node, usage in bookings:
            if (row := self.index.get(node)) is None:
                continue
            rows.append((row, usage.cpu_milli, usage.memory_bytes))
            columns = self._columns[row]
            cards += [(row, columns[uuid], *use) for uuid, use in usage.cards.items() if uuid in columns]
        its_rows, its_columns, cores, blocks = np.array(cards, np.int64).reshape(-1, 4).T
        touched, cpu, memory = np.array(rows, np.int64).reshape(-1, 3).T

        def shift(sign: int) -> None:
            self.clock += 1
            self.changed[touched] = self.clock
            np.add.at(self.free_cores, (its_rows, its_columns), sign * cores)
            np.add.at(self.free_blocks, (its_rows, its_columns), sign * blocks)
            np.add.at(self.free_cpu, touched, sign * cpu)
            np.add.at(self.free_memory, touched, sign * memory)

        shift(1)
        try:
            yield
        finally:
            shift(-1)

    def free(self, node: str, uuid: str) -> tuple[int, int] | None:
        """Cores and blocks of a card that nobody has booked, below 0 if overbooked; None if it is unhealthy or gone."""
        row = self.index.get(node)
        column = None if row is None else self._columns[row].get(uuid)
        if row is None or column is None or not self.usable[row, column]:
            return None
        return int(self.free_cores[row, column]), int(self.free_blocks[row, column])

    def overbooked(self, node: str, uuids: Collection[str]) -> list[str]:
        """Which of some cards of a node have less than nothing free."""
        row = self.index.get(node)
        columns = {} if row is None else self._columns[row]
        return [
            uuid
            for uuid in uuids
            if uuid in columns and min(self.free_cores[row, columns[uuid]], self.free_blocks[row, columns[uuid]]) < 0
        ]

    def why_unhealthy(self, row: int) -> str:
        """What a node's manager says of its unhealthy cards, each reason once; "" if it says nothing."""
        return "; ".join(dict.fromkeys(card.why for card in self.cards[row] if card.why))[:_LONGEST_WHY]

    def described(self, name: str) -> Described | None:
        """A node as `set_node` took it; None if it is not known."""
        row = self.index.get(name)
        if row is None:
            return None
        return Described(name, self.cards[row], *self._capacity_cpu[row], self._problem[row])

    def nodes(self) -> list[str]:
        """All nodes that are known or booked on."""
        return list(dict.fromkeys([*self.index, *self._bookings]))

    def bookings(self, node: str) -> dict[str, Usage]:
        """What is booked on a node, by UID."""
        return dict(self._bookings.get(node, {}))

    def pods_on(self, node: str) -> int:
        """How many pods have something booked on a node."""
        return len(self._bookings.get(node, ()))

    def model_id(self, model: str) -> int:
        """The small integer that stands for a card model in the `model` array."""
        number = self._model_ids.setdefault(model, len(self.models))
        if number == len(self.models):
            self.models.append(model)
        return number

    def size_id(self, size: Size) -> int:
        """The small integer that stands for nodes of about this size in the `size` array; none where it is no place in
        `sizes`.
        """
        alike = Size(size.cards, _rounded(size.cpu_milli), _rounded(size.memory_bytes))
        number = self._size_ids.get(alike)
        if number is None:
            if len(self.sizes) == _MOST_SIZES:
                return _MOST_SIZES
            number = self._size_ids[alike] = len(self.sizes)
            self.sizes.append(size)
        self.sizes[number] = Size(*map(max, self.sizes[number], size))
        return number

    def supply(self) -> Supply:
        """What cards there are, by the numbers of models and sizes."""
        cards = np.zeros((len(self.sizes), len(self.models)), np.int64)
        blocks = np.zeros(len(self.models), np.int64)
        rows, columns = np.nonzero(self.usable)
        sizes, models = self.size[rows], self.model[rows, columns]
        numbered = sizes < len(self.sizes)
        np.add.at(cards, (sizes[numbered], models[numbered]), 1)
        np.maximum.at(blocks, models, self.total_blocks[rows, columns])
        return Supply(cards, blocks, np.array(self.sizes, np.int64).reshape(-1, 3))

    def free_cards(self, rows: Ints) -> Floats:
        """How many cards' worth of cores each of `rows` has free."""
        cores = np.where(self.usable[rows], np.maximum(self.free_cores[rows], 0), 0)
        free: Floats = cores.sum(axis=1) / CORES_PER_CARD
        return free

    def whole(self) -> View:
        """Gather all rows."""
        return self.view(np.arange(len(self)))

    def view(self, rows: Ints) -> View:
        """Gather some rows for scoring."""
        return View(
            rows,
            self.usable[rows],
            np.maximum(self.free_cores[rows], 0),
            np.maximum(self.free_blocks[rows], 0),
            self.total_blocks[rows],
            self.model[rows],
            self.size[rows],
            self.free_cpu[rows],
            self.free_memory[rows],
            self.links[rows],
        )


def _rounded(amount: int) -> int:
    """Its first few bits."""
    beyond = max(amount.bit_length() - _SIZE_BITS, 0)
    return amount >> beyond << beyond
