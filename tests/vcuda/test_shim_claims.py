"""Several shares in one container, a region for each request of a claim: every card is held to its own, whatever becomes of another's."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import share as shares
from tests.support.exports import CLIENT, IPC
from tests.support.share import MIB, Share
from vcuda import region
from vcuda.sim import Machine, SimCard

SMALL, LARGE = 256 * MIB, 512 * MIB
CONTEXT = 64  # MiB

# What a card gives: whether a context, the total that CUDA tells in MiB, and how many chunks of 32 MiB.
TAKE = """
def cards():
    count = C.c_int()
    ok("cuInit", 0); ok("cuDeviceGetCount", C.byref(count))
    return [device(ordinal) for ordinal in range(count.value)]
def device(ordinal):
    handle = C.c_int()
    ok("cuDeviceGet", C.byref(handle), ordinal)
    return handle.value
def uuid(device):
    raw = (C.c_ubyte * 16)()
    ok("cuDeviceGetUuid_v2", raw, device)
    return bytes(raw).hex()
def taken(device):
    context = C.c_void_p()
    result = call("cuCtxCreate_v2", C.byref(context), 0, device)
    if result:
        return [result]
    stream = C.c_void_p()
    ok("cuStreamCreate", C.byref(stream), 0); ok("cuStreamSynchronize", stream)
    return [0, info()[1] // MIB, len(fill(32 * MIB)[1])]
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine.create(tmp_path / "machine", [SimCard(), SimCard(), SimCard()])


def container(folder: Path, machine: Machine, claims: Mapping[str, Sequence[region.CardLimit]]) -> Share:
    """A container with claims by name; the share that lies beside them, of the device plugin, has the name ""."""
    share = shares.simulated(folder, machine, claims.get(""))
    for name, cards in claims.items():
        if name:
            claim(share, name).mkdir(parents=True)
            region.create(claim(share, name), cards)
    return share


def claim(share: Share, name: str) -> Path:
    return share.region_directory / "claims" / name if name else share.region_directory


def used(share: Share, name: str) -> int:
    """MiB, by the account of that claim."""
    return region.read_usage(claim(share, name)).cards[0].memory_used_bytes // MIB


def bare(machine: Machine, index: int) -> str:
    return machine.cards[index].uuid.removeprefix("GPU-").replace("-", "")


def both(tmp_path: Path, machine: Machine, **more: Any) -> Share:
    """Of three cards: the first small in claim b, the second large in claim a."""
    limits = {"b": shares.limit(machine, 0, SMALL, **more), "a": shares.limit(machine, 1, LARGE, **more)}
    return container(tmp_path / "share", machine, {name: [limit] for name, limit in limits.items()})


def outcome(share: Share, code: str = "", **more: str) -> tuple[Any, list[str]]:
    process = share.start(TAKE + (code or "answer({uuid(device): taken(device) for device in cards()})"), **more)
    output, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    return json.loads(output), shares.beside_refusals(said).splitlines()


def test_a_claim_alone_is_the_containers_share(tmp_path: Path, machine: Machine) -> None:
    share = container(tmp_path / "share", machine, {"only": [shares.limit(machine, 1, SMALL)]})
    assert outcome(share) == ({bare(machine, 1): [0, 256, 5]}, [])


@pytest.mark.parametrize("names", [("", "claim"), ("a", "b"), ("b", "a")])
def test_each_card_is_held_to_the_limits_of_its_own_claim(
    tmp_path: Path, machine: Machine, names: tuple[str, str]
) -> None:
    limits = [shares.limit(machine, 0, SMALL), shares.limit(machine, 1, LARGE)]
    share = container(tmp_path / "share", machine, {name: [limit] for name, limit in zip(names, limits, strict=True)})
    assert outcome(share) == ({bare(machine, 0): [0, 256, 5], bare(machine, 1): [0, 512, 13]}, [])
    for name, peak in zip(names, (226, 482), strict=True):
        card = region.read_usage(claim(share, name)).cards[0]
        assert card.memory_peak_bytes == peak * MIB and card.refusals > 0


def test_a_claim_of_two_cards_and_one_that_shares_a_card_with_it(tmp_path: Path, machine: Machine) -> None:
    """The card belongs to the claim that is first in name order; the other keeps what it has beside it."""
    share = container(
        tmp_path / "share",
        machine,
        {
            "b": [shares.limit(machine, 1, SMALL), shares.limit(machine, 2, SMALL)],
            "a": [shares.limit(machine, 0, SMALL), shares.limit(machine, 1, LARGE)],
        },
    )
    (found, said) = outcome(share)
    assert found == {bare(machine, 0): [0, 256, 5], bare(machine, 1): [0, 512, 13], bare(machine, 2): [0, 256, 5]}
    folders = f"{share.lib64}/../vcuda/claims"
    assert said == [
        f"vcuda: two shares name GPU {machine.cards[1].uuid}: {folders}/a counts, {folders}/b does not; "
        "give the container one share of each GPU"
    ]


def cut(path: Path) -> None:
    path.chmod(0o600)
    os.truncate(path, 100)


def test_a_claim_with_unreadable_limits_takes_the_memory_of_no_other(tmp_path: Path, machine: Machine) -> None:
    """Which cards it names nobody knows: all that no other claim names get no memory."""
    share = both(tmp_path, machine)
    cut(claim(share, "a") / "limits")
    (found, said) = outcome(share)
    assert found.pop(bare(machine, 0)) == [0, 256, 5]
    assert [taken[0::2] for taken in found.values()] == [[0, 0], [0, 0]]
    assert len(said) == 1 and said[0].endswith(
        "GPU memory is refused until the container is started with readable limits"
    )


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_primary_context_on_a_card_with_unreadable_limits_gives_no_memory(
    tmp_path: Path, machine: Machine, order: tuple[int, int]
) -> None:
    """Neither in the card's own context nor on the account of the other card, whichever context came first."""
    share = both(tmp_path, machine)
    cut(claim(share, "a") / "limits")
    code = f"""
cards()
contexts = {{}}
for ordinal in {order}:
    contexts[ordinal] = C.c_void_p()
    ok("cuDevicePrimaryCtxRetain", C.byref(contexts[ordinal]), device(ordinal))
found = []
for ordinal in {order} * 2:
    ok("cuCtxSetCurrent", contexts[ordinal])
    pitch = size()
    pitched = call("cuMemAllocPitch_v2", C.byref(u64()), C.byref(pitch), size(MIB), size(8), 4)
    found.append([ordinal, alloc(8 * MIB)[0], pitched])
ok("cuDevicePrimaryCtxRelease_v2", device(1))
ok("cuDevicePrimaryCtxRetain", C.byref(contexts[1]), device(1)); ok("cuCtxSetCurrent", contexts[1])
answer([found, alloc(8 * MIB)[0]])
"""
    (found, _) = outcome(share, code)
    assert found == [[[ordinal, *([2, 2] if ordinal else [0, 0])] for ordinal in order * 2], 2]


def test_a_claim_that_can_not_be_counted_takes_the_memory_of_no_other(tmp_path: Path, machine: Machine) -> None:
    share = both(tmp_path, machine)
    cut(claim(share, "a") / "usage")
    (found, said) = outcome(share)
    assert found == {bare(machine, 0): [0, 256, 5], bare(machine, 1): [2]}
    assert len(said) == 1 and "claims/a/usage" in said[0] and "GPU memory is refused to this process" in said[0]


@pytest.mark.parametrize("damaged", ["limits", "usage", ""])
def test_managed_memory_needs_room_in_every_claim(tmp_path: Path, machine: Machine, damaged: str) -> None:
    """It may come to each card: also to one that is not counted."""
    share = both(tmp_path, machine)
    if damaged:
        cut(claim(share, "a") / damaged)
    code = """
cards(); begin(device(0))
answer([alloc(count * MIB, "cuMemAllocManaged", 1)[0] for count in (100, 150)])
"""
    (found, _) = outcome(share, code)
    assert found == ([2, 2] if damaged else [0, 2])
    assert used(share, "b") == 0


def test_a_claim_made_while_the_process_runs_is_not_its(tmp_path: Path, machine: Machine) -> None:
    share = both(tmp_path, machine)
    process = share.start(TAKE + "cards(); print(flush=True); sys.stdin.readline(); answer(len(cards()))")
    assert process.stdin and process.stdout and process.stdout.readline()
    claim(share, "c").mkdir()
    region.create(claim(share, "c"), [shares.limit(machine, 2)])
    output, said = process.communicate("\n", timeout=60)
    assert (json.loads(output), said) == (2, "")


def test_a_forked_child_has_slots_of_its_own_in_each_claim(tmp_path: Path, machine: Machine) -> None:
    """Forked before CUDA is used: what the child takes of either claim counts there, and ends with it."""
    code = """
first, second = os.pipe()
child = os.fork()
if not child:
    os.write(second, json.dumps([taken(device) for device in cards()]).encode())
    os._exit(0)
os.waitpid(child, 0)
answer([json.loads(os.read(first, 999)), [taken(device) for device in cards()]])
"""
    share = both(tmp_path, machine)
    assert outcome(share, code) == ([[[0, 256, 5], [0, 512, 13]]] * 2, [])


def test_nvml_shows_the_cards_of_all_claims_with_their_own_memory(tmp_path: Path, machine: Machine) -> None:
    code = """
begin(0); alloc(64 * MIB)
nvml = C.CDLL("libnvidia-ml.so.1")
class Memory(C.Structure):
    _fields_ = [("total", C.c_ulonglong), ("free", C.c_ulonglong), ("used", C.c_ulonglong)]
count, rows = C.c_uint(), []
assert nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetCount_v2(C.byref(count)) == 0
for index in range(count.value):
    device, memory, processes = C.c_void_p(), Memory(), C.c_uint(0)
    assert nvml.nvmlDeviceGetHandleByIndex_v2(index, C.byref(device)) == 0
    assert nvml.nvmlDeviceGetMemoryInfo(device, C.byref(memory)) == 0
    nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, C.byref(processes), None)
    rows.append([memory.total // MIB, memory.used // MIB, processes.value])
answer(rows)
"""
    assert outcome(both(tmp_path, machine), code) == ([[256, CONTEXT + 64, 1], [512, 0, 0]], [])


def test_cuda_visible_devices_counts_the_cards_of_all_claims(tmp_path: Path, machine: Machine) -> None:
    share = container(
        tmp_path / "share",
        machine,
        {"a": [shares.limit(machine, 2, LARGE)], "b": [shares.limit(machine, 1, SMALL)]},
    )
    for value, wanted in (("0", [1]), ("1", [2]), ("1,0", [2, 1]), ("2", [])):
        code = "answer([cu.cuInit(0), [uuid(device) for device in cards()] if cu.cuInit(0) == 0 else []])"
        (found, _) = outcome(share, code, CUDA_VISIBLE_DEVICES=value)
        assert found == [0 if wanted else 100, [bare(machine, index) for index in wanted]], value


def test_gpu_time_is_charged_to_the_claim_of_the_card(tmp_path: Path, machine: Machine) -> None:
    code = """
cards(); begin(2)
module, function, stream = C.c_void_p(), C.c_void_p(), C.c_void_p()
ok("cuModuleLoadData", C.byref(module), b".version 7.0\\n.target sm_70\\n.visible .entry spin_10ms() { ret; }")
ok("cuModuleGetFunction", C.byref(function), module, b"spin_10ms")
for _ in range(20):
    ok("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, None, None, None)
ok("cuCtxSynchronize")
answer(0)
"""
    limits = [shares.limit(machine, index, SMALL) for index in range(3)]
    share = container(tmp_path / "share", machine, {"a": limits[:1], "b": limits[1:]})
    outcome(share, code)
    cards = [card for name in ("a", "b") for card in region.read_usage(claim(share, name)).cards]
    assert [card.launches for card in cards] == [0, 0, 20]
    assert [card.gpu_time_ns > 0 for card in cards] == [False, False, True]


def pod(folder: Path, machine: Machine, claims: Mapping[str, Path | Sequence[region.CardLimit]]) -> Share:
    """Another container, that has some claims for itself and shares others."""
    share = container(folder, machine, {name: got for name, got in claims.items() if not isinstance(got, Path)})
    for name, got in claims.items():
        if isinstance(got, Path):
            claim(share, name).parent.mkdir(parents=True, exist_ok=True)
            claim(share, name).symlink_to(got)
    return share


EXPORTS = {
    "descriptor": (
        "exporter(there); there.recv(1)",
        "result, handle = imported(taken(here))",
        'ok("cuMemRelease", handle)',
    ),
    "ipc": (
        "begin(); give_ipc(there, 300); there.recv(1)",
        "result, handle = open_ipc(here)",
        'ok("cuIpcCloseMemHandle", handle)',
    ),
}


@pytest.mark.parametrize("way", EXPORTS)
def test_memory_that_two_pods_share_is_charged_once_to_the_claim_that_both_have(
    tmp_path: Path, machine: Machine, way: str
) -> None:
    """The claim is neither the first of the one pod nor of the other; the exporter is killed while it is open."""
    makes, takes, closes = EXPORTS[way]
    own = {"first": [shares.limit(machine, 1, 1024 * MIB)], "shared": [shares.limit(machine, 0, 1024 * MIB)]}
    maker = container(tmp_path / "maker", machine, own)
    other = pod(
        tmp_path / "other",
        machine,
        {"another": [shares.limit(machine, 2, 1024 * MIB)], "with": claim(maker, "shared")},
    )
    listen = f"""
{CLIENT + IPC}
listener = socket.socket(socket.AF_UNIX); listener.bind(os.environ["SOCKET"]); listener.listen()
print(flush=True)
there = listener.accept()[0]
{makes}
"""
    address = str(tmp_path / "s")
    making = maker.start(listen, SOCKET=address)
    assert making.stdout and making.stdout.readline()
    taking = other.start(
        f"""
{CLIENT + IPC}
here = socket.socket(socket.AF_UNIX); here.connect(os.environ["SOCKET"])
begin()
{takes}
show(result)
show()
{closes}
show()
""",
        SOCKET=address,
    )
    assert taking.stdin and taking.stdout

    def shown() -> list[int]:
        assert taking.stdin and taking.stdout
        line = taking.stdout.readline()
        assert line, taking.communicate()[1]
        answer: list[int] = json.loads(line)
        return answer

    def go() -> None:
        assert taking.stdin
        taking.stdin.write("\n")
        taking.stdin.flush()

    try:
        assert shown() == [1024 - 300 - 2 * CONTEXT, 0]
        assert (used(maker, "shared"), used(maker, "first"), used(other, "another")) == (300 + 2 * CONTEXT, 0, 0)
        making.kill()
        making.communicate(timeout=60)
        go()
        assert shown() == [1024 - 300 - CONTEXT]
        go()
        assert shown() == [1024 - CONTEXT]
        go()
        assert taking.communicate(timeout=60)[1] == "" and taking.returncode == 0
    finally:
        making.kill()
        taking.kill()
