"""Measures the system on a real one-node Kubernetes (kubelab): what our parts cost kube-scheduler, kubelet and a pod's start.

Throughput (T33), over TLS with certificates on both sides: pods are made while kube-scheduler is stopped and bound to nodes that exist as objects only, in turns with and
without the extender, and with a program in its place that decides nothing (_kube_undecided), between the first and the last binding that a watch shows. Start: a pod alone, and many at once, with a share ("share")
and without ("none"), in turns; those at once ask for different memory, and what each holds is read in its container (T24). Beside them, at once, pods with
the devices of a plugin that does nothing but answer ("floor"): what any plugin with as many devices costs kubelet. Allocate: kubelet's own histogram
over the pods with a share. Everything of Kubernetes runs on this machine, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import kubelab
from kube_system import BLOCKS, CORES, System, share_mounts, unmount

from benchmarks import _kube_api, _kube_floor, _kube_shares
from benchmarks._kube_api import PODS, Api, Histogram
from manager.config.settings import Settings
from vcuda.spec import inventory
from vcuda.spec.inventory import Card
from vcuda.spec.names import Names

NAMES = Names()
CARDS = 8
CARD_BYTES = 80 * 2**30
SCHEDULER_ADDRESS = "127.0.0.1:10251"  # in plain HTTP, before 1.23
# kube-scheduler's own limit (50 requests per second) would hide what the extender costs.
UNLIMITED = {"qps": 10000, "burst": 10000}


@dataclass(frozen=True)
class Throughput:
    """One round. Times in milliseconds; `filter_ms` is the extender's own, inside `cycle_ms`; `*_cpu` is processor time per pod.

    `cycle_ms`, `binding_ms`: None where kube-scheduler tells them to nobody without its cluster's word (1.23 and newer).
    """

    extender: bool
    limited: bool
    pods: int
    per_second: float
    cycle_ms: float | None
    binding_ms: float | None
    filter_ms: float
    bind_ms: float
    extender_cpu: float
    scheduler_cpu: float
    server_cpu: float


@dataclass(frozen=True)
class Start:
    """Create to Running in seconds, as a watch of pods sees it; `refused` pods never ran: kubelet's deadlines on a slow machine.

    `*_cpu`: processor time per pod in milliseconds, of the whole machine (others' work, too), the daemon and the extender;
    `shims_cpu` with the runc that they call, which mounts and makes device nodes.
    """

    kind: str
    what: str
    pods: int
    refused: int
    p50_s: float
    p99_s: float
    most_s: float
    machine_cpu: float
    daemon_cpu: float
    extender_cpu: float
    kubelet_cpu: float
    containerd_cpu: float
    shims_cpu: float
    server_cpu: float
    etcd_cpu: float


@dataclass(frozen=True)
class Asked:
    """Requests to the API server for each pod of a burst, whoever sent them, until all ran."""

    kind: str
    request: str
    none: float
    floor: float
    share: float


@dataclass(frozen=True)
class Allocate:
    """Seconds of one Allocate call; quantiles are straight lines within the histogram's buckets."""

    seen_by: str
    calls: int
    mean_ms: float
    p50_ms: float
    p99_ms: float


def hollow_node(name: str) -> dict[str, Any]:
    """A GPU node without a kubelet."""
    cards = tuple(Card(f"GPU-{name}-{number}", number, "Hollow", CARD_BYTES) for number in range(CARDS))
    blocks = sum(card.memory_blocks for card in cards)
    capacity = {"cpu": "128", "memory": "1024Gi", "pods": "1000", NAMES.core: str(100 * CARDS), NAMES.memory: str(blocks)}  # fmt: skip
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {"hollow": "yes"},
            "annotations": {NAMES.inventory: inventory.encode(cards)},
        },
        "status": {"capacity": capacity, "allocatable": capacity},
    }


def pod(name: str, *, share: Names | None = NAMES, hollow: bool = False, blocks: int = 4) -> dict[str, Any]:
    """A pod that sleeps, with a share by these names; on a hollow node it is only bound."""
    limits = {share.core: "3", share.memory: str(blocks)} if share is not None else {}
    container = {
        "name": "main", "image": "busybox:local", "imagePullPolicy": "Never", "command": ["sleep", "3600"],
        "resources": {"requests": {"cpu": "1m"}, "limits": limits},
    }  # fmt: skip
    spec: dict[str, Any] = {"containers": [container], "terminationGracePeriodSeconds": 0}
    if hollow:
        spec |= {"nodeSelector": {"hollow": "yes"}, "tolerations": [{"operator": "Exists"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


class Lab:
    """The cluster with daemon and extender."""

    def __init__(self, system: System) -> None:
        self.system = system
        env = system.lab.environment
        token, ca = Path(env["KUBE_TOKEN_FILE"]).read_text().strip(), Path(env["KUBE_CA"])
        self.api = Api("127.0.0.1", 6443, ca, token)
        self.kubelet = Api("127.0.0.1", 10250, ca, token)
        self._asked: tuple[int, int] | None = None  # port and process of what is asked in place of the extender

    def scheduler(self, *, extender: bool, limited: bool) -> None:
        """Start kube-scheduler anew with a configuration of ours."""
        version = self.system.lab.scheduler_api
        plain = {"healthzBindAddress": SCHEDULER_ADDRESS, "metricsBindAddress": SCHEDULER_ADDRESS}
        configuration: dict[str, Any] = {
            "apiVersion": f"kubescheduler.config.k8s.io/{version}",
            "kind": "KubeSchedulerConfiguration",
            "clientConnection": {"kubeconfig": "@KUBECONFIG@", **({} if limited else UNLIMITED)},
            "leaderElection": {"leaderElect": False},
            "percentageOfNodesToScore": 100,
            **(plain if version == "v1beta1" else {}),
        }
        if extender:
            resources = [{"name": name, "ignoredByScheduler": False} for name in (NAMES.core, NAMES.memory)]
            configuration["extenders"] = [
                {
                    "urlPrefix": f"https://127.0.0.1:{self._asked[0] if self._asked else self.system.extender_port}/scheduler",
                    "enableHTTPS": True,
                    "tlsConfig": self.system.extender_tls,
                    "filterVerb": "filter",
                    "bindVerb": "bind",
                    "nodeCacheCapable": True,
                    "httpTimeout": "15s",
                    "managedResources": resources,
                }
            ]
        # Keys on lines of their own, which kubelab looks for; JSON is YAML.
        lines = [f"{key}: {json.dumps(value)}" for key, value in configuration.items()]
        file = self.system.folder / "scheduler.yaml"
        file.write_text("\n".join([*lines, ""]))
        self.system.lab.call("restart-scheduler", SCHED_CONFIG=str(file), EXTENDER_YAML="")

    @contextlib.contextmanager
    def undecided(self) -> Iterator[None]:
        """Meanwhile kube-scheduler asks what decides nothing, in place of the extender."""
        kubeconfig, tls = self.system.lab.environment["KUBECONFIG"], self.system.extender_tls
        command = [sys.executable, "-m", "benchmarks._kube_undecided", kubeconfig, tls["certFile"], tls["keyFile"], tls["caFile"]]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                self._asked = int(process.stdout.readline()), process.pid
                yield
            finally:
                self._asked = None
                process.terminate()

    def scheduler_metrics(self) -> str | None:
        if self.system.lab.scheduler_api != "v1beta1":
            return None
        return _kube_api.fetch(f"http://{SCHEDULER_ADDRESS}/metrics")

    def processor_ms(self) -> dict[str, float]:
        """Processor time so far: of the whole machine, of our programs, and of the cluster's."""
        extender = self._asked[1] if self._asked else self.system.pid("extender")
        pids = {"extender": extender, "manager": self.system.pid("manager")}
        for name in ("kube-scheduler", "kube-apiserver", "kubelet", "containerd", "etcd"):
            file = Path(self.system.lab.environment["KUBELAB_DIR"]) / f"run/{name}.pid"
            pids[name] = int(file.read_text().split()[0])
        ticks = os.sysconf("SC_CLK_TCK")
        user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
        found = {"machine": 1e3 * (user + nice + system) / ticks}
        for name, pid in pids.items():
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found[name] = 1e3 * (int(words[11]) + int(words[12])) / ticks
        found["shims"] = 1e3 * sum(self.shims()) / ticks
        return found

    def shims(self) -> Iterator[int]:
        """Ticks of each shim that is there, with what it has waited for."""
        ours = os.fsencode(self.system.lab.environment["CONTAINERD_SOCK"])
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                name, _, rest = (process / "stat").read_text().partition("(")[2].rpartition(")")
                if name == "containerd-shim" and ours in (process / "cmdline").read_bytes().split(b"\0"):
                    yield sum(map(int, rest.split()[11:15]))

    def wait_ended(self) -> None:
        """Until the pods before have left nothing: kubelet removes dead containers once a minute, and whatever is started meanwhile pays for it."""
        command = shlex.split(self.system.lab.environment["CTR"])

        def nothing() -> bool:
            left = subprocess.run([*command, "containers", "ls", "-q"], capture_output=True, check=True, timeout=30)
            return not left.stdout.strip() and not any(True for _ in self.shims())

        kubelab.eventually("no container is left", nothing, 240, every=2.0)
        _kube_api.wait_quiet(self.kubelet)

    def extender_metrics(self) -> str:
        return self.system.get(self.system.extender_probe_port, "/metrics")

    def wait_free(self, cores: int) -> None:
        free = f"vcuda_extender_free_cores {cores}.0"
        kubelab.eventually(f"the extender says {free}", lambda: free in self.extender_metrics(), 120)


@contextlib.contextmanager
def cluster() -> Iterator[Lab]:
    """Raises kubelab.Unavailable where there is none."""
    kubelab.script()
    with contextlib.ExitStack() as undo:
        folder = Path(
            tempfile.mkdtemp(prefix="vk-")
        )  # as short as /etc/gpu-manager: kubelet prints each answer's bytes
        undo.callback(shutil.rmtree, folder)
        share_mounts(folder)
        undo.callback(unmount, folder)
        lab = kubelab.KubeLab.up(KUBELET_EXTRA_ARGS="--kube-api-qps=100 --kube-api-burst=200")
        undo.callback(lab.down)
        system = System(lab, folder)
        undo.callback(system.stop)
        system.start(f"--allocation-check-period={Settings().allocation_check_period}")  # that of tests is shorter
        yield Lab(system)


def throughput(
    lab: Lab, nodes: int, pods: int, rounds: int, *, floor: bool
) -> tuple[list[Throughput], list[Throughput]]:
    """Rounds with and without the extender, in turns; one more pair under kube-scheduler's default request limit.

    And where there is a `floor`, in turns with them, rounds with what decides nothing in place of the extender.
    """
    lab.api.create_all("/api/v1/nodes", [hollow_node(f"hollow-{number}") for number in range(nodes)])
    free = CORES + nodes * CARDS * 100
    found: list[Throughput] = []
    undecided: list[Throughput] = []

    def add(rows: list[Throughput], *, extender: bool, limited: bool) -> None:
        rows.append(_round(lab, pods, extender=extender, limited=limited))
        lab.api.delete_pods()
        lab.wait_free(free)

    try:
        lab.wait_free(free)
        for limited in (False, True):
            for _ in range(min(1, rounds) if limited else rounds):
                for extender in (False, True):
                    add(found, extender=extender, limited=limited)
                if floor and not limited:
                    with lab.undecided():
                        add(undecided, extender=True, limited=limited)
    finally:
        lab.api.send("DELETE", "/api/v1/nodes?labelSelector=hollow%3Dyes")
    lab.wait_free(CORES)
    return found, undecided


def _round(lab: Lab, pods: int, *, extender: bool, limited: bool) -> Throughput:
    lab.system.lab.call("stop", "kube-scheduler")
    lab.api.create_all(PODS, [pod(f"bound-{number}", hollow=True) for number in range(pods)])
    before = lab.extender_metrics()
    watch = lab.api.watch_pods()
    lab.scheduler(extender=extender, limited=limited)
    processor = lab.processor_ms()
    watch.wait("all pods are bound", lambda: len(watch.bound) >= pods, 300)
    watch.close()
    spent = {name: (now - processor[name]) / pods for name, now in lab.processor_ms().items()}
    seen = sorted(watch.bound.values())
    scheduler, after = lab.scheduler_metrics(), lab.extender_metrics()
    own = {verb: _since(before, after, "vcuda_extender_request_seconds", verb=verb) for verb in ("filter", "bind")}  # fmt: skip

    def step(name: str) -> float | None:
        return None if scheduler is None else 1e3 * _kube_api.histogram(scheduler, f"scheduler_{name}_seconds").mean

    return Throughput(
        extender, limited, pods, (pods - 1) / (seen[-1] - seen[0]), step("scheduling_algorithm_duration"),
        step("binding_duration"), *(1e3 * own[verb].mean for verb in ("filter", "bind")),
        spent["extender"], spent["kube-scheduler"], spent["kube-apiserver"],
    )  # fmt: skip


def _since(before: str, after: str, name: str, **labels: str) -> Histogram:
    return _kube_api.histogram(after, name, **labels).since(_kube_api.histogram(before, name, **labels))


@dataclass(frozen=True)
class Burst:
    """Pods with equal cores and different memory at once: how many were asked for, how many ran, who holds another share."""

    asked: int
    seen: int
    mismatches: list[str]


@dataclass
class Runs:
    """Pods of one sort, of all rounds."""

    asked: int = 0
    seconds: list[float] = field(default_factory=list)
    cpu_ms: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    requests: Counter[str] = field(default_factory=Counter)

    def row(self, kind: str, what: str) -> Start:
        ordered = sorted(self.seconds)
        parts = ("machine", "manager", "extender", "kubelet", "containerd", "shims", "kube-apiserver", "etcd")
        return Start(
            kind, what, len(ordered), self.asked - len(ordered), statistics.median(ordered),
            ordered[math.ceil(0.99 * len(ordered)) - 1], ordered[-1], *(self.cpu_ms[part] / self.asked for part in parts),
        )  # fmt: skip


def starts(
    lab: Lab, alone: int, bursts: list[int], rounds: int, *, floor: bool
) -> tuple[list[Start], list[Burst], list[Asked]]:
    """One pod after the other, then each number of them at once, in turns with a share and without, then the floor."""
    runs: dict[tuple[str, str], Runs] = {}

    def run(count: int, kind: str, what: str) -> None:
        _run(lab, count, what, runs.setdefault((kind, what), Runs()))

    for _ in range(alone):
        for what in ("none", "share"):
            run(1, "alone", what)
    for count in bursts:
        for number in range(rounds):
            # Who comes later finds more of everything.
            for what in ("none", "share") if number % 2 == 0 else ("share", "none"):
                run(count, f"{count} at once", what)
    if floor:
        with _floor(lab):
            for count in bursts:
                for _ in range(rounds):
                    run(count, f"{count} at once", "floor")
    held = [runs[f"{count} at once", "share"] for count in bursts]
    return (
        [found.row(kind, what) for (kind, what), found in _in_order(runs)],
        [Burst(found.asked, len(found.seconds), found.wrong) for found in held],
        [row for count in bursts for row in _asked(f"{count} at once", runs)],
    )


def _in_order(runs: Mapping[tuple[str, str], Runs]) -> list[tuple[tuple[str, str], Runs]]:
    """By kind as they were begun, and of each kind none, floor, share."""
    kinds = list(dict.fromkeys(kind for kind, _ in runs))
    return sorted(runs.items(), key=lambda item: (kinds.index(item[0][0]), item[0][1] != "none", item[0][1]))


def _asked(kind: str, runs: Mapping[tuple[str, str], Runs]) -> Iterator[Asked]:
    """The kinds of requests of which there was one for every fifth pod or more, the most frequent first."""
    per_pod = {
        what: {name: number / found.asked for name, number in found.requests.items()}
        for (of, what), found in runs.items()
        if of == kind
    }
    for name in sorted(per_pod["share"], key=lambda name: -per_pod["share"][name]):
        numbers = [per_pod.get(what, {}).get(name, 0.0) for what in ("none", "floor", "share")]
        if max(numbers) >= 0.2:
            yield Asked(kind, name, *numbers)


@contextlib.contextmanager
def _floor(lab: Lab) -> Iterator[None]:
    """The plugin that does nothing but answer, as one pod with a share was answered."""
    lab.api.create_all(PODS, [pod("pattern")])

    def runs() -> str | None:
        shown = lab.api.get(f"{PODS}/pattern")
        return shown["metadata"]["uid"] if shown["status"].get("phase") == "Running" else None

    uid = kubelab.eventually("the pod runs whose answer is the floor's", runs, 60)
    plugins = Path(lab.system.lab.environment["KUBELET_ROOT"]) / "device-plugins"
    given = _kube_floor.answers(plugins, uid, lab.system.folder / "vm" / "floored")
    _end_pods(lab)
    cards = [Card(f"GPU-floor-{number}", number, "Floor", CARD_BYTES) for number in range(CARDS)]
    with _kube_floor.served(plugins, cards, given):

        def offered() -> bool:
            has = lab.system.node()["status"]["allocatable"]
            return (has.get(_kube_floor.NAMES.core), has.get(_kube_floor.NAMES.memory)) == (str(CORES), str(BLOCKS))

        kubelab.eventually("the node offers the floor's devices", offered, 60)
        yield


def _run(lab: Lab, count: int, what: str, into: Runs) -> None:
    """Seconds from the first create to Running for each pod, and which of them hold another share than they asked for."""
    if count > 1:  # one pod that ends costs too little to wait for it each time
        lab.wait_ended()
    names = {"none": None, "floor": _kube_floor.NAMES, "share": NAMES}[what]
    watch = lab.api.watch_pods()
    asked = lab.api.requests()
    before, began = lab.processor_ms(), time.monotonic()
    lab.api.create_all(PODS, [pod(f"started-{number}", share=names, blocks=1 + number % 20) for number in range(count)])  # fmt: skip
    watch.wait("all pods run", lambda: len(watch.running | watch.failed) >= count, 600)
    watch.close()
    into.asked += count
    into.seconds += [at - began for at in watch.running.values()]
    into.cpu_ms.update({name: now - before[name] for name, now in lab.processor_ms().items()})
    into.requests.update(lab.api.requests() - asked)
    if what == "share":
        shown = [item for item in lab.api.get(PODS)["items"] if item["metadata"]["name"] in watch.running]
        into.wrong += _kube_shares.mismatches(shown, _kube_shares.mounted(), NAMES)
    _end_pods(lab)


def _end_pods(lab: Lab) -> None:
    lab.api.delete_pods()
    kubelab.eventually("the daemon has no bookings", lambda: not lab.system.bookings(), 240)


def kubelet_allocate(lab: Lab) -> dict[str, Histogram]:
    text = lab.kubelet.send("GET", "/metrics").decode()
    name = "kubelet_device_plugin_alloc_duration_seconds"
    return {kind: _kube_api.histogram(text, name, resource_name=kind) for kind in (NAMES.core, NAMES.memory)}


def daemon_allocate(lab: Lab) -> Histogram:
    text = lab.system.get(lab.system.manager_port, "/metrics")
    return _kube_api.histogram(text, "vcuda_manager_allocate_seconds")


def _row(seen_by: str, found: Histogram) -> Allocate:
    return Allocate(seen_by, found.count, 1e3 * found.mean, 1e3 * found.quantile(0.5), 1e3 * found.quantile(0.99))  # fmt: skip


def machine(lab: Lab) -> dict[str, str]:
    info = lab.system.node()["status"]["nodeInfo"]
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return {
        "processor": f"{os.cpu_count()} × {model[1] if model else platform.machine()}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "kubernetes": info["kubeletVersion"],
        "runtime": info["containerRuntimeVersion"],
        "driver": "simulated",
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def ratio(rows: list[Throughput], *, limited: bool, floor: Sequence[Throughput] = ()) -> float:
    """Pods bound per second with the extender, as a part of those without: medians of all rounds (T33: at least 0.8).

    `floor`: rounds in place of those with the extender.
    """
    rates = {
        extender: statistics.median(
            row.per_second
            for row in (floor if floor and extender else rows)
            if (row.extender, row.limited) == (extender, limited)
        )
        for extender in (False, True)
    }
    return rates[True] / rates[False]


def start_ratios(rows: Sequence[Start]) -> Iterator[tuple[str, float]]:
    """Medians of create to Running: with a share by those without; the floor by those without, and what is ours above it."""
    p50 = {(row.kind, row.what): row.p50_s for row in rows}
    for kind in dict.fromkeys(row.kind for row in rows):
        yield f"start, {kind}", p50[kind, "share"] / p50[kind, "none"]
        if (kind, "floor") in p50:
            yield f"start, {kind}, floor", p50[kind, "floor"] / p50[kind, "none"]
            yield f"start, {kind}, share by floor", p50[kind, "share"] / p50[kind, "floor"]


def show(title: str, rows: list[Any]) -> None:
    if not rows:
        return
    table = Table(title=title, title_justify="left")
    for column in asdict(rows[0]):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in asdict(row).values()))  # fmt: skip
    Console(width=170).print(table)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with cluster() as lab:
        about = machine(lab)
        bound, undecided = throughput(lab, options.nodes, options.pods, options.rounds, floor=options.floor)
        lab.scheduler(extender=True, limited=False)
        before, own = kubelet_allocate(lab), daemon_allocate(lab)
        started, bursts, asked = starts(lab, options.alone, options.bursts, options.burst_rounds, floor=options.floor)
        allocate = [_row(f"kubelet, {kind}", found.since(before[kind])) for kind, found in kubelet_allocate(lab).items()]  # fmt: skip
        allocate.append(_row("the daemon, both", daemon_allocate(lab).since(own)))
    result: Mapping[str, Any] = {
        "machine": about,
        "throughput": bound,
        "undecided": undecided,
        "start": started,
        "bursts": bursts,
        "asked": asked,
        "allocate": allocate,
        "ratios": {
            **({"throughput": ratio(bound, limited=False)} if bound else {}),
            **({"throughput, default limit": ratio(bound, limited=True)} if bound else {}),
            **({"throughput, nothing decided": ratio(bound, limited=False, floor=undecided)} if undecided else {}),
            **dict(start_ratios(started)),
        },
    }
    return dict(result)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.kube", description=__doc__)
    parser.add_argument("--nodes", type=int, default=50, help="nodes to bind to (default %(default)s)")
    parser.add_argument("--pods", type=int, default=500, help="pods bound per round (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds each way (default %(default)s; 0: none)")
    parser.add_argument("--alone", type=int, default=30, help="pods started one by one (default %(default)s)")
    parser.add_argument(
        "--bursts", type=int, nargs="+", default=[40, 200], help="pods started at once (default 40 200)"
    )
    parser.add_argument("--burst-rounds", type=int, default=2, help="rounds each way of those (default %(default)s)")
    parser.add_argument(
        "--floor",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="rounds with an extender that decides nothing, and bursts with a plugin that does nothing but answer, too (default: yes)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer of everything")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    if options.quick:
        options.pods, options.rounds, options.alone, options.bursts, options.burst_rounds = 200, 2, 6, [40], 1
    try:
        result = measure(options)
    except kubelab.Unavailable as error:
        print(f"not measured: {error}")
        return 0
    print(", ".join(f"{key} {value}" for key, value in result["machine"].items()) + "\n")
    show("kube-scheduler's throughput: pods bound per second (T33, over TLS: with / without at least 0.8 on two shared processors)", result["throughput"])  # fmt: skip
    show("the same, asking what decides nothing in place of the extender", result["undecided"])
    show("create to Running", result["start"])
    show("requests to the API server for each pod", result["asked"])
    show("one Allocate call (T20's whole; a container makes two)", result["allocate"])
    for burst in result["bursts"]:
        print(f"\n{burst.asked} pods with equal cores and different memory at once: {burst.seen} ran, {len(burst.mismatches)} mismatches (T24: 0)")  # fmt: skip
        print("".join(f"{sentence}\n" for sentence in burst.mismatches))
    for name, value in result["ratios"].items():
        print(f"ratio of {name}: {value:.3f}")
    if options.json:
        plain = {
            key: [asdict(row) for row in value] if isinstance(value, list) else value for key, value in result.items()
        }
        options.json.write_text(json.dumps(plain, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
