"""The demonstration's course: start the cluster, apply the examples, watch and measure, judge."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live

from localcluster import api as apis
from localcluster.apiserver.table import pod_state
from localcluster.cluster import Cluster, ClusterOptions
from localcluster.demo import checks, scenario, view
from localcluster.demo.checks import Finding, Period
from localcluster.demo.measure import Meter, Sample
from localcluster.demo.scenario import DemoPod, Expect

_SAMPLE_SECONDS = 0.5
_LINE_SECONDS = 2.0
_SETTLE_SECONDS = 2.0
_START_SECONDS = 60.0
# States that waiting does not cure.
_HOPELESS = ("CrashLoopBackOff", "Error", "Completed", "UnexpectedAdmissionError", "Failed", "StartError")
# The simulated card goes by the kernels' names; a real one runs their code, which takes the same time.
_KERNEL_NS = {"spin_500us": 500_000, "spin_1000us": 1_000_000}


@dataclass(frozen=True)
class DemoOptions:
    """What the command line may change of the demonstration."""

    seconds: float = 12.0
    json_file: Path | None = None
    manifests: tuple[Path, ...] = ()


class Demo:
    """One run of the demonstration on a console."""

    def __init__(self, options: DemoOptions, cluster_options: ClusterOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._begin = time.monotonic()
        manifests = scenario.load_manifests(list(options.manifests) or [cluster_options.working_directory])
        self._pods = [scenario.describe(manifest) for manifest in manifests]
        self._cluster = Cluster(cluster_options, self._say)
        self._meter = Meter(self._cluster)
        self._previous: Sample | None = None

    @property
    def _draws(self) -> bool:
        """Whether a table can be drawn again and again in its place."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def _say(self, text: str) -> None:
        self._console.print(
            f"[{time.monotonic() - self._begin:5.1f} s] {text}", highlight=False, markup=False, soft_wrap=True
        )

    def run(self) -> int:
        """0 if every limit held, 1 if not. Raises what the cluster raises when it can't start."""
        with self._cluster:
            for name, time_ns in _KERNEL_NS.items():
                self._cluster.machine.set_kernel_time(name, time_ns)
            self._say(
                f"{len(self._cluster.machine.cards)} simulated cards, gpu-manager and gpu-scheduler-extender are ready"
            )
            for pod in self._pods:
                self._cluster.api.call("POST", "/api/v1/namespaces/default/pods", pod.manifest)
            self._say(f"applied {', '.join(pod.name for pod in self._pods)}")
            period, last_rows = self._watch()
            logs = {pod.name: self._log(pod) for pod in self._pods}
        found = checks.findings(self._pods, period, logs, self._cluster.options.card_bytes)
        self._summary(period, last_rows, found, logs)
        self._write_json(period, found)
        return 0 if all(finding.held or finding.note for finding in found) else 1

    # --- watch ---
    def _watch(self) -> tuple[Period, list[view.Row]]:
        if self._draws:
            with Live(console=self._console, auto_refresh=False) as live:
                return self._follow(
                    lambda title, rows: live.update(view.table(title, rows, self._console.width), refresh=True),
                    _SAMPLE_SECONDS,
                )

        def show(title: str, rows: list[view.Row]) -> None:
            self._say(title)
            for line in view.lines(rows):
                self._console.print(line, highlight=False, markup=False, soft_wrap=True)

        return self._follow(show, _LINE_SECONDS)

    def _follow(
        self, show: Callable[[str, list[view.Row]], None], show_seconds: float
    ) -> tuple[Period, list[view.Row]]:
        deadline = time.monotonic() + _START_SECONDS
        sample = self._step("waiting for the pods", show, show_seconds)
        while not self._settled(sample) and time.monotonic() < deadline:
            sample = self._step("waiting for the pods", show, show_seconds)
        until = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < until:
            sample = self._step("warming up", show, show_seconds)
        first = middle = sample
        while sample.at - first.at < self._options.seconds:
            title = f"measuring: {sample.at - first.at:.0f} of {self._options.seconds:.0f} s"
            sample = self._step(title, show, show_seconds)
            if sample.at - first.at <= self._options.seconds / 2:
                middle = sample
        period = Period(first, middle, sample)
        return period, view.rows(self._pods, first, sample, self._cluster.machine)

    _shown_at = 0.0

    def _step(self, title: str, show: Callable[[str, list[view.Row]], None], show_seconds: float) -> Sample:
        time.sleep(_SAMPLE_SECONDS)
        self._cluster.check()
        sample = self._meter.sample()
        if time.monotonic() - self._shown_at >= show_seconds:
            self._shown_at = time.monotonic()
            show(title, view.rows(self._pods, self._previous, sample, self._cluster.machine))
            self._previous = sample
        return sample

    def _settled(self, sample: Sample) -> bool:
        """Every pod works on its card, met its limit or was refused; or it never will."""
        for pod in self._pods:
            found = sample.pods[pod.name]
            if pod.expect is Expect.REFUSED:
                done = bool(checks.refusal_of(found))
            elif pod_state(found) in _HOPELESS:
                done = True
            elif pod.expect is Expect.OUT_OF_MEMORY:
                done = checks.OUT_OF_MEMORY in self._log(pod)
            else:
                done = sample.truth[pod.name].launches > 0
            if not done:
                return False
        return True

    def _log(self, pod: DemoPod) -> str:
        path = f"/api/v1/namespaces/default/pods/{pod.name}/log"
        try:
            return self._cluster.api.text("GET", path)
        except apis.ApiFailure:
            return ""  # it has not started, which is shown as its state

    # --- end ---
    def _summary(self, period: Period, last_rows: list[view.Row], found: list[Finding], logs: dict[str, str]) -> None:
        self._console.print()
        if self._draws:
            title = f"Averages over {period.seconds:.1f} s"
            self._console.print(view.table(title, last_rows, self._console.width))
        else:
            self._say(f"averages over {period.seconds:.1f} s")
            for line in view.lines(last_rows):
                self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        failed = [finding for finding in found if not finding.held and not finding.note]
        for finding in found:
            mark = "ok  " if finding.held else "note" if finding.note else "FAIL"
            self._console.print(f"{mark} {finding.pod}: {finding.what}", highlight=False, markup=False, soft_wrap=True)
        for name in sorted({finding.pod for finding in failed}):
            tail = "\n".join(f"    {line}" for line in logs.get(name, "").splitlines()[-8:])
            if tail:
                self._console.print(f"last lines of {name}:\n{tail}", highlight=False, markup=False, soft_wrap=True)
        verdict = "Every limit held." if not failed else f"{len(failed)} statement(s) did not hold."
        self._say(f"{verdict} Everything is stopped and removed.")

    def _write_json(self, period: Period, found: list[Finding]) -> None:
        if self._options.json_file is None:
            return
        document = {
            "seconds": period.seconds,
            "total_seconds": time.monotonic() - self._begin,
            "pods": {
                pod.name: {
                    "expect": str(pod.expect), "cores": pod.cores, "core_limit": pod.core_limit,
                    "memory_limit_bytes": pod.memory_bytes, "share": period.share(pod.name),
                    "peak_bytes": period.last.truth[pod.name].peak_bytes,
                    "launches": period.last.truth[pod.name].launches,
                    "cards": sorted(period.last.truth[pod.name].cards),
                }
                for pod in self._pods if pod.name in period.last.truth
            },
            "findings": [finding.as_json() for finding in found],
        }  # fmt: skip
        self._options.json_file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def main(options: DemoOptions, cluster_options: ClusterOptions) -> int:
    """Run it on the real console; width is not cut where there is no terminal."""
    console = Console(file=sys.stdout)
    return Demo(options, cluster_options, console).run()
