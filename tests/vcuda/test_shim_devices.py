"""Which cards CUDA shows: the share's, numbered from 0, whatever else the machine has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import share as shares
from tests.support.share import MIB
from vcuda import region
from vcuda.sim import Machine, SimCard

LOOK = """
ok("cuInit", 0)
count = C.c_int()
ok("cuDeviceGetCount", C.byref(count))
uuids, buses = [], []
for ordinal in range(-1, 5):
    device, uuid, bus = C.c_int(-7), (C.c_ubyte * 16)(), C.create_string_buffer(32)
    result = call("cuDeviceGet", C.byref(device), ordinal)
    if result == 0:
        ok("cuDeviceGetUuid_v2", uuid, device)
        uuids.append(bytes(uuid).hex())
    elif result != 101:
        sys.exit(f"cuDeviceGet({ordinal}): {result}")
for raw in range(4):
    bus, device = C.create_string_buffer(32), C.c_int(-7)
    if call("cuDeviceGetPCIBusId", bus, 32, raw) == 0:
        buses.append(call("cuDeviceGetByPCIBusId", C.byref(device), bus))
answer([count.value, uuids, buses])
"""


def plain(machine: Machine, index: int) -> str:
    return machine.cards[index].uuid.removeprefix("GPU-").replace("-", "")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine.create(tmp_path / "machine", [SimCard(), SimCard(), SimCard(), SimCard()])


def look(tmp_path: Path, machine: Machine, cards: list[int], **environment: str) -> Any:
    share = shares.simulated(tmp_path / "share", machine, [shares.limit(machine, index) for index in cards])
    return share.run(LOOK, **environment)


def test_only_the_cards_of_the_share_are_there(tmp_path: Path, machine: Machine) -> None:
    count, uuids, buses = look(tmp_path, machine, [1, 3])
    assert (count, uuids) == (2, [plain(machine, 1), plain(machine, 3)])
    assert buses == [101, 0, 101, 0]


def test_a_tenant_chooses_among_them_by_environment(tmp_path: Path, machine: Machine) -> None:
    chosen = look(tmp_path, machine, [1, 3], CUDA_VISIBLE_DEVICES=machine.cards[3].uuid)
    assert chosen[:2] == [1, [plain(machine, 3)]]


def test_a_context_on_the_only_card_of_the_share_needs_no_other_number(tmp_path: Path, machine: Machine) -> None:
    share = shares.simulated(tmp_path / "share", machine, [shares.limit(machine, 2, memory_bytes=100 * MIB)])
    total = share.run("""
        ok("cuInit", 0)
        device, context = C.c_int(), C.c_void_p()
        ok("cuDeviceGet", C.byref(device), 0)
        ok("cuCtxCreate_v2", C.byref(context), 0, device)
        answer(info()[1])
    """)
    assert total == 100 * MIB


def test_unreadable_limits_hide_no_card(tmp_path: Path, machine: Machine) -> None:
    share = shares.simulated(tmp_path / "share", machine, [shares.limit(machine)])
    limits = share.region_directory / "limits"
    limits.chmod(0o644)
    limits.write_bytes(b"damaged" * 10)
    process = share.start(LOOK)
    assert process.communicate(timeout=60)[0].startswith("[4, ")
    with pytest.raises(region.RegionError):
        region.read_limits(share.region_directory)
