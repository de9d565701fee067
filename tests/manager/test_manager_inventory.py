"""The cards of a node as the daemon knows them and tells of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from manager.cards.driver import DriverError, NodeCard, Probe, XidEvent
from manager.cards.inventory import Inventory, Snapshot
from manager.cards.seen import SeenCards
from manager.config.settings import Settings
from manager.observe import node_object
from vcuda.driver.root import HostRoot
from vcuda.spec.inventory import Card
from vcuda.spec.names import Names

NAMES = Names()
GIB = 2**30


def test_a_nodes_label_is_a_valid_value() -> None:
    odd = Card("GPU-1", 0, "NVIDIA A100 (80GB) " + "x" * 80, GIB)
    value = node_object.labels([odd], NAMES, ())[NAMES.model_label]
    assert value is not None and re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", value)
    assert node_object.labels([], NAMES, ())[NAMES.model_label] is None
    whole = Snapshot("nvml", "1", (), (("", "no uvm"),))
    assert '"cards":[]' in node_object.inventory_of(whole, NAMES)[NAMES.inventory]


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
            NodeCard(Card(f"GPU-{number}", number, "m", GIB), number)
            for number in range(2)
            if number == 0 or not self.seen["lost"]
        )
        return Probe("1", cards, (("GPU-1", "GPU is lost"),) if self.seen["lost"] else ())

    def wait_xid(self, _: float) -> None:
        raise AssertionError("it has no events")

    def sample(self, _: str) -> None:
        return None

    def close(self) -> None:
        return


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """With the nodes of two cards."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "dev").mkdir()
    (tmp_path / "proc/devices").write_text("195 nvidia\n237 nvidia-uvm\n")
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia0", "nvidia1"):
        (tmp_path / "dev" / name).touch()
    return tmp_path


def test_a_lost_card_is_looked_for_in_a_driver_opened_anew(root: Path) -> None:
    world = {"lost": False, "gone": False}
    watched = Inventory(HostRoot(root), lambda _: PlayedDriver(world), Settings, SeenCards(root))

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


class LosingDriver(PlayedDriver):
    """Its card is lost a moment before the Xid says so; a probe that finds it lost makes the set of events anew."""

    has_events = True

    def __init__(self, world: dict[str, bool]) -> None:
        super().__init__(world)
        self.pending = [XidEvent("GPU-1", 79)]

    def wait_xid(self, timeout_s: float) -> XidEvent | None:
        if self.seen["lost"]:
            return self.pending.pop() if self.pending else None
        if timeout_s > 0:
            self.seen["lost"] = True
            raise DriverError("GPU is lost")
        return None

    def probe(self) -> Probe:
        if self.seen["lost"]:
            self.pending.clear()
        return super().probe()


def test_an_event_that_comes_while_a_failed_wait_is_slept_off_is_counted(root: Path) -> None:
    driver, often = LosingDriver({"lost": False, "gone": False}), Settings(health_check_interval=0.5)
    watched = Inventory(HostRoot(root), lambda _: driver, lambda: often, SeenCards(root))
    watched.probe()
    while not watched.snapshot.problems:
        watched._watch()
    assert watched.xid_counts == {("GPU-1", 79, False): 1}


class LateDriver(LosingDriver):
    """The Xid of its lost card comes after a probe that found it lost, and one of its other card, too."""

    def __init__(self, world: dict[str, bool]) -> None:
        super().__init__(world)
        self.pending = []

    def wait_xid(self, _: float) -> XidEvent | None:
        return self.pending.pop() if self.pending else None


def test_an_xid_is_told_of_a_card_that_a_probe_has_found_lost_before(root: Path) -> None:
    """Events and annotations said that it is lost, and never which error it was."""
    driver, told = LateDriver({"lost": False, "gone": False}), list[tuple[str, str]]()
    watched = Inventory(
        HostRoot(root),
        lambda _: driver,
        Settings,
        SeenCards(root),
        on_health=lambda uuid, why: told.append((uuid, why)),
    )
    watched.probe()
    driver.seen["lost"] = True
    watched.probe()
    assert told == [("GPU-1", "GPU is lost")]
    driver.pending = [XidEvent("GPU-1", 79)]
    watched._watch()
    for _ in range(2):
        assert dict(watched.snapshot.problems) == {"GPU-1": "GPU is lost; Xid 79"}
        watched.probe()
    assert told[1:] == [("GPU-1", "GPU is lost; Xid 79")]


def test_whose_pod_holds_a_card_is_not_told_with_its_xid_either(root: Path) -> None:
    driver = LateDriver({"lost": False, "gone": False})
    watched = Inventory(HostRoot(root), lambda _: driver, Settings, SeenCards(root))
    watched.block({"GPU-1": "claim of pod ns/name"})
    watched.probe()
    driver.pending = [XidEvent("GPU-1", 48)]
    watched._watch()
    assert dict(watched.snapshot.problems) == {"GPU-1": "claim of pod ns/name; Xid 48"}
    assert [item.card.why for item in watched.snapshot.cards][1].startswith("something past gpu-manager holds it")
    assert [item.card.why for item in watched.snapshot.cards][1].endswith("; Xid 48")
