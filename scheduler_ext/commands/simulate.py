"""`gpu-scheduler-extender simulate`: a trace per policy and seed, or a recording per policy; table, JSON, plot."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from scheduler_ext.lab import plots, replay, simulate, trace
from scheduler_ext.lab.replay import Outcome
from scheduler_ext.lab.simulate import Result
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
    add("--nodes", type=Path, metavar="CSV", help="nodes: sn,cpu_milli,memory_mib,gpu,model")
    add(
        "--pods",
        type=Path,
        metavar="CSV",
        help="pods: name,cpu_milli,memory_mib,num_gpu,gpu_milli[,gpu_spec]",
    )
    add(
        "--recording",
        type=Path,
        metavar="FILE",
        help="what `serve --record` wrote, instead of --nodes and --pods",
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
        metavar="N[-M]",
        help="orders of arrival, for instance 42-51 (default 42); not with --recording",
    )
    add(
        "--learnt",
        action="store_true",
        help="expect what has arrived so far, as the server does, not what the whole trace holds",
    )
    add("--plot", type=Path, metavar="FILE.png", help="draw allocation and fragmentation over the load")
    add("--published", action="store_true", help="mark the published figures of the public trace in the plot")
    add("--json", action="store_true", help="print every run as JSON")


def _published(pods: Path) -> dict[str, float]:
    return next((curve for variant, curve in PUBLISHED.items() if pods.stem.endswith(variant)), {})


def _milliseconds(runs: Sequence[tuple[float, float]]) -> str:
    return f"{1e3 * statistics.mean(p50 for p50, _ in runs):.2f}/{1e3 * statistics.mean(p99 for _, p99 in runs):.2f}"


def _show(table: Table) -> None:
    console = Console()
    Console(width=max(console.width, 96)).print(table)


def _mean_curve(name: str, runs: Sequence[Result]) -> plots.Curve:
    shortest = min(len(one.curve) for one in runs)
    mean = np.array([one.curve[:shortest] for one in runs]).mean(axis=0)
    return plots.Curve(name, [(x, allocated, fragmented) for x, allocated, fragmented in mean.tolist()])


def _run_trace(options: argparse.Namespace) -> int:
    nodes, pods = trace.read_nodes(options.nodes), trace.read_pods(options.pods)
    seeds = options.seeds or [42]
    results: list[Result] = []
    curves: list[plots.Curve] = []
    table = Table(
        title=f"Cards allocated at 100 % arrived load; {options.pods.stem}, {len(seeds)} seeds; time per decision"
    )
    for column in ("policy", "allocated %", "min…max", "fragmented %", "refused", "p50/p99 ms"):
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for policy in options.policy or list(Policy):
        runs = [simulate.run(nodes, pods, policy, seed, learnt=options.learnt) for seed in seeds]
        results += runs
        curves.append(_mean_curve(policy, runs))
        shares = [100 * one.allocated for one in runs]
        table.add_row(
            policy,
            f"{statistics.mean(shares):.2f}",
            f"{min(shares):.2f}…{max(shares):.2f}",
            f"{100 * statistics.mean(one.fragmented for one in runs):.2f}",
            f"{statistics.mean(one.refused for one in runs):.0f}",
            _milliseconds([one.decision_seconds for one in runs]),
        )
    published = _published(options.pods)
    if options.plot:
        title = f"{options.pods.stem}, mean of {len(seeds)} seeds"
        plots.packing(options.plot, title, "arrived demand, %", curves, published if options.published else None)
    if options.json:
        json.dump({"runs": [asdict(one) for one in results], "published_percent": published}, sys.stdout, indent=1)
        print()
        return 0
    for name, percent in published.items():
        table.add_row(f"{name}, published", f"{percent:.2f}", "", "", "", "")
    _show(table)
    return 0


def _as_json(outcome: Outcome, recorded: Outcome) -> dict[str, object]:
    return {
        "policy": outcome.policy or "recorded",
        "decisions": outcome.decisions,
        "allocated": outcome.allocated,
        "fragmented": outcome.fragmented,
        "waited": outcome.waited,
        "unplaced": outcome.unplaced,
        "decision_seconds": replay.percentiles(outcome.seconds),
        "curve": [asdict(point) for point in outcome.points],
        "differences": [
            {"uid": uid, "recorded": before, "node": after}
            for uid, before, after in replay.differences(recorded, outcome)
        ],
    }


def _run_recording(options: argparse.Namespace) -> int:
    recording = replay.read(options.recording)
    for problem in (
        recording.cut,
        recording.lost and f"{recording.lost} events are missing: they came faster than they could be written",
    ):
        if problem:
            print(f"{options.recording}: {problem}", file=sys.stderr)
    recorded = replay.Replay(recording, None).run()
    outcomes = [
        recorded,
        *(replay.Replay(recording, policy).run() for policy in options.policy or list(Policy)),
    ]
    if options.plot:
        curves = [
            plots.Curve(
                one.policy or "as recorded",
                [(float(point.decisions), point.allocated, point.fragmented) for point in one.points],
            )
            for one in outcomes
        ]
        plots.packing(options.plot, f"{options.recording.name}, replayed", "decisions", curves)
    if options.json:
        data = {
            "lost": recording.lost,
            "cut": recording.cut,
            "runs": [_as_json(one, recorded) for one in outcomes],
        }
        json.dump(data, sys.stdout, indent=1)
        print()
        return 0
    table = Table(
        title=f"{options.recording.name}: {recorded.decisions} decisions on {len(recorded.nodes)} pods; "
        "means over the decisions"
    )
    for column in ("policy", "allocated %", "fragmented %", "waited", "unplaced", "elsewhere", "p50/p99 ms"):
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for one in outcomes:
        table.add_row(
            one.policy or f"as recorded ({recording.header['policy']})",
            f"{100 * one.allocated:.2f}",
            f"{100 * one.fragmented:.2f}",
            str(one.waited),
            str(one.unplaced),
            "" if one.policy is None else str(sum(1 for _ in replay.differences(recorded, one))),
            _milliseconds([replay.percentiles(one.seconds)]),
        )
    _show(table)
    return 0


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the simulation.

    Raises TraceError, RecordingError and NoPlot; ends with a usage message if options contradict.
    """
    if options.recording is not None:
        if options.nodes or options.pods or options.seeds or options.published:
            parser.error(
                "--recording stands alone: it has nodes, pods and their order, and nothing is published about it"
            )
        return _run_recording(options)
    if not (options.nodes and options.pods):
        parser.error("give --nodes and --pods, or --recording")
    return _run_trace(options)
