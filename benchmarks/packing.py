"""Packing on the public trace (T34): cards allocated when the arrived demand equals all cards, with demand learnt and known, and what no packing exceeds.

*learnt*: what the extender does, from the arrivals so far alone. *known*: the typical pods are those of the whole trace, as in the paper.
*bound*: no choice of arrived pods, made with all of them known, gets more: a linear program over the kinds of nodes, in which pods may be cut
(but shares of a card may not be joined across cards: cards are filled by patterns), a node's parts are those of all nodes of its kind together,
and anybody may be refused, pods without a card too.
*all fit until* (`--full`): the arrived demand up to which that program refuses nobody who asks for a card. Who refuses nobody who fits has a full cluster
there at the latest: what comes after it gets only what is left of cards, while the bound has kept cards free of those who waste a part of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from scheduler_ext.commands.simulate import PUBLISHED
from scheduler_ext.lab import simulate, trace
from scheduler_ext.lab.trace import TraceNode, TracePod
from vcuda.spec.request import CardFilter, Policy
from vcuda.spec.units import CORES_PER_CARD

TRACE = Path(__file__).resolve().parents[2] / "shared" / "trace"
# The authors' FGD on the variants of their trace beside those that `simulate` knows: the means of the ten seeds that they published.
_FGD = {
    "cpu050": 95.00, "cpu100": 95.21, "cpu200": 94.82, "cpu250": 93.20, "gpushare40": 93.96, "gpushare60": 91.25, "gpushare80": 89.08,
    "gpuspec20": 94.66, "gpuspec25": 93.91, "gpuspec33": 87.84, "multigpu30": 96.36, "multigpu40": 96.91, "multigpu50": 97.09,
} | {variant: curve["FGD"] for variant, curve in PUBLISHED.items()}  # fmt: skip
_EPSILON = 1e-6
_MOST_ROUNDS = 60


@dataclass(frozen=True)
class Row:
    """Parts of all cards, in percent; means over the seeds. `least` and `most`: of what is learnt."""

    variant: str
    seeds: int
    learnt: float
    least: float
    most: float
    known: float
    published: float
    bound: float
    full: float | None = None  # None: was not asked for

    @property
    def beyond(self) -> float:
        return self.learnt - self.published


@dataclass(frozen=True)
class _Kind:
    """Pods that are alike: `cores` of each of `cards` cards."""

    cores: int
    cards: int
    cpu_milli: int
    memory_bytes: int
    models: CardFilter

    @property
    def share(self) -> bool:
        return self.cores < CORES_PER_CARD


def _kind(pod: TracePod) -> _Kind:
    one = pod.request.containers[0]
    return _Kind(one.cores_per_card, one.card_count, pod.cpu_milli, pod.memory_bytes, pod.request.models)


class _Program:
    """Variables: pods of each kind on each kind of node; cards of each kind of node filled by each pattern of shares."""

    def __init__(self, nodes: Sequence[TraceNode], pods: Sequence[TracePod]) -> None:
        self._kinds = Counter(_kind(pod) for pod in pods if pod.request.containers)
        places = Counter(
            (one.cpu_milli, one.memory_bytes, len(one.cards), one.cards[0].model) for one in nodes if one.cards
        )
        self._places = list(places.items())
        self._sizes = sorted({kind.cores for kind in self._kinds if kind.share})
        self._patterns = [{size: CORES_PER_CARD // size} for size in self._sizes]
        self.cards = sum(len(node.cards) for node in nodes)

    def bound(self) -> float:
        """The most cards that any packing allocates. Each round adds the pattern of a card that would help most."""
        for _ in range(_MOST_ROUNDS):
            value, prices = self._solved()
            new = [pattern for pattern in (self._best(price) for price in prices) if pattern is not None]
            fresh = [pattern for pattern in new if pattern not in self._patterns]
            if not fresh:
                return value
            for pattern in fresh:
                if pattern not in self._patterns:
                    self._patterns.append(pattern)
        # Not all patterns are known: the value so far would be no bound. Without patterns it is one.
        raise RuntimeError(f"the bound was not found in {_MOST_ROUNDS} rounds")

    def _solved(self) -> tuple[float, list[tuple[list[float], float]]]:
        """The value; per kind of node, the price of each size of share and of a card."""
        entries: list[tuple[int, int, float]] = []
        upper: list[float] = []
        gains: list[float] = []
        kinds, column = list(self._kinds.items()), 0

        def row(limit: float) -> int:
            upper.append(limit)
            return len(upper) - 1

        arrived = [row(count) for _, count in kinds]
        priced: list[tuple[list[int], int]] = []
        for (cpu, memory, cards, model), count in self._places:
            cpu_row, memory_row, card_row = (
                row(cpu * count / 1e3),
                row(memory * count / 2**30),
                row(cards * count),
            )
            size_rows = {size: row(0.0) for size in self._sizes}
            priced.append(([size_rows[size] for size in self._sizes], card_row))
            for at, (kind, _) in enumerate(kinds):
                if (
                    not kind.models.allows(model) or kind.cards > cards or kind.cpu_milli > cpu
                    or kind.memory_bytes > memory
                ):  # fmt: skip
                    continue
                entries += [(arrived[at], column, 1.0), (cpu_row, column, kind.cpu_milli / 1e3)]
                entries.append((memory_row, column, kind.memory_bytes / 2**30))
                entries.append(
                    (size_rows[kind.cores], column, 1.0) if kind.share else (card_row, column, float(kind.cards))
                )
                gains.append(-kind.cores * kind.cards / CORES_PER_CARD)
                column += 1
            for pattern in self._patterns:
                entries.append((card_row, column, 1.0))
                entries += [(size_rows[size], column, -float(number)) for size, number in pattern.items()]
                gains.append(0.0)
                column += 1
        if not entries:
            return 0.0, []  # nobody fits anywhere
        from scipy.optimize import linprog  # here: each process of the tests would take a second for it
        from scipy.sparse import coo_matrix

        rows, columns, values = zip(*entries, strict=True)
        matrix = coo_matrix((values, (rows, columns)), shape=(len(upper), column))
        found = linprog(gains, A_ub=matrix.tocsr(), b_ub=upper, bounds=(0, None), method="highs")
        if found.status != 0:
            raise RuntimeError(f"the bound's program was not solved: {found.message}")
        duals = -np.asarray(found.ineqlin.marginals)
        return -float(found.fun), [([float(duals[at]) for at in sizes], float(duals[card])) for sizes, card in priced]

    def _best(self, prices: tuple[list[float], float]) -> dict[int, int] | None:
        """The pattern that is worth most at these prices, if that is more than a card costs (a knapsack)."""
        worth = [0.0] * (CORES_PER_CARD + 1)
        last = [0] * (CORES_PER_CARD + 1)
        for free in range(1, CORES_PER_CARD + 1):
            worth[free], last[free] = worth[free - 1], 0
            for size, price in zip(self._sizes, prices[0], strict=True):
                if size <= free and worth[free - size] + price > worth[free] + _EPSILON / 100:
                    worth[free], last[free] = worth[free - size] + price, size
        if worth[CORES_PER_CARD] <= prices[1] + _EPSILON:
            return None
        pattern: Counter[int] = Counter()
        free = CORES_PER_CARD
        while free > 0:
            pattern[last[free]] += last[free] > 0
            free -= last[free] or 1
        return {size: number for size, number in pattern.items() if number}


def full(nodes: Sequence[TraceNode], pods: Sequence[TracePod]) -> float:
    """How many cards the first pods ask for, as many of them as can all be placed."""
    demand = np.cumsum([pod.cards for pod in pods])
    placed, refused = 0, len(pods) + 1  # the first so many pods
    while refused - placed > 1:
        count = (placed + refused) // 2
        if _Program(nodes, pods[:count]).bound() >= demand[count - 1] - _EPSILON * max(demand[-1], 1.0):
            placed = count
        else:
            refused = count
    return float(demand[placed - 1]) if placed else 0.0


def measure(
    nodes: Sequence[TraceNode], pods: Sequence[TracePod], variant: str, seeds: Sequence[int], *, until: bool = False
) -> Row:
    """`until`: also until when all fit, which takes a dozen linear programs for each seed."""
    learnt = [simulate.run(nodes, pods, Policy.FGD, seed, learnt=True).allocated for seed in seeds]
    known = [simulate.run(nodes, pods, Policy.FGD, seed).allocated for seed in seeds]
    cards = sum(len(node.cards) for node in nodes)
    bounds = [_Program(nodes, trace.drawn(pods, cards, seed)).bound() / cards for seed in seeds]
    percent = [100 * part for part in learnt]
    return Row(
        variant, len(seeds), statistics.mean(percent), min(percent), max(percent), 100 * statistics.mean(known),
        _FGD.get(variant, float("nan")), 100 * statistics.mean(bounds),
        100 * statistics.mean(full(nodes, trace.drawn(pods, cards, seed)) / cards for seed in seeds) if until else None,
    )  # fmt: skip


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="cards allocated, % of all, when the arrived demand equals all cards (T34); means of the seeds")
    for column in (
        "variant",
        "seeds",
        "learnt",
        "min…max",
        "known",
        "FGD, published",
        "learnt - FGD",
        "no packing exceeds",
        "all fit until",
    ):
        shown.add_column(column, justify="left" if column == "variant" else "right")
    for one in rows:
        shown.add_row(
            one.variant, str(one.seeds), f"{one.learnt:.2f}", f"{one.least:.2f}…{one.most:.2f}", f"{one.known:.2f}",
            f"{one.published:.2f}", f"{one.beyond:+.2f}", f"{one.bound:.2f}", "-" if one.full is None else f"{one.full:.2f}",
        )  # fmt: skip
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, metavar="FOLDER", default=TRACE, help="the public trace")
    parser.add_argument("--seeds", default="42-46", metavar="N[-M]", help="orders of arrival (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--variant", metavar="NAME", help="only this one (default: all)")
    parser.add_argument(
        "--full", action="store_true", help="also until when all fit: a dozen linear programs for each seed"
    )
    parser.add_argument("--quick", action="store_true", help="one seed of one variant")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    seeds = [42] if options.quick else list(range(int(first), int(last or first) + 1))
    file = options.trace / "openb_node_list_gpu_node.csv"
    if not file.is_file():
        print(f"packing: skipped, the public trace is not in {options.trace.name} (--trace)", file=sys.stderr)
        variants: list[tuple[str, list[TracePod]]] = []
        nodes: list[TraceNode] = []
    else:
        nodes = trace.read_nodes(file)
        lists = sorted(options.trace.glob(f"openb_pod_list_{options.variant or '*'}.csv"))[
            : 1 if options.quick else None
        ]
        variants = [(path.stem.removeprefix("openb_pod_list_"), trace.read_pods(path)) for path in lists]
    rows = [measure(nodes, pods, variant, seeds, until=options.full) for variant, pods in variants]
    if options.json:
        options.json.write_text(json.dumps({"rows": [asdict(one) for one in rows]}, indent=1) + "\n")
    Console(width=140).print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
