"""Regions as files: made all or nothing, changed in place, read safely whatever a tenant did to its part."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vcuda import region
from vcuda._native import ffi, lib
from vcuda.region import CardLimit, RegionError

CARD = CardLimit("GPU-5fbe28bb-68ee-51b1-9b74-8a29bf1f552f", 0, 4 << 30, 30, 50)
OTHER = CardLimit(
    "GPU-000d6431-3767-59c8-a758-d43efc31efe2", 3, 1 << 30, 100, 100, whole=True, shared=True, priority="high"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    region.create(tmp_path, [CARD, OTHER])
    return tmp_path


def test_what_was_written_is_read(folder: Path) -> None:
    assert region.read_limits(folder) == (CARD, OTHER)
    usage = region.read_usage(folder)
    assert [card.uuid for card in usage.cards] == [CARD.uuid, OTHER.uuid]
    assert all(card.memory_used_bytes == card.refusals == card.gpu_time_ns == 0 for card in usage.cards)
    assert usage.processes == ()


def test_modes_and_allocated_blocks(folder: Path) -> None:
    limits, usage = (folder / "limits").stat(), (folder / "usage").stat()
    assert stat.S_IMODE(limits.st_mode) == 0o444
    assert stat.S_IMODE(usage.st_mode) == 0o666
    assert (limits.st_size, usage.st_size) == (lib.VC_LIMITS_FILE_BYTES, lib.VC_USAGE_FILE_BYTES)
    assert usage.st_blocks * 512 >= usage.st_size
    assert sorted(path.name for path in folder.iterdir()) == ["limits", "usage"]


def test_the_umask_does_not_lock_tenants_out(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        region.create(tmp_path, [CARD])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "usage").stat().st_mode) == 0o666


def test_usage_may_lie_elsewhere(tmp_path: Path) -> None:
    limits, usage = tmp_path / "limits-of-it", tmp_path / "usage-of-it"
    limits.mkdir()
    usage.mkdir()
    region.create(limits, [CARD], usage_directory=usage)
    assert [path.name for path in limits.iterdir()] == ["limits"]
    assert region.read_usage(limits, usage_directory=usage).cards[0].uuid == CARD.uuid


@pytest.mark.parametrize(
    ("cards", "words"),
    [
        ([], "has 0 cards"),
        ([replace(CARD, uuid=f"GPU-{number}") for number in range(17)], "has 17 cards"),
        ([CARD, CARD], "appears twice"),
        ([replace(CARD, uuid="")], "1 to 47 bytes"),
        ([replace(CARD, uuid="G" * 48)], "1 to 47 bytes"),
        ([replace(CARD, cores=0)], "1 <= cores"),
        ([replace(CARD, core_limit=101)], "1 <= cores"),
        ([replace(CARD, cores=60)], "1 <= cores"),
        ([replace(CARD, memory_bytes=-1)], "impossible limit"),
        ([replace(CARD, memory_bytes=2**64)], "impossible limit"),
    ],
)
def test_impossible_limits_are_refused_and_nothing_is_made(tmp_path: Path, cards: list[CardLimit], words: str) -> None:
    with pytest.raises(RegionError, match=words):
        region.create(tmp_path, cards)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_region_is_never_replaced(folder: Path) -> None:
    inode = (folder / "usage").stat().st_ino
    with pytest.raises(RegionError, match="a region exists there already"):
        region.create(folder, [CARD])
    assert (folder / "usage").stat().st_ino == inode


def test_what_a_killed_creation_left_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / "limits.new").write_text("half")
    (tmp_path / "usage.new").write_text("half")
    region.create(tmp_path, [CARD])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["limits", "usage"]


def test_a_usage_without_limits_is_what_a_killed_creation_left_and_is_replaced(tmp_path: Path) -> None:
    region.create(tmp_path, [CARD])
    (tmp_path / "limits").unlink()
    region.create(tmp_path, [OTHER])
    assert region.read_usage(tmp_path).cards[0].uuid == OTHER.uuid  # the two belong together


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(RegionError, match=f"cannot create {tmp_path}/no/usage: No such file or directory"):
        region.create(tmp_path / "no", [CARD])


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)], check=False).returncode != 0:
        pytest.skip("this machine does not let the test mount a small tmpfs")
    try:
        with pytest.raises(RegionError, match="No space left on device"):
            region.create(tmp_path, [CARD])
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_an_update_is_in_place_and_complete(folder: Path) -> None:
    inode = (folder / "limits").stat().st_ino
    changed = replace(CARD, memory_bytes=1 << 30, cores=10, core_limit=20, shared=True, priority="low", context_bytes=7)
    region.update(folder, [changed, OTHER])
    assert region.read_limits(folder) == (changed, OTHER)
    assert (folder / "limits").stat().st_ino == inode
    assert stat.S_IMODE((folder / "limits").stat().st_mode) == 0o444


@pytest.mark.parametrize("cards", [[CARD], [OTHER, CARD], [CARD, replace(OTHER, uuid="GPU-x")]])
def test_a_running_share_keeps_its_cards(folder: Path, cards: list[CardLimit]) -> None:
    with pytest.raises(RegionError, match="a running share keeps its cards"):
        region.update(folder, cards)
    assert region.read_limits(folder) == (CARD, OTHER)


def test_an_update_finishes_what_a_killed_one_began(folder: Path) -> None:
    with (folder / "limits").open("r+b") if os.access(folder / "limits", os.W_OK) else _writable(folder) as file:
        file.seek(ffi.offsetof("struct vc_limits", "sequence"))
        file.write((5).to_bytes(8, "little"))
    assert region.read_limits(folder) == (CARD, OTHER)  # odd for ever: read in bounded time all the same
    region.update(folder, [CARD, OTHER])
    with (folder / "limits").open("rb") as file:
        file.seek(ffi.offsetof("struct vc_limits", "sequence"))
        assert int.from_bytes(file.read(8), "little") == 6


def test_a_tenant_that_locks_its_limits_for_ever_does_not_stop_an_update(folder: Path) -> None:
    with (folder / "limits").open("rb") as tenant:  # reading is enough to lock
        fcntl.flock(tenant, fcntl.LOCK_EX)
        changed = replace(CARD, memory_bytes=1 << 30)
        region.update(folder, [changed, OTHER])
    assert region.read_limits(folder) == (changed, OTHER)


def _writable(folder: Path):  # type: ignore[no-untyped-def]
    (folder / "limits").chmod(0o644)
    return (folder / "limits").open("r+b")


def test_readers_see_all_of_an_update_or_nothing(folder: Path) -> None:
    states = [(replace(CARD, memory_bytes=number << 20, cores=number, core_limit=number), OTHER) for number in (11, 77)]
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for state in states:
                region.update(folder, state)

    region.update(folder, states[0])
    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            assert region.read_limits(folder) in states
    finally:
        stop.set()
        writer.join()


def truncate(path: Path) -> None:
    os.truncate(path, 1000)


def grow(path: Path) -> None:
    os.truncate(path, 1 << 40)


def remove(path: Path) -> None:
    path.unlink()


def replace_by_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_a_link_to_the_limits(path: Path) -> None:
    path.unlink()
    path.symlink_to("limits")


@pytest.mark.parametrize("abuse", [truncate, remove, replace_by_a_fifo, replace_by_a_link_to_the_limits])
def test_a_damaged_usage_is_an_error_that_names_it(folder: Path, abuse: Callable[[Path], None]) -> None:
    abuse(folder / "usage")
    with pytest.raises(RegionError, match=f"{folder}/usage"):
        region.read_usage(folder)
    assert region.read_limits(folder) == (CARD, OTHER)


def test_a_usage_that_a_tenant_made_huge_is_read_like_any(folder: Path) -> None:
    grow(folder / "usage")
    assert region.read_usage(folder).processes == ()


@settings(max_examples=60, deadline=None)
@given(garbage=st.binary(min_size=1, max_size=400), repeats=st.integers(1, 800), at=st.integers(64, 380_000))
def test_whatever_a_tenant_writes_every_figure_is_bounded(
    tmp_path_factory: pytest.TempPathFactory, garbage: bytes, repeats: int, at: int
) -> None:
    folder = tmp_path_factory.mktemp("region")
    region.create(folder, [CARD, OTHER])
    with (folder / "usage").open("r+b") as file:
        file.seek(at)
        file.write((garbage * repeats)[: lib.VC_USAGE_FILE_BYTES - at])
    usage = region.read_usage(folder)
    for card in usage.cards:
        figures = (card.gpu_time_ns, card.waited_ns, card.launches, card.refusals, card.unknown_symbols)
        assert all(0 <= figure < 2**63 for figure in figures)
        assert 0 <= card.memory_used_bytes <= 1 << 50 and 0 <= card.memory_peak_bytes <= 1 << 50
    assert len(usage.processes) <= lib.VC_MAX_SLOTS
    for process in usage.processes:
        assert process.pid == -1 or 0 < process.pid <= 1 << 22
        assert all(0 <= count <= 1 << 50 for count in process.memory_bytes.values())


# The layout is a contract between versions that run at the same time: these numbers may be added to, never changed.
OFFSETS = {
    ("vc_header", "instance"): 32,
    ("vc_limits", "sequence"): 64,
    ("vc_limits", "card_count"): 72,
    ("vc_limits", "arbiter_heartbeat_ns"): 128,
    ("vc_limits", "cards"): 192,
    ("vc_card_limit", "memory_bytes"): 48,
    ("vc_card_limit", "overhead_bytes"): 56,
    ("vc_card_limit", "cores"): 64,
    ("vc_card_limit", "core_limit"): 68,
    ("vc_card_limit", "flags"): 72,
    ("vc_card_limit", "priority"): 76,
    ("vc_card_limit", "minor"): 80,
    ("vc_card_limit", "context_bytes"): 88,
    ("vc_card_limit", "physical_bytes"): 96,
    ("vc_card_limit", "overhead_samples"): 104,
    ("vc_card_limit", "granted_ppm"): 120,
    ("vc_card_limit", "lease_sequence"): 128,
    ("vc_card_limit", "lease_clock_ns"): 152,
    ("vc_card_limit", "closed_until_ns"): 184,
    ("vc_card_limit", "saved_ns"): 200,
    ("vc_card_limit", "others_still_ns"): 208,
    ("vc_card_limit", "unsaid_ns"): 216,
    ("vc_card_limit", "all_until_ns"): 224,
    ("vc_card_limit", "doubt"): 240,
    ("vc_usage", "slot_high_water"): 64,
    ("vc_usage", "limits_unreadable"): 72,
    ("vc_usage", "slot_shortage"): 80,
    ("vc_usage", "limits_impossible"): 88,
    ("vc_usage", "cards"): 128,
    ("vc_usage", "slots"): 4224,
    ("vc_card_usage", "memory_refusals"): 40,
    ("vc_card_usage", "memory_peak_bytes"): 48,
    ("vc_card_usage", "unknown_symbols"): 80,
    ("vc_card_usage", "learnt_context_bytes"): 88,
    ("vc_card_usage", "oversold_allocations"): 112,
    ("vc_card_usage", "turn"): 120,
    ("vc_card_usage", "began_ns"): 128,
    ("vc_card_usage", "open_slots"): 136,
    ("vc_card_usage", "left_ns"): 152,
    ("vc_card_usage", "all_for_ns"): 168,
    ("vc_card_usage", "doubt"): 176,
    ("vc_card_usage", "unpaid_ns"): 184,
    ("vc_card_usage", "all_until_ns"): 192,
    ("vc_card_usage", "surprises"): 200,
    ("vc_card_usage", "beyond_ns"): 208,
    ("vc_slot", "pid"): 4,
    ("vc_slot", "flags"): 48,
    ("vc_slot", "unpaid_ns"): 56,
    ("vc_slot", "cards"): 128,
    ("vc_slot_card", "committed_bytes"): 8,
    ("vc_slot_card", "generation"): 64,
    ("vc_slot_card", "contexts"): 72,
    ("vc_slot_card", "oversold_bytes"): 80,
    ("vc_slot_card", "waiting_until_ns"): 88,
    ("vc_slot_card", "served_ns"): 96,
    ("vc_slot_card", "owed_ns"): 104,
    ("vc_slot_card", "exported_bytes"): 120,
}
SIZES = {
    "vc_header": 64,
    "vc_limits": 5312,
    "vc_card_limit": 256,
    "vc_card_usage": 256,
    "vc_slot": 2176,
    "vc_slot_card": 128,
}


def test_the_layout_is_what_running_containers_have() -> None:
    assert {name: ffi.offsetof(f"struct {name[0]}", name[1]) for name in OFFSETS} == OFFSETS
    assert {name: ffi.sizeof(f"struct {name}") for name in SIZES} == SIZES
    assert (lib.VC_LIMITS_FILE_BYTES, lib.VC_USAGE_FILE_BYTES, lib.VC_ABI_MAJOR) == (16384, 393216, 1)
