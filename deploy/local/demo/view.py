"""The live table of the demonstration, on a terminal and as plain lines without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from deploy.local.apiserver.table import pod_state
from deploy.local.demo import checks, measure
from deploy.local.demo.measure import ManagerFigures, Sample, Truth
from deploy.local.demo.scenario import DemoPod
from vcuda import sim
from vcuda.spec import units

JsonObject = dict[str, Any]
_HEADERS = ("POD", "CARD", "MEMORY USED / LIMIT", "SHARE: ACHIEVED / TARGET", "gpu-manager SAYS", "STATE")


@dataclass(frozen=True)
class Row:
    """One pod as the table shows it."""

    name: str
    card: str
    memory: str
    share: str
    manager: str
    state: str

    def cells(self) -> tuple[str, ...]:
        return (self.name, self.card, self.memory, self.share, self.manager, self.state)


def _target(pod: DemoPod) -> str:
    if pod.core_limit == pod.cores:
        return str(pod.cores)
    return f"{pod.cores}…{pod.core_limit}"


def _row(
    expected: DemoPod,
    pod: JsonObject | None,
    truth: Truth,
    figures: ManagerFigures,
    share: float | None,
    machine: sim.Machine,
) -> Row:
    if pod is None:
        return Row(expected.name, "", "", "", "", "not applied yet")
    refusal = checks.refusal_of(pod)
    if refusal:
        return Row(expected.name, "none", "", "", "", f"Pending: {refusal}")
    minors = measure.card_minors(pod, machine)
    limit = expected.memory_bytes if expected.memory_bytes is not None else machine.cards[0].memory_bytes
    memory = f"{units.format_bytes(truth.memory_bytes)} / {units.format_bytes(limit)}"
    achieved = "" if share is None else f"{share:.1f}"
    says = []
    if figures.memory_bytes is not None:
        says.append(units.format_bytes(figures.memory_bytes))
    if figures.share is not None:
        says.append(f"{figures.share:.1f}")
    return Row(
        expected.name,
        ", ".join(map(str, minors)),
        memory,
        f"{achieved} / {_target(expected)}",
        ", ".join(says),
        pod_state(pod),
    )


def rows(
    expected: Sequence[DemoPod], previous: Sample | None, now: Sample, machine: sim.Machine
) -> list[Row]:
    """One row per pod; shares are averages since `previous`."""
    result = []
    for pod in expected:
        truth = now.truth.get(pod.name, Truth())
        share = None
        if previous is not None and now.at > previous.at and pod.name in previous.truth:
            share = (truth.busy_ns - previous.truth[pod.name].busy_ns) / 1e7 / (now.at - previous.at)
        figures = now.manager.get(pod.name, ManagerFigures())
        result.append(_row(pod, now.pods.get(pod.name), truth, figures, share, machine))
    return result


def table(title: str, content: Sequence[Row]) -> Table:
    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", expand=False)
    for header in _HEADERS:
        made.add_column(header, overflow="fold", ratio=None)
    for row in content:
        made.add_row(*row.cells())
    return made


def lines(content: Sequence[Row]) -> list[str]:
    """One line per pod, for logs."""
    return [
        f"  {row.name:<12} card {row.card or '?':<4} {row.memory:<22} share {row.share:<14} manager {row.manager or '-':<18} {row.state}"
        for row in content
    ]
