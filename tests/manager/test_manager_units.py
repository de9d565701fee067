"""Pure parts and files of the daemon: settings, placing, booking, mirror, storage, documents."""

from __future__ import annotations

import dataclasses
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager import booking, devices, housekeeping, mirror, node_description, placing, storage
from manager.allocation_index import AllocationIndex
from manager.cards import DriverError, NodeCard, Probe
from manager.errors import StartError
from manager.hostroot import HostRoot
from manager.inventory import Inventory, Snapshot
from manager.metrics import Metrics
from manager.proto import generate
from manager.regions import Company
from manager.report import CardReport, ContainerReport, NodeReport, ShareReport
from manager.settings import Settings, flag_of
from manager.settings_reader import OLD_FLAGS, parse
from manager.state import Allocation, Held
from vcuda.spec.errors import DoesNotFit
from vcuda.spec.fit import CardState
from vcuda.spec.inventory import Card
from vcuda.spec.names import Names
from vcuda.spec.placement import CardShare
from vcuda.spec.request import CardFilter, ContainerRequest, Kind, PodRequest, Policy

NAMES = Names()
GIB = 2**30
DOCS = Path(__file__).parents[2] / "docs"


def settings(*arguments: str, **environment: str) -> Settings:
    found = parse(arguments, environment)
    assert found is not None
    return found.settings


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "query-port: 1\nquery-addr: from-file\ncontainer-env: [A=1, B=2]\nhealth-ignore-xids: [1, 2]\n"
    )
    found = settings(
        "--query-port=3", f"--config={file}", GPU_MANAGER_QUERY_PORT="2", GPU_MANAGER_SAMPLE_PERIOD="5"
    )
    assert found.query_port == 3
    assert found.sample_period == 5.0
    assert found.query_addr == "from-file"
    assert found.container_env == (("A", "1"), ("B", "2"))
    assert found.health_ignore_xids == {1, 2}
    assert found.resource_domain == "tencent.com"
    assert settings(NODE_NAME="n").node_name == "n"
    assert settings("--hostname-override=m", NODE_NAME="n").node_name == "m"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML"),
        ("- a", "must hold `name: value` lines"),
        ("no-such: 1", "unknown settings: no-such"),
        ("query-port: -1", "query-port: '-1' is not valid"),
    ],
)
def test_a_bad_settings_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(StartError, match=re.escape(message)) as error:
        settings(f"--config={file}")
    assert str(file) in str(error.value)


def test_every_setting_and_metric_is_documented() -> None:
    manual = (DOCS / "manager.md").read_text()
    for field in dataclasses.fields(Settings):
        assert f"`--{flag_of(field.name)}`" in manual, field.name
    for name in OLD_FLAGS:
        assert f"`--{name}`" in manual, name
    card = CardReport("u", 0, "m", None, 1, 1, 1, 1, 1, True, "")
    share = ShareReport("u", 0, 1, 1, 1, 1, 1, 1, 1, 1, 1)
    container = ContainerReport("n", "p", "u", "c", 1, "normal", 1, (share,))
    metrics = Metrics()
    metrics.watch(lambda: NodeReport("n", "nvml", "1", "", "watched", (card,), (container,)))
    text = (DOCS / "metrics.md").read_text()
    for line in metrics.exposition().decode().splitlines():
        if line.startswith("# TYPE"):
            name = line.split()[2]
            if not name.endswith("_created"):
                assert f"`{name}`" in text, name


def test_generated_protocol_modules_are_up_to_date() -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is a development dependency")
    assert generate.stale() == []


# Placing.


def request(policy: Policy | None = None, models: CardFilter | None = None) -> PodRequest:
    return PodRequest("u", "n", "p", (), policy=policy, models=models or CardFilter())


def asks(cores: int, blocks: int) -> ContainerRequest:
    return ContainerRequest("c", Kind.APP, 0, cores, blocks, min(cores, 100))


def card(number: int, *, links: dict[int, int] | None = None, model: str = "m", numa: int = 0) -> Card:
    pairs = tuple((f"GPU-{peer}", rank) for peer, rank in (links or {}).items())
    return Card(f"GPU-{number}", number, model, 8 * GIB, numa, True, pairs)


def chosen(
    states: list[CardState], container: ContainerRequest, asked: PodRequest | None = None
) -> list[int]:
    return [
        int(share.uuid.removeprefix("GPU-"))
        for share in placing.choose(request() if asked is None else asked, container, states)
    ]


def test_a_share_goes_to_the_fullest_card_that_fits_or_the_emptiest() -> None:
    states = [CardState(card(0), 100, 32), CardState(card(1), 40, 20), CardState(card(2), 20, 32)]
    assert chosen(states, asks(30, 10)) == [1]
    assert chosen(states, asks(10, 10)) == [2]
    assert chosen(states, asks(30, 25)) == [0]
    assert chosen(states, asks(10, 10), request(Policy.SPREAD)) == [0]


def test_two_whole_cards_are_the_best_linked_pair() -> None:
    cards = [card(0, links={1: 30}), card(1), card(2), card(3, links={2: 110})]
    assert chosen([CardState(item, 100, 32) for item in cards], asks(200, 0)) == [2, 3]


def test_one_whole_card_tears_no_pair_apart() -> None:
    cards = [card(0, links={1: 110}), card(1), card(2)]
    assert chosen([CardState(item, 100, 32) for item in cards], asks(100, 0)) == [2]


def test_cards_without_links_and_a_single_card_are_ordinary() -> None:
    assert chosen([CardState(card(0), 100, 32)], asks(100, 0)) == [0]
    states = [CardState(card(number, numa=number % 2), 100, 32) for number in range(4)]
    assert chosen(states, asks(200, 0)) == [0, 2]  # the same NUMA node


@pytest.mark.parametrize(
    ("states", "container", "asked", "reason"),
    [
        ([], asks(10, 1), request(), "NoCards"),
        ([CardState(card(0), 5, 32)], asks(10, 1), request(), "InsufficientCores"),
        ([CardState(card(0), 50, 0)], asks(10, 1), request(), "InsufficientMemory"),
        ([CardState(card(0), 50, 32)], asks(100, 0), request(), "InsufficientWholeCards"),
        ([CardState(card(0), 100, 32)], asks(200, 0), request(), "InsufficientWholeCards"),
        (
            [CardState(card(0), 100, 32)],
            asks(1, 1),
            request(models=CardFilter(frozenset("x"))),
            "CardNotAllowed",
        ),
        (
            [CardState(dataclasses.replace(card(0), healthy=False), 100, 32)],
            asks(1, 1),
            request(),
            "UnhealthyCard",
        ),
    ],
)
def test_the_reason_for_no_place(
    states: list[CardState], container: ContainerRequest, asked: PodRequest, reason: str
) -> None:
    with pytest.raises(DoesNotFit) as error:
        placing.choose(asked, container, states)
    assert error.value.reason == reason


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5), st.sampled_from([Kind.APP, Kind.INIT, Kind.SIDECAR]), st.integers(1, 60)
        ),
        max_size=30,
    )
)
def test_booking_never_exceeds_a_card(pods: list[tuple[int, Kind, int]]) -> None:
    """Whatever comes in which order: what fits is placed, and the sum of the pods' peaks stays within each card."""
    cards = [card(0), card(1)]
    allocations = AllocationIndex()
    for number, (pod_number, kind, cores) in enumerate(
        sorted(pods, key=lambda item: (item[0], item[1] == Kind.APP))
    ):
        container = ContainerRequest(f"c{number}", kind, None, cores, 1, cores)
        uid = str(pod_number)
        others, beside = allocations.booked_by_others(uid), allocations.of_pod(uid)
        states = booking.states_for(cards, others, beside, container)
        try:
            shares = placing.choose(request(), container, states)
        except DoesNotFit:
            continue
        allocations[uid, container.name] = Allocation(
            uid, "n", "p", container.name, kind, cores, 1, cores, "normal", shares, {}, "", ""
        )
    for cores, blocks in booking.booked(allocations.values()).values():
        assert cores <= 100 and blocks <= 32


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from("abc"),
            st.sampled_from([Kind.APP, Kind.INIT, Kind.SIDECAR]),
            st.sets(st.sampled_from("ABC"), min_size=1),
            st.integers(1, 60),
            st.sets(st.sampled_from(["core", "memory"])),
            st.booleans(),
        ),
        max_size=20,
    )
)
def test_the_index_says_what_counting_anew_says(
    steps: list[tuple[int, str, Kind, set[str], int, set[str], bool]],
) -> None:
    index = AllocationIndex()
    plain: dict[tuple[str, str], Allocation] = {}
    for number, name, kind, cards, cores, held, goes in steps:
        uid = str(number)
        if goes and (uid, name) in plain:
            del index[uid, name], plain[uid, name]
        else:
            shares = tuple(CardShare(uuid, cores, 2) for uuid in sorted(cards))
            item = Allocation(uid, "n", "p", name, kind, cores, 2, cores, "normal", shares, {}, "", "")
            for resource in held:
                item = item.with_held(resource, Held(cores, ""))
            index[uid, name] = plain[uid, name] = item
        assert index.snapshot == tuple(plain.values()) and list(index) == list(plain)
        assert index.holdings == {key: item.held.keys() for key, item in plain.items()}
        assert set(index.pods) == {key[0] for key in plain}
        for uuid in "ABC":
            on_card = [item for item in plain.values() if any(share.uuid == uuid for share in item.shares)]
            assert sorted(item.key for item in index.on_cards([uuid])) == sorted(item.key for item in on_card)
        for other in map(str, range(5)):
            mine = tuple(item for item in plain.values() if item.pod_uid == other)
            assert index.of_pod(other) == mine
            counted = booking.booked(item for item in plain.values() if item.pod_uid != other)
            kept = {uuid: use for uuid, use in index.booked_by_others(other).items() if use != (0, 0)}
            assert kept == counted


def test_who_has_company_on_a_card() -> None:
    def at(pod_uid: str, name: str, kind: Kind, *uuids: str) -> Allocation:
        shares = tuple(CardShare(uuid, 10, 1) for uuid in uuids)
        return Allocation(pod_uid, "n", "p", name, kind, 10, 1, 10, "normal", shares, {}, "", "")

    prepare, app = at("1", "prepare", Kind.INIT, "A"), at("1", "app", Kind.APP, "A")
    assert not Company([prepare, app]).shared(prepare) and not Company([prepare, app]).shared(app)
    side = at("1", "side", Kind.SIDECAR, "A")
    assert Company([prepare, side]).shared(prepare) == Company([prepare, side]).shared(side) == {"A"}
    assert Company([app, side]).shared(app) == {"A"}
    other = at("2", "c", Kind.INIT, "A", "B")
    assert Company([app, other]).shared(other) == Company([app, other]).shared(app) == {"A"}
    assert Company([other]).shared(app) == {"A"}  # asked before it is booked


def test_preferred_ids_are_of_the_placed_card() -> None:
    first, second = devices.card_key("GPU-1"), devices.card_key("GPU-2")
    available = [f"{key}-{slot}" for slot in range(3) for key in (first, second)]
    assert devices.prefer(available, [], 2, {"GPU-2": 2}) == [f"{second}-0", f"{second}-1"]
    assert devices.prefer(available, [f"{second}-2"], 2, {"GPU-2": 2}) == [f"{second}-2", f"{second}-0"]
    assert devices.prefer(available, [], 4, {"GPU-2": 4}) is None


def test_a_nodes_label_is_a_valid_value() -> None:
    odd = Card("GPU-1", 0, "NVIDIA A100 (80GB) " + "x" * 80, GIB)
    value = node_description.labels([odd], NAMES, ())[NAMES.model_label]
    assert value is not None and re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", value)
    assert node_description.labels([], NAMES, ())[NAMES.model_label] is None
    whole = Snapshot("nvml", "1", (), (("", "no uvm"),))
    assert '"cards":[]' in node_description.inventory_of(whole, NAMES)[NAMES.inventory]


# Cards behind a driver that this test plays.


class PlayedDriver:
    """A driver that keeps a lost card lost until it is opened again, as NVML does."""

    name = "played"
    has_events = False

    def __init__(self, world: dict[str, bool]) -> None:
        self.world = world
        self.seen = dict(world)

    def probe(self) -> Probe:
        if self.world["gone"]:
            raise DriverError("nvmlDeviceGetCount: Driver Not Loaded")
        cards = tuple(
            NodeCard(card(number), number) for number in range(2) if number == 0 or not self.seen["lost"]
        )
        return Probe("1", cards, (("GPU-1", "GPU is lost"),) if self.seen["lost"] else ())

    def wait_xid(self, _: float) -> None:
        raise AssertionError("it has no events")

    def sample(self, _: str) -> None:
        return None

    def close(self) -> None:
        return


def test_a_lost_card_is_looked_for_in_a_driver_opened_anew(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "dev").mkdir()
    (tmp_path / "proc/devices").write_text("195 nvidia\n237 nvidia-uvm\n")
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia0", "nvidia1"):
        (tmp_path / "dev" / name).touch()
    world = {"lost": False, "gone": False}
    watched = Inventory(HostRoot(tmp_path), lambda _: PlayedDriver(world), 60.0, frozenset())

    def healthy() -> list[bool]:
        return [item.card.healthy for item in watched.probe().cards]

    assert healthy() == [True, True]
    world["lost"] = True
    watched._reopen()
    assert healthy() == [True, False]
    assert dict(watched.snapshot.problems) == {"GPU-1": "GPU is lost"}
    world["lost"] = False
    assert healthy() == [True, True]
    world["gone"] = True
    assert healthy() == [False, False]
    world["gone"] = False
    assert healthy() == [True, True]


# Mirror and storage.


def host(tmp_path: Path, version: str) -> HostRoot:
    folder = tmp_path / "root/usr/lib64"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*"):
        old.unlink()
    for name in ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler"):
        (folder / f"{name}.so.{version}").write_text(f"{name} {version}")
        (folder / f"{name}.so.1").symlink_to(f"{name}.so.{version}")
    (folder / "libnvidia-nvvm.so.4").symlink_to("libnvidia-nvvm.so.1.0")  # dangling: left over
    return HostRoot(tmp_path / "root")


def our_shims(tmp_path: Path, text: str = "ours") -> Path:
    folder = tmp_path / "shims"
    folder.mkdir(exist_ok=True)
    for name in mirror.SHIMS:
        (folder / name).write_text(text)
    preload = tmp_path / "preload" / mirror.PRELOAD
    preload.parent.mkdir(exist_ok=True)
    preload.write_text(text)
    return folder


def test_upgrades_make_new_directories_and_leave_the_old_ones(tmp_path: Path) -> None:
    """I3: running pods map the old files; they are neither overwritten nor removed while a container mounts them."""
    base = tmp_path / "vm"
    first = mirror.make(base, host(tmp_path, "535.1.2"), our_shims(tmp_path))
    kept = (first.lib64 / "libcuda.so.1").stat()
    assert mirror.make(base, host(tmp_path, "535.1.2"), our_shims(tmp_path)) == first
    assert (first.lib64 / "libcuda.so.1").stat() == kept
    ours = mirror.make(base, host(tmp_path, "535.1.2"), our_shims(tmp_path, "newer"))
    driver = mirror.make(base, host(tmp_path, "550.1.2"), our_shims(tmp_path, "newer"))
    assert len({first.directory, ours.directory, driver.directory}) == 3
    assert (first.lib64 / "libcuda.so.1").read_text() == "ours"
    assert (base / "driver/current").resolve() == driver.directory
    assert mirror.remove_unused(base, [first.directory]) == [ours.directory]
    assert first.directory.exists() and driver.directory.exists()


def test_the_mirrors_layout(tmp_path: Path) -> None:
    made = mirror.make(tmp_path / "vm", host(tmp_path, "535.1.2"), our_shims(tmp_path))
    names = {str(path.relative_to(made.directory)) for path in made.directory.rglob("*") if not path.is_dir()}
    assert names == {
        ".complete",
        "preload/ld.so.preload",
        "preload/libvcuda-preload.so",
        "lib64/libcuda.so",
        "lib64/libcuda.so.1",
        "lib64/libnvidia-ml.so",
        "lib64/libnvidia-ml.so.1",
        "lib64/libnvidia-ptxjitcompiler.so.1",
        "lib64/libnvidia-ptxjitcompiler.so.535.1.2",
        "lib64/drv/libcuda.so.535.1.2",
        "lib64/drv/libcuda-driver.so.1",
        "lib64/drv/libnvidia-ml.so.535.1.2",
        "lib64/drv/libnvidia-ml-driver.so.1",
    }
    assert (made.lib64 / "drv/libcuda-driver.so.1").read_text() == "libcuda 535.1.2"
    assert "libnvidia-ptxjitcompiler.so.1" in made.loader_files


def test_an_interrupted_build_of_the_mirror_is_made_anew(tmp_path: Path) -> None:
    base = tmp_path / "vm"
    made = mirror.make(base, host(tmp_path, "535.1.2"), our_shims(tmp_path))
    (made.directory / mirror.MANIFEST).unlink()
    (made.lib64 / "libcuda.so.1").unlink()
    again = mirror.make(base, host(tmp_path, "535.1.2"), our_shims(tmp_path))
    assert again == made and (made.lib64 / "libcuda.so.1").exists()


def test_a_missing_driver_or_shim_is_named(tmp_path: Path) -> None:
    root = host(tmp_path, "535.1.2")
    with pytest.raises(
        mirror.MirrorError, match=r"our own libcuda.so.1 is missing .* python -m vcuda._build"
    ):
        mirror.make(tmp_path / "vm", root, tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(mirror.MirrorError, match=r"no libcuda.so.1 below .* --driver-root right"):
        mirror.make(tmp_path / "vm", HostRoot(tmp_path / "empty"), our_shims(tmp_path))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_regions_on_a_tmpfs_of_their_own(tmp_path: Path) -> None:
    chosen_storage = storage.choose(tmp_path, "tmpfs")
    assert chosen_storage.tmpfs
    directory = tmp_path / "r"
    chosen_storage.make(directory)
    try:
        assert os.path.ismount(directory)
        with pytest.raises(OSError, match="No space left"), (directory / "x").open("wb") as file:
            file.write(b"0" * (storage.TMPFS_BYTES + 4096))
        chosen_storage.make(directory)  # a left-over is replaced, not mounted over
        assert list(directory.iterdir()) == []
    finally:
        storage.Storage.remove(directory)
    assert not directory.exists()


@pytest.mark.parametrize(
    ("mountinfo", "expected"),
    [
        ("27 1 0:24 / / rw shared:1 - ext4 /dev/sda rw", True),
        ("27 1 0:24 / / rw - ext4 /dev/sda rw", True),
        ("27 1 0:24 / / rw - overlay overlay rw", False),
        ("27 1 0:24 / / rw - overlay overlay rw\n28 27 8:1 /x /vm rw - ext4 /dev/sda rw", False),
        ("27 1 0:24 / / rw - overlay overlay rw\n28 27 8:1 /x /vm rw shared:9 - ext4 /dev/sda rw", True),
        ("27 1 0:24 / / rw - overlay overlay rw\n28 27 8:1 /x /vmx rw shared:9 - ext4 /dev/sda rw", False),
    ],
)
def test_whether_a_mount_would_reach_the_host(mountinfo: str, expected: bool) -> None:
    assert storage.reaches_host(Path("/vm"), mountinfo) is expected


def test_what_can_wait_waits_until_kubelet_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "QUIET_S", 0.1)
    monkeypatch.setattr(housekeeping, "PATIENCE_S", 0.4)
    wake = threading.Event()

    def waited(quiet_s: Callable[[], float]) -> float:
        started = time.monotonic()
        housekeeping.await_quiet(quiet_s, wake)
        return time.monotonic() - started

    called = time.monotonic()
    assert 0.09 < waited(lambda: time.monotonic() - called) < 0.35
    assert waited(lambda: 60.0) < 0.05
    assert 0.4 <= waited(lambda: 0.0) < 2  # a burst without an end
    wake.set()
    assert waited(lambda: 0.0) < 0.05
