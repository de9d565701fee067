"""PNG plots of simulations. matplotlib is needed here alone, and only when a plot is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class NoPlot(Exception):
    """The plot can't be drawn or written; the message says why."""


class Curve(NamedTuple):
    """One line in both halves of the plot: (x, allocated, fragmented), the latter two as parts of all cards."""

    name: str
    points: Sequence[tuple[float, float, float]]


def pyplot() -> Any:
    """matplotlib's pyplot without a display. Raises NoPlot."""
    try:
        import matplotlib
    except ImportError as error:
        raise NoPlot("plots need matplotlib, which is not installed (pip install 'vcuda-gpu-manager[plot]')") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def save(figure: Any, path: Path) -> None:
    """Write a figure as a PNG of at most about 100 KiB. Raises NoPlot."""
    try:
        figure.savefig(path, dpi=80, bbox_inches="tight", format="png")
    except OSError as error:
        raise NoPlot(f"cannot write {path}: {error.strerror or error}") from error


def packing(
    path: Path, title: str, label: str, curves: Sequence[Curve], published: Mapping[str, float] | None = None
) -> None:
    """Allocation and fragmentation over the load, several policies in one picture. Raises NoPlot.

    `published`: percent of all cards that others' policies allocate when the arrived demand equals all cards.
    """
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5))
    for curve in curves:
        x = [100 * point[0] if label.endswith("%") else point[0] for point in curve.points]
        left.plot(x, [100 * point[1] for point in curve.points], label=curve.name)
        right.plot(x, [100 * point[2] for point in curve.points], label=curve.name)
    for name, percent in sorted((published or {}).items(), key=lambda one: -one[1]):
        left.plot([100], [percent], "x", label=f"{name}, published: {percent:.1f}")
    left.set(xlabel=label, ylabel="allocated, % of all cards", title=title)
    right.set(xlabel=label, ylabel="fragmented, % of all cards", title="free, but of no use to a typical pod")
    left.legend(fontsize=7)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    save(figure, path)
    plt.close(figure)
