"""Every target with what the programs measured of it and a verdict: the table at the head of the report."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from benchmarks import _readings

CARD_RUN = "_on_card"  # what follows a program's name in the name of its run on a real card


@dataclass(frozen=True)
class Target:
    """One row: `programs` say which figures `read` takes; with `card` there is a second row, of a real card.

    `card_only`: no figure of the simulated card says anything about it.
    """

    name: str
    what: str
    target: str
    programs: tuple[str, ...]
    read: Callable[[_readings.Figures], list[_readings.Reading]]
    card: bool = False
    card_only: bool = False


@dataclass(frozen=True)
class Verdict:
    """A target with what was measured; `verdict` is `met`, `missed`, or why there is none."""

    name: str
    what: str
    target: str
    measured: str
    verdict: str
    programs: tuple[str, ...] = ()


def run_of(program: str, figures: _readings.Figures | dict[str, object]) -> str:
    """The run of a program on a card, if there is one, else its only one."""
    return program + CARD_RUN if program + CARD_RUN in figures else program


def judge(figures: _readings.Figures, kept: Collection[str] = ()) -> list[Verdict]:
    """All targets in their order, whatever was run; those of a real card behind their twins on the simulated one.

    `kept`: runs of which an earlier report speaks.
    """
    known = dict.fromkeys([*figures, *kept])
    rows: list[Target] = []
    for target in TARGETS:
        rows += [_on_card(target, known)] if target.card_only else [target]
        rows += [_on_card(target, known)] if target.card else []
    return [_verdict(target, figures) for target in rows]


def _on_card(target: Target, known: dict[str, object]) -> Target:
    """The same target judged by figures of a real card only."""
    runs = {name: run_of(name, known) for name in target.programs}

    def read(figures: _readings.Figures) -> list[_readings.Reading]:
        on_card = {name: _readings.real(name, figures[run]) for name, run in runs.items()}
        models = figures.get(run_of("models", figures), {})
        return target.read({**figures, "models": models, **on_card})

    row = replace(target, programs=tuple(runs.values()), read=read)
    return row if target.card_only else replace(row, name=f"{target.name} G", what=f"{target.what}: on a card")


def _verdict(target: Target, figures: _readings.Figures) -> Verdict:
    measured, verdict = _measured(target, figures)
    return Verdict(target.name, target.what, target.target, measured, verdict, target.programs)


def _measured(target: Target, figures: _readings.Figures) -> tuple[str, str]:
    missing = [name for name in target.programs if name not in figures]
    if missing:
        return "-", f"not run: {', '.join(missing)}"
    skipped = [str(figures[name]["skipped"]) for name in target.programs if figures[name].get("skipped")]
    if skipped:
        return "-", f"not measured: {skipped[0]}"
    try:
        readings = target.read(figures)
    except _readings.NotMeasured as reason:
        return "-", f"not measured: {reason}"
    except (KeyError, IndexError, TypeError, ValueError) as error:
        return "-", f"no such figure: {error!r}"
    if not readings:
        return "-", "not measured"
    measured = "; ".join(text if met else f"**{text}**" for text, met in readings)
    return measured, "met" if all(met for _, met in readings) else "missed"


TARGETS = (
    Target(
        "T1",
        "added to a launch, limited and in credit; throughput lost below the cap",
        "p50 ≤ 50 ns, p99 ≤ 200 ns; ≤ 1 %",
        ("throttle",),
        _readings.launch,
        card=True,
    ),
    Target("T2", "added to a launch, unlimited", "p50 ≤ 10 ns", ("throttle",), _readings.unlimited, card=True),
    Target(
        "T3",
        "added to alloc + free",
        "p50 ≤ 400 ns, with 100,000 live too",
        ("memory",),
        _readings.allocation,
        card=True,
    ),
    Target(
        "T4",
        "throughput of a whole-card tenant",
        "≥ 99.5 % of native",
        ("whole_card",),
        _readings.whole,
        card_only=True,
    ),
    Target(
        "T5",
        "share error, caps 5…90, 1 s or 100 × the kernel",
        "≤ 1 point",
        ("throttle",),
        _readings.caps,
        card=True,
    ),
    Target(
        "T6",
        "share error over 100 ms, kernels ≤ 1 ms",
        "≤ 3 points",
        ("throttle",),
        _readings.short_windows,
        card=True,
    ),
    Target("T7", "settled after a step", "≤ 200 ms", ("throttle",), _readings.steps, card=True),
    Target(
        "T8",
        "30/70 and 10/20/30/40 greedy, kernels ≤ 1 ms, 1 s",
        "each within 1 point; sum ≥ 98 % of native",
        ("throttle",),
        _readings.splits,
        card=True,
    ),
    Target("T9", "elastic tenant alone", "≥ 98 % of its limit", ("throttle",), _readings.elastic, card=True),
    Target(
        "T10",
        "short inference, p99 against native alone",
        "≤ 1.05 x alone, ≤ 2 x beside short, ≤ 3 x beside long kernels",
        ("throttle",),
        _readings.inference,
        card=True,
    ),
    Target("T11", "bytes over the limit, bytes leaked", "0, 0", ("memory",), _readings.stress, card=True),
    Target("T12", "load and initialise the shim", "≤ 2 ms over native", ("memory",), _readings.load),
    Target(
        "T20",
        "Allocate, 8 cards, 200 shares, beyond kubelet's replies",
        "p99 ≤ 5 ms",
        ("manager",),
        _readings.allocate,
    ),
    Target("T21", "start to both resources registered", "≤ 1.5 s", ("manager",), _readings.registered),
    Target("T22", "resident memory; idle CPU", "≤ 80 MiB; ≤ 1 % of a core", ("manager",), _readings.footprint),
    Target(
        "T23",
        "kill -9 at random points of 1,000 pod life cycles",
        "0 doubled, lost, leaked",
        ("manager_kill",),
        _readings.kills,
    ),
    Target(
        "T24",
        "200 pods, equal cores, different memory, at once on a real kubelet",
        "0 mismatches",
        ("kube",),
        _readings.burst,
    ),
    Target(
        "T26",
        "audit of 60,000 open files of tenants; 110 pods with live contexts",
        "≤ 1 % of a core more; ≤ 80 MiB",
        ("manager_tenants",),
        _readings.tenants,
    ),
    Target(
        "T27",
        "NodePrepareResources at 200 claims, beyond the API server's answer; kill -9 during 100 cycles",
        "p99 ≤ 10 ms; 0 doubled, lost, leaked",
        ("claims",),
        _readings.prepared,
    ),
    Target(
        "T30",
        "filter over TLS, 5,000 nodes, all names",
        "p50 ≤ 0.4 ms, p99 ≤ 1.2 ms",
        ("extender",),
        _readings.filter_all_names,
    ),
    Target(
        "T31",
        "filter decisions per second, 5,000 nodes, 500 names",
        "≥ 3,000",
        ("extender",),
        _readings.decisions,
    ),
    Target(
        "T36",
        "processor time of the extender per scheduled pod (filter, bind, watch)",
        "≤ 0.3 ms",
        ("extender",),
        _readings.pod_cost,
    ),
    Target(
        "T37",
        "the longest that any request keeps decisions waiting, by processor time",
        "≤ 20 ms",
        ("extender",),
        _readings.holds,
    ),
    Target("T38", "a review of the admission webhook, p99", "≤ 10 ms", ("webhook",), _readings.reviews),
    Target("T32", "API writes per scheduled pod", "1", ("extender",), _readings.writes),
    Target(
        "T33",
        "kube-scheduler's throughput with the extender / without, over TLS, request limits lifted",
        "≥ 0.8 on two shared cores",
        ("kube",),
        _readings.throughput,
    ),
    Target(
        "T34",
        "cards allocated at 100 % arrived load on the public trace",
        "≥ the authors' figures, then beyond their FGD by ≥ 1 point",
        ("extender",),
        _readings.packing,
    ),
    Target(
        "T39",
        "the same for claims (DRA), against node and card by the extender",
        "≤ 0.5 points behind on all four variants",
        ("claims_packing",),
        _readings.claims_packing,
    ),
    Target(
        "T35",
        "two extenders, restarts, API faults, 10,000 pods",
        "0 doubled, 0 stale, 0 waiting where there is room",
        ("extender_faults",),
        _readings.faults,
    ),
    Target("T40", "fresh clone to the demo's table, warm package cache", "≤ 2 min", ("product",), _readings.demo),
    Target("T41", "`make test` on 2 cores", "≤ 10 min", ("product",), _readings.suite),
    Target(
        "T42",
        "branch coverage of Python; line coverage of C",
        "≥ 90 %; ≥ 85 %",
        ("product",),
        _readings.coverage,
    ),
)
