"""How each target's figures are read from what the programs wrote: a text for each quantity, and whether it is good enough."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Figures = dict[str, dict[str, Any]]  # what each program wrote with --json, by its name
Reading = tuple[str, bool]  # one measured quantity and whether it meets the target


class NotMeasured(Exception):
    """The programs ran, but not so that the target can be judged; the message is the reason."""


def real(name: str, figures: dict[str, Any]) -> dict[str, Any]:
    """What a program measured on a real card: kept apart in `real`, or all that it has. Raises NotMeasured."""
    apart: dict[str, Any] | None = figures.get("real")
    if apart and "skipped" in apart:
        raise NotMeasured(apart["skipped"])
    if apart is None and _card_of(figures) == "simulated":
        raise NotMeasured(f"{name} ran on the simulated card only: run it where a card is")
    return apart or figures


def of_a_card(figures: dict[str, Any]) -> bool:
    """Whether a program measured a real card."""
    apart: dict[str, Any] | None = figures.get("real")
    if apart is not None:
        return "skipped" not in apart
    return "skipped" not in figures and ("card" in figures or _card_of(figures) != "simulated")


def _card_of(figures: dict[str, Any]) -> str:
    """The card that a program names; `simulated` for one that names none, as it knows no other."""
    machine = figures.get("machine")
    return str(machine.get("card", "simulated")) if isinstance(machine, dict) else "simulated"


def _shares(figures: Figures, beginning: str) -> list[dict[str, Any]]:
    return [row for row in figures["throttle"]["shares"] if row["what"].startswith(beginning)]


def _worst(rows: Iterable[dict[str, Any]], key: str) -> float:
    return max(float(row[key]) for row in rows if row[key] is not None)


def launch(figures: Figures) -> list[Reading]:
    cost = figures["throttle"]["launch_ns"]
    p50 = cost["limited"]["p50_ns"] - cost["native"]["p50_ns"]
    p99 = cost["limited"]["quiet_p99_ns"] - cost["native"]["quiet_p99_ns"]
    lost = 100 * (1 - min(figures["throttle"]["below_cap"].values()))
    return [
        (f"p50 {p50:.0f} ns", p50 <= 50),
        (f"p99 {p99:.0f} ns", p99 <= 200),
        (f"{lost:.2f} % lost", lost <= 1),
    ]


def unlimited(figures: Figures) -> list[Reading]:
    cost = figures["throttle"]["launch_ns"]
    p50 = cost["unlimited"]["p50_ns"] - cost["native"]["p50_ns"]
    return [(f"p50 {p50:.0f} ns", p50 <= 10)]


def allocation(figures: Figures) -> list[Reading]:
    # Before a real driver a large one takes a hundred times longer than what is added: reported.
    rows = figures["memory"]["costs"]
    if "card" in figures["memory"]:
        rows = [row for row in rows if row["bytes"] == 4096]
    readings = []
    for live in sorted({row["live"] for row in rows}):
        worst = _worst((row for row in rows if row["live"] == live), "added_ns")
        readings.append((f"{worst:.0f} ns with {live:,} live", worst <= 400))
    return readings


def whole(figures: Figures) -> list[Reading]:
    """Programs of the driver API, and a model where PyTorch is."""
    rows = figures["whole_card"]["rows"]
    models = figures.get("models", {})
    if not models.get("dry_run"):
        rows = rows + models.get("whole_card", [])
    return [
        (f"{row['what']} {100 * row['of_native']:.2f} % ({row['pairs']} pairs)", row["of_native"] >= 0.995)
        for row in rows
    ]


def caps(figures: Figures) -> list[Reading]:
    rows = _shares(figures, "cap alone")
    kinds = dict.fromkeys(row["what"].removeprefix("cap alone, ") for row in rows)
    readings = []
    for kind in kinds:
        worst = _worst((row for row in rows if row["what"].endswith(kind)), "error_1s")
        readings.append((f"{kind}: {worst:.2f}", worst <= 1))
    return readings


def short_windows(figures: Figures) -> list[Reading]:
    worst = _worst(_shares(figures, "cap alone"), "error_100ms")
    return [(f"worst {worst:.2f} points", worst <= 3)]


def steps(figures: Figures) -> list[Reading]:
    return [
        (
            f"{row['what']}: {_or_never(row['milliseconds'])}",
            (row["milliseconds"] or 0) <= 200 and row["milliseconds"] is not None,
        )
        for row in figures["throttle"]["steps"]
    ]


def _or_never(milliseconds: float | None) -> str:
    return "not settled" if milliseconds is None else f"{milliseconds:.0f} ms"


def splits(figures: Figures) -> list[Reading]:
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
    sums = {row["what"].removesuffix(": sum"): row["achieved"] for row in rows if row["what"].endswith(": sum")}
    least = min(100 * sums[name] / native[name] for name in sums)
    return [(f"worst {worst:.2f} points", worst <= 1), (f"least sum {least:.1f} % of native", least >= 98)]


def elastic(figures: Figures) -> list[Reading]:
    rows = [row for row in figures["throttle"]["shares"] if "alone on a shared card" in row["what"]]
    return [(f"{100 * row['achieved'] / row['target']:.1f} %", row["achieved"] >= 0.98 * row["target"]) for row in rows]


def inference(figures: Figures) -> list[Reading]:
    times = figures["throttle"]["inference_p99_ms"]
    native = times["native"]
    limits = {"alone": 1.05, "beside greedy 1 ms": 2.0, "beside greedy 20 ms": 3.0}
    return [(f"{case} {times[case] / native:.2f} x", times[case] <= limit * native) for case, limit in limits.items()]


def stress(figures: Figures) -> list[Reading]:
    row = figures["memory"]["stress"]
    # NVML counts what a driver keeps for itself too: there the ledger is judged, as the target says.
    peaks = [row["peak_in_ledger_bytes"], *([row["peak_bytes"]] if row.get("exact_books", True) else [])]
    over = max(peaks) - row["limit_bytes"]
    left = row["left_bytes"] + row["left_in_ledger_bytes"]
    return [
        (f"{max(0, over)} over{' in the ledger' if 0 < over == peaks[0] - row['limit_bytes'] else ''}", over <= 0),
        (f"{left} left, {row['operations']:,} operations, {row['kills']} SIGKILLs", left == 0),
    ]


def load(figures: Figures) -> list[Reading]:
    added = figures["memory"]["load"]["shim_ms"] - figures["memory"]["load"]["native_ms"]
    return [(f"{added:.2f} ms", added <= 2)]


def allocate(figures: Figures) -> list[Reading]:
    calls = [row for row in figures["manager"]["calls"] if row["call"].startswith("Allocate")]
    return [(f"{row['call']} p99 {row['own_p99_ms']:.2f} ms", row["own_p99_ms"] <= 5) for row in calls]


def registered(figures: Figures) -> list[Reading]:
    start = figures["manager"]["start_to_registered_s"]
    return [(f"{kind.replace('_', ' ')} {start[kind]:.2f} s", start[kind] <= 1.5) for kind in ("most", "with_shares")]


def footprint(figures: Figures) -> list[Reading]:
    most = max(figures["manager"]["resident_mib"].values())
    idle = figures["manager"]["idle_cpu_percent"]
    return [(f"{most:.0f} MiB", most <= 80), (f"{idle:.2f} % of a core", idle <= 1)]


def kills(figures: Figures) -> list[Reading]:
    tally = figures["manager_kill"]
    bad = [(f"{len(tally[what])} {what}", not tally[what]) for what in ("doubled", "lost", "leaked", "refused")]
    return [(f"{tally['cycles']} cycles, {tally['kills']} kills", tally["cycles"] >= 1000), *bad]


def tenants(figures: Figures) -> list[Reading]:
    without, beside = figures["manager_tenants"]["rows"]
    more, most = (
        beside["cpu_percent"] - without["cpu_percent"],
        max(row["resident_mib"] for row in (without, beside)),
    )
    pods, files = beside["tenants"], beside["open_files"]
    asked = pods >= 110 and files >= 60_000
    return [
        (f"{more:.2f} % of a core for {files} files", asked and more <= 1),
        (f"{most:.0f} MiB beside {pods} contexts", asked and most <= 80),
    ]


def burst(figures: Figures) -> list[Reading]:
    burst = max(figures["kube"]["bursts"], key=lambda row: int(row["asked"]))
    wrong = burst["mismatches"]
    return [
        (f"{len(wrong)} mismatches of {burst['seen']} pods", not wrong),
        (f"{burst['asked']} asked", burst["asked"] >= 200 and burst["seen"] == burst["asked"]),
    ]


def _filters(figures: Figures, names: int) -> list[dict[str, Any]]:
    """The rows of 5,000 empty nodes with 8 cards each, by connections."""
    wanted = {"nodes": 5000, "cards": 8, "pods": 0, "names": names}
    rows = [row for row in figures["extender"]["rows"] if wanted.items() <= row.items()]
    if not rows:
        raise NotMeasured("extender ran on smaller clusters only")
    return sorted(rows, key=lambda row: int(row["connections"]))


def filter_all_names(figures: Figures) -> list[Reading]:
    row = _filters(figures, 5000)[0]
    return [
        (f"p50 {row['p50_ms']:.2f} ms", row["p50_ms"] <= 0.4),
        (f"p99 {row['p99_ms']:.2f} ms", row["p99_ms"] <= 1.2),
    ]


def decisions(figures: Figures) -> list[Reading]:
    return [
        (
            f"{row['decisions_per_second']:.0f}/s, {row['connections']} connections",
            row["decisions_per_second"] >= 3000,
        )
        for row in _filters(figures, 500)
    ]


def pod_cost(figures: Figures) -> list[Reading]:
    row = _filters(figures, 500)[0]
    floor = f"; {row['floor_ms']:.2f} ms of it without any decision" if "floor_ms" in row else ""
    cost = row.get("pod_http2_ms", row["pod_cpu_ms"])
    return [(f"{cost:.2f} ms, {row['names']} names{floor}", cost <= 0.3)]


def holds(figures: Figures) -> list[Reading]:
    """By the lock's holders' processor time: what a light filter sees beside them is the machine's, too."""
    found = figures["extender"]["holds_ms"]
    what, worst = max(found.items(), key=lambda item: item[1]["held"])
    return [(f"{worst['held']:.1f} ms, {what}", worst["held"] <= 20.0)]


def reviews(figures: Figures) -> list[Reading]:
    slowest = max(figures["webhook"]["rows"], key=lambda row: row["p99_ms"])
    return [(f"{slowest['p99_ms']:.1f} ms, {slowest['kind']}", slowest["p99_ms"] <= 10.0)]


def writes(figures: Figures) -> list[Reading]:
    rows = figures["extender"]["rows"]
    each = sum(row["writes"] for row in rows) / sum(row["binds"] for row in rows)
    return [(f"{each:.2f}", each <= 1)]


# What the rows of T34 ask: the first two in the authors' text, the others their own FGD.
PACKING_PERCENT = {"default": 95.2, "gpushare100": 86.6}


def packing(figures: Figures) -> list[Reading]:
    readings = []
    if not figures["extender"]["packing"]:
        raise NotMeasured("extender found no trace")
    for variant, data in figures["extender"]["packing"].items():
        runs = [run["allocated"] for run in data["runs"] if run["policy"] == "fgd"]
        percent, theirs = 100 * sum(runs) / len(runs), data["published_percent"]["FGD"]
        wanted = PACKING_PERCENT.get(variant, theirs)
        text = f"{variant} {percent:.2f} ({percent - theirs:+.2f} to FGD, {len(runs)} seeds)"
        readings.append((text, percent >= max(wanted, theirs + 1)))
    return readings


def prepared(figures: Figures) -> list[Reading]:
    times, tally = figures["claims"]["times"], figures["claims"]["tally"]
    wrong = sum(len(tally[what]) for what in ("doubled", "lost", "leaked", "refused"))
    return [
        (f"{times['p99_ms']:.1f} ms, {times['claims']} claims", times["p99_ms"] <= 10 and times["claims"] >= 200),
        (f"{wrong} doubled, lost, leaked or refused in {tally['cycles']} cycles, {tally['kills']} kills", not wrong),
    ]


CLAIMS_BEHIND_POINTS = 0.5
_VARIANTS = 4  # of the public trace


def claims_packing(figures: Figures) -> list[Reading]:
    rows = figures["claims_packing"]["rows"]
    built = [row for row in rows if row["way"] != rows[-1]["way"]]
    if not built:
        raise NotMeasured("claims_packing found no trace")
    readings = [
        (
            f"{row['variant']} {row['allocated']:.2f} ({-row['behind']:+.2f}, {row['seeds']} seeds)",
            row["behind"] <= CLAIMS_BEHIND_POINTS,
        )
        for row in built
    ]
    if len(built) < _VARIANTS:
        readings.append((f"{len(built)} of {_VARIANTS} variants", False))
    return readings


def throughput(figures: Figures) -> list[Reading]:
    ratios = figures["kube"]["ratios"]
    lifted, default = ratios["throughput"], ratios["throughput, default limit"]
    return [
        (f"{lifted:.3f} with kube-scheduler's request limits lifted", lifted >= 0.8),
        (f"{default:.3f} with its default limits", default >= 0.8),
    ]


def faults(figures: Figures) -> list[Reading]:
    tally = figures["extender_faults"]
    bad = [
        (f"{len(tally[what])} {text}", not tally[what])
        for what, text in (
            ("double_bookings", "doubled"),
            ("stale", "stale"),
            ("waiting_with_room", "waiting where there is room"),
        )
    ]
    return [(f"{tally['pods']:,} pods", tally["pods"] >= 10_000 and tally["finished"]), *bad]


def demo(figures: Figures) -> list[Reading]:
    seconds = figures["product"]["demo_seconds"]
    return [(f"{seconds:.0f} s until the demo has ended", seconds <= 120)]


def suite(figures: Figures) -> list[Reading]:
    row = figures["product"]
    return [
        (
            f"{row['test_seconds']:.0f} s, {row['tests_passed']} passed",
            row["test_seconds"] <= 600 and not row.get("tests_failed"),
        )
    ]


def coverage(figures: Figures) -> list[Reading]:
    row = figures["product"]
    if row.get("coverage_skipped"):
        raise NotMeasured(row["coverage_skipped"])
    return [
        (f"Python's branches {row['python_branches_percent']:.1f} %", row["python_branches_percent"] >= 90),
        (f"C's lines {row['c_lines_percent']:.1f} %", row["c_lines_percent"] >= 85),
    ]
