"""Whose call it is: the pod being admitted, exactly, or a refusal."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.allocate import find_pod, matcher
from manager.allocations.record import Held
from manager.kubelet import incremental_json, records
from tests.manager.manager_kubelet import Rejected
from tests.manager.manager_pods import NAMES, container, eventually, pod
from tests.manager.manager_support import Node
from vcuda import region
from vcuda.sim import Machine, SimCard

MIB = 2**20


def facts(*pods: dict[str, Any]) -> list[matcher.Facts]:
    return [matcher.Facts.of(item, NAMES) for item in pods]


def test_many_pods_with_equal_cores_and_different_memory_in_any_order(
    make_machine: Callable[..., Machine], make_node: Callable[..., Node]
) -> None:
    """I8: each gets its own limit, with kubelet restarts in between; kubelet lists a pod just before it admits it."""
    node = make_node(make_machine(*(SimCard() for _ in range(4))).root)
    node.kubelet.start()
    node.start(wait=400)
    pods = [pod(f"p{number}", container("c", 5, 1 + number)) for number in range(30)]
    order = random.Random(7).sample(pods, len(pods))
    for number, item in enumerate(order):
        if number in (10, 20):
            node.kubelet.restart()
            node.kubelet.wait_devices(400)
        node.kubelet.admit(item)
    for number, item in enumerate(pods):
        (limit,) = region.read_limits(node.region(item, "c"))
        assert limit.memory_bytes == (1 + number) * 256 * MIB


def test_a_refused_pod_that_is_still_listed_does_not_confuse_the_next_ones(node: Node) -> None:
    node.start(wait=200)
    refused = pod("refused", container("c", 30, 10), annotations={NAMES.core_limit: "nonsense"})
    with pytest.raises(Rejected, match="InvalidAnnotation"):
        node.kubelet.admit(refused)
    good = pod("good", container("c", 30, 10))
    node.kubelet.admit(good)
    assert region.read_limits(node.region(good, "c"))
    assert not node.region(refused, "c").exists()


def test_equal_pods_of_which_one_never_came_are_told_apart_by_the_api_server(
    make_node: Callable[..., Node], machine: Machine
) -> None:
    """Kubelet rejected the first before it asked us; only the API server knows already."""
    node = make_node(machine.root, with_api=True)
    node.kubelet.start()
    node.start(wait=200)
    assert node.api is not None
    rejected, good = pod("rejected", container("c", 30, 10)), pod("good", container("c", 30, 10))
    node.kubelet.pods += [rejected, good]
    node.api.put("pods", {**rejected, "status": {"phase": "Failed"}}, good)
    node.kubelet.admit(good)
    assert region.read_limits(node.region(good, "c"))


def test_a_kubelet_that_answers_late_tells_equal_pods_apart(make_node: Callable[..., Node], machine: Machine) -> None:
    """It admits one pod of many that the API server has bound; on a busy machine its list takes longer than we wait at first."""
    node = make_node(machine.root, with_api=True)
    node.kubelet.start()
    node.start(wait=200)
    assert node.api is not None
    pods = [pod(f"p{number}", container("c", 30, 10)) for number in range(3)]
    node.api.put("pods", *pods)
    node.kubelet.delay_s = find_pod.PODS_TIMEOUT_S + 0.2
    for item in pods:
        node.kubelet.admit(item)
    assert all(region.read_limits(node.region(item, "c")) for item in pods)


@pytest.mark.parametrize("with_kubelet_url", [True, False])
def test_ambiguity_is_refused_with_an_event_and_never_guessed(
    make_node: Callable[..., Node], machine: Machine, with_kubelet_url: bool
) -> None:
    node = make_node(machine.root, with_api=True, with_kubelet_url=with_kubelet_url)
    node.kubelet.start()
    node.start(wait=200)
    api = node.api
    assert api is not None
    first, second = pod("first", container("c", 30, 10)), pod("second", container("c", 30, 10))
    node.kubelet.pods += [first, second]
    api.put("pods", first, second)
    with pytest.raises(Rejected, match=r"PodAmbiguous: 2 pods wait for .*default/first, default/second"):
        node.kubelet.admit(first)
    assert set(node.booked().values()) == {(0, 0)}
    eventually(lambda: len(api.events) >= 2, "an event on both pods")
    assert {event["involvedObject"]["name"] for event in api.events} == {"first", "second"}
    assert {event["reason"] for event in api.events} == {"PodAmbiguous"}


def test_without_kubelets_list_the_api_servers_pods_decide(make_node: Callable[..., Node], machine: Machine) -> None:
    node = make_node(machine.root, with_api=True, with_kubelet_url=False)
    node.kubelet.start()
    node.start(wait=200)
    assert node.api is not None
    pods = [pod("a", container("c", 30, 10)), pod("b", container("c", 31, 11), container("d", 20, 3))]
    node.api.put("pods", *pods)
    for item in pods:
        node.kubelet.admit(item)
    assert region.read_limits(node.region(pods[1], "c"))[0].memory_bytes == 11 * 256 * MIB


def test_with_neither_list_everything_is_refused(make_node: Callable[..., Node], machine: Machine) -> None:
    node = make_node(machine.root, with_kubelet_url=False)
    node.kubelet.start()
    node.start(wait=200)
    with pytest.raises(Rejected, match="PodUnknown: the pod being admitted can't be identified: neither"):
        node.kubelet.admit(pod("a", container("c", 30, 10)))


def test_slow_servers_are_answered_for_within_two_seconds(make_node: Callable[..., Node], machine: Machine) -> None:
    node = make_node(machine.root, with_api=True)
    node.kubelet.start()
    node.start(wait=200)
    assert node.api is not None
    node.kubelet.use_preferred = False
    node.kubelet.delay_s = node.api.delay_s = 3.0
    item = pod("a", container("c", 30, 10))
    with pytest.raises(Rejected, match=r"kubelet's /pods: .*timed out; the API server: .*timed out"):
        node.kubelet.admit(item)
    assert 'vcuda_manager_allocate_seconds_bucket{le="2.0",node="node-1"} 1.0' in node.get("/metrics")[1]
    node.kubelet.delay_s = node.api.delay_s = 0.0
    node.kubelet.admit(item)


def test_kubelet_asks_again_for_what_it_has_forgotten(node: Node) -> None:
    node.start(wait=200)
    item = pod("a", container("c", 30, 10))
    node.kubelet.admit(item)
    cards, before = node.kubelet.cards(item, "c"), node.booked()
    node.kubelet.forget(item)
    node.kubelet.admit(pod("b", container("c", 5, 1)))  # kubelet's checkpoint knows only this one now
    node.kubelet.admit(item)
    assert node.kubelet.cards(item, "c") == cards
    assert all(node.booked()[uuid][0] >= cores for uuid, (cores, _) in before.items())


def test_a_given_up_pod_is_not_taken_for_the_next_one() -> None:
    """PodFinder is serial: a pod with some devices that was not the last one served will not go on."""
    given_up = pod("given-up", container("c", 30, 10))
    fresh = pod("fresh", container("c", 40, 10))
    held = {(given_up["metadata"]["uid"], "c"): {"core"}}

    def find(last_uid: str | None) -> list[str]:
        found = matcher.candidates(facts(given_up, fresh), "memory", 10, held, last_uid=last_uid)
        return [item.name for item in found]

    assert find(fresh["metadata"]["uid"]) == ["default/fresh"]
    assert find(given_up["metadata"]["uid"]) == ["default/given-up", "default/fresh"]
    assert find(None) == ["default/given-up", "default/fresh"]


def test_only_the_first_container_that_lacks_something_counts() -> None:
    item = pod("p", container("a", 30, 10), container("b", 40, 10), init=[container("i", 50, 5)])
    uid = item["metadata"]["uid"]
    assert matcher.Facts.of(item, NAMES).next_container({}) == ("i", {"core": 50, "memory": 5})
    held: dict[tuple[str, str], set[str]] = {(uid, "i"): {"core", "memory"}, (uid, "a"): {"memory"}}
    assert matcher.Facts.of(item, NAMES).next_container(held) == ("a", {"core": 30})
    assert not matcher.candidates(facts(item), "core", 40, held)


@pytest.mark.parametrize(
    "ids", [["k-1", "k-2"], {"-1": ["k-1"], "0": ["k-2"]}], ids=["list of kubelet 1.19", "by NUMA node"]
)
def test_both_formats_of_kubelets_checkpoint(tmp_path: Path, ids: object) -> None:
    rows = [
        {"PodUID": "u", "ContainerName": "c", "ResourceName": NAMES.core, "DeviceIDs": ids, "AllocResp": ""},
        {
            "PodUID": "u",
            "ContainerName": "c",
            "ResourceName": "other.io/x",
            "DeviceIDs": ids,
            "AllocResp": "",
        },
    ]
    document = {"Data": {"PodDeviceEntries": rows, "RegisteredDevices": {}}, "Checksum": 1}
    (tmp_path / records.CHECKPOINT_FILE).write_text(json.dumps(document))
    (entry,) = records.Checkpoint(tmp_path, NAMES).list(answers=True)
    assert (entry.pod_uid, entry.container, entry.resource) == ("u", "c", "core")
    assert entry.held == Held.of(["k-2", "k-1"])


ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "PodUID": st.sampled_from(["u1", "u2", '},{"PodUID":"', '"DeviceIDs"']),
            "ContainerName": st.sampled_from(["c", "d", '],"RegisteredDevices"']),
            "ResourceName": st.sampled_from([NAMES.core, NAMES.memory, "other"]),
            "DeviceIDs": st.dictionaries(
                st.sampled_from(["-1", "0"]), st.lists(st.sampled_from(["a", "b", '"}]', "},{"]), min_size=1)
            ),
            "AllocResp": st.sampled_from(["", "CgQK"]),
        }
    ),
    max_size=5,
)


@given(st.lists(ROWS, min_size=1, max_size=4))
def test_a_checkpoint_read_again_says_what_one_read_anew_says(documents: list[list[dict[str, Any]]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / records.CHECKPOINT_FILE
        again = records.Checkpoint(Path(folder), NAMES)
        for number, rows in enumerate(documents):
            document = {
                "Data": {"PodDeviceEntries": rows, "RegisteredDevices": {NAMES.core: ["a"]}},
                "Checksum": 1,
            }
            path.write_text(json.dumps(document, separators=(",", ":")))
            os.utime(path, ns=(number, number))
            anew = records.Checkpoint(Path(folder), NAMES).list(answers=True)
            found = again.list()
            assert sorted(map(repr, found)) == sorted(repr(dataclasses.replace(e, answer="")) for e in anew)


def test_of_a_checkpoint_only_new_rows_are_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {
            "PodUID": f"u{number}",
            "ContainerName": "c",
            "ResourceName": NAMES.core,
            "DeviceIDs": {"0": [str(number)]},
            "AllocResp": "",
        }
        for number in range(20)
    ]
    path = tmp_path / records.CHECKPOINT_FILE
    checkpoint = records.Checkpoint(tmp_path, NAMES)
    parsed: list[bytes] = []
    loads = incremental_json.orjson.loads
    monkeypatch.setattr(incremental_json.orjson, "loads", lambda text: parsed.append(text) or loads(text))
    for count in (19, 20):
        parsed.clear()
        document = {"Data": {"PodDeviceEntries": rows[:count], "RegisteredDevices": {}}, "Checksum": count}
        path.write_text(json.dumps(document, separators=(",", ":")))
        assert len(checkpoint.list()) == count
    assert len(parsed) == 2 and b'"u19"' in parsed[1]  # what is around them, and the new one
    checkpoint.list()
    assert len(parsed) == 2


@pytest.mark.parametrize("text", ["", "{}", '{"Data": 3}', '{"Data": {"PodDeviceEntries": [3]}}'])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / records.CHECKPOINT_FILE).write_text(text)
    with pytest.raises(records.RecordsError, match="kubelet's checkpoint"):
        records.Checkpoint(tmp_path, NAMES).list(answers=True)
