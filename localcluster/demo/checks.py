"""Whether every limit held: pure functions from what was measured to a list of findings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from localcluster.apiserver.table import pod_state
from localcluster.demo.measure import Sample, Truth
from localcluster.demo.scenario import DemoPod, Expect
from vcuda.spec import units

JsonObject = dict[str, Any]
SHARE_TOLERANCE = 3.0  # points, averaged over the measured period
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"


@dataclass(frozen=True)
class Finding:
    """One statement about one pod, and whether it is true. A note informs and never fails the demonstration."""

    pod: str
    what: str
    held: bool
    note: bool = False

    def as_json(self) -> JsonObject:
        return asdict(self)


@dataclass(frozen=True)
class Period:
    """The measured period: its first and last samples, and one about its middle."""

    first: Sample
    middle: Sample
    last: Sample

    @property
    def seconds(self) -> float:
        return self.last.at - self.first.at

    def share(self, name: str) -> float:
        """The average share in cores (1/100 of a card) by ground truth."""
        before, after = self.first.truth.get(name, Truth()), self.last.truth.get(name, Truth())
        return 100.0 * (after.busy_ns - before.busy_ns) / 1e9 / self.seconds


def _restarts(pod: JsonObject) -> int:
    return sum(int(status.get("restartCount", 0)) for status in pod["status"].get("containerStatuses", []))


def refusal_of(pod: JsonObject) -> str:
    """Why a pod was not scheduled, from its PodScheduled condition."""
    for condition in pod["status"].get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message", ""))
    return ""


def _refused(expected: DemoPod, pod: JsonObject) -> list[Finding]:
    reason = refusal_of(pod)
    refused = bool(reason) and not pod["spec"].get("nodeName")
    what = f"was refused: {reason}" if refused else f"should have been refused, but is {pod_state(pod)}"
    return [Finding(expected.name, what, refused)]


def _memory(expected: DemoPod, peak_bytes: int, card_bytes: int) -> Finding:
    limit = expected.memory_bytes if expected.memory_bytes is not None else card_bytes
    what = f"used at most {units.format_bytes(peak_bytes)} of its {units.format_bytes(limit)}"
    return Finding(expected.name, what, 0 < peak_bytes <= limit)


def _share(expected: DemoPod, share: float) -> list[Finding]:
    kind = "hard limit" if expected.core_limit == expected.cores else "elastic limit"
    what = f"used {share:.1f} cores on average, {kind} {expected.core_limit}"
    held = Finding(expected.name, what, share <= expected.core_limit + SHARE_TOLERANCE)
    return [held]


def findings(expected: list[DemoPod], period: Period, logs: dict[str, str], card_bytes: int) -> list[Finding]:
    """All statements, pod by pod."""
    result: list[Finding] = []
    for demo_pod in expected:
        name = demo_pod.name
        pod = period.last.pods.get(name)
        if pod is None:
            result.append(Finding(name, "is gone", False))
            continue
        if demo_pod.expect is Expect.REFUSED:
            result += _refused(demo_pod, pod)
            continue
        alive = pod["status"].get("phase") == "Running" and _restarts(pod) == 0
        if not alive:
            result.append(
                Finding(
                    name,
                    f"should run undisturbed, but is {pod_state(pod)} ({_restarts(pod)} restarts)",
                    False,
                )
            )
            continue
        result.append(_memory(demo_pod, period.last.truth[name].peak_bytes, card_bytes))
        if demo_pod.expect is Expect.OUT_OF_MEMORY:
            refused = OUT_OF_MEMORY in logs.get(name, "")
            result.append(Finding(name, f"was told {OUT_OF_MEMORY}" if refused else "met no limit", refused))
        else:
            result += _share(demo_pod, period.share(name))
            half = period.last.truth[name].launches - period.middle.truth.get(name, Truth()).launches
            result.append(
                Finding(name, f"kept working beside its neighbours ({half} kernels in the second half)", half > 0)
            )
    result += _same_card(expected, period)
    return result


def _same_card(expected: list[DemoPod], period: Period) -> list[Finding]:
    """The demonstration is about sharing: the shares that work must really be on one card."""
    sharing = [pod.name for pod in expected if pod.expect is Expect.RUNS and not pod.whole]
    if len(sharing) < 2:
        return []
    cards = {frozenset(period.last.truth.get(name, Truth()).cards) for name in sharing}
    together = len(cards) == 1 and all(len(found) == 1 for found in cards)
    return [
        Finding(
            ", ".join(sharing),
            "share one card" if together else "should share one card, but do not",
            together,
        )
    ]
