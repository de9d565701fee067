"""The report of the benchmarks: verdicts follow the figures, what is missing is said, earlier figures are kept or refused by name."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import (
    _clients,
    _coverage,
    _elsewhere,
    _pairs,
    _plots,
    _readings,
    _report,
    _targets,
    extender_faults,
    manager,
    manager_kill,
    manager_tenants,
    peers,
    product,
)
from vcuda.runs.errors import RunError

ROOT = Path(__file__).resolve().parents[2]


def verdicts(figures: _readings.Figures) -> dict[str, _targets.Verdict]:
    return {row.name: row for row in _targets.judge(figures)}


def test_a_target_without_its_program_says_what_to_run() -> None:
    assert {row.measured for row in verdicts({}).values()} == {"-"}
    assert verdicts({})["T3"].verdict == "not run: memory"


@pytest.mark.parametrize(("added_ns", "verdict", "shown"), [(400, "met", "400 ns"), (401, "missed", "**401 ns")])
def test_the_worst_row_decides(added_ns: int, verdict: str, shown: str) -> None:
    costs = [{"live": 1, "added_ns": 10}, {"live": 1, "added_ns": added_ns}]
    row = verdicts({"memory": {"costs": costs}})["T3"]
    assert (row.verdict, shown in row.measured) == (verdict, True)


@pytest.mark.parametrize(("peak", "left", "verdict"), [(100, 0, "met"), (101, 0, "missed"), (100, 1, "missed")])
def test_a_byte_over_the_limit_or_left_behind_is_a_miss(peak: int, left: int, verdict: str) -> None:
    stress = {"limit_bytes": 100, "peak_bytes": peak, "peak_in_ledger_bytes": 100, "left_bytes": left}
    more = {"left_in_ledger_bytes": 0, "operations": 10, "kills": 1}
    assert verdicts({"memory": {"stress": stress | more}})["T11"].verdict == verdict


def test_a_step_that_never_settled_is_a_miss() -> None:
    steps = [{"what": "load starts", "milliseconds": 20}, {"what": "it stops", "milliseconds": None}]
    row = verdicts({"throttle": {"steps": steps}})["T7"]
    assert (row.measured, row.verdict) == ("load starts: 20 ms; **it stops: not settled**", "missed")


def test_figures_of_another_shape_are_no_verdict() -> None:
    assert verdicts({"memory": {"cost": []}})["T3"].verdict == "no such figure: KeyError('costs')"


def test_what_the_manager_and_fault_programs_write_is_what_is_read() -> None:
    calls = [manager.Row(name, 200, 1, 9, 9, 1, 4.9, 9, 1, 2) for name in ("Allocate core", "Allocate memory")]
    rows = verdicts(
        {
            "manager": {"calls": [dataclasses.asdict(row) for row in calls]},
            "manager_kill": dataclasses.asdict(manager_kill.Tally(cycles=1000)),
            "manager_tenants": {
                "rows": [
                    dataclasses.asdict(manager_tenants.Row(110, files, 3.0 + files / 1e5, 67.0))
                    for files in (0, 60_000)
                ]
            },
            "extender_faults": dataclasses.asdict(extender_faults.Tally(pods=10_000, finished=True)),
        }
    )
    assert rows["T20"].measured == "Allocate core p99 4.90 ms; Allocate memory p99 4.90 ms"
    assert rows["T26"].measured == "0.60 % of a core for 60000 files; 67 MiB beside 110 contexts"
    assert {rows[name].verdict for name in ("T20", "T23", "T26", "T35")} == {"met"}


def test_the_longest_hold_of_the_extenders_lock_is_judged() -> None:
    held = {"filter": {"held": 0.4, "spent": 1, "waited": 90}, "a gang": {"held": 20.5, "spent": 800, "waited": 1}}
    row = verdicts({"extender": {"holds_ms": held}})["T37"]
    assert (row.measured, row.verdict) == ("**20.5 ms, a gang**", "missed")
    assert verdicts({"extender": {"holds_ms": held | {"a gang": held["filter"]}}})["T37"].verdict == "met"


def test_a_program_that_skipped_gives_its_reason() -> None:
    assert verdicts({"kube": {"skipped": "no kubelet"}})["T33"].verdict == "not measured: no kubelet"


def a_pair(of_native: float) -> dict[str, object]:
    return {"what": "train", "of_native": of_native, "pairs": 6}


def test_the_whole_card_is_judged_on_a_real_card_only() -> None:
    figures = {"whole_card": {"machine": {"card": "simulated"}, "rows": [a_pair(0.5)]}}
    assert verdicts(figures)["T4"].verdict.startswith("not measured: whole_card ran on the simulated card")
    real = {"whole_card": {"machine": {"card": "NVIDIA L4"}, "rows": [a_pair(0.996)]}}
    assert verdicts(real)["T4"].verdict == "met"
    model = {"models": {"dry_run": False, "whole_card": [a_pair(0.994)]}}
    assert verdicts(real | model)["T4"].measured == "train 99.60 % (6 pairs); **train 99.40 % (6 pairs)**"
    assert verdicts(real | {"models": {"skipped": "no PyTorch"}})["T4"].verdict == "met"
    dry = {"models": {"dry_run": True, "whole_card": [a_pair(0.1)]}}
    assert verdicts(real | dry)["T4"].verdict == "met"


def test_pairs_take_turns_and_their_median_decides() -> None:
    calls: list[str] = []
    rates = iter([10.0, 9.0, 8.0, 16.0, 10.0, 10.0])

    def run(name: str) -> float:
        calls.append(name)
        return next(rates)

    found = _pairs.paired("x", lambda: run("native"), lambda: run("share"), 3)
    assert calls == ["native", "share", "share", "native", "native", "share"]
    assert (found.lowest, found.of_native, found.highest, found.pairs) == (0.5, 0.9, 1.0, 3)
    with pytest.raises(ValueError, match="0 pairs"):
        _pairs.paired("x", lambda: 1.0, lambda: 1.0, 0)


def test_a_real_cards_row_takes_no_figure_of_the_simulated_one() -> None:
    shares = [{"what": "cap alone, kernels", "error_100ms": 1.0}]
    told = {card: verdicts({"throttle": {"machine": {"card": card}, "shares": shares}}) for card in ("simulated", "H1")}
    assert told["simulated"]["T6"].verdict == told["H1"]["T6"].verdict == told["H1"]["T6 G"].verdict == "met"
    assert told["simulated"]["T6 G"].verdict.startswith("not measured: throttle ran on the simulated card")


def test_a_run_on_a_card_stands_beside_the_simulated_one_and_survives_the_next_report(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    rows = {
        card: [{"what": "cap alone, kernels", "error_100ms": error}]
        for card, error in (("simulated", 1.0), ("H1", 5.0))
    }
    runs = {card: a_run(f"table of {card}", machine={"card": card}, shares=shares) for card, shares in rows.items()}
    _report.write(report, {"throttle": runs["simulated"], "throttle_on_card": runs["H1"]})
    lines = [line for line in report.read_text().splitlines() if line.startswith("| T6")]
    assert [line.rsplit("| ", 1)[1] for line in lines] == ["met |", "missed |"]
    _report.write(report, {"throttle": runs["simulated"]}, ["throttle"])
    text = report.read_text()
    assert [line for line in text.splitlines() if line.startswith("| T6")] == lines
    whole = _report.Run("python -m benchmarks.whole_card", "2026-01-02 10:00 UTC", "pairs", "", None)
    _report.write(report, {"whole_card": whole})
    _report.write(report, {"throttle": runs["simulated"]}, ["throttle", "whole_card"])
    assert "## whole_card" in report.read_text(), "a program whose own name ends so"
    assert "## throttle_on_card" in text and "table of H1" in text and "table of simulated" in text


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"machine": {"card": "simulated"}}, False),
        ({"machine": {"card": "H1"}}, True),
        ({"machine": {}, "card": ["H1"]}, True),
        ({"machine": {}, "skipped": "no card"}, False),
        ({"machine": {}, "real": {"card": "H1"}}, True),
        ({"machine": {}, "real": {"skipped": "no card"}}, False),
    ],
)
def test_which_figures_are_of_a_card(figures: dict[str, object], expected: bool) -> None:
    assert _readings.of_a_card(figures) is expected


def test_a_run_of_some_minutes_begins_nothing_after_them() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--card", "--quick", "--minutes", "0.1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert ran.stderr.count("was not begun: the time is up") == 9


def test_a_run_goes_on_after_what_ended_with_all_its_rows_lately(tmp_path: Path) -> None:
    """A card that is lent twice for ten minutes measured the first programs twice and the last ones never."""
    run = _report.Run("python -m x", _report.now(), "", "", None)
    runs = {
        "card_facts": dataclasses.replace(run, whole=True),
        "card_memory" + _targets.CARD_RUN: dataclasses.replace(run, whole=True),
        "throttle": run,  # its time was up
        "models": dataclasses.replace(run, whole=True, date="2026-01-01 00:00 UTC"),
    }
    _report.save(tmp_path / "report.json", runs)
    words = ["--card", "--minutes", "0.1", "--resume", "--report", str(tmp_path / "report.md")]
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    before = [line.split()[0] for line in ran.stderr.splitlines() if "ran to its end before" in line]
    assert before == ["card_facts", "card_memory"] and ran.stderr.count("was not begun") == 7


@pytest.mark.parametrize(
    ("burst", "verdict"),
    [
        ({"asked": 200, "seen": 200, "mismatches": []}, "met"),
        ({"asked": 200, "seen": 199, "mismatches": []}, "missed"),
        ({"asked": 40, "seen": 40, "mismatches": []}, "missed"),
        ({"asked": 200, "seen": 200, "mismatches": ["a: asked 1, has 2"]}, "missed"),
    ],
)
def test_a_burst_is_judged_by_what_every_pod_has(burst: dict[str, object], verdict: str) -> None:
    assert (
        verdicts({"kube": {"bursts": [{"asked": 40, "seen": 40, "mismatches": []}, burst]}})["T24"].verdict == verdict
    )


@pytest.fixture
def kept_coverage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(_coverage, "FIGURES", tmp_path / "figures.json")
    monkeypatch.setattr(_coverage, "sources", lambda: ["the sources"])
    return tmp_path / "figures.json"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "is not there: `make coverage` writes it"),
        ("{", "can't be read"),
        ('{"sources": ["others"], "coverage_date": "today"}', "is of today and other sources"),
    ],
)
def test_coverage_of_other_sources_is_not_taken(kept_coverage: Path, text: str | None, reason: str) -> None:
    if text is not None:
        kept_coverage.write_text(text)
    row = verdicts({"product": product.coverage(Path())})["T42"]
    assert reason in row.verdict and row.verdict.startswith("not measured: ")


def test_coverage_of_the_same_sources_is_judged(kept_coverage: Path) -> None:
    kept_coverage.write_text('{"sources": ["the sources"], "python_branches_percent": 90.0, "c_lines_percent": 84.9}')
    row = verdicts({"product": product.coverage(Path())})["T42"]
    assert (row.measured, row.verdict) == ("Python's branches 90.0 %; **C's lines 84.9 %**", "missed")


def a_run(output: str, **figures: object) -> _report.Run:
    return _report.Run("python -m benchmarks.memory", "2026-01-01 10:00 UTC", output, "", figures or None)


def test_the_report_is_made_from_what_is_kept(tmp_path: Path) -> None:
    runs = {"memory": a_run("a table", costs=[{"live": 1, "added_ns": 5, "bytes": 4096, "processes": 1}])}
    kept = tmp_path / "benchmarks.json"
    _report.save(kept, runs)
    assert _report.load(kept) == runs
    _report.write(tmp_path / "benchmarks.md", _report.load(kept))
    text = (tmp_path / "benchmarks.md").read_text()
    assert "a table" in text
    assert "| T3 | added to alloc + free | p50 ≤ 400 ns, with 100,000 live too | 5 ns with 1 live | met |" in text
    for picture in (line.split("](")[1][:-1] for line in text.splitlines() if line.startswith("![")):
        assert (tmp_path / picture).stat().st_size > 1000


def test_a_report_keeps_what_it_says_of_programs_whose_raw_figures_are_gone(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    rows = [{"live": live, "added_ns": 500, "bytes": 4096, "processes": 1} for live in (1, 9)]
    _report.write(report, {"memory": a_run("an older table", costs=rows)})
    before = report.read_text()
    assert before.count("T3, added to alloc + free") == 1 and "![" in before
    kube = _report.Run("python -m benchmarks.kube", "2026-01-02 10:00 UTC", "no cluster", "", None)
    _report.write(report, {"kube": kube})
    text = report.read_text()
    assert "an older table" in text and "no cluster" in text
    for line in ("| T3 | added", "- T3, added"):
        assert [one for one in before.splitlines() if one.startswith(line)] == [
            one for one in text.splitlines() if one.startswith(line)
        ]
    assert [line for line in text.splitlines() if line.startswith("![")] == [
        line for line in before.splitlines() if line.startswith("![")
    ]
    # Raw figures that lie about from an earlier run don't replace a newer report's.
    stale = _report.Run("python -m benchmarks.kube", "2026-01-01 09:00 UTC", "an old cluster", "", None)
    _report.write(report, {"kube": stale})
    assert report.read_text() == text
    _report.write(report, {"kube": kube}, ["kube"])
    assert "an older table" not in report.read_text() and "not run: memory" in report.read_text()


def test_what_falls_short_is_told_with_what_else_the_machine_did(tmp_path: Path) -> None:
    costs = [{"live": 1, "added_ns": 5}, {"live": 9, "added_ns": 500}]
    figures: dict[str, object] = {"costs": costs, "load": {"native_ms": 1, "shim_ms": 2}}
    run = _report.Run("python -m benchmarks.memory", "2026-01-01 10:00 UTC", "", "", figures, 42.0)
    _report.write(tmp_path / "report.md", {"memory": run})
    text = (tmp_path / "report.md").read_text()
    short = text.partition("## What falls short\n")[2].partition("\n## ")[0]
    assert "- T3, added to alloc + free (p50 ≤ 400 ns, with 100,000 live too): **500 ns with 9 live**." in short
    assert "See [memory](#memory); memory: other programs took 42 % of the processors meanwhile." in short
    assert "T12" not in short and "- T23: not run: manager_kill" in short
    assert "2026-01-01 10:00 UTC; other programs took 42 %" in text
    quiet = _report.Run("python -m benchmarks.memory", "2026-01-01 10:00 UTC", "", "", figures, 3.0)
    _report.write(tmp_path / "report.md", {"memory": quiet})
    assert "other programs took" not in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("output", "problem", "verdict"),
    [
        ("a line\nnot measured: no kubelab script\n", "", "not measured: no kubelab script"),
        ("a line\n", "was stopped after 900 s", "not measured: the run was stopped after 900 s"),
        ("", "", "not measured: it said nothing"),
    ],
)
def test_a_program_that_ran_without_figures_gives_the_reason(
    tmp_path: Path, output: str, problem: str, verdict: str
) -> None:
    run = _report.Run("python -m benchmarks.kube", "2026-01-01 10:00 UTC", output, problem, None)
    _report.write(tmp_path / "report.md", {"kube": run})
    text = (tmp_path / "report.md").read_text()
    assert f"| 0 mismatches | - | {verdict} |" in text
    assert f"- T24, T33: {verdict}\n" in text


def test_work_of_others_is_told_from_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    values = {"monotonic": iter([100.0, 110.0]), "busy": iter([50.0, 65.0]), "own": iter([3.0, 8.0])}
    monkeypatch.setattr(_elsewhere.time, "monotonic", lambda: next(values["monotonic"]))
    monkeypatch.setattr(_elsewhere, "_busy_seconds", lambda: next(values["busy"]))
    monkeypatch.setattr(_elsewhere, "_own_seconds", lambda: next(values["own"]))
    assert _elsewhere.Elsewhere().percent() == 100 * (15 - 5) / (10 * 2)


def test_what_the_host_took_is_said_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ticks = iter([0.0, 10.0]), [[0] * 7 + [stolen] for stolen in (100, 220)]
    monkeypatch.setattr(_elsewhere.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(_elsewhere.os, "sysconf", lambda _: 100)
    monkeypatch.setattr(_elsewhere.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(_elsewhere, "_ticks", lambda: ticks[0])
    since = _elsewhere.Elsewhere()
    monkeypatch.setattr(_elsewhere, "_ticks", lambda: ticks[1])
    assert since.stolen_percent() == pytest.approx(100 * 1.2 / 20)
    run = _report.Run("c", "d", "", "", None, others_percent=4.0, stolen_percent=6.0)
    assert run.busy() == "the host took 6.0 % of the processors away"
    both = dataclasses.replace(run, others_percent=12.0)
    assert (
        both.busy()
        == "other programs took 12 % of the processors meanwhile, the host took 6.0 % of the processors away"
    )
    assert dataclasses.replace(run, stolen_percent=0.4).busy() == ""


def test_what_a_child_computes_is_ours_once_it_has_ended() -> None:
    spin = "import time\nwhile time.process_time() < 0.5: pass"
    busy, own = _elsewhere._busy_seconds(), _elsewhere._own_seconds()
    subprocess.run([sys.executable, "-c", spin], check=True)
    assert _elsewhere._own_seconds() - own >= 0.5
    assert _elsewhere._busy_seconds() - busy >= 0.4, "in ticks of 10 ms"


def a_filter(p50: float, **size: int) -> dict[str, object]:
    usual = {"nodes": 5000, "cards": 8, "pods": 0, "names": 5000, "connections": 1}
    return {**usual, "p50_ms": p50, "p99_ms": 2 * p50, **size}


def test_each_curve_of_a_filter_changes_one_size_only() -> None:
    rows = [
        a_filter(0.1, nodes=100, names=100),
        a_filter(1.0),
        a_filter(0.5, names=500),
        a_filter(1.5, connections=4),
        a_filter(1.2, cards=16),
        a_filter(1.1, pods=10_000),
    ]
    figures = {"extender": {"rows": rows}}
    curves = {file: draw(figures)[0] for file, *_, draw in _plots.PICTURES if file in ("nodes", "cards", "pods")}
    assert curves == {
        "nodes": ("p50", [100, 5000], [0.1, 1.0]),
        "cards": ("p50", [8, 16], [1.0, 1.2]),
        "pods": ("p50", [0, 10_000], [1.0, 1.1]),
    }


def test_a_short_run_of_the_extender_is_no_verdict() -> None:
    figures = {"extender": {"rows": [a_filter(0.1, nodes=100, names=100)], "packing": {}}}
    rows = verdicts(figures)
    assert rows["T30"].verdict == rows["T31"].verdict == "not measured: extender ran on smaller clusters only"
    assert rows["T34"].verdict == "not measured: extender found no trace"


@pytest.mark.parametrize("text", ["", "[]", '{"programs": {"memory": {"command": 1}}}', '{"programs": 3}'])
def test_damaged_figures_are_named_and_not_overwritten(tmp_path: Path, text: str) -> None:
    kept = tmp_path / "benchmarks.json"
    kept.write_text(text)
    words = [sys.executable, "-m", "benchmarks", "models", "--report", str(tmp_path / "benchmarks.md")]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert f"{kept} does not hold earlier figures" in result.stderr
    assert kept.read_text() == text


def test_a_program_run_again_leaves_the_others_figures(tmp_path: Path) -> None:
    kept = tmp_path / "benchmarks.json"
    _report.save(kept, {"memory": a_run("an older table"), "gone": a_run("of a program that is no more")})
    words = [sys.executable, "-m", "benchmarks", "models", "--report", str(tmp_path / "benchmarks.md")]
    assert subprocess.run(words, cwd=ROOT, capture_output=True, check=False).returncode == 0
    assert _report.load(kept).keys() == {"memory", "models"}
    text = (tmp_path / "benchmarks.md").read_text()
    assert "an older table" in text
    assert "no more" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x"], "--peer x: give a name and the path of the built library"),
        (["x", "/no/such.so"], "--peer x: there is no library /no/such.so"),
        (["x", __file__, "LIMIT"], "--peer x: 'LIMIT' is no VARIABLE=VALUE"),
        (["x", __file__], "--peer x: give its limit variables; only those of hami, vgpu-manager are known"),
        (["x", __file__, "A={memory}"], "--peer x: 'memory' is no placeholder; there are"),
    ],
)
def test_a_peer_that_cannot_be_used_is_named(words: list[str], message: str) -> None:
    with pytest.raises(RunError) as error:
        peers.peer(words)
    assert str(error.value).startswith(message)


def test_a_peer_is_handed_to_the_program_that_measures_peers() -> None:
    command = [sys.executable, "-m", "benchmarks", "peers", "--peer", "hami@1a2b3c", "/no/such.so"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "=== python -m benchmarks.peers --peer hami@1a2b3c /no/such.so" in result.stdout, result.stderr
    assert "--peer hami@1a2b3c: there is no library /no/such.so" in result.stderr


def test_what_the_suite_said_is_judged_with_its_skipped_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "...\n==== 1 failed, 20 passed, 3 skipped in 4.00s ===="
    monkeypatch.setattr(product, "run", lambda *_: (4.0, said))
    figures = product.tests(Path())
    assert figures == {"test_seconds": 4.0, "tests_failed": 1, "tests_passed": 20, "tests_skipped": 3}
    assert verdicts({"product": figures})["T41"].verdict == "missed"
    assert verdicts({"product": {**figures, "tests_failed": 0}})["T41"].verdict == "met"


def test_with_card_all_and_only_the_programs_that_a_card_has_figures_of_are_run() -> None:
    judged = {name for target in _targets.TARGETS if target.card for name in target.programs}
    help_text = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    said = " ".join(help_text.split()).split("a card matters to (", 1)[1].split(")", 1)[0]
    named = {name.strip() for name in said.split(",")}
    assert judged | {"whole_card", "models"} <= named
    for name in named:
        assert (ROOT / "benchmarks" / f"{name}.py").exists()
    assert not named & {"extender", "manager", "kube", "product"}


def test_a_python_for_the_clients_is_the_one_that_was_named_before_all_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = tmp_path / "python3"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(_clients.SETTING, raising=False)
    without = _clients.pythons()
    assert str(own) in without and sys.executable in without
    monkeypatch.setenv(_clients.SETTING, "/opt/mine")
    assert _clients.pythons() == ["/opt/mine", *without]
