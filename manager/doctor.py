"""`gpu-manager doctor`: what of this node the daemon needs, looked at once, with what to do where it is not there."""

from __future__ import annotations

import enum
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from manager.cards import device_nodes, nvml
from manager.cards.device_nodes import NodeProblem
from manager.cards.driver import DriverError, NullDriver
from manager.cards.seen import SeenCards
from manager.cgroups import devices
from manager.cgroups.devices import Unwatched
from manager.config.settings import Settings
from manager.errors import StartError
from manager.kube import api
from manager.kubelet import pods
from manager.limits import possible
from manager.observe.http import DoctorFailed
from manager.plugin import registration
from manager.process import instance_lock
from manager.regions import storage
from vcuda.driver import layout
from vcuda.driver.root import HostRoot
from vcuda.kube.errors import KubeError
from vcuda.printable import printable

_TIMEOUT_S = 3.0
_LOOK_S = 30.0


class Verdict(enum.StrEnum):
    """`WARN`: it works without. `FAIL`: pods will not get shares."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Check:
    """One thing, how it is, and the details with the way out."""

    what: str
    verdict: Verdict
    details: str


def examine(settings: Settings, environment: Mapping[str, str]) -> list[Check]:
    """All checks in the order in which one thing builds on another. Never raises."""
    root = HostRoot(settings.driver_root, settings.driver_root_on_host)
    parts: tuple[Callable[[], Iterator[Check]], ...] = (
        lambda: _driver(root, settings),
        lambda: _mirror(root),
        lambda: _kubelet(settings),
        lambda: _api(settings, environment),
        lambda: _host(settings),
        lambda: _standby(settings),
    )
    return [check for part in parts for check in part()]


def look(arguments: Sequence[str]) -> bytes:
    """What `gpu-manager doctor` says with these arguments, as JSON. Raises DoctorFailed.

    In a process of its own: a stuck driver may hold it.
    """
    command = [sys.executable, "-m", "manager.main", "doctor", *arguments, "--log-format=json"]
    try:
        found = subprocess.run(command, capture_output=True, timeout=_LOOK_S, check=False)
        json.loads(found.stdout)
    except subprocess.TimeoutExpired:
        raise DoctorFailed(f"gpu-manager doctor did not end within {_LOOK_S:.0f} s: is the driver stuck?") from None
    except ValueError:
        raise DoctorFailed(f"gpu-manager doctor failed: {found.stderr.decode(errors='replace')[-300:]}") from None
    return found.stdout


def text(checks: list[Check]) -> str:
    """A line per check: verdict, what was looked at, details."""
    width = max(len(check.what) for check in checks)
    return "".join(f"{check.verdict:4}  {check.what:{width}}  {printable(check.details)}\n" for check in checks)


def as_json(checks: list[Check]) -> str:
    """The same checks for programs: a list of objects."""
    return json.dumps([asdict(check) for check in checks], indent=1) + "\n"


def _driver(root: HostRoot, settings: Settings) -> Iterator[Check]:
    driver = nvml.open_driver(root)
    try:
        probe = driver.probe()
        alone = possible.tried(settings, driver, probe.cards)
    except DriverError as error:
        yield Check("driver", Verdict.FAIL, f"it does not answer: {error}")
        return
    finally:
        driver.close()
    if isinstance(driver, NullDriver):
        yield Check("driver", Verdict.FAIL, f"{driver.reason}; install NVIDIA's driver, or set --driver-root")
        return
    yield Check("driver", Verdict.OK, f"{probe.driver_version} below {root.path}, {len(probe.cards)} cards")
    for name, why in probe.failed:
        yield Check(f"card {name}", Verdict.FAIL, why)
    for item in probe.cards:
        card = item.card
        yield Check(f"card {card.minor}", Verdict.OK, f"{card.uuid}  {card.model}")
    seen = SeenCards(settings.checkpoint_path)
    missed = seen.cards.keys() - {item.card.uuid for item in probe.cards} - dict(probe.failed).keys()
    for uuid in sorted(missed - settings.removed_cards):
        yield Check(
            f"card {uuid}",
            Verdict.FAIL,
            f"not seen since {seen.since(uuid)}; look for Xid 79 in the kernel's log, restart the machine; "
            "if it was taken out, name it in --removed-cards",
        )
    yield _limits(settings, len(probe.cards), alone)
    try:
        wanted = device_nodes.numbers(root, probe.cards)
    except NodeProblem as problem:
        yield Check("device nodes", Verdict.FAIL, str(problem))
        return
    for path, (major, minor) in wanted.items():
        yield _node(root, path, major, minor)


def _limits(settings: Settings, cards: int, alone: Mapping[str, str]) -> Check:
    """`alone`: why a card's memory is held by the shim alone, by UUID."""
    what, verdict = "driver's limits", Verdict.FAIL if settings.require_driver_limits else Verdict.WARN
    kernel = (settings.cgroup_root / "dmem.capacity").exists()
    well = "one was set and taken away; " + ("the kernel counts (dmem)" if kernel else "the driver counts (no dmem)")
    if not alone:
        return Check(what, Verdict.OK, well)
    reasons = "; ".join(sorted(set(alone.values())))
    if len(alone) < cards:
        which = ", ".join(alone)
        return Check(what, verdict, f"{well}; but the shim alone holds the memory of pods on {which}: {reasons}")
    return Check(what, verdict, f"the shim alone holds the memory of pods: {reasons}")


def _node(root: HostRoot, path: str, major: int, minor: int) -> Check:
    found = root.path / path.lstrip("/")
    number = f"{major}:{minor}"
    try:
        status = found.stat()
    except OSError as error:
        return Check(
            path,
            Verdict.WARN,
            f"{error.strerror}; the daemon makes it ({number}) if it may write to {found.parent}",
        )
    if stat.S_ISREG(status.st_mode) and not root.is_host:
        return Check(path, Verdict.OK, f"{number}, a plain file in its place below this root")
    if not stat.S_ISCHR(status.st_mode):
        return Check(path, Verdict.FAIL, f"{found} is no character device; remove it")
    have = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    if have != number:
        return Check(
            path,
            Verdict.WARN,
            f"it is {have}, /proc/devices says {number}; the daemon makes it anew if it may",
        )
    link = root.path / "dev/char" / number
    if not link.is_symlink():
        return Check(path, Verdict.WARN, f"{number}, without {link}: some versions of runc drop it at daemon-reload")
    return Check(path, Verdict.OK, number)


def _mirror(root: HostRoot) -> Iterator[Check]:
    shims = layout.SHIMS_FOLDER
    lacking = [name for name in layout.SHIMS if not (shims / name).is_file()]
    if lacking:
        yield Check("shims", Verdict.FAIL, f"no {', '.join(lacking)} in {shims}; python -m vcuda._build makes them")
    else:
        yield Check("shims", Verdict.OK, str(shims))
    for name in layout.SHIMS:
        path = root.find_library(name)
        if path is None:
            yield Check(name, Verdict.FAIL, f"not below {root.path}; is the driver's user part installed?")
        else:
            yield Check(name, Verdict.OK, str(path))


def _kubelet(settings: Settings) -> Iterator[Check]:
    path = settings.device_plugin_path / registration.KUBELET_SOCKET
    if path.is_socket():
        yield Check("kubelet", Verdict.OK, str(path))
    else:
        yield Check("kubelet", Verdict.FAIL, f"there is no socket {path}; is kubelet running, and its folder mounted?")
    path = settings.pod_resources_socket
    if path.is_socket():
        yield Check("PodResources", Verdict.OK, str(path))
    else:
        yield Check("PodResources", Verdict.WARN, f"there is no socket {path}; kubelet's checkpoint serves instead")
    if not settings.kubelet_url:
        yield Check("kubelet's pods", Verdict.WARN, "--kubelet-url is not set: pods that look alike may be refused")


def _api(settings: Settings, environment: Mapping[str, str]) -> Iterator[Check]:
    try:
        login = api.login(settings.kubeconfig, environment)
        kubelet = pods.by_settings(settings, login)
    except StartError as error:
        yield Check("API server", Verdict.FAIL, str(error))
        return
    if kubelet is not None:
        try:
            yield Check("kubelet's pods", Verdict.OK, f"{len(kubelet.list(_TIMEOUT_S))} at {settings.kubelet_url}")
        except KubeError as error:
            yield Check("kubelet's pods", Verdict.FAIL, f"{error}; is nodes/pods (or nodes/proxy) granted?")
    kube = api.connect(login, settings.node_name)
    if kube is None:
        yield Check("API server", Verdict.WARN, "not configured: no events, no annotations on node and pods")
        return
    try:
        found = len(kube.pods(_TIMEOUT_S))
        where = kube.client.endpoint.url
        yield Check("API server", Verdict.OK, f"{found} pods on node {settings.node_name} at {where}")
    except KubeError as error:
        yield Check("API server", Verdict.FAIL, str(error))


def _standby(settings: Settings) -> Iterator[Check]:
    serving = instance_lock.holder(settings.checkpoint_path)
    following = instance_lock.holder(settings.checkpoint_path, instance_lock.NEXT)
    if following is None:
        if serving is not None:
            yield Check("daemons", Verdict.OK, f"one, process {serving.pid}")
        return
    since = f"process {following.pid} has stood by for {following.age_s:.0f} s"
    whom = f"process {serving.pid}" if serving is not None else "one that has just ended"
    way_out = "well in an update; else a second DaemonSet or service starts gpu-manager here: remove it"
    yield Check("daemons", Verdict.WARN, f"{since}, for {whom}: {way_out}")


def _host(settings: Settings) -> Iterator[Check]:
    try:
        chosen = storage.choose(settings.virtual_manager_path, settings.usage_storage)
        verdict = Verdict.OK if chosen.tmpfs else Verdict.WARN
        kind = "a tmpfs each" if chosen.tmpfs else "plain directories, which a tenant can fill"
        yield Check("regions", verdict, f"{settings.virtual_manager_path}: {kind} ({chosen.why})")
    except StartError as error:
        yield Check("regions", Verdict.FAIL, str(error))
    try:
        machine = devices.of_machine(settings.cgroup_root, settings.virtual_manager_path)
        yield Check("device cgroups", Verdict.OK, f"{machine.base}, {machine.version}")
    except Unwatched as error:
        yield Check("device cgroups", Verdict.WARN, f"not watched: {error}")
    # Kernel threads are visible in the host's PID namespace only; PID 2 is their parent there.
    if Path("/proc/2/comm").exists() and Path("/proc/2/comm").read_text().strip() == "kthreadd":
        yield Check("host's PIDs", Verdict.OK, "visible")
    else:
        yield Check("host's PIDs", Verdict.WARN, "not visible: no audit of bypasses; set hostPID")
