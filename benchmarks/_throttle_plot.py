"""PNG plots of achieved share over time, so that one can look at it. matplotlib is needed here alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks._throttle_bench import SAMPLE_SECONDS, Trace

WINDOW_SECONDS = 0.1
NO_MATPLOTLIB = "no plot, matplotlib is not installed (pip install 'vcuda-gpu-manager[dev]')"


def plot(folder: Path, name: str, trace: Trace, targets: Mapping[str, Sequence[float]]) -> str:
    """Draw one trace; `targets`: for each process its wanted share before the first step and after each.

    Returns what was done, or why nothing was.
    """
    try:
        import matplotlib
    except ImportError:
        return f"{name}: {NO_MATPLOTLIB}"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(9, 4))
    end = trace.moments[-1].at_s
    edges = [0.0, *trace.steps_s, end]
    for index, (title, wanted) in enumerate(targets.items()):
        times = [moment.at_s for moment in trace.moments if moment.at_s >= WINDOW_SECONDS]
        shares = [trace.share(index, at - WINDOW_SECONDS, at) for at in times]
        (line,) = axes.plot(times, shares, label=title)
        for target, left, right in zip(wanted, edges, edges[1:], strict=False):
            axes.hlines(target, left, right, colors=line.get_color(), linestyles="dotted")
    for step in trace.steps_s:
        axes.axvline(step, color="grey", linewidth=0.8)
    axes.set(xlabel="seconds", ylabel="% of the card, last 100 ms", ylim=(0, 105), title=f"{name} (simulated card)")
    axes.legend()
    path = folder / f"{name.replace(',', '').replace(' ', '-')}.png"
    figure.savefig(path, dpi=100, bbox_inches="tight")
    pyplot.close(figure)
    return f"{name}: {path}"


def plot_caps(folder: Path, samples: Mapping[str, Mapping[int, Sequence[float]]], card: str) -> str:
    """Draw the share of each capped program in every sample: one panel per kind of kernel, one line per cap.

    Returns what was done, or why nothing was.
    """
    try:
        import matplotlib
    except ImportError:
        return f"caps: {NO_MATPLOTLIB}"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    figure, panels = pyplot.subplots(1, len(samples), figsize=(4 * len(samples), 4), sharey=True, squeeze=False)
    for axes, (title, lines) in zip(panels[0], samples.items(), strict=True):
        for cap, shares in lines.items():
            times = [SAMPLE_SECONDS * (at + 1) for at in range(len(shares))]
            (line,) = axes.plot(times, shares, label=str(cap))
            axes.axhline(cap, color=line.get_color(), linestyle="dotted", linewidth=0.8)
        axes.set(xlabel="seconds", ylim=(0, 100), title=title)
    panels[0][0].set_ylabel("% of the card in each 100 ms")
    panels[0][-1].legend(title="cap", loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.suptitle(f"a program alone under a cap ({card} card)")
    path = folder / "caps.png"
    figure.savefig(path, dpi=100, bbox_inches="tight")
    pyplot.close(figure)
    return f"caps: {path}"
