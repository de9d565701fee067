"""Packing of claims (DRA) on the public trace (T39): our node and kube-scheduler's card, against node and card by our extender.

Demand is learnt from the arrivals. `--ways` compares every way in which claims may be placed (docs/extender.md, "Claims").
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks._claim_ways import BOTH, BUILT, WAYS
from scheduler_ext.lab import simulate, trace
from scheduler_ext.lab.trace import TraceNode, TracePod
from vcuda.spec.request import Policy

TRACE = Path(__file__).resolve().parents[2] / "shared" / "trace"


@dataclass(frozen=True)
class Row:
    """Parts of all cards, in percent, that one way of placing claims allocates; `behind`: points to the extender."""

    variant: str
    way: str
    seeds: int
    allocated: float
    least: float
    most: float
    behind: float


def measure(
    nodes: Sequence[TraceNode], pods: Sequence[TracePod], variant: str, seeds: Sequence[int], ways: Sequence[str]
) -> list[Row]:
    """One row per way; the last one is what the others are compared with."""
    found: dict[str, list[float]] = {}
    for way in ways:
        found[way] = [
            100 * simulate.run(nodes, pods, Policy.FGD, seed, learnt=True, scheduler=WAYS[way](seed)).allocated
            for seed in seeds
        ]
        print(f"{variant}, {way}: {', '.join(f'{part:.2f}' for part in found[way])}", file=sys.stderr, flush=True)
    best = statistics.mean(found[ways[-1]])
    return [
        Row(variant, way, len(seeds), mean, min(parts), max(parts), best - mean)
        for way, parts in found.items()
        for mean in (statistics.mean(parts),)
    ]


def table(rows: Sequence[Row]) -> Table:
    variants = sorted({one.variant for one in rows})
    seeds = max((one.seeds for one in rows), default=0)
    shown = Table(title=f"claims: cards allocated, % of all, at 100 % arrived load (points behind); seeds: {seeds}")
    for column in ("who chooses", *variants):
        shown.add_column(column, justify="left" if column == "who chooses" else "right")
    cells = {(one.way, one.variant): f"{one.allocated:.2f} ({-one.behind:+.2f})" for one in rows}
    for way in dict.fromkeys(one.way for one in rows):
        shown.add_row(way, *(cells.get((way, variant), "") for variant in variants))
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, metavar="FOLDER", default=TRACE, help="the public trace")
    parser.add_argument("--seeds", default="42-44", metavar="N[-M]", help="orders of arrival (default %(default)s)")
    parser.add_argument("--variant", action="append", metavar="NAME", help="only this one (default: all)")
    parser.add_argument("--ways", action="store_true", help="every way to place claims, not only the one that is built")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--quick", action="store_true", help="one seed of one variant")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    seeds = [42] if options.quick else list(range(int(first), int(last or first) + 1))
    ways = list(WAYS) if options.ways else [BUILT, BOTH]
    file, rows = options.trace / "openb_node_list_gpu_node.csv", list[Row]()
    if not file.is_file():
        print(f"claims_packing: skipped, the public trace is not in {options.trace.name} (--trace)", file=sys.stderr)
    else:
        nodes = trace.read_nodes(file)
        for path in sorted(options.trace.glob("openb_pod_list_*.csv"))[: 1 if options.quick else None]:
            variant = path.stem.removeprefix("openb_pod_list_")
            if options.variant is None or variant in options.variant:
                rows += measure(nodes, trace.read_pods(path), variant, seeds, ways)
    if options.json:
        options.json.write_text(json.dumps({"rows": [asdict(one) for one in rows]}, indent=1) + "\n")
    Console(width=140).print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
