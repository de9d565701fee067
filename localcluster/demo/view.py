"""The live table of the demonstration, on a terminal and as plain lines without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from localcluster.apiserver.table import pod_state
from localcluster.demo import checks, measure
from localcluster.demo.measure import Sample, Truth
from localcluster.demo.scenario import DemoPod
from vcuda import sim
from vcuda.spec import units

_HEADERS = ("POD", "CARD", "MEMORY", "GPU TIME", "DAEMON SAYS", "STATE")
_DAEMON = 4  # the column that a narrow terminal does without
_WIDE = 100  # columns
_COLOURS = {"Running": "green", "Pending": "yellow"}


@dataclass(frozen=True)
class Row:
    """One pod as the table shows it: used / limit, achieved / target. `why`: it was refused."""

    name: str
    card: str
    memory: str
    share: str
    manager: str
    state: str
    why: str = ""

    def cells(self) -> tuple[str, ...]:
        return (self.name, self.card, self.memory, self.share, self.manager, self.state)


def _target(pod: DemoPod) -> str:
    if pod.core_limit == pod.cores:
        return str(pod.cores)
    return f"{pod.cores}-{pod.core_limit}"


def _share(before_ns: int, after_ns: int, seconds: float) -> float:
    return 100.0 * (after_ns - before_ns) / 1e9 / seconds


def _manager(name: str, previous: Sample | None, now: Sample) -> str:
    """The manager's own figures: memory, and the share since `previous`."""
    figures = now.manager.get(name)
    if figures is None:
        return ""
    text = units.format_bytes(figures.memory_bytes)
    before = previous.manager.get(name) if previous is not None else None
    if figures.gpu_time_ns is None:
        return f"{text}, not metered"
    if previous is not None and before is not None and before.gpu_time_ns is not None and now.at > previous.at:
        text += f", {_share(before.gpu_time_ns, figures.gpu_time_ns, now.at - previous.at):.1f}"
    return text


def _row(expected: DemoPod, previous: Sample | None, now: Sample, machine: sim.Machine) -> Row:
    name = expected.name
    pod = now.pods.get(name)
    if pod is None:
        return Row(name, "", "", "", "", "not applied yet")
    refusal = checks.refusal_of(pod)
    if refusal:
        return Row(name, "none", "", "", "", "Pending", refusal)
    truth = now.truth.get(name, Truth())
    limit = expected.memory_bytes if expected.memory_bytes is not None else machine.cards[0].memory_bytes
    achieved = ""
    if previous is not None and now.at > previous.at and name in previous.truth:
        achieved = f"{_share(previous.truth[name].busy_ns, truth.busy_ns, now.at - previous.at):.1f}"
    return Row(
        name,
        ", ".join(map(str, measure.card_minors(pod, machine))),
        f"{units.format_bytes(truth.memory_bytes)} / {units.format_bytes(limit)}",
        f"{achieved} / {_target(expected)}",
        _manager(name, previous, now),
        pod_state(pod),
    )


def rows(expected: Sequence[DemoPod], previous: Sample | None, now: Sample, machine: sim.Machine) -> list[Row]:
    """One row per pod; shares are averages since `previous`."""
    return [_row(pod, previous, now, machine) for pod in expected]


def table(title: str, content: Sequence[Row], width: int) -> Group:
    """The live table: a line per pod, in the order of `content`, then why which one was refused."""
    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", expand=False)
    columns = [at for at in range(len(_HEADERS)) if width >= _WIDE or at != _DAEMON]
    for at in columns:
        made.add_column(_HEADERS[at], no_wrap=True, overflow="ellipsis" if at == len(_HEADERS) - 1 else "crop")
    for row in content:
        cells = [Text(cell) for cell in row.cells()]
        cells[0].truncate(18 if width < _WIDE else max(18, width - 86))  # figures stay whole, however long a name is
        cells[-1].stylize(_COLOURS.get(row.state, ""))
        made.add_row(*(cells[at] for at in columns))
    return Group(made, *(Text(f"  {row.name}: {row.why}") for row in content if row.why))


def lines(content: Sequence[Row]) -> list[str]:
    """One line per pod, for logs."""
    return [
        f"  {row.name:<12} card {row.card or '?':<4} {row.memory:<22} share {row.share:<14} manager "
        f"{row.manager or '-':<18} {row.state}{row.why and f': {row.why}'}"
        for row in content
    ]
