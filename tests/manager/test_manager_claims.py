"""Claims on a node: prepared exactly once whatever is asked how often, refused in their own answer, gone without a trace."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from localcluster.apiserver.faults import Fault, Request
from manager.allocations import accounting
from manager.container.response import in_the_way
from manager.dra.node import NodeClaims
from manager.errors import StartError
from tests.manager.manager_claims import ClaimNode, claim, claim_node, config, result
from tests.manager.manager_pods import NAMES, container, eventually, pod
from tests.manager.manager_support import Node
from vcuda import region
from vcuda.sim import CardLost, Machine
from vcuda.spec import bookings, inventory

BLOCK = 2**28


@pytest.fixture
def claims(machine: Machine, make_node: Callable[..., Node]) -> Iterator[ClaimNode]:
    """Two cards of 8 GiB, all of them for claims."""
    with claim_node(make_node(machine.root, with_api=True)) as found:
        yield found


def uid_of(item: dict[str, Any]) -> str:
    return str(item["metadata"]["uid"])


def booked(claims: ClaimNode) -> list[tuple[int, int]]:
    """Cores and blocks by card."""
    assert claims.node.daemon is not None
    use = accounting.booked(claims.node.daemon.allocator.allocations)
    return [use.get(uuid, (0, 0)) for uuid in claims.cards]


def error_of(claims: ClaimNode, item: dict[str, Any]) -> str:
    """Of preparing it; nothing of it may be left."""
    before, left = booked(claims), claims.left()
    answer = claims.driver().prepare(item)[uid_of(item)]
    assert answer.error and not answer.devices
    assert booked(claims) == before and claims.left() == left
    return str(answer.error)


def test_a_claim_gets_a_region_and_a_runtimes_device(claims: ClaimNode) -> None:
    driver = claims.start()
    item = claim("train", result(claims.cards[0]), configs=[config(coreLimit=50, priority="high")])
    claims.put(item)
    (device,) = driver.prepare(item)[uid_of(item)].devices
    share = item["status"]["allocation"]["devices"]["results"][0]
    assert (device.pool_name, device.device_name, device.share_id) == ("node-1", share["device"], share["shareID"])
    assert list(device.request_names) == ["gpu"]
    spec = claims.spec(item)
    assert list(device.cdi_device_ids) == [f"{spec['kind']}={spec['devices'][0]['name']}"]
    edits = spec["devices"][0]["containerEdits"]
    place = f"/etc/vcuda/claims/{uid_of(item)}-gpu"
    assert [(mount["containerPath"], mount["options"][0]) for mount in edits["mounts"]] == [
        (place, "ro"),
        (f"{place}/usage", "rw"),
    ]
    nodes = {node["path"] for node in edits["deviceNodes"]}
    assert {"/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"} <= nodes and "/dev/nvidia1" not in nodes
    mounted = {mount["containerPath"] for mount in spec["containerEdits"]["mounts"]}
    assert "/usr/local/nvidia" in mounted
    assert "NVIDIA_VISIBLE_DEVICES=void" in spec["containerEdits"]["env"]
    (limit,) = region.read_limits(claims.region(item))
    assert (limit.uuid, limit.cores, limit.core_limit, limit.memory_bytes) == (claims.cards[0], 30, 50, 10 * BLOCK)
    assert limit.priority == "high" and not limit.whole
    assert str(claims.region(item)) in claims.node.arbiter.regions
    assert booked(claims) == [(30, 10), (0, 0)]
    eventually(lambda: "default/train/gpu of pods p: 30 cores (up to 50)" in claims.node.get("/graph")[1], "/graph")


def test_it_may_be_asked_any_number_of_times(claims: ClaimNode) -> None:
    driver = claims.start()
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    first = driver.prepare(item)[uid_of(item)]
    inode = (claims.region(item) / "usage").stat().st_ino
    assert driver.prepare(item)[uid_of(item)] == first
    assert (claims.region(item) / "usage").stat().st_ino == inode
    assert booked(claims)[0] == (30, 10)


def test_unprepared_it_leaves_nothing(claims: ClaimNode) -> None:
    driver = claims.start()
    item, other = claim("train", result(claims.cards[0])), claim("other", result(claims.cards[0]))
    claims.put(item, other)
    driver.prepare(item, other)
    for _ in range(2):
        assert not driver.unprepare(item)[uid_of(item)].error
    assert booked(claims)[0] == (30, 10)
    assert not driver.unprepare(other)[uid_of(other)].error
    assert claims.left() == [] and booked(claims) == [(0, 0), (0, 0)] and not claims.node.arbiter.regions


def test_unprepared_it_leaves_no_file_that_a_kill_left_unfinished(claims: ClaimNode) -> None:
    """The next start leaves it, because it is young and may be another driver's; the claim's own end need not."""
    driver = claims.start()
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    driver.prepare(item)
    (claims.cdi / f".tencent.com-claim-{uid_of(item)}.json.4711").write_text("{")
    other = claims.cdi / ".tencent.com-claim-others.json.4711"
    other.write_text("{")
    assert not driver.unprepare(item)[uid_of(item)].error
    assert claims.left() == [other.name]


def test_one_that_was_never_prepared_is_unprepared_all_the_same(claims: ClaimNode) -> None:
    driver = claims.start()
    stranger = claim("never", result(claims.cards[0]))
    assert driver.unprepare(stranger)[uid_of(stranger)].error == ""


def test_every_claim_asked_for_gets_its_own_answer(claims: ClaimNode) -> None:
    driver = claims.start()
    good, gone, wrong = (claim(name, result(claims.cards[0])) for name in ("good", "gone", "wrong"))
    claims.put(good, {**wrong, "metadata": {**wrong["metadata"], "uid": "another"}})
    answers = driver.prepare(gone, good, wrong)
    assert set(answers) == {uid_of(item) for item in (good, gone, wrong)}
    assert answers[uid_of(good)].devices and not answers[uid_of(good)].error
    assert "gone from the API server" in answers[uid_of(gone)].error
    assert "deleted and made again" in answers[uid_of(wrong)].error
    assert booked(claims)[0] == (30, 10)


@pytest.mark.parametrize("service", ["v1.DRAPlugin", "v1beta1.DRAPlugin"])
def test_kubelets_of_both_versions_are_served(machine: Machine, make_node: Callable[..., Node], service: str) -> None:
    with claim_node(make_node(machine.root, with_api=True), services=[service]) as claims:
        driver = claims.start()
        item = claim("train", result(claims.cards[0]))
        claims.put(item)
        assert driver.service == service and driver.prepare(item)[uid_of(item)].devices
        assert not driver.unprepare(item)[uid_of(item)].error


# Bad input: a clear error in that claim's answer, nothing half prepared.


def test_deleted_between_prepare_and_start(claims: ClaimNode) -> None:
    """Kubelet asks again: what was prepared stays until it is unprepared, for a container may run; the answer says why."""
    driver = claims.start()
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    driver.prepare(item)
    assert claims.node.api is not None
    claims.node.api.remove("resourceclaims", "default/train")
    assert "ClaimChanged" in error_of(claims, item)
    assert not driver.unprepare(item)[uid_of(item)].error
    assert claims.left() == []


def test_allocated_beyond_a_cards_capacity(claims: ClaimNode) -> None:
    assert claims.node.api is not None
    claims.node.api.put("pods", pod("p", container("c", 0), uid="uid-p"))
    driver = claims.start()
    first, second = claim("a", result(claims.cards[0], cores=60)), claim("b", result(claims.cards[0], cores=50))
    third = claim("c", result(claims.cards[0], cores=1, memory="6Gi"))
    claims.put(first, second, third)
    driver.prepare(first)
    said = error_of(claims, second)
    assert "InsufficientCores" in said and "40" in said and "default/a/gpu" in said
    assert "InsufficientMemory" in error_of(claims, third)


@pytest.mark.parametrize("newcomers", [1, 24])
def test_a_newcomer_waits_for_a_claim_whose_pod_is_gone_and_whose_container_still_ends(
    claims: ClaimNode, newcomers: int
) -> None:
    """A pod without a grace period loses its claim at once; kubelet lets go of it seconds later, while others wait."""
    api = claims.node.api
    assert api is not None
    before = pod("before", container("c", 0), uid="uid-before")
    api.put("pods", before)
    driver = claims.start()
    old = claim("old", result(claims.cards[0], cores=90), pods=("before",))
    new = [
        claim(f"new-{number}", result(claims.cards[0], cores=90 // newcomers, memory="256Mi"), pods=(f"p{number}",))
        for number in range(newcomers)
    ]
    claims.put(old, *new)
    assert driver.prepare(old)[uid_of(old)].devices
    api.delete(before)
    api.remove("resourceclaims", "default/old")
    daemon = claims.node.daemon
    assert daemon is not None
    eventually(lambda: daemon._known_pods() == [], "the watch")
    with ThreadPoolExecutor(newcomers) as pool:
        calls = [pool.submit(driver.prepare, item) for item in new]
        if newcomers == 1:  # it waits: as many as there are would not say so in the same moment
            time.sleep(1.0)
            assert not calls[0].done() and booked(claims)[0] == (90, 10), "the old one's container may run"
        assert not driver.unprepare(old)[uid_of(old)].error
        answers = [call.result()[uid_of(item)] for call, item in zip(calls, new, strict=True)]
    assert [answer.error for answer in answers] == [""] * newcomers
    assert booked(claims)[0] == (90 // newcomers * newcomers, newcomers)


def test_a_newcomer_is_refused_where_the_other_one_never_ends(
    claims: ClaimNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manager.dra.claims.ENDING_S", 0.5)
    driver = claims.start()
    old, new = (claim(name, result(claims.cards[0], cores=60), pods=(name,)) for name in ("old", "new"))
    claims.put(old, new)
    assert driver.prepare(old)[uid_of(old)].devices
    assert "InsufficientCores" in error_of(claims, new)


def test_twice_on_one_card_by_one_claim_beyond_its_capacity(claims: ClaimNode) -> None:
    claims.start()
    twice = claim("twice", result(claims.cards[0], cores=60), result(claims.cards[0], cores=60))
    claims.put(twice)
    assert "InsufficientCores" in error_of(claims, twice)


def test_unknown_fields_of_its_configuration(claims: ClaimNode) -> None:
    claims.start()
    item = claim("typo", result(claims.cards[0]), configs=[config(corelimit=50)])
    claims.put(item)
    said = error_of(claims, item)
    assert "InvalidShareConfig" in said and "'corelimit'" in said and "coreLimit, priority, oversell" in said


def test_capacity_that_no_card_has(claims: ClaimNode) -> None:
    claims.start()
    item = claim("huge", result(claims.cards[0], cores=30, memory="100Gi"))
    claims.put(item)
    said = error_of(claims, item)
    assert "InsufficientMemory" in said and "and 32; delete" in said, "nobody is beside it"


def test_a_card_that_this_node_does_not_have(claims: ClaimNode) -> None:
    claims.start()
    item = claim("lost", result("GPU-00000000-0000-0000-0000-000000000000"))
    claims.put(item)
    assert "UnknownCard" in error_of(claims, item)


def test_a_sick_card_takes_no_new_claim_and_keeps_the_old_one(claims: ClaimNode, machine: Machine) -> None:
    driver = claims.start()
    old, new = claim("old", result(claims.cards[0])), claim("new", result(claims.cards[0]))
    claims.put(old, new)
    driver.prepare(old)
    machine.inject(CardLost(0))
    daemon = claims.node.daemon
    assert daemon is not None
    eventually(lambda: daemon.inventory.snapshot.problems, "the loss")
    assert "UnhealthyCard" in error_of(claims, new)
    assert driver.prepare(old)[uid_of(old)].devices


@pytest.mark.parametrize("fault", ["a file in the folder's place", "no room for the state"])
def test_no_room_for_what_must_be_written(claims: ClaimNode, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    driver = claims.start()
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    with monkeypatch.context() as patch:
        if fault.startswith("a file"):
            claims.cdi.write_text("in the way")
            answer = driver.prepare(item)[uid_of(item)]
            assert "CdiUnavailable" in answer.error and "--cdi-root" in answer.error
            assert booked(claims) == [(0, 0), (0, 0)] and not claims.region(item).exists()
            claims.cdi.unlink()
        else:
            assert claims.node.daemon is not None
            patch.setattr(claims.node.daemon.book.state, "append", _full)
            assert "StateUnwritable" in error_of(claims, item)
    assert driver.prepare(item)[uid_of(item)].devices
    assert booked(claims)[0] == (30, 10)


@pytest.mark.parametrize("what", ["no text", "a pipe", "a link"])
def test_something_else_in_place_of_the_runtimes_file(claims: ClaimNode, what: str) -> None:
    """A power cut, or another driver: it is written anew, and nothing waits for it."""
    driver = claims.start()
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    driver.prepare(item)
    text, path = claims.spec(item), next(claims.cdi.glob(f"*{uid_of(item)}.json"))
    path.unlink()
    if what == "no text":
        path.write_bytes(b"\xff\xfe")
    elif what == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(claims.node.directory / "elsewhere")
    answer = driver.prepare(item)[uid_of(item)]
    assert answer.devices and not answer.error
    assert claims.spec(item) == text and path.is_file() and not path.is_symlink()


def test_a_folder_in_place_of_the_runtimes_file(claims: ClaimNode) -> None:
    """Nothing is booked for the claim: kubelet must be able to forget it."""
    driver = claims.start()
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    path = claims.cdi / f"tencent.com-claim-{uid_of(item)}.json"
    path.mkdir(parents=True)
    assert "CdiUnavailable" in error_of(claims, item)
    assert not driver.unprepare(item)[uid_of(item)].error
    path.rmdir()


def test_a_defect_while_a_region_is_made_leaves_nothing(claims: ClaimNode, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = claims.start()
    item = claim("two", result(claims.cards[0], "one", 10), result(claims.cards[0], "other", 10))
    claims.put(item)
    make = region.create

    def fail(directory: Path, *arguments: Any) -> None:
        if directory.name == "other":
            raise OverflowError("int too big to convert")
        make(directory, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr("manager.regions.regions.region.create", fail)
        assert "int too big" in error_of(claims, item)
        assert not any((claims.node.directory / "vm/regions").iterdir())
    assert driver.prepare(item)[uid_of(item)].devices


@pytest.mark.parametrize("request_name", ["a\0b", "..", "r" * 300])
def test_a_name_that_is_no_folders(claims: ClaimNode, request_name: str) -> None:
    claims.start()
    item = claim("odd", result(claims.cards[0], "good", 10), result(claims.cards[0], request_name, 10))
    claims.put(item)
    said = error_of(claims, item)
    assert "defect" not in said and len(said) < 300
    assert not (claims.node.directory / "vm/regions" / uid_of(item)).exists()


def _full(*_: Any) -> None:
    from manager.allocations.state_file import StateError

    raise StateError("cannot write the state file: the disk is full; make room or make it writable")


def test_the_disk_fills_up_between_the_state_and_the_runtimes_file(
    claims: ClaimNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then even taking it back can't be written down: it stays booked, so that nobody else gets it, and is asked again."""
    driver = claims.start()
    daemon = claims.node.daemon
    assert daemon is not None
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    claims.cdi.write_text("in the way")
    append, calls = daemon.book.state.append, []

    def once(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) > 1:
            _full()
        append(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(daemon.book.state, "append", once)
        assert "CdiUnavailable" in driver.prepare(item)[uid_of(item)].error
    assert booked(claims)[0] == (30, 10)
    assert [found.key for found in daemon.book.state.read().values()] == [(uid_of(item), "gpu")]
    assert not driver.unprepare(item)[uid_of(item)].error
    claims.cdi.unlink()
    assert claims.left() == [] and booked(claims)[0] == (0, 0)


def test_a_volume_over_its_limits(claims: ClaimNode) -> None:
    driver = claims.start()
    assert claims.node.api is not None
    user = pod(
        "p", container("c", 0) | {"volumeMounts": [{"name": "v", "mountPath": "/etc/vcuda/claims/x"}]}, uid="uid-p"
    )
    user["spec"]["containers"][0]["resources"] = {}
    claims.node.api.put("pods", user)
    daemon = claims.node.daemon
    assert daemon is not None
    eventually(daemon._known_pods, "the pod by the watch")
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    assert "MountInTheWay" in error_of(claims, item)
    del driver


@pytest.mark.parametrize("path", ["//etc//vcuda", "etc/vcuda", "///etc/./vcuda/", "etc/x/../ld.so.preload"])
def test_a_volume_in_the_way_however_its_path_is_written(path: str) -> None:
    """Runtimes take each from the root; the API server stores what it was given."""
    assert in_the_way(["/data", path]) == path


def test_a_volume_in_the_way_of_a_pod_that_the_watch_does_not_know(
    claims: ClaimNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = claims.start()
    assert claims.node.api is not None and claims.node.daemon is not None
    user = pod("p", container("c", 0) | {"volumeMounts": [{"name": "v", "mountPath": "/etc/vcuda"}]}, uid="uid-p")
    user["spec"]["containers"][0]["resources"] = {}
    claims.node.api.put("pods", user)
    assert isinstance(claims.node.daemon.claims, NodeClaims)
    monkeypatch.setattr(claims.node.daemon.claims.preparer, "_pods", lambda: None)
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    assert "MountInTheWay" in error_of(claims, item)
    note = claims.node.api.hook
    claims.node.api.hook = lambda request: Fault(500) if request.path.endswith("/pods") else note(request)
    assert "ClaimUnreadable" in error_of(claims, item)
    claims.node.api.hook = note
    user["spec"]["containers"][0].pop("volumeMounts")
    claims.node.api.put("pods", user)
    assert driver.prepare(item)[uid_of(item)].devices


def test_a_claim_that_is_reserved_for_no_pod(claims: ClaimNode) -> None:
    claims.start()
    item = claim("train", result(claims.cards[0]), pods=())
    claims.put(item)
    assert "reserved for no pod" in error_of(claims, item)


def test_reads_that_stall_leave_every_claim_an_answer(claims: ClaimNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may take its time-out, all together no more than the call's time."""
    monkeypatch.setattr("manager.dra.claims.READ_TIMEOUT_S", 0.3)
    monkeypatch.setattr("manager.dra.server.BUDGET_S", 0.5, raising=False)
    driver = claims.start()
    items = [claim(f"c{number}", result(claims.cards[0], cores=2)) for number in range(12)]
    claims.put(*items)
    api = claims.node.api
    assert api is not None
    note, asked = api.hook, []

    def stall(request: Request) -> Fault | None:
        if "/resourceclaims/" in request.path:
            asked.append(request.path)
            return Fault(late_s=2.0)
        return note(request)

    api.hook = stall
    answers = driver.prepare(*items)
    assert len(answers) == 12 and all("ClaimUnreadable" in answer.error for answer in answers.values())
    assert 1 <= len({*asked}) <= 4, asked
    api.hook = note
    monkeypatch.setattr("manager.dra.server.BUDGET_S", 20.0, raising=False)
    monkeypatch.setattr("manager.dra.claims.READ_TIMEOUT_S", 5.0)
    assert driver.prepare(items[-1])[uid_of(items[-1])].devices


def test_a_container_with_a_share_of_the_device_plugin_besides(claims: ClaimNode) -> None:
    """Its region would be mounted over the place of the claim's. Another container of the pod may have one."""
    driver = claims.start()
    assert claims.node.api is not None and claims.node.daemon is not None
    daemon = claims.node.daemon
    both, apart = (pod(name, container("c", 10, 4), {"name": "d"}, uid=f"uid-{name}") for name in ("both", "apart"))
    for item, index in ((both, 0), (apart, 1)):
        item["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": item["metadata"]["name"]}]
        item["spec"]["containers"][index].setdefault("resources", {})["claims"] = [{"name": "gpu"}]
    claims.node.api.put("pods", both, apart)
    eventually(lambda: len(daemon._known_pods() or ()) == 2, "the pods by the watch")
    refused, given = (claim(name, result(claims.cards[0]), pods=(name,)) for name in ("both", "apart"))
    claims.put(refused, given)
    said = error_of(claims, refused)
    assert "InvalidPod" in said and "container 'c'" in said and "several requests" in said
    assert driver.prepare(given)[uid_of(given)].devices


def test_the_api_server_is_away(claims: ClaimNode) -> None:
    driver = claims.start()
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    assert claims.node.api is not None
    claims.node.api.failing = True
    assert "ClaimUnreadable" in error_of(claims, item)
    claims.node.api.failing = False
    assert driver.prepare(item)[uid_of(item)].devices


def test_a_restart_between_prepare_and_unprepare(claims: ClaimNode) -> None:
    driver = claims.start()
    item, left = claim("train", result(claims.cards[0])), claims.cdi / "tencent.com-claim-nobody.json"
    others = claims.cdi / "tencent.com-claim-others.json"
    claims.put(item)
    answer = driver.prepare(item)[uid_of(item)]
    inode = (claims.region(item) / "usage").stat().st_ino
    claims.node.stop()
    text = next(claims.cdi.glob(f"*{uid_of(item)}.json")).read_text()
    left.write_text(text.replace(uid_of(item), "nobody"))
    others.write_text(text.replace(str(claims.node.directory), "/var/lib/other"))
    driver = claims.start()
    assert not left.exists(), "a file of a claim that nobody knows"
    assert others.exists(), "the folder is all drivers', and this file another daemon's"
    others.unlink()
    assert booked(claims)[0] == (30, 10) and str(claims.region(item)) in claims.node.arbiter.regions
    assert driver.prepare(item)[uid_of(item)] == answer
    assert (claims.region(item) / "usage").stat().st_ino == inode
    assert not driver.unprepare(item)[uid_of(item)].error
    assert claims.left() == []


def test_a_claim_that_is_allocated_anew_gets_the_new_card_alone(claims: ClaimNode) -> None:
    """Kubelet forgot to unprepare it, and the scheduler has given it other devices meanwhile."""
    driver = claims.start()
    first, second = claims.cards
    item = claim("train", result(first))
    claims.put(item)
    driver.prepare(item)
    item["status"]["allocation"]["devices"]["results"] = [result(second, cores=20)]
    claims.put(item)
    (device,) = driver.prepare(item)[uid_of(item)].devices
    assert device.device_name == second.lower()
    assert booked(claims) == [(0, 0), (20, 10)]
    assert region.read_limits(claims.region(item))[0].uuid == second


def test_two_cards_and_two_requests_of_one_claim(claims: ClaimNode) -> None:
    driver = claims.start()
    first, second = claims.cards
    item = claim(
        "many", result(first, "pair", 10), result(second, "pair", 10), result(first, "one", 5), pods=("p", "q")
    )
    claims.put(item)
    devices = driver.prepare(item)[uid_of(item)].devices
    assert [list(device.request_names) for device in devices] == [["pair"], ["pair"], ["one"]]
    named = [name.partition("=")[2] for device in devices for name in device.cdi_device_ids]
    assert named == [f"{uid_of(item)}-pair", f"{uid_of(item)}-one"], "the runtime takes each device once"
    assert [limit.uuid for limit in region.read_limits(claims.region(item, "pair"))] == [first, second]
    assert booked(claims) == [(15, 20), (10, 10)]
    eventually(lambda: "of pods p, q:" in claims.node.get("/graph")[1], "/graph")


def test_a_pod_with_a_container_that_is_none_is_refused_in_words(claims: ClaimNode) -> None:
    """It ended in an AttributeError, which says nothing to whoever has to mend the pod."""
    assert claims.node.api is not None
    user = pod("p", container("c", 0), uid="uid-p")
    user["spec"] |= {"resourceClaims": [{"name": "gpu", "resourceClaimName": "train"}]}
    driver = claims.start()
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    for odd in ({"resources": None}, {"resources": {"limits": [], "claims": [None]}}):
        claims.node.api.put("pods", user | {"spec": user["spec"] | {"containers": [{"name": "c", **odd}]}})
        assert driver.prepare(item)[uid_of(item)].devices
        driver.unprepare(item)
    claims.node.api.put("pods", user | {"spec": user["spec"] | {"containers": [None]}})
    said = ""

    def refused() -> bool:
        nonlocal said
        said = driver.prepare(item)[uid_of(item)].error
        return bool(said)

    eventually(refused, "the odd pod to be seen", 30)
    assert "InvalidPod" in said and "lists a container that is not an object" in said


def test_what_a_claim_has_is_reported_for_the_extender_to_compare(claims: ClaimNode) -> None:
    def reported() -> Any:
        api = claims.node.api
        text = api.node().get("annotations", {}).get(NAMES.bookings) if api is not None else None
        return bookings.decode(text).claims if text is not None else None

    driver = claims.start()
    eventually(lambda: reported() == {}, "a report without claims", 30)
    first, second = claims.cards
    item = claim("many", result(first, "pair", 10), result(second, "pair", 10), result(first, "one", 5))
    claims.put(item)
    driver.prepare(item)
    has = {uid_of(item): {first: (15, 20), second: (10, 10)}}
    eventually(lambda: reported() == has, "the claim in the report", 30)
    driver.unprepare(item)
    eventually(lambda: reported() == {}, "the claim gone from the report", 30)


def test_what_kubelet_forgets_to_unprepare_is_collected(claims: ClaimNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once none of its pods is here; one whose pods are is kept, also those that came to it later."""
    monkeypatch.setattr("manager.dra.claims.ABSENT_GRACE_S", 0.0)
    assert claims.node.api is not None
    first, later = (pod(name, container("c", 0), uid=f"uid-{name}") for name in ("first", "later"))
    for item in (first, later):
        item["spec"] |= {"resourceClaims": [{"name": "gpu", "resourceClaimName": "shared"}]}
        item["spec"]["containers"][0]["resources"] = {}
    claims.node.api.put("pods", first, later)
    driver = claims.start()
    item = claim("shared", result(claims.cards[0]), pods=("first",))
    claims.put(item)
    driver.prepare(item)
    eventually(lambda: "of pods first, later" in claims.node.get("/graph")[1], "the second pod is noted")
    claims.node.api.delete(first)
    eventually(lambda: "of pods later:" in claims.node.get("/graph")[1], "the first pod is gone")
    assert booked(claims)[0] == (30, 10)
    claims.node.api.delete(later)
    claims.node.api.remove("resourceclaims", "default/shared")
    eventually(lambda: claims.left() == [], "the claim is let go")


@pytest.mark.parametrize("readable", [True, False])
def test_claims_that_nobody_serves_any_more_are_told_and_let_go(
    claims: ClaimNode, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    """They stayed booked for ever. Without claims in its chart the daemon may not even read them any more."""
    monkeypatch.setattr("manager.dra.claims.ABSENT_GRACE_S", 0.0)
    api = claims.node.api
    assert api is not None
    user = pod("p", container("c", 0), uid="uid-p")
    user["spec"] |= {"resourceClaims": [{"name": "gpu", "resourceClaimName": "train"}]}
    user["spec"]["containers"][0]["resources"] = {}
    api.put("pods", user)
    driver = claims.start()
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    driver.prepare(item)
    claims.node.stop()
    note = api.hook
    if not readable:
        api.hook = lambda request: Fault(403) if "resourceclaims" in request.path else note(request)
    claims.node.start(f"--cdi-root={claims.cdi}")

    def told() -> list[str]:
        return [event["message"] for event in api.events if event.get("reason") == "ClaimUnserved"]

    (message,) = eventually(told, "the event")
    assert message.startswith("claim train: ") and "--protocols=dra" in message
    assert booked(claims)[0] == (30, 10), "its container may run"
    assert claims.node.daemon is not None
    claims.node.daemon.claims.collect()
    assert booked(claims)[0] == (30, 10)
    api.delete(user)
    eventually(lambda: claims.left() == [] and booked(claims)[0] == (0, 0), "the claim is let go")


@pytest.mark.parametrize("asked", ["asked for", "not asked for"])
def test_a_forgotten_claim_is_let_go_though_another_has_its_name_now(
    claims: ClaimNode, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """Pods that use the new one are no users of the old one, by whose booking it would be refused."""
    if asked == "not asked for":
        monkeypatch.setattr("manager.dra.claims.ABSENT_GRACE_S", 0.0)
    api = claims.node.api
    assert api is not None
    first, second = (pod(name, container("c", 0), uid=f"uid-{name}") for name in ("first", "second"))
    for user in (first, second):
        user["spec"] |= {"resourceClaims": [{"name": "gpu", "resourceClaimName": "shared"}]}
        user["spec"]["containers"][0]["resources"] = {}
    api.put("pods", first)
    driver = claims.start()
    old, new = (claim("shared", result(claims.cards[0], cores=60), pods=(name,)) for name in ("first", "second"))
    claims.put(old)
    assert driver.prepare(old)[uid_of(old)].devices
    if asked == "asked for":
        claims.put(new)
        api.put("pods", second)
        assert "InsufficientCores" in error_of(claims, new), "its pod is here: its container may run"
    api.delete(first)
    api.remove("resourceclaims", "default/shared")
    claims.put(new)
    api.put("pods", second)
    daemon = claims.node.daemon
    assert daemon is not None
    eventually(lambda: [one["metadata"]["name"] for one in daemon._known_pods() or ()] == ["second"], "the watch")
    if asked == "asked for":
        assert driver.prepare(new)[uid_of(new)].devices
        assert booked(claims)[0] == (60, 10) and not claims.region(old).exists()
    else:
        eventually(lambda: claims.left() == [], "the old claim is let go")


def test_a_lost_state_is_rebuilt_from_the_claims_of_living_pods(claims: ClaimNode) -> None:
    """A container runs on: its region must stay as it is, and what it has must not be given to another claim."""
    assert claims.node.api is not None
    user = pod("p", container("c", 0), uid="uid-p")
    user["spec"] |= {"resourceClaims": [{"name": "gpu", "resourceClaimName": "train"}]}
    user["spec"]["containers"][0]["resources"] = {}
    claims.node.api.put("pods", user)
    driver = claims.start()
    item, gone = claim("train", result(claims.cards[0], cores=60)), claim("gone", result(claims.cards[0], cores=10))
    claims.put(item, gone)
    driver.prepare(item, gone)
    inode = (claims.region(item) / "usage").stat().st_ino
    claims.node.stop()
    for path in (claims.node.directory / "checkpoint").glob("state.*"):
        path.write_text("damaged")
    claims.start()
    assert booked(claims)[0] == (60, 10)
    assert (claims.region(item) / "usage").stat().st_ino == inode and not claims.region(gone).exists()
    second = claim("second", result(claims.cards[0], cores=50))
    claims.put(second)
    assert "InsufficientCores" in error_of(claims, second)


def test_a_daemon_that_serves_no_claims_touches_no_files_of_claims(claims: ClaimNode) -> None:
    driver = claims.start()
    item = claim("train", result(claims.cards[0]))
    claims.put(item)
    driver.prepare(item)
    claims.node.stop()
    claims.more = ("--protocols=device-plugin", f"--checkpoint-path={claims.node.directory}/elsewhere")
    claims.node.kubelet.start()
    claims.node.start(*claims.arguments(), wait=200)
    assert claims.spec(item)


# Whose a card is.


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["--protocols=device-plugin,dra"], "--dra-cards"),
        (["--protocols=dra", "--dra-cards=GPU-1"], "--protocols=device-plugin,dra"),
        (["--protocols=device-plugin", "--dra-cards=GPU-1"], "--protocols=device-plugin,dra"),
    ],
)
def test_settings_that_leave_open_whose_a_card_is_are_refused(
    claims: ClaimNode, settings: list[str], said: str
) -> None:
    with pytest.raises(StartError, match=said):
        claims.node.start(*claims.arguments(*settings))


def test_without_an_api_server_there_are_no_claims(machine: Machine, make_node: Callable[..., Node]) -> None:
    with claim_node(make_node(machine.root)) as found, pytest.raises(StartError, match="--kubeconfig"):
        found.start()


def test_a_card_belongs_to_one_protocol(claims: ClaimNode, machine: Machine) -> None:
    first, second = (card.uuid for card in machine.cards)
    node = claims.node
    node.kubelet.start()
    claims.more = ("--protocols=device-plugin,dra", f"--dra-cards={second}")
    driver = claims.start()
    node.kubelet.wait_devices(100)
    eventually(claims.slices, "slices")
    (slice_,) = claims.slices()
    assert [device["attributes"]["uuid"]["string"] for device in slice_["spec"]["devices"]] == [second]
    item = claim("train", result(first))
    claims.put(item)
    assert "CardNotAllowed" in error_of(claims, item)
    mine = claim("mine", result(second))
    claims.put(mine)
    assert driver.prepare(mine)[uid_of(mine)].devices
    assert node.api is not None

    described = eventually(
        lambda: node.api and node.api.node().get("annotations", {}).get(NAMES.inventory), "inventory"
    )
    assert [card.uuid for card in inventory.decode(described)] == [first]


def test_a_card_that_containers_still_have_from_the_device_plugin_is_not_offered(
    claims: ClaimNode, machine: Machine
) -> None:
    first, second = (card.uuid for card in machine.cards)
    node = claims.node
    node.kubelet.start()
    node.start(wait=200)
    item = pod("old", container("c", 30, 4))
    assert node.api is not None
    node.api.put("pods", item)
    node.kubelet.admit(item)
    node.stop()
    claims.start()
    eventually(claims.slices, "slices")
    (slice_,) = claims.slices()
    held = json.loads(node.get("/usage")[1])["containers"][0]["cards"][0]["uuid"]
    offered = {device["attributes"]["uuid"]["string"] for device in slice_["spec"]["devices"]}
    assert offered == {first, second} - {held}
    claims.put(late := claim("late", result(held)))
    said = error_of(claims, late)
    assert "CardNotAllowed" in said and "device plugin" in said, "its scheduler knew older slices"
    node.kubelet.remove(item)
    node.api.delete(item)
    eventually(lambda: len(claims.slices()[0]["spec"]["devices"]) == 2, "the card once its container has ended")


def joining(name: str, **extra: Any) -> dict[str, Any]:
    """A pod whose container names the claim `train`."""
    made = pod(name, container("c", 0) | extra, uid=f"uid-{name}")
    made["spec"]["containers"][0]["resources"] = {"claims": [{"name": "it"}], **extra.get("resources", {})}
    made["spec"]["resourceClaims"] = [{"name": "it", "resourceClaimName": "train"}]
    return made


def events_of(claims: ClaimNode, name: str) -> list[tuple[str, str]]:
    assert claims.node.api is not None
    found = claims.node.api.store("events").list(None, lambda _: True)
    return [(one["reason"], one["message"]) for one in found if one["involvedObject"]["name"] == name]


@pytest.mark.parametrize("policy", ["report", "evict"])
def test_a_pod_that_joins_a_prepared_claim_with_a_volume_in_the_way(claims: ClaimNode, policy: str) -> None:
    """Kubelet does not ask for it: the daemon looks by itself, and ends nobody unless it is told to."""
    driver = claims.start(f"--audit-policy={policy}")
    assert claims.node.api is not None
    first = joining("first")
    claims.node.api.put("pods", first)
    claims.node.kubelet.pods.append(first)
    item = claim("train", result(claims.cards[0]), pods=("first", "second", "third"))
    claims.put(item)
    assert not driver.prepare(item)[uid_of(item)].error
    bad = joining("second", volumeMounts=[{"name": "v", "mountPath": "/etc/vcuda/claims"}])
    good = joining("third", volumeMounts=[{"name": "v", "mountPath": "/data"}])
    for other in (bad, good):
        claims.node.api.put("pods", other)
        claims.node.kubelet.pods.append(other)
    eventually(lambda: events_of(claims, "second"), "the event")
    ((reason, message),) = events_of(claims, "second")
    assert reason == "MountInTheWay" and "'/etc/vcuda/claims'" in message
    assert (
        'vcuda_manager_claim_pods_at_fault_total{node="node-1",reason="MountInTheWay"} 1.0'
        in claims.node.get("/metrics")[1]
    )
    api = claims.node.api

    def evicted() -> list[str]:
        return [one["metadata"]["name"] for one in api.events if one.get("kind") == "Eviction"]

    if policy == "evict":
        eventually(evicted, "the eviction")
    assert evicted() == (["second"] if policy == "evict" else [])
    assert events_of(claims, "first") == events_of(claims, "third") == []
