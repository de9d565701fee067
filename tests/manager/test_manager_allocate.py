"""Allocate end to end on simulated cards: what a container gets, who gets what, what is refused."""

from __future__ import annotations

import json
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from manager.allocate import allocator
from manager.allocate.find_pod import PODS_TIMEOUT_S
from manager.kubelet.pods import KubeletPods
from tests.manager.manager_kubelet import Rejected
from tests.manager.manager_pods import NAMES, container, eventually, pod
from tests.manager.manager_support import Node
from vcuda import region
from vcuda.sim import Machine, SimCard
from vcuda.spec import placement
from vcuda.spec.placement import CardShare, Placement

MIB = 2**20


def test_a_share_gets_nodes_mounts_environment_and_a_region(node: Node, machine: Machine) -> None:
    node.start("--container-env=A=b", "--container-mount=/opt:/opt:ro", wait=200)
    mine = pod("one", container("main", 30, 10), annotations={NAMES.core_limit: "50"})
    node.kubelet.admit(mine)
    answer = node.kubelet.answer(mine, "main")

    devices = {spec.container_path: spec for spec in answer.devices}
    minor = next(card.minor for card in machine.cards if card.uuid == answer.annotations[NAMES.device])
    assert set(devices) == {
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
        "/dev/nvidia-modeset",
        f"/dev/nvidia{minor}",
    }
    assert {spec.permissions for spec in answer.devices} == {"rw"}
    assert devices["/dev/nvidiactl"].host_path == str(machine.root / "dev/nvidiactl")

    mounts = {mount.container_path: mount for mount in answer.mounts}
    driver = Path(mounts["/usr/local/nvidia"].host_path)
    assert mounts["/usr/local/nvidia"].read_only and driver.name != "current"
    assert (driver.parent / "current").resolve() == driver
    assert (driver / "lib64/libcuda.so.1").read_text() == "shim libcuda.so.1"
    assert not (driver / "lib64/libcuda.so.1").is_symlink()
    assert (driver / "lib64/drv/libcuda-driver.so.1").resolve().name.startswith("libcuda.so.5")
    assert mounts["/etc/vcuda"].read_only and not mounts["/etc/vcuda/usage"].read_only
    for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64"):
        for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
            assert mounts[f"{folder}/{name}"].host_path == str(driver / "lib64" / name)
    assert mounts["/opt"].read_only
    order = [mount.container_path for mount in answer.mounts]
    assert order.index("/etc/vcuda") < order.index("/etc/vcuda/usage")

    assert dict(answer.envs) == {
        "NVIDIA_VISIBLE_DEVICES": "void",
        "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64",
        "TRITON_LIBCUDA_PATH": "/usr/local/nvidia/lib64",
        "A": "b",
    }
    assert answer.annotations[NAMES.core] == "30"
    assert answer.annotations[NAMES.memory] == str(10 * 256 * MIB)

    directory = Path(mounts["/etc/vcuda"].host_path)
    assert stat.S_IMODE((directory / "limits").stat().st_mode) == 0o444
    assert stat.S_IMODE((directory / "usage").stat().st_mode) == 0o666
    (limit,) = region.read_limits(directory)
    assert (limit.cores, limit.core_limit, limit.memory_bytes) == (30, 50, 10 * 256 * MIB)
    assert not limit.whole and not limit.shared
    assert str(directory) in node.arbiter.regions
    second = node.kubelet.answer(mine, "main", NAMES.memory)
    assert second.ByteSize() == 0, "kubelet prints each byte of it at each admission"


def test_settings_leave_variables_out(node: Node) -> None:
    node.start("--ld-library-path=omit", "--nvidia-visible-devices=", wait=200)
    mine = pod("one", container("main", 30, 10))
    node.kubelet.admit(mine)
    assert set(node.kubelet.answer(mine, "main").envs) == {"TRITON_LIBCUDA_PATH"}


def test_the_preload_library_is_injected_with_the_real_driver_under_its_own_names(node: Node) -> None:
    node.start("--injection=preload", wait=200)
    mine = pod("one", container("main", 30, 10))
    node.kubelet.admit(mine)
    answer = node.kubelet.answer(mine, "main")
    mounts = {mount.container_path: mount for mount in answer.mounts}
    listed = Path(mounts["/etc/ld.so.preload"].host_path).read_text()
    directory = Path(mounts["/usr/local/nvidia"].host_path)
    assert listed == "/usr/local/nvidia/preload/libvcuda-preload.so\n"
    assert (directory / "preload/libvcuda-preload.so").is_file()
    for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64"):
        for name in ("libcuda", "libnvidia-ml"):
            file = Path(mounts[f"{folder}/{name}.so.1"].host_path)
            assert file.parent == directory / "lib64/drv" and not file.is_symlink()
            assert file.read_bytes() != (directory / f"lib64/{name}.so.1").read_bytes()
    assert all(mount.read_only for path, mount in mounts.items() if path != "/etc/vcuda/usage")
    # The driver directory holds the shims: found there too, they would count everything twice.
    assert dict(answer.envs) == {
        "NVIDIA_VISIBLE_DEVICES": "void",
        "TRITON_LIBCUDA_PATH": "/usr/lib/x86_64-linux-gnu",
    }


def test_shares_fill_one_card_and_learn_of_each_other(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.start(wait=200)
    first, second, third = (
        pod("a", container("c", 30, 10)), pod("b", container("c", 60, 10)), pod("d", container("c", 20, 20))
    )  # fmt: skip
    node.kubelet.admit(first)
    assert not region.read_limits(node.region(first, "c"))[0].shared
    node.kubelet.admit(second)
    assert node.kubelet.cards(first, "c") == node.kubelet.cards(second, "c")
    assert region.read_limits(node.region(first, "c"))[0].shared
    assert region.read_limits(node.region(second, "c"))[0].shared
    node.kubelet.admit(third)
    assert node.kubelet.cards(third, "c") != node.kubelet.cards(first, "c")
    assert not region.read_limits(node.region(third, "c"))[0].shared
    node.kubelet.remove(second)
    monkeypatch.setattr(allocator, "ABSENT_GRACE_S", 0.0)
    eventually(lambda: not region.read_limits(node.region(first, "c"))[0].shared, "the first is alone again")
    assert not node.region(second, "c").exists()
    assert len(node.arbiter.regions) == 2


def test_whole_cards_are_given_whole(node: Node, machine: Machine) -> None:
    node.start(wait=200)
    node.kubelet.admit(pod("share", container("c", 10, 1)))
    whole = pod("whole", container("c", 100, 1))
    node.kubelet.admit(whole)
    (limit,) = region.read_limits(node.region(whole, "c"))
    assert limit.whole and limit.cores == 100 and limit.memory_bytes == 32 * 256 * MIB
    with pytest.raises(Rejected):
        node.kubelet.admit(pod("late", container("c", 100, 1)))


def test_two_whole_cards_without_memory(node: Node, machine: Machine) -> None:
    node.start(wait=200)
    both = pod("both", container("c", 200))
    node.kubelet.admit(both)
    assert set(node.kubelet.cards(both, "c")) == {card.uuid for card in machine.cards}
    assert {f"/dev/nvidia{card.minor}" for card in machine.cards} <= {
        spec.container_path for spec in node.kubelet.answer(both, "c").devices
    }


def test_the_extenders_placement_is_obeyed_and_preferred(
    make_machine: Callable[..., Machine], make_node: Callable[..., Node]
) -> None:
    machine = make_machine(*(SimCard(memory_bytes=8192 * MIB, numa_node=number) for number in range(2)))
    node = make_node(machine.root)
    node.kubelet.start()
    node.start(wait=200)
    other = machine.cards[1].uuid
    node.kubelet.admit(pod("fill", container("c", 10, 1)))
    placed = Placement({"c": (CardShare(other, 30, 10),)})
    mine = pod("placed", container("c", 30, 10), annotations={NAMES.placement: placement.encode(placed)})
    node.kubelet.admit(mine)
    assert node.kubelet.cards(mine, "c") == [other]
    keys = {
        device_id.partition("-")[0]
        for device_id in node.kubelet.devices.records[mine["metadata"]["uid"], "c"][NAMES.core].devices
    }
    assert len(keys) == 1


@pytest.mark.parametrize(
    ("annotation", "reason"),
    [
        ("not json", "InvalidPlacement"),
        (placement.encode(Placement({"c": (CardShare("GPU-elsewhere", 30, 10),)})), "UnknownCard"),
        (placement.encode(Placement({"c": (CardShare("CARD0", 40, 10),)})), "InvalidPlacement"),
        (placement.encode(Placement({"c": (CardShare("CARD0", 30, 10),)})), "InsufficientCores"),
    ],
)
def test_a_placement_that_disagrees_is_refused(node: Node, machine: Machine, annotation: str, reason: str) -> None:
    node.start(wait=200)
    node.kubelet.admit(pod("fill", container("c", 80, 1)))
    (full,) = {uuid for uuid, (cores, _) in node.booked().items() if cores}
    before = node.booked()
    mine = pod("placed", container("c", 30, 10), annotations={NAMES.placement: annotation.replace("CARD0", full)})
    with pytest.raises(Rejected, match=f"{reason}: default/placed"):
        node.kubelet.admit(mine)
    assert node.booked() == before
    assert not node.region(mine, "c").exists()


@pytest.mark.parametrize(
    ("cores", "blocks", "annotations", "reason"),
    [
        (150, 10, {}, "InvalidCores"),
        (30, None, {}, "IncompleteRequest"),
        (30, 10, {NAMES.core_limit: "20"}, "InvalidAnnotation"),
        (30, 10, {NAMES.core_limit: "101"}, "InvalidAnnotation"),
        (30, 10, {NAMES.priority: "urgent"}, "InvalidAnnotation"),
        (30, 33, {}, "InsufficientMemory"),
    ],
)
def test_invalid_requests_are_refused_and_nothing_is_booked(
    node: Node, cores: int, blocks: int | None, annotations: dict[str, str], reason: str
) -> None:
    node.start(wait=200)
    with pytest.raises(Rejected, match=reason):
        node.kubelet.admit(pod("bad", container("c", cores, blocks), annotations=annotations))
    assert set(node.booked().values()) == {(0, 0)}
    good = pod("good", container("c", 30, 10))
    node.kubelet.admit(good)


def test_containers_init_containers_and_sidecars(node: Node) -> None:
    node.start(wait=200)
    mine = pod(
        "many",
        container("a", 30, 4),
        container("b", 40, 4),
        init=[container("prepare", 90, 8), container("side", 20, 2, restartPolicy="Always")],
    )
    node.kubelet.admit(mine)
    regions = {name: region.read_limits(node.region(mine, name))[0] for name in ("a", "b", "prepare", "side")}
    assert [regions[name].cores for name in ("a", "b", "prepare", "side")] == [30, 40, 90, 20]
    # The init container ends before the rest starts: its 90 cores and their 90 are never booked together.
    assert sorted(cores for cores, _ in node.booked().values()) == [0, 90]


def test_what_an_init_container_used_is_free_for_its_pod_only(node: Node) -> None:
    node.start(wait=200)
    node.kubelet.admit(pod("x", container("a", 100, 1)))
    node.kubelet.admit(pod("y", container("a", 50, 1), init=[container("i", 90, 1)]))
    node.kubelet.admit(pod("z", container("a", 10, 1)))
    assert {cores for cores, _ in node.booked().values()} == {100}
    # Y's later container needs 50 of the 90: what is left of them is not for others.
    placed = Placement({"a": (CardShare(node.kubelet.cards(node.kubelet.pods[1], "a")[0], 1, 1),)})
    node.kubelet.devices.records[node.kubelet.pods[1]["metadata"]["uid"], "i"][NAMES.core].devices.pop()
    with pytest.raises(Rejected, match="InsufficientCores"):
        node.kubelet.admit(pod("w", container("a", 1, 1), annotations={NAMES.placement: placement.encode(placed)}))


def test_gpu_time_that_nothing_measures_is_not_shown_as_zero(node: Node) -> None:
    """A container that is alone on its card and uncapped passes without a gate; neighbours makes it metered."""
    node.start(wait=200)
    whole, elastic, capped = (
        pod("whole", container("c", 100)),
        pod("elastic", container("c", 30, 10), annotations={NAMES.core_limit: "100"}),
        pod("capped", container("c", 30, 10)),
    )

    def times() -> dict[str, tuple[bool, bool]]:
        time.sleep(0.06)  # a sample period
        report = json.loads(node.get("/usage")[1])
        return {
            item["pod_name"]: (card["gpu_time_ns"] is None, card["card_percent"] is None)
            for item in report["containers"]
            for card in item["cards"]
        }

    node.kubelet.admit(whole)
    node.kubelet.admit(elastic)
    assert times() == {"whole": (True, False), "elastic": (True, False)}
    node.kubelet.admit(capped)
    assert times() == {"whole": (True, False), "elastic": (False, True), "capped": (False, True)}
    seconds = [line for line in node.get("/metrics")[1].splitlines() if "gpu_seconds_total{" in line]
    assert len(seconds) == 2 and not any('pod_name="whole"' in line for line in seconds)


def test_the_share_in_force_and_time_waited_are_exported(node: Node) -> None:
    node.start(wait=200)
    whole = pod("whole", container("c", 100))
    capped = pod("capped", container("c", 30, 10), annotations={NAMES.core_limit: "80"})
    node.kubelet.admit(whole)
    node.kubelet.admit(capped)
    limits = node.region(capped, "c") / "limits"
    content = bytearray(limits.read_bytes())
    struct.pack_into("<Q", content, 128, time.monotonic_ns() + 60_000_000_000)  # vc_limits.arbiter_heartbeat_ns
    struct.pack_into("<I", content, 192 + 120, 450_000)  # vc_card_limit.granted_ppm
    limits.chmod(0o644)
    limits.write_bytes(content)
    usage = node.region(capped, "c") / "usage"
    content = bytearray(usage.read_bytes())
    struct.pack_into("<Q", content, 88, 3)  # vc_usage.limits_impossible
    struct.pack_into("<QQ", content, 128 + 16, 2_500_000_000, 1_250_000_000)  # vc_card_usage.gpu_ns, waited_ns
    usage.write_bytes(content)
    time.sleep(0.06)  # a sample period
    page = node.get("/metrics")[1].splitlines()

    def figures(name: str) -> dict[str, float]:
        lines = [line for line in page if line.startswith(name + "{")]
        return {line.split('pod="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}

    assert figures("vcuda_container_granted_cores") == {"whole": 100, "capped": 45}
    assert figures("vcuda_container_limits_impossible_total") == {"whole": 0, "capped": 3}
    assert figures("vcuda_container_gpu_seconds_total") == {"capped": 2.5}
    assert figures("vcuda_container_waited_seconds_total") == {"whole": 0, "capped": 1.25}


@pytest.mark.parametrize("prefers", [True, False])
def test_kubelet_writes_its_list_of_pods_once_for_each_container(
    make_machine: Callable[..., Machine],
    make_node: Callable[..., Node],
    monkeypatch: pytest.MonkeyPatch,
    prefers: bool,
) -> None:
    """It was four times, and twice: in a burst of 200 pods each list costs kubelet and us as much as the pods before it."""
    cards = [SimCard(memory_bytes=8192 * MIB, numa_node=number * prefers) for number in range(2)]
    node = make_node(make_machine(*cards).root)
    node.kubelet.start()
    node.start(wait=200)
    asked: list[float] = []
    listed = KubeletPods.list

    def counted(self: KubeletPods, timeout: float) -> list[dict[str, object]]:
        asked.append(timeout)
        return listed(self, timeout)

    monkeypatch.setattr(KubeletPods, "list", counted)
    monkeypatch.setattr(node.daemon.allocator, "collect", lambda: None)  # asks, too, at times of its own
    assert node.kubelet.devices.endpoint(NAMES.core).preferred_allocation == prefers
    for number in range(4):
        node.kubelet.admit(pod(f"p{number}", container("c", 20, 1 + number), container("d", 10, 2)))
    # Housekeeping asks, too, at times of its own, and waits for longer.
    assert len([timeout for timeout in asked if timeout <= PODS_TIMEOUT_S]) == 4 * 2


def test_a_container_that_asks_other_plugins_too_may_be_given_up_between_our_two_calls(node: Node) -> None:
    """Kubelet asks for a container's resources in any order: the other plugin's refusal leaves ours half given."""
    node.start(wait=200)
    node.kubelet.use_preferred = False
    nic = container("c", 20, 4)
    nic["resources"]["limits"]["example.com/nic"] = "1"
    first, second = pod("first", nic), pod("second", container("c", 20, 4))
    core, memory = (node.kubelet.devices.endpoint(name) for name in (NAMES.core, NAMES.memory))
    node.kubelet.pods.append(first)
    core.allocate([device.id for device in node.kubelet.listed(NAMES.core) or ()][:20])
    first["status"] = {"phase": "Failed"}
    node.kubelet.pods.append(second)
    memory.allocate([device.id for device in node.kubelet.listed(NAMES.memory) or ()][:4])
    assert node.region(second, "c").is_dir()


def test_a_pod_that_went_between_kubelets_questions_gets_nothing_of_the_next_one(node: Node) -> None:
    """Kubelet says which devices it would give one pod, gives that up, and gives another pod as many, unasked."""
    node.start(wait=200)
    first, second = pod("first", container("c", 20, 4)), pod("second", container("c", 20, 4))
    node.kubelet.pods.append(first)
    endpoint = node.kubelet.devices.endpoint(NAMES.core)
    free = [device.id for device in node.kubelet.listed(NAMES.core) or ()]
    assert len(endpoint.preferred(endpoint.preference(free, [], 20))) == 20
    node.kubelet.pods.remove(first)
    node.kubelet.use_preferred = False
    node.kubelet.admit(second)
    assert node.region(second, "c").is_dir() and not node.region(first, "c").exists()
