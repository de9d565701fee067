"""What can be broken in a running playground, what one then sees and where, and how it is taken back."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from localcluster import api as apis
from localcluster.apiserver import errors
from localcluster.apiserver.faults import Fault, Request
from localcluster.cluster import Cluster
from localcluster.supervision import NAMESPACE
from vcuda import sim
from vcuda.spec import names, placement

JsonObject = dict[str, Any]
PATH = "/localcluster/breaks"
MANAGER, EXTENDER = "gpu-manager", "gpu-scheduler-extender"
_PODS = "/api/v1/namespaces/default/pods"
_FILL_BYTES = 2**20
_STOP_SECONDS = 15.0
_WITH_ECC_ERROR = 48  # a double-bit error: no application's fault, and the next probe finds the card well again


class BreakFailure(Exception):
    """It can't be broken or mended; the message says why, and what to do."""


@dataclass(frozen=True)
class Sign:
    """What one sees: the words after `python -m localcluster`, and a regular expression that their output then has."""

    command: str
    shows: str


@dataclass(frozen=True)
class Break:
    """One entry of the list. `mend` takes it back, None where the parts mend it themselves; `alert` is the chart's."""

    what: str
    signs: tuple[Sign, ...]
    do: Callable[[Cluster], None]
    mend: Callable[[Cluster], None] | None = None
    alert: str = ""


def _kill(name: str) -> Callable[[Cluster], None]:
    return lambda cluster: cluster.programs[name].daemon.kill()


def _held(name: str, hold: bool) -> Callable[[Cluster], None]:
    def act(cluster: Cluster) -> None:
        program = cluster.programs[name]
        program.hold = hold
        deadline = time.monotonic() + _STOP_SECONDS
        while hold and program.daemon.running and time.monotonic() < deadline:
            time.sleep(0.05)

    return act


def _inject(*faults: sim.Fault) -> Callable[[Cluster], None]:
    return lambda cluster: cluster.machine.inject(*faults)


def _from(request: Request, *programs: str) -> bool:
    return request.headers.get("User-Agent", "") in programs


def _refusing(name: str, hook: Callable[[Request], Fault | None]) -> Callable[[Cluster], None]:
    def act(cluster: Cluster) -> None:
        cluster.faults[name] = hook
        cluster.server.break_watches()

    return act


def _answering(name: str) -> Callable[[Cluster], None]:
    def act(cluster: Cluster) -> None:
        cluster.faults.pop(name)

    return act


def _cut(request: Request) -> Fault | None:
    return Fault(status=0) if _from(request, MANAGER, EXTENDER) else None


def _silent(request: Request) -> Fault | None:
    return Fault(stalled_s=3600.0) if _from(request, EXTENDER) and request.method == "GET" else None


def _unbound(request: Request) -> Fault | None:
    bind = request.method == "POST" and request.path.endswith("/binding")
    return Fault(status=500, message="etcdserver: no leader") if bind and _from(request, EXTENDER) else None


def _pod(
    name: str, command: list[str], cores: int, blocks: int, annotations: dict[str, str] | None = None
) -> JsonObject:
    asked = {names.Names().core: str(cores), names.Names().memory: str(blocks)}
    container = {"name": "main", "image": "any", "command": command, "resources": {"limits": asked}}
    return {
        "metadata": {"name": name, "annotations": annotations or {}},
        "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]},
    }


def _apply(cluster: Cluster, pod: JsonObject) -> None:
    try:
        cluster.api.call("POST", _PODS, pod)
    except apis.ApiFailure as error:
        raise BreakFailure(f"pod {pod['metadata']['name']} can't be made: {error}") from error


def _delete(name: str) -> Callable[[Cluster], None]:
    def act(cluster: Cluster) -> None:
        with contextlib.suppress(apis.ApiFailure):
            cluster.api.call("DELETE", f"{_PODS}/{name}")

    return act


def _tries(name: str, command: list[str] | None = None) -> Callable[[Cluster], None]:
    return lambda cluster: _apply(cluster, _pod(name, command or ["sleep", "3600"], 1, 1))


def _both(*acts: Callable[[Cluster], None]) -> Callable[[Cluster], None]:
    def act(cluster: Cluster) -> None:
        for one in acts:
            one(cluster)

    return act


def _fill(cluster: Cluster) -> None:
    if cluster.disk_bytes is None:
        raise BreakFailure("the node has no disk of its own here: mounting a small one needs root; run `up` as root")
    with (cluster.node_directory / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (_FILL_BYTES, 4096):
            with contextlib.suppress(OSError):
                while file.write(b"\0" * size) == size:
                    pass


def _empty(cluster: Cluster) -> None:
    (cluster.node_directory / "filler").unlink(missing_ok=True)


def _damage(cluster: Cluster) -> None:
    file = cluster.node_directory / "checkpoint" / "state.json"
    descriptor = os.open(file, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        os.pwrite(descriptor, b"\0" * 16, 0)
    finally:
        os.close(descriptor)
    cluster.programs[MANAGER].daemon.kill()  # it reads the file when it starts


def _forge(cluster: Cluster) -> None:
    """A pod that says itself where it belongs, and takes more of the card than it asks for."""
    card = cluster.machine.report().cards[0].uuid
    shares = {"main": (placement.CardShare(card, 90, 16),)}
    forged = {names.Names().placement: placement.encode(placement.Placement(shares))}
    pod = _pod("break-forged", ["sleep", "3600"], 1, 1, forged)
    pod["spec"]["nodeName"] = cluster.options.node_name
    _apply(cluster, pod)


BREAKS: dict[str, Break] = {
    "kill-manager": Break(
        "gpu-manager is killed, as by the kernel for memory; pods go on, it starts again and finds them",
        (
            Sign(f"get -n {NAMESPACE}", rf"{MANAGER}-\S+ .*restarts: [1-9]"),
            Sign(f"logs -n {NAMESPACE} --previous {MANAGER}-local", r"registered with kubelet"),
        ),
        _kill(MANAGER),
    ),
    "kill-extender": Break(
        "the extender is killed; what it had decided is in the pods, so it forgets nothing",
        (Sign(f"get -n {NAMESPACE}", rf"{EXTENDER}-\S+ .*restarts: [1-9]"),),
        _kill(EXTENDER),
    ),
    "stop-manager": Break(
        "gpu-manager leaves the node, as when its label is taken; pods go on at their guaranteed part, new ones wait",
        (Sign("nodes", r"vcuda-core 0 of [1-9]"),),
        _held(MANAGER, True),
        _held(MANAGER, False),
        "VcudaDaemonDown",
    ),
    "stop-extender": Break(
        "no extender runs; pods with a share wait",
        (Sign("events", r"FailedScheduling +pod/break-waits .*the extender does not answer"),),
        _both(_held(EXTENDER, True), _tries("break-waits")),
        _both(_held(EXTENDER, False), _delete("break-waits")),
        "VcudaNoLeader",
    ),
    "card-lost": Break(
        "card 0 falls off the bus (Xid 79): it takes no more shares, its pods are told",
        (
            Sign("events", r"CardUnhealthy +node/.*Xid 79"),
            Sign("metrics manager vcuda_card_healthy", r'minor="0".* 0\.0'),
            Sign("metrics manager vcuda_card_xid_errors_total", r'xid="79".* [1-9]'),
        ),
        _inject(sim.CardLost(0)),
        _inject(sim.CardRecovered(0)),
        "VcudaCardUnhealthy",
    ),
    "xid": Break(
        f"card 0 reports Xid {_WITH_ECC_ERROR} (double-bit error) and is well again: a counter keeps what happened",
        (
            Sign("metrics manager vcuda_card_xid_errors_total", rf'xid="{_WITH_ECC_ERROR}".* [1-9]'),
            Sign("events", rf"CardUnhealthy +node/.*Xid {_WITH_ECC_ERROR}"),
        ),
        _inject(sim.Xid(0, _WITH_ECC_ERROR)),
        None,
        "VcudaXid",
    ),
    "driver": Break(
        "the driver's kernel modules are unloaded: no card takes shares, and each part says why",
        (
            Sign("events", r"CardUnhealthy +node/.* load the kernel module"),
            Sign("metrics manager vcuda_card_healthy", r'minor="0".* 0\.0'),
        ),
        lambda cluster: cluster.machine.unload_driver(),
        lambda cluster: cluster.machine.load_driver(),
        "VcudaCardUnhealthy",
    ),
    "kubelet": Break(
        "kubelet stops: containers go on, the daemon waits for it and registers again by itself",
        (Sign("metrics manager vcuda_manager_registered", r" 0\.0"),),
        lambda cluster: cluster.kubelet.stop(),
        lambda cluster: cluster.start_kubelet(),
        "VcudaNotRegistered",
    ),
    "disk": Break(
        "the node's disk is full (a small one of its own): nothing new starts, what runs goes on",
        (
            Sign("events", r"pod/break-disk .*No space left on device"),
            Sign("metrics manager vcuda_manager_folders_without_room", r" [1-9]"),
            Sign(f"logs -n {NAMESPACE} {MANAGER}-local", r"can be written to .*No space left on device"),
        ),
        _both(_fill, _tries("break-disk")),
        _both(_empty, _delete("break-disk")),
        "VcudaDiskFull",
    ),
    "state-file": Break(
        "gpu-manager's state file is damaged while it is down: it says so, keeps it aside, and rebuilds what it knew",
        (Sign(f"logs -n {NAMESPACE} {MANAGER}-local", r"state\.json.*damaged"),),
        _damage,
    ),
    "api": Break(
        "the API server cuts every connection of gpu-manager and the extender; running pods notice nothing",
        (
            Sign(f"logs -n {NAMESPACE} {MANAGER}-local", r"pods: no answer from http"),
            Sign("metrics manager vcuda_manager_api_failing", r" 1\.0"),
        ),
        _refusing("api", _cut),
        _answering("api"),
        "VcudaApiUnreachable",
    ),
    "watch": Break(
        "the API server takes the extender's requests and never answers: it decides by what it knew",
        # Ours sends a bookmark every 5 s.
        (Sign("metrics extender vcuda_extender_watch_unheard_seconds", r'resource="pods".* \d{2,}\.'),),
        _refusing("watch", _silent),
        _answering("watch"),
        "VcudaStaleWatch",
    ),
    "bind": Break(
        "the API server refuses every binding of the extender; pods with a share wait and are tried again",
        (
            Sign("events", r"FailedScheduling +pod/break-bind .*binding rejected"),
            Sign("metrics extender vcuda_extender_binds_total", r'result="Bind(Failed|Uncertain)".* [1-9]'),
        ),
        _both(_refusing("bind", _unbound), _tries("break-bind")),
        _both(_answering("bind"), _delete("break-bind")),
        "VcudaBindErrors",
    ),
    "forged": Break(
        "a pod comes with a node and a placement that it wrote itself, of more than it asks for: it is refused",
        (
            Sign("get", r"break-forged +UnexpectedAdmissionError .*InvalidPlacement"),
            Sign("metrics extender vcuda_extender_wrong_placements_total", r" [1-9]"),
        ),
        _forge,
        _delete("break-forged"),
        "VcudaWrongPlacement",
    ),
    "memory": Break(
        "a tenant takes memory until it is refused: it is told why, its neighbours notice nothing",
        (
            Sign("logs break-memory", r"vcuda: refused .* of GPU memory: limit"),
            Sign("metrics manager vcuda_container_memory_refusals_total", r'pod="break-memory".* [1-9]'),
        ),
        _tries("break-memory", ["sh", "-c", "python workloads/memory_hog.py; sleep 3600"]),
        _delete("break-memory"),
    ),
}


class Desk:
    """Carries out what `break` and `mend` ask of a running playground; used by the API server's threads."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._broken: set[str] = set()
        self._lock = threading.Lock()

    def answer(self, request: Request) -> JsonObject | None:
        """The answer to a request below PATH, None for others. Raises ApiError."""
        if request.path == PATH and request.method == "GET":
            return {"broken": sorted(self._broken)}
        if not request.path.startswith(f"{PATH}/"):
            return None
        name = request.path.removeprefix(f"{PATH}/")
        found = BREAKS.get(name)
        if found is None:
            raise errors.ApiError(404, "NotFound", f"nothing is called {name:.40}; `break` lists what there is")
        try:
            with self._lock:
                self._act(name, found, mend=request.method == "DELETE")
        except (BreakFailure, sim.SimError, OSError) as error:
            raise errors.ApiError(409, "Conflict", str(error)) from error
        return {}

    def _act(self, name: str, found: Break, *, mend: bool) -> None:
        if mend and name in self._broken and found.mend is not None:
            found.mend(self._cluster)
            self._broken.discard(name)
        elif not mend and name in self._broken:
            raise BreakFailure(f"{name} is broken already; `mend {name}` takes it back")
        elif not mend:
            found.do(self._cluster)
            if found.mend is not None:
                self._broken.add(name)
