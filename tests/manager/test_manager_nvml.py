"""NVML on drivers and cards that know less than ours, and after its end: what can't be had is left out, the card stays."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest

from manager.cards import mig, nvml
from manager.cards.driver import DriverError, NullDriver
from manager.cards.nvml import NvmlDriver
from tests.support.ldcache import ELF
from vcuda.driver.root import HostRoot
from vcuda.sim import CardLost, Machine, SimCard, Xid

GIB = 2**30
Opened = Callable[..., NvmlDriver]


@pytest.fixture
def opened(make_machine: Callable[..., Machine], request: pytest.FixtureRequest) -> Opened:
    """Drivers of machines with these cards, by default two of 8 GiB that are linked."""

    def open_one(*cards: SimCard) -> NvmlDriver:
        machine = make_machine(
            *(cards or (SimCard(memory_bytes=8 * GIB, links={1: "NV4"}), SimCard(memory_bytes=8 * GIB)))
        )
        made = nvml.open_driver(HostRoot(machine.root))
        assert isinstance(made, NvmlDriver), getattr(made, "reason", made)
        request.addfinalizer(made.close)
        return made

    return open_one


def unknown(monkeypatch: pytest.MonkeyPatch, *names: str, number: int = pynvml.NVML_ERROR_NOT_SUPPORTED) -> None:
    """These questions are answered with an error from now on."""

    def fail(*_: object) -> None:
        raise pynvml.NVMLError(number)

    for name in names:
        fail.__name__ = name
        monkeypatch.setattr(pynvml, name, fail)


def test_linked_cards_are_closer_than_any_bus(opened: Opened) -> None:
    cards = [
        SimCard(links={1: "NV4", 2: "SYS", 3: "PIX"}),
        SimCard(links={2: "PHB"}),
        SimCard(),
        SimCard(),
    ]
    first, second, third, fourth = (item.card for item in opened(*cards).probe().cards)
    ranks = dict(first.links)
    assert ranks[second.uuid] > 100 > ranks[fourth.uuid] > dict(second.links)[third.uuid] > 0
    assert third.uuid not in ranks  # the bus between sockets is no closeness


@pytest.mark.parametrize(
    ("names", "links"),
    [
        (["nvmlDeviceGetNvLinkState"], "bus"),
        (["nvmlDeviceGetP2PStatus"], "bus"),
        (["nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetNvLinkState"], "none"),
        (["nvmlDeviceGetPciInfo", "nvmlDeviceGetUtilizationRates"], "link"),
        (["nvmlEventSetCreate"], "link"),
        (["nvmlDeviceRegisterEvents"], "link"),
    ],
)
def test_a_question_that_a_driver_does_not_know_costs_no_card(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, names: list[str], links: str
) -> None:
    unknown(monkeypatch, *names)
    driver = opened()
    probe = driver.probe()
    first, second = (item.card for item in probe.cards)
    assert probe.failed == () and (first.memory_bytes, second.memory_bytes) == (8 * GIB, 8 * GIB)
    rank = dict(first.links).get(second.uuid, 0)
    assert {"none": rank == 0, "bus": 0 < rank <= 100, "link": rank > 100}[links], rank
    assert (first.numa_node is None) == ("nvmlDeviceGetPciInfo" in names)
    assert driver.has_events == (not {"nvmlEventSetCreate", "nvmlDeviceRegisterEvents"} & set(names))
    if not driver.has_events:
        assert driver.wait_xid(0.01) is None
    sample = driver.sample(first.uuid)
    assert sample is not None and sample.memory_used_bytes < GIB


def test_a_card_that_does_not_answer_is_named_and_the_other_one_serves(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = opened()
    ask = pynvml.nvmlDeviceGetMemoryInfo
    broken: list[Any] = []

    def memory(handle: Any, version: Any = None) -> Any:
        if not broken or handle is broken[0]:
            broken[:] = [handle]
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return ask(handle)

    memory.__name__ = "nvmlDeviceGetMemoryInfo"
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", memory)
    probe = driver.probe()
    assert len(probe.cards) == 1
    ((name, why),) = probe.failed
    assert name.startswith("GPU-") and "nvmlDeviceGetMemoryInfo" in why and "GPU is lost" in why
    assert driver.sample(name) is None and driver.processes(name) is None and driver.utilization(name, 0) is None


def test_after_its_end_a_driver_says_so_and_is_not_asked(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = opened()
    uuid = driver.probe().cards[0].card.uuid
    driver.close()
    asked: list[str] = []
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: asked.append("shutdown"))
    driver.close()
    with pytest.raises(DriverError, match="the driver was closed"):
        driver.probe()
    assert driver.sample(uuid) is None and driver.processes(uuid) is None and driver.utilization(uuid, 0) is None
    assert asked == [] and not driver.has_events


def test_a_driver_that_was_never_probed_ends_without_events(opened: Opened) -> None:
    driver = opened()
    driver.close()
    assert not driver.has_events


@pytest.mark.parametrize(
    ("number", "found"),
    [(pynvml.NVML_ERROR_NOT_FOUND, ()), (pynvml.NVML_SUCCESS, ()), (pynvml.NVML_ERROR_NOT_SUPPORTED, None)],
)
def test_nobody_at_work_is_no_use_and_a_card_that_does_not_say_is_unknown(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, number: int, found: object
) -> None:
    driver = opened()
    uuid = driver.probe().cards[0].card.uuid
    unknown(monkeypatch, "nvmlDeviceGetProcessUtilization", number=number)
    assert driver.utilization(uuid, 0) == found


def test_a_wait_for_events_that_fails_is_an_error_and_no_silence(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = opened()
    driver.probe()
    assert driver.wait_xid(0.001) is None
    unknown(monkeypatch, "nvmlEventSetWait_v2", number=pynvml.NVML_ERROR_GPU_IS_LOST)
    with pytest.raises(DriverError, match="nvmlEventSetWait: GPU is lost"):
        driver.wait_xid(0.001)


def test_a_library_that_is_none_is_named_by_its_path(tmp_path: Path) -> None:
    library = tmp_path / "usr/lib64/libnvidia-ml.so.1"
    library.parent.mkdir(parents=True)
    library.write_text(ELF + "and no more")
    driver = nvml.open_driver(HostRoot(tmp_path))
    assert isinstance(driver, NullDriver) and f"cannot load {library}: " in driver.reason


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("gone", "cannot read .*gpu0/mig/gi.*access: No such file or directory"),
        ("empty", "gpu0/mig/gi.*access names no DeviceFileMinor"),
        ("nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMaxMigDeviceCount: Not Supported"),
        ("nvmlDeviceGetGpuInstanceId", "MIG instance 0 of GPU-.*: Not Supported"),
    ],
)
def test_an_instance_that_can_not_be_given_is_named_and_no_part_of_its_card_is_offered(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, how: str, message: str
) -> None:
    driver = opened(SimCard(mig=("1g", "3g")), SimCard())
    assert len(driver.probe().cards) == 3
    if how in ("gone", "empty"):
        (access, *_) = sorted((driver._root.path / mig.CAPABILITIES / "gpu0/mig").rglob("access"))
        access.unlink()
        if how == "empty":
            access.write_text("DeviceFileMode: 292\n")
    else:
        unknown(monkeypatch, how)
    probe = driver.probe()
    ((name, why),) = probe.failed
    assert name.startswith("GPU-") and re.search(message, why), why
    assert len(probe.cards) == 1 and not probe.cards[0].parent_uuid


@pytest.mark.parametrize("profiles", [(), ("1g", "3g")])
def test_what_the_driver_keeps_for_itself_is_not_sold(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, profiles: tuple[str, ...]
) -> None:
    """Else the limits of a full card add up to more than there is, and a tenant within its own gets OUT_OF_MEMORY."""
    driver = opened(SimCard(memory_bytes=80 * GIB, mig=profiles))
    before = {item.card.uuid: item.card.memory_bytes for item in driver.probe().cards}
    genuine = pynvml.nvmlDeviceGetMemoryInfo

    def keeping(handle: Any, version: int | None = None) -> Any:
        found = genuine(handle, version)
        if version is not None:
            found.reserved = GIB // 2
        return found

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", keeping)
    after = {item.card.uuid: item.card.memory_bytes for item in driver.probe().cards}
    assert after == {uuid: size - GIB // 2 for uuid, size in before.items()} and after


def test_the_xid_of_a_lost_card_is_told_though_the_card_no_longer_tells_its_uuid(
    make_machine: Callable[..., Machine],
) -> None:
    machine = make_machine(SimCard(), SimCard())
    driver = nvml.open_driver(HostRoot(machine.root))
    assert isinstance(driver, NvmlDriver)
    try:
        uuids = [item.card.uuid for item in driver.probe().cards]
        machine.inject(CardLost(1))
        event = driver.wait_xid(5.0)
        assert event is not None
        assert (event.uuid, event.xid) == (uuids[1], 79)
    finally:
        driver.close()


def test_the_xid_of_a_card_that_a_probe_found_lost_before_is_told(make_machine: Callable[..., Machine]) -> None:
    """The probe made the set of events anew without the card, and what the driver said a moment later was never heard."""
    machine = make_machine(SimCard(memory_bytes=8 * GIB), SimCard(memory_bytes=8 * GIB))
    driver = nvml.open_driver(HostRoot(machine.root))
    try:
        uuids = [item.card.uuid for item in driver.probe().cards]
        machine.inject(CardLost(1, xid=False))
        assert [uuid for uuid, _ in driver.probe().failed]
        machine.inject(Xid(1, 79))
        event = driver.wait_xid(5.0)
        assert event is not None
        assert (event.uuid, event.xid) == (uuids[1], 79)
    finally:
        driver.close()
