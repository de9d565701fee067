"""The report's pictures: how costs grow with what there is of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
    for label, horizontal, vertical in lines:
        axes.plot(horizontal, vertical, marker="o", label=label)
    widest = max(max(horizontal) for _, horizontal, _ in lines)
    if widest > 50:
        axes.set_xscale("log")
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
    return _by(rows, "processes", "live", "added_ns", "{} processes")


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


def _nodes(figures: Figures) -> list[Line]:
    rows = [
        row for row in figures["extender"]["rows"] if row["connections"] == 1 and row["names"] == row["nodes"]
    ]
    across = [row["nodes"] for row in rows]
    return [
        (name, across, [row[key] for row in rows]) for name, key in (("p50", "p50_ms"), ("p99", "p99_ms"))
    ]


PICTURES: tuple[tuple[str, str, str, str, Callable[[Figures], list[Line]]], ...] = (
    ("allocations", "Added to alloc + free of 4 KiB", "live allocations", "ns", _allocations),
    ("processes", "Added to alloc + free of 4 KiB", "processes at once", "ns", _allocating_processes),
    ("kernels", "A cap of 50 with work on many streams", "streams in flight", "points of the card", _flight),
    ("tenants", "Greedy tenants with equal shares", "tenants on the card", "points, per cent", _tenants),
    ("nodes", "Filter over HTTP, all names sent", "nodes of 8 cards", "ms", _nodes),
)
