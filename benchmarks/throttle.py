"""GPU-time limits on whichever card is there: achieved shares against their targets, and what a launch costs.

The truth is the simulated card's own books, or the kernels that ended on a real one, never our accounting. Figures of the
simulated card say how well the rules hold in real processes; they say nothing about a real card. Run it alone on an idle machine, from the
repository's root: `python -m benchmarks.throttle [--driver auto|real|simulated] [--json FILE] [--plots FOLDER] [--quick] [--rows TEXT …]`.
Every row is said and written as soon as it is known; SIGTERM ends it with what there is.
Targets: T1, T2, T5 to T10 of docs/compute.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._card import Options, SimulatedCard
from benchmarks._throttle_bench import (
    Bench,
    Load,
    Step,
    Trace,
    about_machine,
    answer_of,
)
from benchmarks._throttle_plot import plot, plot_caps
from benchmarks.launch_cost import launch_cost
from vcuda import region
from vcuda.arbiter import Arbiter
from vcuda.runs.errors import RunError
from vcuda.sim import cards

CAPS = (5, 10, 30, 50, 90)
KERNELS: dict[str, Options] = {
    "kernels of 10 us": {"kernel": "spin_10us"},
    "kernels of 1 ms": {"kernel": "spin_1000us"},
    "a graph of 20 x 100 us": {"kernel": "spin_100us", "graph": 20},
}
IDLE_TENANTS = (64, 200)
SPLITS = ((30, 70), (10, 20, 30, 40))
LONG_KERNEL = "spin_100ms"
GREEDY: Options = {"kernel": "spin_1000us"}
# Longer than a slice of the card: reported.
LONG_KERNELS: dict[str, Options] = {
    "kernels of 5 ms": {"kernel": "spin_5ms"},
    "kernels of 100 ms": {"kernel": LONG_KERNEL},
}
# The window of a kernel that can't be split: 100 of them.
LONG_SECONDS = 10.0
# On a card that runs every kernel to its end: reported.
# What a load's start, warm-up and end take.
AROUND_SECONDS = 3.5
WHOLE_KERNELS = ("spin_10us", "spin_1000us", "spin_20ms")
TIMINGS = {"default": {}, "second": cards.SECOND_TIMING, "h100": cards.H100_TIMING}
# By kind of kernel and cap: the share in each sample.
Samples = dict[str, dict[int, list[float]]]


@dataclass(frozen=True)
class Row:
    """One measured quantity in points of the card: mean absolute errors over long windows (1 s) and over 100 ms; what was charged for it."""

    what: str
    target: float
    achieved: float
    error_1s: float
    error_100ms: float | None
    charged: float | None = None


@dataclass(frozen=True)
class Settled:
    """How long after a step the share was right (T7); None: not within the trace."""

    what: str
    milliseconds: float | None


def row_of(what: str, target: float, samples: Sequence[float], charged: float | None = None) -> Row:
    seconds = [statistics.fmean(samples[at : at + 10]) for at in range(0, len(samples) - 9, 10)]
    return Row(
        what,
        target,
        statistics.fmean(samples),
        statistics.fmean(abs(value - target) for value in seconds or samples),
        statistics.fmean(abs(value - target) for value in samples),
        charged,
    )


class Stopped(BaseException):
    """SIGTERM came: what was found so far is all there is."""


@dataclass
class Run:
    """What is measured, on what, and what was found so far."""

    bench: Bench
    seconds: float
    quick: bool
    rows: Sequence[str]  # only what has one of these in its name; none: all
    json: Path | None
    result: dict[str, Any]
    over_time: Samples = field(default_factory=dict)
    traces: dict[str, tuple[Trace, dict[str, list[float]]]] = field(default_factory=dict)

    def wants(self, name: str) -> bool:
        return not self.rows or any(text in name for text in self.rows)

    def add(self, row: Row, key: str = "shares") -> None:
        """Say and write a row at once: a lent card may be taken back before the table is whole."""
        self.result.setdefault(key, []).append(dataclasses.asdict(row))
        self.save()  # first: whoever reads of it may end us
        charged = "" if row.charged is None else f" (charged {row.charged:.2f})"
        print(
            f"  {row.what}: {row.achieved:.2f} of {row.target:.0f}{charged}",
            file=sys.stderr,
            flush=True,
        )

    def save(self) -> None:
        if self.json:
            self.json.write_text(json.dumps(self.result, indent=1) + "\n")


def caps(run: Run) -> None:
    run.over_time = {title: {} for title in KERNELS}
    for title, options in KERNELS.items():
        name = f"cap alone, {title}"
        for cap in CAPS[2:3] if run.quick and "graph" in options else CAPS:
            if run.wants(name):
                samples, _ = run.bench.run([Load(cap, options)], run.seconds, shared=False)
                run.add(row_of(name, cap, samples[0], run.bench.charged[0]))
                run.over_time[title][cap] = samples[0]
    for cap in CAPS[2:3] if run.quick else CAPS:
        name = "cap alone, kernels of 100 ms (over 10 s)"
        if run.wants(name):
            samples, _ = run.bench.run([Load(cap, {"kernel": LONG_KERNEL})], LONG_SECONDS, shared=False)
            got = statistics.fmean(samples[0])
            run.add(Row(name, cap, got, abs(got - cap), None, run.bench.charged[0]))


def one_by_one(run: Run) -> None:
    """Every launch waited for, so that the card is idle before each: what it is charged shows the launch gap."""
    name = "each launch waited for, kernels of 10 us"
    for cap in CAPS[1:3] if run.wants(name) else ():
        load = Load(cap, {"kernel": "spin_10us", "sync": 1})
        samples, _ = run.bench.run([load], run.seconds, shared=False)
        run.add(row_of(name, cap, samples[0], run.bench.charged[0]))


def splits(run: Run) -> None:
    """Greedy tenants side by side; and what the same programs had together without any share, in the same minute."""
    cases = [(shares, title, options, 1) for shares in SPLITS for title, options in list(KERNELS.items())[:2]]
    if not run.quick:
        cases += [(SPLITS[0], title, options, 2) for title, options in list(KERNELS.items())[:2]]
        cases += [(shares, title, options, 1) for shares in SPLITS for title, options in LONG_KERNELS.items()]
    native = run.result.setdefault("native_sums", {})
    for shares, title, options, processes in cases:
        many = "" if processes == 1 else f", {processes} processes each"
        name = f"{'/'.join(map(str, shares))} greedy, {title}{many}"
        if not run.wants(name):
            continue
        run.bench.card.prepare(options)
        lasts = LONG_SECONDS if options["kernel"] == LONG_KERNEL else run.seconds
        loads = [Load(cores, options, processes=processes) for cores in shares]
        samples, _ = run.bench.run(loads, lasts, shared=True)
        charged = run.bench.charged
        for cores, mine, paid in zip(shares, samples, charged, strict=True):
            run.add(row_of(name, cores, mine, paid))
        together = [sum(parts) for parts in zip(*samples, strict=True)]
        run.add(row_of(f"{name}: sum", 100, together, sum(charged)))
        native[name] = run.bench.native_share([options] * len(shares) * processes, lasts)
        print(f"  {name}: without a share {native[name]:.2f}", file=sys.stderr, flush=True)


def launch_bound(run: Run) -> None:
    """Programs that need half of the card because their host launches no faster, as PyTorch's training of a small model: part of native."""
    options: Options = {"kernel": "spin_10us", "host_us": 17, "sync": 16000}
    cases = {
        "50 alone": ([50], options),
        "of 30/70": ([30, 70], options),
        "beside greedy": ([70, 30], GREEDY),
    }
    if not run.wants("launch-bound"):
        return
    timed = {**options, "seconds": run.seconds}
    native = per_second(run.bench.native(timed))
    found = run.result.setdefault("launch_bound", {})
    alone = run.bench.native_share([options], run.seconds)
    found["two without shares"] = run.bench.native_share([options, options], run.seconds) / (2 * alone)
    print(
        f"  launch-bound, two without shares: {100 * found['two without shares']:.1f} % of native each, alone {alone:.1f} points",
        file=sys.stderr,
        flush=True,
    )
    for title, (shares, other) in cases.items():
        loads = [Load(cores, options if at == 0 or title == "of 30/70" else other) for at, cores in enumerate(shares)]
        samples, answers = run.bench.run(loads, run.seconds, shared=len(loads) > 1)
        for load, answer, got, paid in zip(loads, answers, samples, run.bench.charged, strict=True):
            if load.options is options:
                name = f"{load.cores} {title}" if len(loads) > 1 else title
                found[name] = per_second(answer) / native
                said = f"{100 * found[name]:.1f} % of native, {statistics.fmean(got):.1f} points (charged {paid:.1f})"
                print(f"  launch-bound, {name}: {said}", file=sys.stderr, flush=True)


def per_second(answer: dict[str, Any]) -> float:
    return float(answer["launches"]) / float(answer["seconds"])


def uncut(run: Run) -> None:
    """A cap, a split and short requests on a simulated card that cuts no kernel: one that has begun keeps all others out."""
    if not isinstance(run.bench.card, SimulatedCard):
        return
    folder = Path(run.bench.folder, "uncut")
    folder.mkdir()
    bench = Bench(folder, card=SimulatedCard(folder, run_to_completion=True))
    for kernel in WHOLE_KERNELS:
        if not run.wants(kernel):
            continue
        samples, _ = bench.run([Load(30, {"kernel": kernel})], run.seconds, shared=False)
        run.add(row_of(f"cap alone, {kernel}", 30, samples[0], bench.charged[0]), "uncut_shares")
        samples, _ = bench.run([Load(cores, {"kernel": kernel}) for cores in SPLITS[0]], run.seconds, shared=True)
        for cores, mine, paid in zip(SPLITS[0], samples, bench.charged, strict=True):
            run.add(row_of(f"30/70 greedy, {kernel}", cores, mine, paid), "uncut_shares")
        together = [sum(parts) for parts in zip(*samples, strict=True)]
        run.add(row_of(f"30/70 greedy, {kernel}: sum", 100, together), "uncut_shares")
    if not run.rows:
        run.result["uncut_p99_ms"] = inference(bench, 2 * run.seconds)


def below_the_cap(bench: Bench, seconds: float) -> dict[str, float]:
    """Launches per second of a load that needs half of the card, under a cap of 90, as part of native."""
    loads: dict[str, Options] = {
        "10 us": {"kernel": "spin_10us", "sync": 100, "pause_us": 1000},
        "1 ms": {"kernel": "spin_1000us", "sync": 5, "pause_us": 5000},
    }
    found = {}
    for title, options in loads.items():
        timed = {**options, "seconds": seconds}
        native = bench.native(timed)
        _, environment = bench.share(Load(90), False)
        limited = answer_of(bench.start(environment, timed))
        found[title] = per_second(limited) / per_second(native)
    return found


def steps(bench: Bench) -> tuple[list[Settled], dict[str, tuple[Trace, dict[str, list[float]]]]]:
    """A load starts; a neighbour starts and stops; the limit is changed live. Kernels of 1 ms."""
    options: Options = {"kernel": "spin_1000us", "seconds": 20}
    bench.card.prepare(options)
    traces: dict[str, tuple[Trace, dict[str, list[float]]]] = {}

    def release(process: Any) -> Step:
        return Step(0.5, lambda: (process.stdin.write("go\n"), process.stdin.flush()))

    with Arbiter() as arbiter:
        folder, environment = bench.share(Load(30), False)
        arbiter.add("alone", folder / "vcuda")
        process = bench.start(environment, {**options, "wait": 1})
        limits = region.read_limits(folder / "vcuda")[0]
        wider = dataclasses.replace(limits, cores=60, core_limit=60)
        change = Step(2.5, lambda: region.update(folder / "vcuda", [wider]))
        traces["load starts, limit changes"] = (
            bench.trace([process], 5, [release(process), change]),
            {"30, then 60": [0, 30, 60]},
        )
        process.kill()
        process.communicate()
    with Arbiter() as arbiter:
        processes = []
        for index, load in enumerate((Load(30, core_limit=60), Load(70))):
            folder, environment = bench.share(load, True)
            arbiter.add(str(index), folder / "vcuda")
            processes.append(bench.start(environment, {**options, "wait": 1} if index else options))
        stop = Step(3.5, processes[1].kill)
        start = dataclasses.replace(release(processes[1]), at_s=1.5)
        traces["neighbour starts and stops"] = (
            bench.trace(processes, 6, [start, stop]),
            {"30 up to 60": [60, 30, 60], "70, from time to time": [0, 70, 0]},
        )
        for process in processes:
            process.kill()
            process.communicate()
    alone, together = (trace for trace, _ in traces.values())
    settled = [
        Settled("load starts: 30", alone.settled_ms(0, 30, 0)),
        Settled("limit changed live: 60", alone.settled_ms(0, 60, 1)),
        Settled("neighbour starts: back to 30", together.settled_ms(0, 30, 0)),
        Settled("neighbour starts: its 70", together.settled_ms(1, 70, 0)),
        Settled("neighbour stops: up to 60 again", together.settled_ms(0, 60, 1)),
    ]
    print(*(f"  {each}" for each in settled), sep="\n", file=sys.stderr, flush=True)
    return settled, traces


def lending(run: Run) -> None:
    name = "30 up to 50, alone on a shared card"
    if run.wants(name):
        load = Load(30, {"kernel": "spin_1000us"}, core_limit=50)
        samples, _ = run.bench.run([load], run.seconds, shared=True)
        run.add(row_of(name, 50, samples[0], run.bench.charged[0]))


def inference(bench: Bench, seconds: float) -> dict[str, float]:
    """Bursts of ten 500 us kernels every 50 ms under a 30 % share: p99 in ms."""
    requests: Options = {"kernel": "spin_500us", "sync": 10, "pause_us": 45000}
    found = {"native": bench.native({**requests, "seconds": seconds})["burst_p99_ns"] / 1e6}
    neighbours = {"alone": None, "beside greedy 1 ms": "spin_1000us", "beside greedy 20 ms": "spin_20ms"}
    for title, kernel in neighbours.items():
        loads = [Load(30, requests)] + ([Load(70, {"kernel": kernel})] if kernel else [])
        _, answers = bench.run(loads, seconds, shared=True)
        found[title] = answers[0]["burst_p99_ns"] / 1e6
        print(f"  inference {title}: p99 {found[title]:.2f} ms", file=sys.stderr, flush=True)
    return found


def _inference(run: Run) -> None:
    run.result["inference_p99_ms"] = inference(run.bench, 2 * run.seconds)


def _steps(run: Run) -> None:
    settled, run.traces = steps(run.bench)
    run.result["steps"] = [dataclasses.asdict(step) for step in settled]


def _below_the_cap(run: Run) -> None:
    run.result["below_cap"] = below_the_cap(run.bench, 2 * run.seconds)


def _launch(run: Run) -> None:
    run.result["launch_ns"] = launch_cost(run.bench, 20000 if run.quick else 100000)


def _arbiter(run: Run) -> None:
    run.result["arbiter_percent"] = {tenants: run.bench.idle_arbiter(tenants, 3) for tenants in IDLE_TENANTS}


# In the order of their worth, with how many loads each runs in turn.
PARTS: dict[str, tuple[Callable[[Run], None], int]] = {
    "caps": (caps, 18),
    "splits": (splits, 10),
    "launch-bound": (launch_bound, 4),
    "steps": (_steps, 3),
    "inference": (_inference, 6),
    "lending": (lending, 1),
    "one by one": (one_by_one, 2),
    "launch": (_launch, 2),
    "below the cap": (_below_the_cap, 4),
    "arbiter": (_arbiter, 2),
    "uncut": (uncut, 16),
}
# Parts that choose among their rows by themselves; the others are rows by their title.
CHOOSE = (caps, splits, launch_bound, lending, one_by_one, uncut)


def show(result: dict[str, Any]) -> None:
    about = result["machine"]
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    if about["load_average"] > 0.5:
        print("The machine was not idle: these figures are worse than they would be.")
    print(f"\n{'':52}{'target':>8}{'got':>8}{'|err| 1 s':>11}{'100 ms':>8}{'charged':>9}   points of the card")
    for row in result["shares"]:
        short = f"{row['error_100ms']:8.2f}" if row["error_100ms"] is not None else f"{'-':>8}"
        paid = f"{row['charged']:9.2f}" if row["charged"] is not None else ""
        print(f"{row['what']:52}{row['target']:8.0f}{row['achieved']:8.2f}{row['error_1s']:11.2f}{short}{paid}")
    if "native_sums" in result:
        print("\nthe same programs without any share: sum in points; ours as part of it")
        sums = {row["what"].removesuffix(": sum"): row["achieved"] for row in result["shares"]}
        for title, value in result["native_sums"].items():
            print(f"  {title:50}{value:8.2f}{100 * sums[title] / value:8.1f} %")
    if "launch_bound" in result:
        print("\nprograms whose host launches no faster than half of the card needs, part of native")
        for title, value in result["launch_bound"].items():
            print(f"  {title:20}{100 * value:8.1f} %")
    if "uncut_shares" in result:
        print("\na simulated card that runs every kernel to its end: points of the card")
        for row in result["uncut_shares"]:
            short = f"{row['error_1s']:11.2f}{row['error_100ms']:8.2f}"
            print(f"  {row['what']:50}{row['target']:8.0f}{row['achieved']:8.2f}{short}")
        for title, value in result.get("uncut_p99_ms", {}).items():
            times = value / result["uncut_p99_ms"]["native"]
            print(f"  5 ms of kernels every 50 ms, p99 {title:19}{value:8.2f} ms  {times:.2f} x native")
    if "below_cap" in result:
        print("\nthroughput of a load below its cap, part of native")
        for title, value in result["below_cap"].items():
            print(f"  kernels of {title:12}{100 * value:8.2f} %")
    if "steps" in result:
        print("\nsettled after a step, ms (in steps of 20)")
        for row in result["steps"]:
            shown = "not settled" if row["milliseconds"] is None else f"{row['milliseconds']:.0f}"
            print(f"  {row['what']:40}{shown:>12}")
    if "inference_p99_ms" in result:
        print("\n5 ms of kernels every 50 ms under 30 %, p99 in ms")
        for title, value in result["inference_p99_ms"].items():
            print(f"  {title:24}{value:8.2f}  {value / result['inference_p99_ms']['native']:.2f} x native")
    if "arbiter_percent" in result:
        print("\nan arbiter with idle tenants of one card, % of a processor")
        for tenants, percent in result["arbiter_percent"].items():
            print(f"  {tenants:>4} tenants{percent:12.2f}")
    if "launch_ns" in result:
        show_launch(result["launch_ns"])
    if result.get("stopped"):
        print("\nstopped before the end")
    if "left_out" in result:
        print(f"\nleft out for want of time: {', '.join(result['left_out'])}")


def show_launch(launch_ns: dict[str, dict[str, float]]) -> None:
    print("\none launch on a driver that does nothing, ns")
    base = launch_ns["native"]
    for title, cost in launch_ns.items():
        added = ""
        if title != "native":
            added = f"  adds {cost['p50_ns'] - base['p50_ns']:.0f} / {cost['p99_ns'] - base['p99_ns']:.0f}"
            quiet = cost["quiet_p99_ns"] - base["quiet_p99_ns"]
            added += f"; launches without an event: p99 adds {quiet:.0f}"
        print(f"  {title:24}p50 {cost['p50_ns']:6.0f}   p99 {cost['p99_ns']:6.0f}{added}")


def show_trace(name: str, trace: Trace, titles: Sequence[str]) -> None:
    """The share of every process in each 100 ms from before a step until after it."""
    print(f"\n{name}: % of the card in each 100 ms, from 0.3 s before a step to 0.7 s after it")
    for step in trace.steps_s:
        for index, title in enumerate(titles):
            shares = [trace.share(index, step + at / 10, step + (at + 1) / 10) for at in range(-3, 7)]
            values = [f"{share:6.1f}" for share in shares]
            print(f"  step at {step:4.1f} s  {title:22}{''.join(values[:3])}  |{''.join(values[3:])}")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="throttle", description="GPU-time limits on a card.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw the steps there as PNG (needs matplotlib)")
    parser.add_argument("--quick", action="store_true", help="2 s per figure instead of 5: for a first look")
    parser.add_argument(
        "--rows",
        action="append",
        metavar="TEXT",
        help=f"only rows with TEXT in their name, or parts ({', '.join(PARTS)}); may be given again",
    )
    parser.add_argument(
        "--timing",
        choices=TIMINGS,
        help="on a simulated card of this timing model (docs/simulated-driver.md)",
    )
    parser.add_argument("--driver", choices=("auto", "real", "simulated"), default="auto")
    parser.add_argument(
        "--within",
        type=float,
        metavar="SECONDS",
        help="begin no part that would end later; the worthiest come first",
    )
    options = parser.parse_args(arguments)
    seconds = 2.0 if options.quick else 5.0
    with tempfile.TemporaryDirectory(prefix="vcuda-throttle-") as folder:
        try:
            card = SimulatedCard(Path(folder), knobs=TIMINGS[options.timing]) if options.timing else None
            bench = Bench(Path(folder), options.driver, card)
        except RunError as error:
            print(f"throttle: {error}", file=sys.stderr)
            return 1
        result: dict[str, Any] = {"machine": about_machine(bench.card), "shares": []}
        run = Run(bench, seconds, options.quick, options.rows or (), options.json, result)
        signal.signal(signal.SIGTERM, _stop)
        begun = time.monotonic()
        try:
            for title, (part, loads) in PARTS.items():
                took = time.monotonic() - begun
                if part not in CHOOSE and not run.wants(title):
                    continue
                if options.within is not None and took + loads * (seconds + AROUND_SECONDS) > options.within:
                    run.result.setdefault("left_out", []).append(title)
                    continue
                part(run)
                run.save()
        except Stopped:
            run.result["stopped"] = True
        run.save()
    show(run.result)
    for name, (trace, targets) in run.traces.items():
        show_trace(name, trace, list(targets))
    if options.plots and run.over_time:
        print(plot_caps(options.plots, run.over_time, bench.card.name))
        for name, (trace, targets) in run.traces.items():
            print(plot(options.plots, name, trace, targets))
    else:
        print("\nno plots: give --plots FOLDER")
    return 0


def _stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Stopped


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
