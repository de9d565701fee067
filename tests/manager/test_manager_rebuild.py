"""What is rebuilt from kubelet's records when state and regions are gone, and what is left out because its cards can't be told."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from manager.allocate import rebuild
from manager.allocations import accounting
from manager.allocations.record import Allocation, Held
from manager.container import driver_dir
from manager.kubelet.records import Entry
from manager.proto import deviceplugin_pb2 as api
from manager.regions import regions
from tests.manager.manager_pods import NAMES, container, pod
from vcuda import region
from vcuda.spec import placement, resize
from vcuda.spec.inventory import Card
from vcuda.spec.names import OLD_POD_GROUP_NAME_LABEL, OLD_POD_GROUP_SIZE_LABEL
from vcuda.spec.placement import CardShare
from vcuda.spec.request import Kind
from vcuda.spec.units import BLOCK_BYTES

KEY = ("u", "c")
CARDS = {uuid: Card(uuid, minor, "m", size * BLOCK_BYTES) for uuid, minor, size in (("GPU-0", 4, 32), ("GPU-1", 5, 64))}
MINORS = {"GPU-0": 4, "GPU-1": 5}


def answer(
    cards: str | None = "GPU-0",
    nodes: Sequence[int] = (4,),
    memory: object = 10 * BLOCK_BYTES,
    cores: int = 30,
) -> str:
    """What Allocate answered, as kubelet's checkpoint keeps it."""
    made = api.ContainerAllocateResponse()
    if cards is not None:
        made.annotations.update({NAMES.core: str(cores), NAMES.memory: str(memory), NAMES.device: cards})
    for path in ("/dev/nvidiactl", *(f"/dev/nvidia{minor}" for minor in nodes)):
        made.devices.add(container_path=path, host_path=path, permissions="rw")
    made.mounts.add(container_path=regions.CONTAINER_PATH, host_path="/kept/regions/u/c")
    made.mounts.add(container_path=driver_dir.CONTAINER_PATH, host_path="/kept/mirror")
    return base64.b64encode(made.SerializeToString()).decode()


def entry(resource: str, count: int, text: str = "", **more: Any) -> Entry:
    return Entry("c", resource, Held.of(map(str, range(count))), **{"pod_uid": "u", **more}, answer=text)


def complete(
    entries: Sequence[Entry],
    *pods: dict[str, Any],
    known: Mapping[tuple[str, str], Allocation] | None = None,
    base: Path = Path("/none"),
    told: list[str] | None = None,
) -> dict[tuple[str, str], Allocation]:
    """`told`: takes what owners are told."""
    heard = [] if told is None else told
    return rebuild.complete(
        known or {}, entries, pods, NAMES, base, CARDS, lambda item, text: heard.append(f"{item.name}: {text}")
    )


def written(**shares: CardShare) -> dict[str, str]:
    chosen = placement.Placement({name: (share,) for name, share in shares.items()})
    return {NAMES.placement: placement.encode(chosen)}


def test_the_answer_that_kubelet_keeps_says_cards_amounts_and_folders() -> None:
    found = complete([entry("core", 30, answer()), entry("memory", 10, answer())])
    item = found[KEY]
    assert (item.cores, item.memory_blocks, item.shares) == (30, 10, (CardShare("GPU-0", 30, 10),))
    assert (item.region, item.mirror, item.minors) == ("/kept/regions/u/c", "/kept/mirror", {"GPU-0": 4})
    assert set(item.held) == {"core", "memory"}


def test_a_card_that_had_another_minor_at_admission_keeps_that_one() -> None:
    """The container's nodes are the old ones: `prestart` compares and refuses."""
    assert complete([entry("core", 30, answer(nodes=[9]))])[KEY].minors == {"GPU-0": 9}


def test_of_several_cards_todays_minors_count_if_they_are_the_answered_nodes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    two = answer("GPU-1,GPU-0", [5, 4], 96 * BLOCK_BYTES, 200)
    found = complete([entry("core", 200, two)])[KEY]
    assert found.minors == MINORS
    assert [share.memory_blocks for share in found.shares] == [64, 32]  # each as large as it is, not the mean
    moved = answer("GPU-1,GPU-0", [5, 9], 96 * BLOCK_BYTES, 200)
    assert complete([entry("core", 200, moved)]) == {}
    assert "its cards can't be told; recreate the pod" in caplog.text


def test_a_pod_that_the_extender_placed_is_rebuilt_from_its_annotation() -> None:
    """PodResources knows neither UID nor answer: the pod of that name says the rest."""
    share = CardShare("GPU-0", 30, 10)
    placed = pod("p", container("c", 30, 10), annotations=written(c=share), uid="u")
    entries = [
        entry("core", 30, pod_uid="", pod=("default", "p")),
        entry("memory", 10, pod_uid="", pod=("default", "p")),
    ]
    # Without an answer no node tells the minor: only a card that was answered for, or a region, does.
    assert complete(entries, placed) == {}
    entries.append(entry("core", 30, answer(None)))
    found = complete(entries, placed)
    assert (found[KEY].shares, found[KEY].minors) == ((share,), {"GPU-0": 4})
    assert found[KEY].name == "default/p/c"


UNTOLD = {
    "no answer and nothing else": ([entry("core", 30)], []),
    "an answer that is no base64": ([entry("core", 30, "abcde")], []),
    "an answer that is no message": ([entry("core", 30, base64.b64encode(b"\xff\xff").decode())], []),
    "an answer without cards": ([entry("core", 30, answer(""))], []),
    "amounts that are no numbers": ([entry("core", 30, answer(memory="much"))], []),
    "memory without cores": ([entry("memory", 10, answer())], []),
    "a placement of another container": (
        [entry("core", 30, answer(None))],
        [pod("p", container("c", 30, 10), annotations=written(d=CardShare("GPU-0", 30, 10)), uid="u")],
    ),
    "a placement that is none": (
        [entry("core", 30, answer(None))],
        [pod("p", container("c", 30, 10), annotations={NAMES.placement: "nonsense"}, uid="u")],
    ),
    "a card that this node does not have": (
        [entry("core", 30)],
        [pod("p", container("c", 30, 10), annotations=written(c=CardShare("GPU-9", 30, 10)), uid="u")],
    ),
    "a pod that asks for half a share and was not placed": (
        [entry("core", 30, answer(None))],
        [pod("p", container("c", 30), uid="u")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", UNTOLD)
def test_what_can_not_be_told_is_named_and_left_out(what: str, caplog: pytest.LogCaptureFixture) -> None:
    entries, pods = UNTOLD[what]
    assert complete(entries, *pods) == {}
    assert "container c of pod u holds devices by kubelet's records, but its cards can't be told" in caplog.text
    assert "recreate the pod" in caplog.text


def test_devices_of_a_pod_that_nobody_knows_by_name_and_of_one_that_has_ended_stay_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended = pod("p", container("c", 30, 10), uid="u") | {"status": {"phase": "Failed"}}
    stranger = entry("core", 30, answer(), pod_uid="", pod=("default", "gone"))
    assert complete([stranger, entry("core", 30, answer())], ended) == {}
    assert caplog.text == ""


def test_what_is_known_only_learns_of_calls_that_kubelet_saved_and_we_did_not() -> None:
    (before,) = complete([entry("core", 30, answer())]).values()
    after = complete([entry("memory", 10, answer("GPU-1"))], known={KEY: before})[KEY]
    assert after.shares == before.shares and set(after.held) == {"core", "memory"}


def region_of(base: Path, uid: str, name: str, cores: int, blocks: int, limit: int = 0) -> None:
    directory = base / "regions" / uid / name
    directory.mkdir(parents=True)
    region.create(directory, [region.CardLimit("GPU-0", 4, blocks * BLOCK_BYTES, cores, limit or cores)])


def test_an_edited_annotation_counts_for_nothing_beside_the_region_and_kubelets_records(
    tmp_path: Path,
) -> None:
    forged = pod("p", container("c", 10, 4), annotations=written(c=CardShare("GPU-1", 100, 320)), uid="u")
    entries = [
        entry("core", 10, pod_uid="", pod=("default", "p")),
        entry("memory", 4, pod_uid="", pod=("default", "p")),
    ]
    assert complete(entries, forged, base=tmp_path) == {}  # it does not say what the container holds
    region_of(tmp_path, "u", "c", 10, 4)
    assert complete(entries, forged, base=tmp_path)[KEY].shares == (CardShare("GPU-0", 10, 4),)


def test_when_state_and_kubelets_records_are_lost_the_regions_of_living_pods_remain(tmp_path: Path) -> None:
    living, over, other = (pod(name, container("c", 10, 4), uid=name) for name in ("u", "over", "other"))
    over["status"] = {"phase": "Succeeded"}
    for uid, cores in (("u", 10), ("over", 10), ("other", 100), ("stranger", 10)):
        region_of(tmp_path, uid, "c", cores, 4)
    found = complete([], living, over, other, base=tmp_path)
    assert {key: (item.shares, item.held) for key, item in found.items()} == {
        KEY: ((CardShare("GPU-0", 10, 4),), {})
    }  # the one with a whole card is no size of a share


@pytest.mark.parametrize("granted", [(30, 9), (31, 9), (60, 20), None])
def test_a_region_stands_whatever_was_granted_since(tmp_path: Path, granted: tuple[int, int] | None) -> None:
    """It holds what is in force: kubelet goes on counting what was asked for at first, and the last grant may still wait, or was refused."""
    item = pod("p", container("c", 10, 4), uid="u")
    if granted is not None:
        grant = resize.Answer("x", {"c": resize.Target(CardShare("GPU-0", *granted))})
        item["status"] = {"phase": "Running", "conditions": [resize.condition(grant, NAMES, "")]}
    region_of(tmp_path, "u", "c", 30, 9, limit=70)
    (found,) = complete([entry("core", 10), entry("memory", 4)], item, base=tmp_path).values()
    assert (found.shares, found.core_limit) == ((CardShare("GPU-0", 30, 9),), 70)
    assert (found.cores, found.memory_blocks) == (10, 4), "what kubelet counts"


@pytest.mark.parametrize(("cores", "asked"), [(100, 10), (30, 100)])
def test_a_region_of_another_kind_of_share_does_not_count(tmp_path: Path, cores: int, asked: int) -> None:
    """No resize makes a share of a whole card, nor the other way round."""
    region_of(tmp_path, "u", "c", cores, 4)
    item = pod("p", container("c", asked, 4), uid="u")
    assert complete([entry("core", asked), entry("memory", 4)], item, base=tmp_path) == {}


@pytest.mark.parametrize(
    ("beside", "wanted"),
    [((80, 20), (20, 10)), ((40, 28), (30, 4)), ((70, 22), (30, 10)), ((99, 31), (1, 1)), ((99, 32), None)],
)
def test_no_card_is_rebuilt_to_more_than_it_has(
    beside: tuple[int, int],
    wanted: tuple[int, int] | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What a region says stands; who has none any more and was shrunk since gets what is left of what kubelet counts."""
    region_of(tmp_path, "b", "c", *beside)
    pods = [pod("p", container("c", 30, 10), uid="u"), pod("q", container("c", 10, 4), uid="b")]
    entries = [entry("core", 30, answer()), entry("memory", 10, answer())]
    entries += [entry("core", 10, pod_uid="b"), entry("memory", 4, pod_uid="b")]
    told: list[str] = []
    found = complete(entries, *pods, base=tmp_path, told=told)
    assert found[("b", "c")].shares == (CardShare("GPU-0", *beside),)
    assert all(text in caplog.text for text in told) and len(told) == (wanted != (30, 10))
    if wanted is None:
        assert KEY not in found
        assert "default/p/c" in caplog.text and "recreate the pod" in caplog.text
    else:
        assert found[KEY].shares == (CardShare("GPU-0", *wanted),)
        assert found[KEY].core_limit == wanted[0]
        assert ("default/p/c" in caplog.text and "has no more room" in caplog.text) == (wanted != (30, 10))


def test_regions_that_hold_more_than_their_card_are_named_and_stand(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are in force; to write less would take memory from under a program."""
    pods = [pod(uid, container("c", 60, 4), uid=uid) for uid in "ab"]
    for uid in "ab":
        region_of(tmp_path, uid, "c", 60, 4)
    assert accounting.booked(complete([], *pods, base=tmp_path).values()) == {"GPU-0": (120, 8)}
    assert "GPU-0" in caplog.text and "default/b/c" in caplog.text


EDITED: dict[str, dict[str, str]] = {
    "a limit that is no number": {NAMES.core_limit: "banana"},
    "a limit below the cores": {NAMES.core_limit: "1"},
    "an oversell that is none": {NAMES.oversell: "banana"},
    "an oversell of nobody": {NAMES.oversell: "nobody=9"},
    "a priority that is none": {NAMES.priority: "banana"},
    "a policy that is none": {NAMES.policy: "banana"},
    "a gang that is none": {NAMES.gang: "banana"},
}


@pytest.mark.parametrize("what", EDITED)
def test_a_region_counts_whatever_the_pods_owner_wrote_since(what: str, tmp_path: Path) -> None:
    item = pod("p", container("c", 60, 4), init=[container("i", 60, 4)], annotations=EDITED[what], uid="u")
    for name in ("c", "i"):
        region_of(tmp_path, "u", name, 60, 4)
    found = complete([], item, base=tmp_path)
    assert {name: (each.shares, each.kind) for (_, name), each in found.items()} == {
        "i": ((CardShare("GPU-0", 60, 4),), Kind.INIT),
        "c": ((CardShare("GPU-0", 60, 4),), Kind.APP),
    }
    by_kubelet = [
        Entry(name, "core", Held.of(map(str, range(60))), pod_uid="u", answer=answer(cores=60)) for name in ("c", "i")
    ]
    assert accounting.booked(complete(by_kubelet, item).values()) == {"GPU-0": (60, 10)}


def test_labels_that_the_pods_owner_wrote_since_cost_it_nothing_either(tmp_path: Path) -> None:
    item = pod("p", container("c", 10, 4), uid="u")
    item["metadata"]["labels"] = {OLD_POD_GROUP_NAME_LABEL: "g", OLD_POD_GROUP_SIZE_LABEL: "banana"}
    region_of(tmp_path, "u", "c", 10, 4)
    assert KEY in complete([], item, base=tmp_path)


def test_an_elastic_limit_is_what_the_region_says_and_without_one_the_cores(tmp_path: Path) -> None:
    """The annotation may have been edited since, and kubelet's records do not have the limit."""
    item = pod("p", container("c", 30, 10), annotations={NAMES.core_limit: "100"}, uid="u")
    entries = [entry("core", 30, answer()), entry("memory", 10, answer())]
    assert complete(entries, item)[KEY].core_limit == 30
    directory = tmp_path / "regions/u/c"
    directory.mkdir(parents=True)
    region.create(directory, [region.CardLimit("GPU-0", 4, 10 * BLOCK_BYTES, 30, 70)])
    entries = [entry("core", 30), entry("memory", 10)]
    assert complete(entries, item, base=tmp_path)[KEY].core_limit == 70


def test_in_whatever_order_kubelet_remembers_containers_a_pod_books_its_peak() -> None:
    """Init and app container run one after the other: 60 cores, not 120."""
    item = pod("p", container("c", 60, 10), init=[container("init", 60, 10)], uid="u")
    both = [
        Entry(name, resource, Held.of(map(str, range(count))), pod_uid="u", answer=answer(cores=60))
        for name in ("c", "init")
        for resource, count in (("core", 60), ("memory", 10))
    ]
    found = complete(both, item)
    assert [name for _, name in found] == ["init", "c"]
    assert accounting.booked(found.values()) == {"GPU-0": (60, 10)}


IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "negative amounts": {"cores": -5},
    "no region of it": {"region": "/etc"},
    "is no region": {"region": "/kept/regions/u/other"},
}


@pytest.mark.parametrize("why", IMPOSSIBLE)
def test_what_nobody_of_ours_wrote_into_the_state_is_named_and_rebuilt(
    why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its checksum may be right: a region is a folder that we remove one day, whoever wrote its name."""
    (before,) = complete([entry("core", 30, answer())]).values()
    forged = dataclasses.replace(before, **IMPOSSIBLE[why])
    assert complete([], known={KEY: forged}) == {}
    assert f"default/{forged.pod_name}/c" in caplog.text and why in caplog.text
    assert complete([entry("core", 30, answer())], known={KEY: forged}) == {KEY: before}
    assert complete([], known={KEY: before}) == {KEY: before}


def test_a_share_of_a_card_that_is_gone_is_named_and_stays(caplog: pytest.LogCaptureFixture) -> None:
    """The card may come back, and its container has it still."""
    (before,) = complete([entry("core", 30, answer())]).values()
    gone = dataclasses.replace(before, shares=(CardShare("GPU-gone", 30, 10),))
    assert complete([], known={KEY: gone}) == {KEY: gone}
    assert "holds a share of GPU-gone, which this node does not have" in caplog.text
