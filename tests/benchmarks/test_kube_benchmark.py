"""The cluster benchmark's own waiting: a measurement begins when kubelet has ended the pods before."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks import _kube_api, _kube_floor, _report, kube
from manager.proto import deviceplugin_pb2 as api
from vcuda.spec.names import Names

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


def test_requests_are_counted_by_verb_and_resource_without_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = (
        ("PATCH", "pods", "status", 3),
        ("PATCH", "pods", "status", 1),
        ("GET", "pods", "", 2),
        ("WATCH", "pods", "", 9),
    )
    lines = [
        f'apiserver_request_total{{code="20{code}",resource="{resource}",subresource="{sub}",verb="{verb}"}} {number}'
        for code, (verb, resource, sub, number) in enumerate(counted)
    ]
    one = object.__new__(_kube_api.Api)
    monkeypatch.setattr(one, "send", lambda *_words: "\n".join(lines).encode())
    assert one.requests() == {"PATCH pods/status": 4, "GET pods": 2}


def test_the_floor_answers_as_we_did_with_a_region_of_its_own(tmp_path: Path) -> None:
    region = tmp_path / "regions" / "u1" / "main"
    region.mkdir(parents=True)
    (region / "usage").write_text("x")
    answer = api.ContainerAllocateResponse(
        mounts=[
            api.Mount(container_path="/etc/vcuda", host_path=str(region), read_only=True),
            api.Mount(container_path="/etc/vcuda/usage", host_path=f"{region}/usage"),
            api.Mount(container_path="/usr/local/nvidia", host_path="/driver", read_only=True),
        ],
        devices=[api.DeviceSpec(container_path="/dev/nvidia0", host_path="/dev/nvidia0", permissions="rw")],
    )
    names = Names()
    rows = [
        {
            "PodUID": uid,
            "ContainerName": "main",
            "ResourceName": name,
            "DeviceIDs": {"-1": [f"{uid}-{name[-1]}0"]},
            "AllocResp": base64.b64encode(given).decode(),
        }
        for uid in ("u0", "u1")
        for name, given in ((names.core, answer.SerializeToString()), (names.memory, b""))
    ]
    (tmp_path / "kubelet_internal_checkpoint").write_text(
        json.dumps({"Data": {"PodDeviceEntries": rows, "RegisteredDevices": {}}}, separators=(",", ":"))
    )
    found = _kube_floor.answers(tmp_path, "u1", tmp_path / "floored")
    copy = tmp_path / "floored" / "u1" / "main"
    assert [mount.host_path for mount in found["core"].mounts] == [str(copy), f"{copy}/usage", "/driver"]
    assert (copy / "usage").read_text() == "x" and found["core"].devices == answer.devices
    assert found["memory"] == api.ContainerAllocateResponse()
    with pytest.raises(KeyError):
        _kube_floor.answers(tmp_path, "u2", tmp_path / "floored")


def test_what_is_ours_is_told_beside_what_any_plugin_costs() -> None:
    blank = kube.Start("", "", *[0] * (len(dataclasses.fields(kube.Start)) - 2))
    rows = [
        dataclasses.replace(blank, kind=kind, what=what, p50_s=seconds)
        for kind, what, seconds in (
            ("alone", "none", 0.5), ("alone", "share", 0.6), ("9 at once", "none", 4.0), ("9 at once", "floor", 4.4),
            ("9 at once", "share", 5.5),
        )
    ]  # fmt: skip
    ratios = {name: round(value, 3) for name, value in kube.start_ratios(rows)}
    assert ratios == {
        "start, alone": 1.2,
        "start, 9 at once": 1.375,
        "start, 9 at once, floor": 1.1,
        "start, 9 at once, share by floor": 1.25,
    }


def test_what_decides_nothing_is_set_against_the_rounds_without_an_extender_alone() -> None:
    def row(per_second: float, *, extender: bool, limited: bool = False) -> kube.Throughput:
        more = [0.0] * (len(dataclasses.fields(kube.Throughput)) - 4)
        return kube.Throughput(extender, limited, 9, per_second, *more)

    rows = [row(800, extender=False), row(400, extender=True), row(50, extender=False, limited=True)]
    assert kube.ratio(rows, limited=False) == 0.5
    assert kube.ratio(rows, limited=False, floor=[row(600, extender=True)]) == 0.75
