"""`gpu-scheduler-extender simulate`: arguments, runs per policy and seed, table or JSON."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scheduler_ext import simulate, trace
from scheduler_ext.simulate import Result
from vcuda.spec.request import Policy

# Mean GPUs allocated at 100 % arrived load over seeds 42…51, in % of all, computed from the curves that the
# authors of the ATC'23 paper published, by variant of the trace.
PUBLISHED = {
    "default": {
        "Random": 86.30,
        "DotProd": 90.62,
        "Clustering": 91.65,
        "Packing": 91.78,
        "BestFit": 92.86,
        "FGD": 95.23,
    },
    "gpushare100": {
        "Random": 78.90,
        "DotProd": 81.98,
        "Clustering": 82.22,
        "Packing": 82.13,
        "BestFit": 84.62,
        "FGD": 86.64,
    },
    "gpuspec10": {
        "Random": 86.26,
        "DotProd": 90.17,
        "Clustering": 91.96,
        "Packing": 92.24,
        "BestFit": 93.10,
        "FGD": 94.66,
    },
    "multigpu20": {
        "Random": 86.92,
        "DotProd": 91.85,
        "Clustering": 93.34,
        "Packing": 93.50,
        "BestFit": 93.73,
        "FGD": 95.53,
    },
}


def _seeds(text: str) -> list[int]:
    first, _, last = text.partition("-")
    seeds = list(range(int(first), int(last or first) + 1))
    if not 1 <= len(seeds) <= 1000:
        raise ValueError
    return seeds


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--nodes", type=Path, required=True, metavar="CSV", help="nodes: sn,cpu_milli,memory_mib,gpu,model")
    add(
        "--pods",
        type=Path,
        required=True,
        metavar="CSV",
        help="pods: name,cpu_milli,memory_mib,num_gpu,gpu_milli[,gpu_spec]",
    )
    add(
        "--policy",
        type=Policy,
        choices=list(Policy),
        action="append",
        help="repeat for several; default: all",
    )
    add(
        "--seeds",
        type=_seeds,
        default=[42],
        metavar="N[-M]",
        help="orders of arrival, for instance 42-51 (default 42)",
    )
    add("--json", action="store_true", help="print every run as JSON")


def _published(pods: Path) -> dict[str, float]:
    return next((curve for variant, curve in PUBLISHED.items() if pods.stem.endswith(variant)), {})


def run(options: argparse.Namespace) -> int:
    """Run the simulation. Raises TraceError."""
    nodes, pods = trace.read_nodes(options.nodes), trace.read_pods(options.pods)
    results: list[Result] = []
    table = Table(
        title=f"Cards allocated at 100 % arrived load; {options.pods.stem}, {len(options.seeds)} seeds; time per decision"
    )
    for column in ("policy", "allocated %", "min…max", "fragmented %", "refused", "p50/p99 ms"):
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for policy in options.policy or list(Policy):
        runs = [simulate.run(nodes, pods, policy, seed) for seed in options.seeds]
        results += runs
        shares = [100 * one.allocated for one in runs]
        table.add_row(
            policy,
            f"{statistics.mean(shares):.2f}",
            f"{min(shares):.2f}…{max(shares):.2f}",
            f"{100 * statistics.mean(one.fragmented for one in runs):.2f}",
            f"{statistics.mean(one.refused for one in runs):.0f}",
            f"{1e3 * statistics.mean(one.decision_seconds[0] for one in runs):.2f}/"
            f"{1e3 * statistics.mean(one.decision_seconds[1] for one in runs):.2f}",
        )
    published = _published(options.pods)
    if options.json:
        json.dump(
            {"runs": [asdict(one) for one in results], "published_percent": published}, sys.stdout, indent=1
        )
        print()
        return 0
    for name, percent in published.items():
        table.add_row(f"{name}, published", f"{percent:.2f}", "", "", "", "")
    console = Console()
    Console(width=max(console.width, 96)).print(table)
    return 0
