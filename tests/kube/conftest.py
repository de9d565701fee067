"""The whole system on a real one-node Kubernetes: cluster, simulated machine, daemon and extender, once per run.

`make test-kube` selects these tests; a plain `pytest` leaves them out, because they take minutes and the machine's ports.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import kube_matrix
import kubelab
from kube_chart import Chart
from kube_system import STRATEGY, System, share_mounts, unmount


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    chosen = "kube" in (config.option.markexpr or "")
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.kube)
            item.add_marker(pytest.mark.timeout(900))
            if not chosen:
                item.add_marker(pytest.mark.skip(reason="real Kubernetes: `make test-kube` runs these"))


_EVIDENCE = pytest.StashKey[list[str]]()
_CLUSTER = pytest.StashKey[tuple[str, str, str, str]]()


@pytest.fixture
def evidence(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Keep a line of what was really seen; the run ends with all of them."""
    lines = request.config.stash.setdefault(_EVIDENCE, [])

    def keep(line: str) -> None:
        lines.append(f"{request.node.name}: {line}")

    return keep


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash.get(_EVIDENCE, [])
    if not lines:
        return
    counts = {
        outcome: len(terminalreporter.stats.get(outcome, ())) for outcome in ("passed", "failed", "error", "skipped")
    }
    terminalreporter.section("what was seen on the real Kubernetes")
    for line in lines:
        terminalreporter.write_line(line)
    terminalreporter.write_line(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the run into the matrix, where $KUBE_MATRIX names the page."""
    page, cluster = os.environ.get("KUBE_MATRIX"), session.config.stash.get(_CLUSTER, None)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not page or cluster is None or reporter is None:
        return
    names = {
        outcome: [report.nodeid for report in reporter.stats.get(outcome, ())]
        for outcome in ("passed", "failed", "error", "skipped")
    }
    parts = [item.nodeid for item in reporter.stats.get("deselected", ())]
    files = kube_matrix.counts(names, parts, [item.nodeid for item in session.items])
    if files:
        row = kube_matrix.Row(*cluster, files, datetime.date.today().isoformat())
        kube_matrix.update(Path(page), row)


def _cluster(system: System) -> tuple[str, str, str, str]:
    """Kubernetes, runtime, cgroup version, injection: what this run is about, as the node says it."""
    info = system.node()["status"]["nodeInfo"]
    cgroup = "v2" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "v1"
    runtime = info["containerRuntimeVersion"].replace("://", " ")
    return info["kubeletVersion"], runtime, cgroup, f"CDI ({STRATEGY})" if STRATEGY else "DeviceSpecs"


@pytest.fixture(scope="session")
def system(request: pytest.FixtureRequest) -> Iterator[System]:
    # Undone in reverse order, each step whatever the others did: daemon and extender, cluster with its pods, mounts.
    with contextlib.ExitStack() as undo:
        # Not below pytest's folder: another run may tidy that up, and here are mounts.
        folder = Path(tempfile.mkdtemp(prefix="vcuda-kube-"))
        undo.callback(shutil.rmtree, folder)
        share_mounts(folder)
        undo.callback(unmount, folder)
        try:
            lab = kubelab.KubeLab.up(
                CPU_MANAGER="static",
                RUNC_OLD=os.environ.get(
                    "RUNC_OLD", "1"
                ),  # the old one wipes devices; users of a pod's own need a new one
                RECONCILE="3s",
                NODE_LABELS="nvidia-device-enable=enable",
                KUBELET_EXTRA_ARGS="--kube-api-qps=100 --kube-api-burst=200",
            )
        except kubelab.Unavailable as error:
            pytest.skip(str(error))
        undo.callback(lab.down)
        if STRATEGY:  # it stays when a daemon ends: containers restart without it
            undo.callback(Path("/var/run/cdi/tencent.com-vcuda.json").unlink, missing_ok=True)
        system = System(lab, folder)
        undo.callback(system.stop)
        system.start()
        request.config.stash[_CLUSTER] = _cluster(system)
        yield system


@pytest.fixture
def pods(system: System) -> Iterator[Callable[..., str]]:
    """Create pods that go away with the test, and nothing of them may stay booked or mounted."""

    def create(*wanted: dict[str, Any]) -> str:
        system.create_all(list(wanted))
        return str(wanted[-1]["metadata"]["name"])

    yield create
    system.delete_all()
    system.wait_free(120)


@pytest.fixture(scope="session")
def client_image(system: System, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image with nothing but glibc, a CUDA driver-API client linked against the stub, and what starts it bare."""
    root = tmp_path_factory.mktemp("image")
    (root / "bin").mkdir()
    sources = Path(__file__).parent / "client"
    stubs = system.native_folder / "stubs"
    for command in (
        ["gcc", "-O2", "-o", str(root / "bin/hog"), str(sources / "hog.c"), f"-L{stubs}", "-lcuda"],
        ["gcc", "-O2", "-o", str(root / "bin/bare"), str(sources / "bare.c")],
    ):
        subprocess.run(command, check=True, timeout=60)
    shutil.copy(root / "bin/hog", root / "bin/setuid-hog")
    (root / "bin/setuid-hog").chmod(0o4755)
    for library in (
        "/lib/x86_64-linux-gnu/libc.so.6",
        "/lib64/ld-linux-x86-64.so.2",
        "/lib/x86_64-linux-gnu/libpthread.so.0",
        "/lib/x86_64-linux-gnu/libdl.so.2",
        "/lib/x86_64-linux-gnu/libm.so.6",
    ):
        target = root / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(Path(library).read_bytes())
        target.chmod(0o755)
    system.lab.image("vcuda-client:test", root, "/bin/hog")
    return "vcuda-client:test"


@pytest.fixture(scope="session")
def packaged(system: System, tmp_path_factory: pytest.TempPathFactory) -> Chart:
    """The product's image and the extender's certificate in the cluster, made once."""
    return Chart(system, tmp_path_factory.mktemp("chart"))


@pytest.fixture(scope="module")
def chart(system: System, packaged: Chart) -> Iterator[Chart]:
    """For modules that install the chart: the processes on the host are stopped meanwhile."""
    system.stop()
    try:
        yield packaged
    finally:
        system.delete_all()
        try:
            packaged.wait_free()
        finally:
            packaged.uninstall()
            system.lab.call("restart-scheduler", SCHED_CONFIG="", EXTENDER_YAML="")
            system.start()
