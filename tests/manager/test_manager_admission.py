"""Which pod a call is for when kubelet, its records and the API server say little, contradict us or are away: never guessed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from manager.allocate import find_pod as admission_module
from manager.allocate.find_pod import PodFinder, Presence
from manager.allocate.matcher import Candidate
from manager.allocations.accounting import AllocationIndex
from manager.allocations.record import Held
from manager.errors import Refusal
from manager.kube.api import Kube
from manager.kubelet.pods import KubeletPods
from manager.kubelet.records import CHECKPOINT_FILE, Entry, PodResources, RecordsError
from tests.manager.manager_pods import NAMES, allocation, container, pod
from vcuda.kube.errors import ApiError, ApiUnreachable
from vcuda.spec.placement import CardShare

FAR = 1e12  # a deadline


class Source:
    """A kubelet, an API server or PodResources that says this, or fails so."""

    def __init__(self, says: Sequence[Any] | Exception) -> None:
        self.says = says

    def list(self, _timeout: float) -> list[Any]:
        if isinstance(self.says, Exception):
            raise self.says
        return list(self.says)

    def pods(self, timeout: float) -> list[Any]:
        return self.list(timeout)


def admission(directory: Path, kubelet: Any = None, kube: Any = None, resources: Any = None) -> PodFinder:
    sources = [None if says is None else Source(says) for says in (kubelet, resources, kube)]
    return PodFinder(
        NAMES,
        directory,
        cast(KubeletPods | None, sources[0]),
        cast(PodResources | None, sources[1]),
        cast(Kube | None, sources[2]),
    )


def checkpoint(directory: Path, *rows: tuple[str, str, str, int]) -> None:
    """Kubelet's file: pod UID, container, resource, how many devices."""
    entries = [
        {
            "PodUID": uid,
            "ContainerName": name,
            "ResourceName": resource,
            "DeviceIDs": [str(n) for n in range(count)],
        }
        for uid, name, resource, count in rows
    ]
    text = {"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {}}, "Checksum": 1}
    (directory / CHECKPOINT_FILE).write_text(json.dumps(text, separators=(",", ":")))


def booked(uid: str, *resources: str) -> AllocationIndex:
    held = {resource: Held(1, resource) for resource in resources}
    return AllocationIndex([allocation(CardShare("GPU-0", 30, 10), pod_uid=uid, pod_name=uid, held=held)])


A, B = (pod(name, container("c", 30, 10), uid=name) for name in "ab")
EMPTY = AllocationIndex()


def find(one: PodFinder, allocations: AllocationIndex = EMPTY, resource: str = "core", count: int = 30) -> str:
    return one.find(resource, count, allocations, FAR)[0].uid


@pytest.mark.parametrize("with_records", [False, True])
def test_a_call_that_no_pod_waits_for_is_refused_with_what_to_do(tmp_path: Path, with_records: bool) -> None:
    if with_records:
        checkpoint(tmp_path, ("a", "c", NAMES.core, 30), ("a", "c", NAMES.memory, 10))
    one = admission(tmp_path, [A])
    with pytest.raises(Refusal) as error:
        find(one, booked("a", "core", "memory"))
    assert str(error.value) == (
        f"PodUnknown: no pod of this node waits for 30 {NAMES.core}: kubelet's records and ours disagree; recreate the pod"
    )
    with pytest.raises(Refusal, match=f"no pod of this node waits for 11 {NAMES.memory}"):
        find(one, resource="memory", count=11)


def test_devices_that_we_gave_and_kubelet_has_no_record_of_are_asked_for_again(tmp_path: Path) -> None:
    checkpoint(tmp_path, ("a", "c", NAMES.memory, 10))
    assert find(admission(tmp_path, [A]), booked("a", "core", "memory")) == "a"


def test_who_holds_devices_by_kubelets_records_is_not_the_one_who_waits(tmp_path: Path) -> None:
    checkpoint(tmp_path, ("a", "c", NAMES.core, 30))
    assert find(admission(tmp_path, [A, B])) == "b"


def test_records_by_name_count_for_the_pod_of_that_name_and_others_for_nobody(tmp_path: Path) -> None:
    rows = [
        Entry("c", "core", Held(30, "x"), pod=("default", "b")),
        Entry("c", "core", Held(30, "y"), pod=("other", "a")),
    ]
    assert find(admission(tmp_path, [A, B], resources=rows)) == "a"


@pytest.mark.parametrize("kube", [None, ApiError(503, "away"), [A, B]])
def test_pods_that_nothing_tells_apart_are_refused_by_name(tmp_path: Path, kube: Any) -> None:
    broken = RecordsError("PodResources: there is no socket")
    one = admission(tmp_path, [A, B], kube, broken)
    with pytest.raises(
        Refusal, match=r"PodAmbiguous: 2 pods wait for 30 .*default/a, default/b.; recreate the pod"
    ) as error:
        find(one)
    assert {name for _, name, _ in error.value.pods} == {"a", "b"}


def test_who_has_ended_by_the_watch_needs_no_question(tmp_path: Path) -> None:
    """A pod that was refused because two were waiting is in kubelet's list for long, and each later call meets it."""
    over = dict(A, status={"phase": "Failed"})
    never = Source(AssertionError("the API server is asked for what the watch has told"))
    kubelet, kube = cast(KubeletPods, Source([A, B])), cast(Kube, never)
    assert find(PodFinder(NAMES, tmp_path, kubelet, None, kube, known=lambda: [over, B])) == "b"


def test_both_holding_by_the_records_tells_nothing(tmp_path: Path) -> None:
    checkpoint(tmp_path, ("a", "c", NAMES.core, 30), ("b", "c", NAMES.core, 30))
    with pytest.raises(Refusal, match="PodAmbiguous"):
        find(admission(tmp_path, [A, B]))


@pytest.mark.parametrize(
    ("kubelet", "kube", "reason"),
    [
        (None, None, "neither --kubelet-url nor an API server is configured"),
        (ApiUnreachable("refused"), None, "kubelet's /pods: refused"),
        (None, ApiUnreachable("403"), "the API server: 403"),
        (ApiUnreachable("refused"), ApiUnreachable("away"), "kubelet's /pods: refused; the API server: away"),
    ],
)
def test_without_any_list_of_pods_the_refusal_says_who_did_not_answer(
    tmp_path: Path, kubelet: Any, kube: Any, reason: str
) -> None:
    with pytest.raises(Refusal) as error:
        find(admission(tmp_path, kubelet, kube))
    assert str(error.value) == f"PodUnknown: the pod being admitted can't be identified: {reason}"


def test_a_kubelet_that_comes_back_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = admission(tmp_path, ApiUnreachable("refused"), [A])
    assert find(one) == "a" and find(one) == "a"
    assert caplog.text.count("kubelet's pods can't be had: refused; asking the API server instead") == 1
    cast(Any, one._kubelet).says = [B]
    with caplog.at_level("INFO"):
        assert find(one) == "b"
    assert "kubelet's pods can be had again" in caplog.text


def test_refused_pods_are_remembered_the_newest_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "_REFUSED_KEPT", 1)
    one = admission(tmp_path, [A, B])
    one.refused("b")
    assert find(one) == "a"
    one.refused("a")  # "b" is forgotten
    assert find(one) == "b"
    one.refused("b")
    one.succeeded(Candidate(B, "c"), [])
    with pytest.raises(Refusal, match="PodAmbiguous"):
        find(one)


ENDED = B | {"status": {"phase": "Succeeded"}}


@pytest.mark.parametrize(
    ("kubelet", "kube", "present", "ended", "certain"),
    [
        ([A], None, "a", "", False),
        ([A, ENDED], None, "ab", "b", False),
        (None, [A, ENDED], "ab", "b", True),
        (ApiUnreachable("away"), [A], "a", "", True),
        ([A], [ENDED], "ab", "b", True),
        ([], [], "", "", True),
    ],
)
def test_who_is_there_is_what_either_says_and_certain_only_with_the_api_server(
    tmp_path: Path, kubelet: Any, kube: Any, present: str, ended: str, certain: bool
) -> None:
    seen = admission(tmp_path, kubelet, kube).presence({}, 1.0)
    assert isinstance(seen, Presence)
    assert (seen.present, seen.ended, seen.certain) == (frozenset(present), frozenset(ended), certain)


@pytest.mark.parametrize(
    ("kubelet", "kube"),
    [
        (None, None),
        (ApiUnreachable("away"), None),
        ([A], ApiUnreachable("away")),
        (ApiUnreachable("x"), ApiUnreachable("y")),
    ],
)
def test_nobody_is_gone_while_the_one_who_knows_is_away(tmp_path: Path, kubelet: Any, kube: Any) -> None:
    assert admission(tmp_path, kubelet, kube).presence({}, 1.0) is None


@pytest.mark.parametrize(
    ("between", "resource", "ids"),
    [
        ("nothing", "core", ["1", "0"]),
        ("nothing", "memory", ["0", "1"]),
        ("nothing", "core", ["0", "2"]),
        ("another call", "core", ["0", "1"]),
        ("a restart of kubelet", "core", ["0", "1"]),
        ("seconds", "core", ["0", "1"]),
    ],
)
def test_kubelets_list_serves_for_the_devices_that_it_was_answered_with_at_once_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: str, resource: str, ids: list[str]
) -> None:
    one = admission(tmp_path, [A])
    find(one)
    one.prefer("core", ["0", "1"])
    if between == "another call":
        one.preferred("memory", ["7"])
    elif between == "a restart of kubelet":
        one.kubelet_restarted()
    elif between == "seconds":
        later = admission_module.time.monotonic() + 1.1
        monkeypatch.setattr(admission_module.time, "monotonic", lambda: later)
    told = one.preferred(resource, ids)
    assert (told == [A]) == (between == "nothing" and resource == "core" and set(ids) == {"0", "1"})
    assert one.preferred("core", ["0", "1"]) is None


def test_the_api_servers_list_is_asked_each_time(tmp_path: Path) -> None:
    one = admission(tmp_path, kube=[A])
    find(one)
    one.prefer("core", ["0"])
    assert one.preferred("core", ["0"]) is None


def test_a_list_that_names_nobody_is_asked_for_again(tmp_path: Path) -> None:
    assert admission(tmp_path, [A]).find("core", 30, EMPTY, FAR, [])[0].uid == "a"
