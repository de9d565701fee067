"""The report's pictures: how costs grow with what there is of it."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# So that lines that lie on each other are seen to be several.
STYLES = (("o", "-"), ("s", "--"), ("^", ":"), ("D", "-."))

Figures = dict[str, dict[str, Any]]
Line = tuple[str, Sequence[float], Sequence[float]]


def draw(figures: Figures, folder: Path) -> list[tuple[str, Path]]:
    """Draw what there are figures for; titles and files. Nothing without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    pictures = []
    for file, title, across, up, lines_of in PICTURES:
        try:
            lines = lines_of(figures)
        except (KeyError, TypeError):  # that program was not run, or says less
            continue
        if lines:
            folder.mkdir(parents=True, exist_ok=True)
            pictures.append((title, _picture(folder / f"growth-{file}.png", title, across, up, lines)))
    return pictures


def _picture(path: Path, title: str, across: str, up: str, lines: Sequence[Line]) -> Path:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.4), dpi=100)
    for (label, horizontal, vertical), (marker, dash) in zip(lines, itertools.cycle(STYLES), strict=False):
        axes.plot(horizontal, vertical, marker=marker, linestyle=dash, label=label)
    measured = sorted({at for _, horizontal, _ in lines for at in horizontal})
    if measured[-1] > 50 and measured[0] > 0:
        axes.set_xscale("log")
    axes.set_xticks(measured, [f"{at:,}" for at in measured])
    axes.minorticks_off()
    axes.set(title=title, xlabel=across, ylabel=up)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Software": None})  # the same figures make the same file
    pyplot.close(figure)
    return path


def _by(rows: Sequence[dict[str, Any]], key: str, across: str, up: str, label: str) -> list[Line]:
    """One line per value of `key`."""
    lines: list[Line] = []
    for value in dict.fromkeys(row[key] for row in rows):
        mine = sorted((row for row in rows if row[key] == value), key=lambda row: float(row[across]))
        lines.append((label.format(value), [row[across] for row in mine], [row[up] for row in mine]))
    return lines


def _allocations(figures: Figures) -> list[Line]:
    rows = [row for row in figures["memory"]["costs"] if row["bytes"] == 4096]
    return _by(rows, "processes", "live", "added_ns", "{} at once")


def _allocating_processes(figures: Figures) -> list[Line]:
    rows = [row for row in figures["memory"]["costs"] if row["bytes"] == 4096]
    return _by(rows, "live", "processes", "added_ns", "{:,} live")


def _flight(figures: Figures) -> list[Line]:
    rows = figures["growth"]["in_flight"]
    return [("error over 100 ms", [row["streams"] for row in rows], [row["error"] for row in rows])]


def _tenants(figures: Figures) -> list[Line]:
    rows = figures["growth"]["tenants"]
    across = [row["tenants"] for row in rows]
    return [
        ("worst tenant's error, points", across, [row["worst_error"] for row in rows]),
        ("arbiter, % of a core", across, [row["arbiter_percent"] for row in rows]),
    ]


def _inside(figures: Figures) -> list[Line]:
    rows = figures["growth"]["processes"]
    across = [row["processes"] for row in rows]
    return [
        ("all together", across, [row["achieved"] for row in rows]),
        ("the least, times their number", across, [row["achieved"] * row["fairness"] for row in rows]),
    ]


def _filters(figures: Figures, across: str) -> list[Line]:
    """p50 and p99 of a filter with all names sent, the other sizes as usual (8 cards, no pods; of the largest cluster)."""
    rows = [row for row in figures["extender"]["rows"] if row["connections"] == 1 and row["names"] == row["nodes"]]
    usual = {"nodes": max(row["nodes"] for row in rows), "cards": 8, "pods": 0}
    fixed = {name: value for name, value in usual.items() if name != across}
    rows = sorted((row for row in rows if fixed.items() <= row.items()), key=lambda row: int(row[across]))
    at = [row[across] for row in rows]
    return [(name, at, [row[key] for row in rows]) for name, key in (("p50", "p50_ms"), ("p99", "p99_ms"))]


PICTURES: tuple[tuple[str, str, str, str, Callable[[Figures], list[Line]]], ...] = (
    (
        "allocations",
        "Added to alloc + free of 4 KiB: live allocations",
        "live allocations",
        "added, ns",
        _allocations,
    ),
    (
        "processes",
        "Added to alloc + free of 4 KiB: processes",
        "processes at once",
        "added, ns",
        _allocating_processes,
    ),
    (
        "kernels",
        "A cap of 50 with work on many streams",
        "streams in flight",
        "mean error over 100 ms, points",
        _flight,
    ),
    (
        "tenants",
        "Greedy tenants with equal shares",
        "tenants on the card",
        "points; % of a core",
        _tenants,
    ),
    (
        "inside",
        "Greedy processes of one container capped at 50",
        "processes in the container",
        "points of the card",
        _inside,
    ),
    (
        "nodes",
        "Filter over HTTP, all names sent: nodes",
        "nodes of 8 cards",
        "ms",
        partial(_filters, across="nodes"),
    ),
    (
        "cards",
        "Filter over HTTP, all names sent: cards",
        "cards per node",
        "ms",
        partial(_filters, across="cards"),
    ),
    (
        "pods",
        "Filter over HTTP, all names sent: pods",
        "pods that run already",
        "ms",
        partial(_filters, across="pods"),
    ),
)
