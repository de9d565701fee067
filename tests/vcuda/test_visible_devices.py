"""CUDA_VISIBLE_DEVICES inside a share chooses among the share's cards as the driver does among a machine's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import share as shares
from tests.support.share import MIB
from vcuda import region
from vcuda.sim import Machine, SimCard

LIMIT = 512 * MIB

VISIBLE = """
count, uuids = C.c_int(-1), []
result = cu.cuInit(0)
if result == 0:
    ok("cuDeviceGetCount", C.byref(count))
    for ordinal in range(count.value):
        device, raw = C.c_int(), (C.c_ubyte * 16)()
        ok("cuDeviceGet", C.byref(device), ordinal)
        ok("cuDeviceGetUuid_v2", raw, device)
        uuids.append(bytes(raw).hex())
answer([result, uuids])
"""


@pytest.mark.parametrize("place", ["container", "run"])
def test_cuda_visible_devices_chooses_among_the_shares_cards_as_the_driver_does(tmp_path: Path, place: str) -> None:
    """The same value must give the same cards inside a share of cards 1 and 2 as on a machine that has only these."""
    machine = Machine.create(tmp_path / "machine", [SimCard(), SimCard(), SimCard()])
    cards = [shares.limit(machine, index, LIMIT) for index in (1, 2)]
    share = shares.simulated(tmp_path / "share", machine, cards)
    if place == "container":
        machine.remove_node("nvidia0")  # its device nodes are those of its cards
    first, second = (machine.cards[index].uuid for index in (1, 2))
    bare = [first.removeprefix("GPU-").replace("-", ""), second.removeprefix("GPU-").replace("-", "")]
    expected: dict[str, list[str]] = {
        "0": bare[:1],
        "1": bare[1:],
        "1,0": bare[::-1],
        "0,7,1": bare[:1],  # out of range: what follows is not seen
        "-1": [],
        "": [],
        second: bare[1:],
        second[:12]: bare[1:],
        f"{second},{first}": bare[::-1],
        "GPU-ffffffff": [],
    }
    bare_machine = shares.simulated(tmp_path / "bare", machine, None)
    for value, wanted in expected.items():
        result, uuids = share.run(VISIBLE, CUDA_VISIBLE_DEVICES=value)
        assert uuids == wanted, value
        assert result == (0 if wanted else 100), value
        if place == "run":
            continue
        process = bare_machine.start(VISIBLE, CUDA_VISIBLE_DEVICES=value)
        output, _ = process.communicate(timeout=60)
        assert json.loads(output.splitlines()[-1]) == [result, uuids], value


def test_cuda_visible_devices_names_a_mig_instance(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path / "machine", [SimCard(mig=["3g", "3g"])])
    mine, other = machine.cards[0].mig[1], machine.cards[0].mig[0]
    limit = region.CardLimit(mine.uuid, 0, LIMIT, 50, 50)
    share = shares.simulated(tmp_path / "share", machine, [limit])
    for name in (f"nvidia-caps/nvidia-cap{cap}" for cap in other.caps):
        machine.remove_node(name)
    raw = mine.uuid.removeprefix("MIG-").replace("-", "")
    for value in (mine.uuid, "0"):
        assert share.run(VISIBLE, CUDA_VISIBLE_DEVICES=value) == [0, [raw]], value
    assert share.run(VISIBLE, CUDA_VISIBLE_DEVICES=other.uuid) == [100, []]
