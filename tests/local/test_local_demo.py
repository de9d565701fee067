"""The demonstration's verdict: each limit that does not hold must be found; and its reading of manifests and commands."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localcluster.demo import checks, measure, scenario
from localcluster.demo.checks import Period
from localcluster.demo.measure import Sample, Truth
from localcluster.demo.scenario import DemoPod, Expect

REPOSITORY = Path(__file__).resolve().parents[2]
GIB = 2**30
SECOND = 10**9


def demo_pod(name: str, expect: Expect, cores: int = 30, core_limit: int = 30, memory: int | None = 2 * GIB) -> DemoPod:
    return DemoPod({"metadata": {"name": name}}, expect, cores, core_limit, memory)


PODS = [
    demo_pod("whole", Expect.RUNS, 100, 100, None),
    demo_pod("elastic", Expect.RUNS, 30, 50),
    demo_pod("hard", Expect.RUNS),
    demo_pod("hog", Expect.OUT_OF_MEMORY, 10, 10, GIB),
    demo_pod("refused", Expect.REFUSED, 0, 0, 0),
]


def running(name: str) -> dict[str, Any]:
    status = {"phase": "Running", "containerStatuses": [{"restartCount": 0, "state": {"running": {}}}]}
    return {"metadata": {"name": name}, "spec": {"nodeName": "n"}, "status": status}


def good() -> tuple[Period, dict[str, str]]:
    """Ten seconds in which everything is as it should be."""
    refused = {
        "type": "PodScheduled",
        "status": "False",
        "message": "0/1 nodes are available: 1 InvalidCores",
    }
    pods = {pod.name: running(pod.name) for pod in PODS}
    pods["refused"] = {
        "metadata": {"name": "refused"},
        "spec": {},
        "status": {"phase": "Pending", "conditions": [refused]},
    }
    busy = {"whole": 9.9, "elastic": 4.9, "hard": 3.0, "hog": 0.0}

    def sample(at: float) -> Sample:
        truth = {
            name: Truth(GIB // 2, GIB, round(share / 10 * at * SECOND), round(100 * at), {0 if name == "whole" else 1})
            for name, share in busy.items()
        }
        return Sample(at, copy.deepcopy(pods), {**truth, "refused": Truth()}, {})

    return Period(sample(0.0), sample(5.0), sample(10.0)), {"hog": "refused after 960 MiB: CUDA_ERROR_OUT_OF_MEMORY"}


def failures(period: Period, logs: dict[str, str]) -> list[str]:
    return [finding.what for finding in checks.findings(PODS, period, logs, 8 * GIB) if not finding.held]


def test_a_good_period_has_no_failure() -> None:
    assert failures(*good()) == []


def _restarted(period: Period) -> None:
    period.last.pods["hard"]["status"]["containerStatuses"][0]["restartCount"] = 1


def _scheduled(period: Period) -> None:
    period.last.pods["refused"] = running("refused")


def _alone(period: Period) -> None:
    period.last.truth["hard"].cards = {0}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda p: setattr(p.last.truth["hard"], "peak_bytes", 2 * GIB + 1), "used at most 2.0 GiB"),
        (
            lambda p: setattr(p.last.truth["hard"], "busy_ns", round(3.31 * SECOND)),
            "used 33.1 cores on average, hard limit 30",
        ),
        (lambda p: setattr(p.last.truth["elastic"], "busy_ns", round(5.31 * SECOND)), "elastic limit 50"),
        (lambda p: setattr(p.last.truth["elastic"], "launches", 500), "0 kernels in the second half"),
        (lambda p: p.last.pods.pop("hard"), "is gone"),
        (_restarted, "1 restarts"),
        (_scheduled, "should have been refused"),
        (_alone, "should share one card"),
    ],
)
def test_each_limit_that_does_not_hold_is_found(change: Callable[[Period], Any], told: str) -> None:
    period, logs = good()
    change(period)
    found = failures(period, logs)
    assert len(found) == 1 and told in found[0]


def test_a_hog_that_meets_no_limit_is_found() -> None:
    period, _ = good()
    assert failures(period, {"hog": "holds 2 GiB"}) == ["met no limit"]


def test_a_share_just_within_the_tolerance_holds() -> None:
    period, logs = good()
    period.last.truth["hard"].busy_ns = round(3.29 * SECOND)
    assert failures(period, logs) == []


def test_the_examples_are_what_the_issue_names() -> None:
    pods = {pod.name: pod for pod in map(scenario.describe, scenario.load_manifests([REPOSITORY / "examples"]))}
    vcuda = pods["vcuda"]
    assert (vcuda.cores, vcuda.core_limit, vcuda.memory_bytes) == (30, 50, 10 * 256 * 2**20)
    assert vcuda.manifest["metadata"]["annotations"] == {"tencent.com/vcuda-core-limit": "50"}
    shares = [pod for pod in pods.values() if pod.expect is not Expect.REFUSED and not pod.whole]
    assert len(shares) >= 4 and sum(pod.cores for pod in shares) <= 100
    assert [pod.name for pod in pods.values() if pod.whole] == ["whole-card"]
    assert pods["too-much"].expect is Expect.REFUSED


def test_what_is_no_pod_is_refused_with_the_files_name(tmp_path: Path) -> None:
    for text, told in (
        ("kind: Deployment\nmetadata: {}", "takes pods, this is Deployment"), ("a: [", "can't be read"), ("- 1", "this is list"),
    ):  # fmt: skip
        file = tmp_path / "x.yaml"
        file.write_text(text)
        with pytest.raises(scenario.ScenarioFailure, match=told) as error:
            scenario.load_manifests([tmp_path])
        assert str(file) in str(error.value)
    file.unlink()
    with pytest.raises(scenario.ScenarioFailure, match=r"no \*\.yaml"):
        scenario.load_manifests([tmp_path])
    with pytest.raises(scenario.ScenarioFailure, match="not one of runs"):
        scenario.describe(
            {"metadata": {"name": "a", "labels": {scenario.EXPECT_LABEL: "fame"}}, "spec": {"containers": []}}
        )


def test_the_managers_figures_are_added_up_per_pod() -> None:
    card = {"memory_used_bytes": 5, "gpu_time_ns": 7}
    document = {"containers": [{"pod_name": "a", "cards": [card, card]}, {"pod_name": "a", "cards": [card]}]}
    assert measure.read_usage(document) == {"a": measure.ManagerFigures(15, 21)}
    document["containers"].append({"pod_name": "a", "cards": [{"memory_used_bytes": 1, "gpu_time_ns": None}]})
    assert measure.read_usage(document) == {"a": measure.ManagerFigures(16, None)}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["demo", "--seconds", "0"], "--seconds is 0"),
        (["demo", "--cards", "0"], "--cards is 0"),
        (["demo", "--card-memory", "much"], "InvalidMemory"),
        (["demo", "no-such.yaml"], "can't be read"),
        (["up", "--working-directory", "/no/such/folder"], "is no folder"),
        (["get"], "no kubeconfig"),
        (["get", "--kubeconfig", "/no/such/file"], "No such file"),
        (["dance"], "invalid choice"),
    ],
)
def test_bad_commands_are_one_clear_message(words: list[str], told: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "localcluster", *words], capture_output=True, text=True, cwd=REPOSITORY, timeout=60,
        check=False, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode in (1, 2) and told in done.stderr and "Traceback" not in done.stderr
