"""Every target with what the programs measured of it and a verdict: the table at the head of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

Figures = dict[str, dict[str, Any]]  # what each program wrote with --json, by its name
Reading = tuple[str, bool]  # one measured quantity and whether it meets the target


class NotMeasured(Exception):
    """The programs ran, but not so that the target can be judged; the message is the reason."""


@dataclass(frozen=True)
class Target:
    """One row: `programs` say which figures `read` takes; with `card` there is a second row, of a real card."""

    name: str
    what: str
    target: str
    programs: tuple[str, ...]
    read: Callable[[Figures], list[Reading]]
    card: bool = False


@dataclass(frozen=True)
class Verdict:
    """A target with what was measured; `verdict` is `met`, `missed`, or why there is none."""

    name: str
    what: str
    target: str
    measured: str
    verdict: str


def judge(figures: Figures) -> list[Verdict]:
    """All targets in their order, whatever was run; those of a real card behind their twins on the simulated one."""
    rows = [row for target in TARGETS for row in ((target, _on_card(target)) if target.card else (target,))]
    return [_verdict(target, figures) for target in rows]


def _on_card(target: Target) -> Target:
    """The same target judged by figures of a real card only."""

    def read(figures: Figures) -> list[Reading]:
        for name in target.programs:
            if _card_of(figures[name]) == "simulated":
                raise NotMeasured(f"{name} ran on the simulated card only: run it where a card is")
        return target.read(figures)

    return replace(target, name=f"{target.name} G", what=f"{target.what}: on a card", read=read)


def _card_of(figures: dict[str, Any]) -> str:
    """The card that a program names; `simulated` for one that names none, as it knows no other."""
    machine = figures.get("machine")
    return str(machine.get("card", "simulated")) if isinstance(machine, dict) else "simulated"


def _verdict(target: Target, figures: Figures) -> Verdict:
    missing = [name for name in target.programs if name not in figures]
    if missing:
        return Verdict(target.name, target.what, target.target, "-", f"not run: {', '.join(missing)}")
    skipped = [str(figures[name]["skipped"]) for name in target.programs if figures[name].get("skipped")]
    if skipped:
        return Verdict(target.name, target.what, target.target, "-", f"not measured: {skipped[0]}")
    try:
        readings = target.read(figures)
    except NotMeasured as reason:
        return Verdict(target.name, target.what, target.target, "-", f"not measured: {reason}")
    except (KeyError, IndexError, TypeError, ValueError) as error:
        return Verdict(target.name, target.what, target.target, "-", f"no such figure: {error!r}")
    if not readings:
        return Verdict(target.name, target.what, target.target, "-", "not measured")
    measured = "; ".join(text if met else f"**{text}**" for text, met in readings)
    return Verdict(
        target.name,
        target.what,
        target.target,
        measured,
        "met" if all(met for _, met in readings) else "missed",
    )


def _shares(figures: Figures, beginning: str) -> list[dict[str, Any]]:
    return [row for row in figures["throttle"]["shares"] if row["what"].startswith(beginning)]


def _worst(rows: Iterable[dict[str, Any]], key: str) -> float:
    return max(float(row[key]) for row in rows if row[key] is not None)


def _launch(figures: Figures) -> list[Reading]:
    cost = figures["throttle"]["launch_ns"]
    p50 = cost["limited"]["p50_ns"] - cost["native"]["p50_ns"]
    p99 = cost["limited"]["quiet_p99_ns"] - cost["native"]["quiet_p99_ns"]
    lost = 100 * (1 - min(figures["throttle"]["below_cap"].values()))
    return [
        (f"p50 {p50:.0f} ns", p50 <= 50),
        (f"p99 {p99:.0f} ns", p99 <= 200),
        (f"{lost:.2f} % lost", lost <= 1),
    ]


def _unlimited(figures: Figures) -> list[Reading]:
    cost = figures["throttle"]["launch_ns"]
    p50 = cost["unlimited"]["p50_ns"] - cost["native"]["p50_ns"]
    return [(f"p50 {p50:.0f} ns", p50 <= 10)]


def _allocation(figures: Figures) -> list[Reading]:
    rows = figures["memory"]["costs"]
    readings = []
    for live in sorted({row["live"] for row in rows}):
        worst = _worst((row for row in rows if row["live"] == live), "added_ns")
        readings.append((f"{worst:.0f} ns with {live:,} live", worst <= 400))
    return readings


def _whole(figures: Figures) -> list[Reading]:
    rows = [row for row in figures["models"]["rows"] if row["case"] == "whole card"]
    return [(f"{row['work']} {100 * row['of_native']:.2f} %", row["of_native"] >= 0.995) for row in rows]


def _caps(figures: Figures) -> list[Reading]:
    rows = _shares(figures, "cap alone")
    kinds = dict.fromkeys(row["what"].removeprefix("cap alone, ") for row in rows)
    readings = []
    for kind in kinds:
        worst = _worst((row for row in rows if row["what"].endswith(kind)), "error_1s")
        readings.append((f"{kind}: {worst:.2f}", worst <= 1))
    return readings


def _short_windows(figures: Figures) -> list[Reading]:
    worst = _worst(_shares(figures, "cap alone"), "error_100ms")
    return [(f"worst {worst:.2f} points", worst <= 3)]


def _steps(figures: Figures) -> list[Reading]:
    return [
        (
            f"{row['what']}: {_or_never(row['milliseconds'])}",
            (row["milliseconds"] or 0) <= 200 and row["milliseconds"] is not None,
        )
        for row in figures["throttle"]["steps"]
    ]


def _or_never(milliseconds: float | None) -> str:
    return "not settled" if milliseconds is None else f"{milliseconds:.0f} ms"


def _splits(figures: Figures) -> list[Reading]:
    # Kernels longer than 1 ms and several processes are reported, not judged.
    rows = [
        row
        for row in figures["throttle"]["shares"]
        if " greedy, kernels of 10 us" in row["what"] or " greedy, kernels of 1 ms" in row["what"]
    ]
    rows = [row for row in rows if "process" not in row["what"]]
    tenants = [row for row in rows if not row["what"].endswith(": sum")]
    worst = max(abs(row["achieved"] - row["target"]) for row in tenants)
    native = figures["throttle"]["native_sums"]
    sums = {
        row["what"].removesuffix(": sum"): row["achieved"] for row in rows if row["what"].endswith(": sum")
    }
    least = min(100 * sums[name] / native[name] for name in sums)
    return [(f"worst {worst:.2f} points", worst <= 1), (f"least sum {least:.1f} % of native", least >= 98)]


def _elastic(figures: Figures) -> list[Reading]:
    rows = [row for row in figures["throttle"]["shares"] if "alone on a shared card" in row["what"]]
    return [
        (f"{100 * row['achieved'] / row['target']:.1f} %", row["achieved"] >= 0.98 * row["target"])
        for row in rows
    ]


def _inference(figures: Figures) -> list[Reading]:
    times = figures["throttle"]["inference_p99_ms"]
    native = times["native"]
    limits = {"alone": 1.05, "beside greedy 1 ms": 2.0, "beside greedy 20 ms": 3.0}
    return [
        (f"{case} {times[case] / native:.2f} x", times[case] <= limit * native)
        for case, limit in limits.items()
    ]


def _stress(figures: Figures) -> list[Reading]:
    row = figures["memory"]["stress"]
    over = max(row["peak_bytes"], row["peak_in_ledger_bytes"]) - row["limit_bytes"]
    left = row["left_bytes"] + row["left_in_ledger_bytes"]
    return [
        (f"{max(0, over)} over", over <= 0),
        (f"{left} left, {row['operations']:,} operations, {row['kills']} SIGKILLs", left == 0),
    ]


def _load(figures: Figures) -> list[Reading]:
    added = figures["memory"]["load"]["shim_ms"] - figures["memory"]["load"]["native_ms"]
    return [(f"{added:.2f} ms", added <= 2)]


def _allocate(figures: Figures) -> list[Reading]:
    calls = [row for row in figures["manager"]["calls"] if row["call"].startswith("Allocate")]
    return [(f"{row['call']} p99 {row['own_p99']:.2f} ms", row["own_p99"] <= 5) for row in calls]


def _registered(figures: Figures) -> list[Reading]:
    start = figures["manager"]["start_to_registered_s"]
    return [
        (f"{kind.replace('_', ' ')} {start[kind]:.2f} s", start[kind] <= 1.5)
        for kind in ("most", "with_shares")
    ]


def _footprint(figures: Figures) -> list[Reading]:
    most = max(figures["manager"]["resident_mib"].values())
    idle = figures["manager"]["idle_cpu_percent"]
    return [(f"{most:.0f} MiB", most <= 80), (f"{idle:.2f} % of a core", idle <= 1)]


def _kills(figures: Figures) -> list[Reading]:
    tally = figures["manager_kill"]
    bad = [
        (f"{len(tally[what])} {what}", not tally[what]) for what in ("doubled", "lost", "leaked", "refused")
    ]
    return [(f"{tally['cycles']} cycles, {tally['kills']} kills", tally["cycles"] >= 1000), *bad]


def _burst(figures: Figures) -> list[Reading]:
    burst = figures["kube"]["burst"]
    wrong = burst["mismatches"]
    return [
        (f"{len(wrong)} mismatches of {burst['seen']} pods", not wrong),
        (f"{burst['asked']} asked", burst["asked"] >= 200 and burst["seen"] == burst["asked"]),
    ]


def _filters(figures: Figures, names: int) -> list[dict[str, Any]]:
    """The rows of 5,000 empty nodes with 8 cards each, by connections."""
    wanted = {"nodes": 5000, "cards": 8, "pods": 0, "names": names}
    rows = [row for row in figures["extender"]["rows"] if wanted.items() <= row.items()]
    return sorted(rows, key=lambda row: int(row["connections"]))


def _filter_all_names(figures: Figures) -> list[Reading]:
    row = _filters(figures, 5000)[0]
    return [
        (f"p50 {row['p50_ms']:.2f} ms", row["p50_ms"] <= 1),
        (f"p99 {row['p99_ms']:.2f} ms", row["p99_ms"] <= 3),
    ]


def _decisions(figures: Figures) -> list[Reading]:
    return [
        (
            f"{row['decisions_per_second']:.0f}/s, {row['connections']} connections",
            row["decisions_per_second"] >= 1000,
        )
        for row in _filters(figures, 500)
    ]


def _writes(figures: Figures) -> list[Reading]:
    rows = figures["extender"]["rows"]
    each = sum(row["writes"] for row in rows) / sum(row["binds"] for row in rows)
    return [(f"{each:.2f}", each <= 1)]


# What the rows of T34 ask: the first two in the authors' text, the others their own FGD.
PACKING_PERCENT = {"default": 95.2, "gpushare100": 86.6}


def _packing(figures: Figures) -> list[Reading]:
    readings = []
    for variant, data in figures["extender"]["packing"].items():
        runs = [run["allocated"] for run in data["runs"] if run["policy"] == "fgd"]
        percent, theirs = 100 * sum(runs) / len(runs), data["published_percent"]["FGD"]
        wanted = PACKING_PERCENT.get(variant, theirs)
        text = f"{variant} {percent:.2f} ({percent - theirs:+.2f} to FGD, {len(runs)} seeds)"
        readings.append((text, percent >= max(wanted, theirs + 1)))
    return readings


def _throughput(figures: Figures) -> list[Reading]:
    ratio = figures["kube"]["throughput_ratio"]
    return [(f"{ratio:.3f}", ratio >= 0.9)]


def _faults(figures: Figures) -> list[Reading]:
    tally = figures["extender_faults"]
    bad = [
        (f"{len(tally[what])} {text}", not tally[what])
        for what, text in (("double_bookings", "doubled"), ("stale", "stale"))
    ]
    return [(f"{tally['pods']:,} pods", tally["pods"] >= 10_000 and tally["finished"]), *bad]


def _demo(figures: Figures) -> list[Reading]:
    seconds = figures["product"]["demo_seconds"]
    return [(f"{seconds:.0f} s until the demo has ended", seconds <= 120)]


def _suite(figures: Figures) -> list[Reading]:
    row = figures["product"]
    return [
        (
            f"{row['test_seconds']:.0f} s, {row['passed']} passed",
            row["test_seconds"] <= 600 and not row.get("failed"),
        )
    ]


def _coverage(figures: Figures) -> list[Reading]:
    row = figures["product"]
    if row.get("coverage_skipped"):
        raise NotMeasured(row["coverage_skipped"])
    return [
        (f"Python's branches {row['python_branches_percent']:.1f} %", row["python_branches_percent"] >= 90),
        (f"C's lines {row['c_lines_percent']:.1f} %", row["c_lines_percent"] >= 85),
    ]


TARGETS = (
    Target(
        "T1",
        "added to a launch, limited and in credit; throughput lost below the cap",
        "p50 ≤ 50 ns, p99 ≤ 200 ns; ≤ 1 %",
        ("throttle",),
        _launch,
        card=True,
    ),
    Target("T2", "added to a launch, unlimited", "p50 ≤ 10 ns", ("throttle",), _unlimited, card=True),
    Target(
        "T3",
        "added to alloc + free",
        "p50 ≤ 400 ns, with 100,000 live too",
        ("memory",),
        _allocation,
        card=True,
    ),
    Target("T4", "throughput of a whole-card tenant", "≥ 99.5 % of native", ("models",), _whole),
    Target(
        "T5", "share error, caps 5…90, 1 s or 100 × the kernel", "≤ 1 point", ("throttle",), _caps, card=True
    ),
    Target(
        "T6",
        "share error over 100 ms, kernels ≤ 1 ms",
        "≤ 3 points",
        ("throttle",),
        _short_windows,
        card=True,
    ),
    Target("T7", "settled after a step", "≤ 200 ms", ("throttle",), _steps, card=True),
    Target(
        "T8",
        "30/70 and 10/20/30/40 greedy, kernels ≤ 1 ms, 1 s",
        "each within 1 point; sum ≥ 98 % of native",
        ("throttle",),
        _splits,
        card=True,
    ),
    Target("T9", "elastic tenant alone", "≥ 98 % of its limit", ("throttle",), _elastic, card=True),
    Target(
        "T10",
        "short inference, p99 against native alone",
        "≤ 1.05 x alone, ≤ 2 x beside short, ≤ 3 x beside long kernels",
        ("throttle",),
        _inference,
        card=True,
    ),
    Target("T11", "bytes over the limit, bytes leaked", "0, 0", ("memory",), _stress, card=True),
    Target("T12", "load and initialise the shim", "≤ 2 ms over native", ("memory",), _load),
    Target(
        "T20",
        "Allocate, 8 cards, 200 shares, beyond kubelet's replies",
        "p99 ≤ 5 ms",
        ("manager",),
        _allocate,
    ),
    Target("T21", "start to both resources registered", "≤ 1.5 s", ("manager",), _registered),
    Target("T22", "resident memory; idle CPU", "≤ 80 MiB; ≤ 1 % of a core", ("manager",), _footprint),
    Target(
        "T23",
        "kill -9 at random points of 1,000 pod life cycles",
        "0 doubled, lost, leaked",
        ("manager_kill",),
        _kills,
    ),
    Target(
        "T24",
        "200 pods, equal cores, different memory, at once on a real kubelet",
        "0 mismatches",
        ("kube",),
        _burst,
    ),
    Target(
        "T30", "filter, 5,000 nodes, all names", "p50 ≤ 1 ms, p99 ≤ 3 ms", ("extender",), _filter_all_names
    ),
    Target(
        "T31", "filter decisions per second, 5,000 nodes, 500 names", "≥ 1,000", ("extender",), _decisions
    ),
    Target("T32", "API writes per scheduled pod", "1", ("extender",), _writes),
    Target("T33", "kube-scheduler's throughput with the extender / without", "≥ 0.9", ("kube",), _throughput),
    Target(
        "T34",
        "cards allocated at 100 % arrived load on the public trace",
        "≥ the authors' figures, then beyond their FGD by ≥ 1 point",
        ("extender",),
        _packing,
    ),
    Target(
        "T35",
        "two extenders, restarts, API faults, 10,000 pods",
        "0 doubled, 0 stale",
        ("extender_faults",),
        _faults,
    ),
    Target("T40", "fresh clone to the demo's table, warm package cache", "≤ 2 min", ("product",), _demo),
    Target("T41", "`make test` on 2 cores", "≤ 10 min", ("product",), _suite),
    Target("T42", "branch coverage of Python; line coverage of C", "≥ 90 %; ≥ 85 %", ("product",), _coverage),
)
