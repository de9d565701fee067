"""PNG plots of the extender's benchmark: latency by size of the cluster, packing by policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scheduler_ext.lab import plots


def draw(folder: Path, rows: Sequence[Any], packing: Mapping[str, Any]) -> None:
    """Write extender-latency.png and, if there is any packing, extender-trace.png. Raises NoPlot."""
    plt = plots.pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(7, 4))
    usual = [row for row in rows if row.connections == 1 and not row.pods and row.cards == 8]
    for label, chosen in (
        ("all names sent", [row for row in usual if row.names == row.nodes]),
        ("500 names sent", [row for row in usual if row.names < row.nodes]),
    ):
        for quantile in ("p50_ms", "p99_ms"):
            times = [getattr(row, quantile) for row in chosen]
            axes.plot([row.nodes for row in chosen], times, "o-", label=f"{label}, {quantile[:3]}")
    axes.set(
        xlabel="nodes of 8 cards",
        ylabel="filter, ms",
        title="latency over loopback HTTP, one connection",
        xscale="log",
    )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    plots.save(figure, folder / "extender-latency.png")
    plt.close(figure)
    if packing:
        figure, axes = plt.subplots(figsize=(9, 4))
        bars: dict[str, list[float]] = {}
        for data in packing.values():
            for policy in dict.fromkeys(run["policy"] for run in data["runs"]):
                some = [100 * run["allocated"] for run in data["runs"] if run["policy"] == policy]
                bars.setdefault(policy, []).append(sum(some) / len(some))
            for name, percent in data["published_percent"].items():
                bars.setdefault(f"{name}, published", []).append(percent)
        for index, (name, heights) in enumerate(bars.items()):
            places = [place + 0.08 * index for place in range(len(heights))]
            axes.bar(places, heights, 0.07, label=name, hatch="//" if "published" in name else None)
        axes.set(ylim=(70, 100), ylabel="allocated, % of all cards", title="cards allocated at 100 % arrived load")
        axes.set_xticks([place + 0.36 for place in range(len(packing))], list(packing))
        axes.legend(fontsize=7, ncols=2)
        plots.save(figure, folder / "extender-trace.png")
        plt.close(figure)
