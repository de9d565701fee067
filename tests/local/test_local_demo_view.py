"""What the demonstration shows: its table, the figures that are not known, and the summary of a period that did not hold."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from localcluster import api as apis
from localcluster.cluster import ClusterOptions
from localcluster.demo import checks, measure, run, scenario, view
from localcluster.demo.measure import ManagerFigures, Sample, Truth
from localcluster.demo.scenario import DemoPod, Expect
from tests.support import screens
from vcuda import sim
from vcuda.spec.names import Names

GIB, SECOND = 2**30, 10**9


def demo_pod(name: str, expect: Expect = Expect.RUNS, limit: int = 30, memory: int | None = 2 * GIB) -> DemoPod:
    return DemoPod({"metadata": {"name": name}}, expect, 30, limit, memory)


def pod(name: str, phase: str = "Running", **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"nodeName": "n"}, "status": {"phase": phase, **status}}


def sample(at: float, busy_s: float = 0.0, manager: ManagerFigures | None = None) -> Sample:
    truth = Truth(GIB, GIB, round(busy_s * SECOND), round(10 * at), {0})
    return Sample(at, {"a": pod("a")}, {"a": truth}, {} if manager is None else {"a": manager})


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> sim.Machine:
    folder = tmp_path_factory.mktemp("demo") / "machine"
    return sim.Machine.create(folder, [sim.SimCard(memory_bytes=8 * GIB)])


@pytest.mark.parametrize(
    ("before", "now", "share", "manager"),
    [
        (None, sample(1.0), " / 30", ""),
        (sample(0.0), sample(2.0, 0.5), "25.0 / 30", ""),
        (sample(2.0), sample(2.0, 0.5), " / 30", ""),
        (sample(0.0), sample(2.0, 0.5, ManagerFigures(GIB, None)), "25.0 / 30", "1 GiB, not metered"),
        (sample(0.0), sample(2.0, 0.5, ManagerFigures(GIB, SECOND)), "25.0 / 30", "1 GiB"),
        (
            sample(0.0, manager=ManagerFigures(0, 0)),
            sample(2.0, 0.5, ManagerFigures(GIB, SECOND)),
            "25.0 / 30",
            "1 GiB, 50.0",
        ),
    ],
)
def test_a_row_shows_shares_since_the_last_one_and_leaves_out_what_is_not_known(
    machine: sim.Machine, before: Sample | None, now: Sample, share: str, manager: str
) -> None:
    (row,) = view.rows([demo_pod("a")], before, now, machine)
    assert (row.share, row.manager, row.state) == (share, manager, "Running")
    assert row.memory.endswith("/ 2 GiB")


def test_a_pod_that_waits_was_refused_or_has_whole_cards_is_shown_as_that(machine: sim.Machine) -> None:
    why = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available: 1 InvalidCores"}
    pods = {"refused": pod("refused", "Pending", conditions=[why]), "whole": pod("whole")}
    del pods["refused"]["spec"]["nodeName"]
    now = Sample(1.0, pods, {}, {})
    expected = [
        demo_pod("new"),
        demo_pod("refused", Expect.REFUSED),
        demo_pod("whole", limit=50, memory=None),
    ]
    new, refused, whole = view.rows(expected, None, now, machine)
    assert new.state == "not applied yet"
    assert (refused.card, refused.state) == ("none", "Pending") and "InvalidCores" in refused.why
    assert whole.memory == "0 B / 8 GiB" and whole.share == " / 30-50"


def test_on_a_terminal_it_is_a_table_with_a_line_for_each_pod(machine: sim.Machine) -> None:
    rows = view.rows([demo_pod("a")], None, sample(1.0), machine)
    out = io.StringIO()
    Console(file=out, width=200).print(view.table("waiting", rows, 200))
    title, *lines = [line.split() for line in out.getvalue().splitlines() if line.strip()]
    assert title == ["waiting"] and lines[0][0] == "POD" and lines[-1][0] == "a" and lines[-1][-1] == "Running"


@pytest.mark.parametrize(("width", "encoding"), [(80, "utf-8"), (80, "ascii"), (120, "latin-1")])
def test_no_cell_is_folded_and_any_encoding_will_do(width: int, encoding: str) -> None:
    """At 80 columns six pods took 28 lines, and a latin-1 locale a traceback."""
    names = ("whole-card", "vcuda", "vcuda-hard", "inference", "memory-hog")
    rows = [
        view.Row(
            name,
            "0",
            "832.1 MiB / 1.5 GiB",
            f"44.7 / {view._target(demo_pod(name, limit=50))}",
            "4.1 GiB, not metered",
            "Running",
        )
        for name in names
    ]
    why = "0/1 nodes are available: 2 InvalidCores: ask 1 to 99 for a share of one card"
    rows.append(view.Row("too-much", "none", "", "", "", "Pending", why))
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding)
    Console(file=out, width=width, legacy_windows=False).print(view.table("measuring: 3 of 12 s", rows, width))
    out.flush()
    lines = raw.getvalue().decode(encoding).splitlines()
    assert len(lines) <= 14 and max(map(len, lines)) <= width
    for name in names:
        (line,) = [line for line in lines if line.strip(" |").startswith(f"{name} ")]
        assert "832.1 MiB / 1.5 GiB" in line and "44.7 / 30-50" in line and line.rstrip(" |").endswith("Running")
        assert ("not metered" in line) == (width > 100)
    assert why in " ".join(" ".join(lines).split())


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
def test_a_pods_long_name_costs_no_figure(width: int, height: int) -> None:
    """At 80 columns the name took the card's column and half of each figure."""
    row = view.Row(
        "a-pod-of-a-training-operator-" * 3,
        "0, 1",
        "832.1 MiB / 1.5 GiB",
        "44.7 / 30-100",
        "4.1 GiB, not metered",
        "Running",
    )
    out = io.StringIO()
    Console(file=out, width=width, height=height, force_terminal=True).print(view.table("measuring", [row], width))
    screen = screens.shown(out.getvalue().replace("\n", "\r\n"), width, height)
    assert all(cell in screen for cell in (row.card, row.memory, row.share, row.state)), screen


def test_a_terminal_that_can_not_draw_gets_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was blank until the end."""
    monkeypatch.setenv("TERM", "dumb")
    one, _ = demo(tmp_path, monkeypatch, [demo_pod("a")], terminal=True)
    assert one._console.is_terminal and not one._draws
    monkeypatch.setenv("TERM", "xterm")
    assert demo(tmp_path, monkeypatch, [demo_pod("a")], terminal=True)[0]._draws


@pytest.mark.parametrize(
    ("annotations", "minors"),
    [({}, []), ({Names().placement: "damaged"}, [])],
)
def test_a_pod_without_a_readable_placement_is_on_no_card(
    machine: sim.Machine, annotations: dict[str, str], minors: list[int]
) -> None:
    assert measure.card_minors({"metadata": {"annotations": annotations}}, machine) == minors


# --- the course, on a cluster that is not started ---
class Cluster:
    """As much of a cluster as the end of a demonstration asks for."""

    def __init__(self, options: ClusterOptions, *_: Any) -> None:
        self.options = options
        self.logs: dict[str, str] = {}
        self.api = SimpleNamespace(text=self._text)

    def _text(self, _method: str, path: str) -> str:
        name = path.split("/")[-2]
        if name not in self.logs:
            raise apis.ApiFailure(400, "BadRequest", "it has no log")
        return self.logs[name]


def demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pods: list[DemoPod], *, terminal: bool = False
) -> tuple[Any, io.StringIO]:
    monkeypatch.setattr(run, "Cluster", Cluster)
    monkeypatch.setattr(scenario, "load_manifests", lambda _: [])
    out = io.StringIO()
    console = Console(file=out, width=200, force_terminal=terminal, color_system=None)
    made: Any = run.Demo(run.DemoOptions(1.0, tmp_path / "demo.json"), ClusterOptions(), console)
    made._pods = pods
    return made, out


@pytest.mark.parametrize("terminal", [False, True])
def test_what_did_not_hold_is_summed_up_with_the_last_lines_of_the_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: sim.Machine, terminal: bool
) -> None:
    made, out = demo(tmp_path, monkeypatch, [demo_pod("a"), demo_pod("b")], terminal=terminal)
    period = checks.Period(sample(0.0), sample(5.0), sample(10.0, 9.0))
    found = [
        checks.Finding("a", "used 90.0 cores", False),
        checks.Finding("b", "is gone", False),
        checks.Finding("a", "kept working", True),
    ]
    rows = view.rows([demo_pod("a")], period.first, period.last, machine)
    made._summary(period, rows, found, {"a": "\n".join(f"line {number}" for number in range(20)), "b": ""})
    made._write_json(period, found)
    text = out.getvalue()
    assert "FAIL a: used 90.0 cores" in text and "ok   a: kept working" in text
    assert "last lines of a:\n    line 12\n" in text and "line 11" not in text and "last lines of b" not in text
    assert "2 statement(s) did not hold. Everything is stopped and removed." in text
    assert ("POD" in text) is terminal and "verages over 10.0 s" in text
    written = json.loads((tmp_path / "demo.json").read_text())
    assert list(written["pods"]) == ["a"] and written["pods"]["a"]["share"] == pytest.approx(90)
    assert [finding["held"] for finding in written["findings"]] == [False, False, True]


@pytest.mark.parametrize(
    ("expected", "found", "log", "launches", "settled"),
    [
        (Expect.RUNS, pod("a"), "", 0, False),
        (Expect.RUNS, pod("a"), "", 5, True),
        (Expect.RUNS, pod("a", "Failed", reason="UnexpectedAdmissionError"), "", 0, True),
        (Expect.OUT_OF_MEMORY, pod("a"), None, 5, False),
        (Expect.OUT_OF_MEMORY, pod("a"), f"{checks.OUT_OF_MEMORY}\n", 0, True),
        (Expect.REFUSED, pod("a", "Pending"), "", 0, False),
    ],
)
def test_it_waits_until_each_pod_does_what_it_should_or_never_will(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: Expect, found: dict[str, Any], log: str | None,
    launches: int, settled: bool,
) -> None:  # fmt: skip
    made, _ = demo(tmp_path, monkeypatch, [demo_pod("a", expected)])
    if log is not None:
        made._cluster.logs["a"] = log
    assert made._settled(Sample(1.0, {"a": found}, {"a": Truth(launches=launches)}, {})) is settled


def test_one_share_alone_is_not_asked_to_be_with_others() -> None:
    period = checks.Period(sample(0.0), sample(5.0), sample(10.0, 2.0))
    found = checks.findings([demo_pod("a")], period, {}, 8 * GIB)
    assert all(finding.held for finding in found) and not any("share one card" in one.what for one in found)
