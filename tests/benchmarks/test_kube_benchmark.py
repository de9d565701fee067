"""The cluster benchmark's own waiting: a measurement begins when kubelet has ended the pods before."""

from __future__ import annotations

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
