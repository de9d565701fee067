"""The cluster benchmark's own waiting: a measurement begins when kubelet has ended the pods before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks import _kube_api, _report

ROOT = Path(__file__).resolve().parents[2]


class Kubelet:
    """Stops one container or sandbox at each look, `ends` in all."""

    def __init__(self, ends: float) -> None:
        self.ends, self.looks = ends, 0

    def send(self, _method: str, _path: str) -> bytes:
        self.looks += 1
        name, done = "kubelet_runtime_operations_duration_seconds", min(self.looks, self.ends)
        counts = {
            "stop_container": done // 2,
            "stop_podsandbox": done - done // 2,
            "start_container": self.looks,
        }
        lines = (f'{name}_bucket{{operation_type="{kind}",le="+Inf"}} {count}' for kind, count in counts.items())
        return "\n".join(lines).encode()


def wait(kubelet: Kubelet, seconds: float = 60.0) -> None:
    _kube_api.wait_quiet(cast(Any, kubelet), seconds)


def test_a_measurement_waits_until_kubelet_stops_nothing_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    wait(Kubelet(ends=1))
    assert now[0] == pytest.approx(_kube_api.QUIET_SECONDS)
    now[0] = 0.0
    wait(Kubelet(ends=9))
    assert now[0] == pytest.approx(_kube_api.QUIET_SECONDS + 8 * 0.5)
    with pytest.raises(RuntimeError, match="still stops containers after 10 s"):
        wait(Kubelet(ends=10**6), 10.0)


def test_without_a_cluster_the_report_gets_the_reason_and_no_path_of_this_machine() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.kube"],
        cwd=ROOT,
        env={**os.environ, "KUBELAB": str(ROOT / "nowhere" / "kubelab")},
        capture_output=True,
        text=True,
        check=True,
    )
    run = _report.Run("c", "d", ran.stdout, "", None)
    assert run.why_none().startswith("no kubelab script at nowhere/kubelab; set KUBELAB=path")


class Watched:
    """A connection whose watch gives these events and ends."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self.lines, self.sock = [json.dumps(event).encode() for event in events], None

    def getresponse(self) -> list[bytes]:
        return self.lines


def event(kind: str, version: int, phase: str, node: str = "n1") -> dict[str, Any]:
    metadata = {"name": "a", "resourceVersion": str(version)}
    return {"type": kind, "object": {"metadata": metadata, "spec": {"nodeName": node}, "status": {"phase": phase}}}


def test_a_watch_that_the_server_ends_goes_on_after_the_last_event() -> None:
    """A real one ends the watch of a client that is too slow for it."""
    lost = {"type": "ERROR", "object": {"kind": "Status", "code": 410}}
    answers = [Watched(event("ADDED", 5, "Pending")), Watched(event("MODIFIED", 7, "Running")), Watched(lost)]
    asked = []

    def connect(version: str) -> Any:
        asked.append(version)
        return answers[len(asked) - 1]

    watch = _kube_api.PodWatch(connect, "3")
    watch.wait("the pod runs", lambda: "a" in watch.running, 30)
    watch.thread.join(30)
    assert asked == ["3", "5", "7"] and set(watch.bound) == {"a"}
