"""Making, opening and refusing simulated machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import simulated
from vcuda import sim
from vcuda.sim import conf, libraries
from vcuda.sim.cards import capability_minor

GIB = 2**30


def test_a_machine_opened_again_has_the_cards_it_was_made_with(tmp_path: Path) -> None:
    made = sim.Machine.create(
        tmp_path / "machine",
        [
            sim.SimCard(memory_bytes=8 * GIB, links={1: "NV4"}, context_bytes=1 << 20, slice_ns=1_000_000),
            sim.SimCard(model="Tesla T4", numa_node=-1, minor=7),
            sim.SimCard(mig=["1g", "2g.10gb"]),
        ],
    )
    assert sim.Machine(tmp_path / "machine").cards == made.cards
    assert [card.minor for card in made.cards] == [0, 7, 1]
    assert made.cards[1].links == ((0, "NV4"),)
    assert [part.memory_bytes for part in made.cards[2].mig] == [5 * GIB, 10 * GIB]


def test_chosen_uuids_are_the_same_when_the_machine_is_made_again(tmp_path: Path) -> None:
    first = conf.machine_conf(sim.cards.resolve(tmp_path / "a", [sim.SimCard()] * 2), "1.2", 12040)
    again = conf.machine_conf(sim.cards.resolve(tmp_path / "a", [sim.SimCard()] * 2), "1.2", 12040)
    other = conf.machine_conf(sim.cards.resolve(tmp_path / "b", [sim.SimCard()] * 2), "1.2", 12040)
    assert first == again != other


def test_the_driver_itself_reads_the_machine(tmp_path: Path) -> None:
    machine = sim.Machine.create(tmp_path / "machine", [sim.SimCard(memory_bytes=8 * GIB), sim.SimCard(mig=["7g"])])
    report = machine.report()
    assert [card.memory_bytes for card in report.cards] == [8 * GIB, 40 * GIB, 40 * GIB]
    assert report.cards[2].uuid == machine.cards[1].mig[0].uuid
    assert report.processes == () and not any(card.used_bytes or card.busy_ns or card.lost for card in report.cards)


UUID = "GPU-00000000-0000-0000-0000-000000000001"


@pytest.mark.parametrize(
    ("cards", "words"),
    [
        ([], "1 to 32 cards"),
        ([sim.SimCard()] * 33, "1 to 32 cards"),
        ([sim.SimCard(mig=["1g"] * 7)] * 5, "1 to 32 cards and MIG instances, not 40"),
        ([sim.SimCard(uuid=UUID), sim.SimCard(uuid=UUID)], f"UUID {UUID}"),
        ([sim.SimCard(minor=3), sim.SimCard(minor=3)], "minor 3"),
        ([sim.SimCard(minor=255)], "minor 255"),
        ([sim.SimCard(uuid="card")], "does not look like"),
        ([sim.SimCard(memory_bytes=0)], "0 bytes of memory"),
        ([sim.SimCard(model='x" mig=1 "')], "double quote"),
        ([sim.SimCard(model="two\nlines")], "printable"),
        ([sim.SimCard(mig=["5g"])], "no MIG profile '5g'"),
        ([sim.SimCard(mig=["1g.10gb"])], "1g.5gb"),
        ([sim.SimCard(mig=["4g", "4g"])], "8 of 7 compute"),
        ([sim.SimCard(model="Tesla T4", mig=["1g"])], "can't be cut"),
        ([sim.SimCard(links={0: "NV1"})], "not another card"),
        ([sim.SimCard(links={1: "NV0"}), sim.SimCard()], "no connection 'NV0'"),
        ([sim.SimCard(links={1: "NV1"}), sim.SimCard(links={0: "PIX"})], "in two ways"),
        ([sim.SimCard(slice_ns=-5000)], "slice_us is -5"),
        ([sim.SimCard(numa_node=-2)], "NUMA node -2"),
    ],
)
def test_impossible_cards_are_refused_and_leave_nothing(tmp_path: Path, cards: list[sim.SimCard], words: str) -> None:
    with pytest.raises(sim.SimError) as caught:
        sim.Machine.create(tmp_path / "machine", cards)
    assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_anything_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(sim.SimError, match="is not an empty folder"):
        sim.Machine.create(tmp_path)
    assert (tmp_path / "kept").read_text() == "mine"
    sim.Machine.create(tmp_path / "machine")
    with pytest.raises(sim.SimError, match="is not an empty folder"):
        sim.Machine.create(tmp_path / "machine")


def test_an_unwritable_place_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(sim.SimError, match=r"file/machine: .*; give a writable folder"):
        sim.Machine.create(tmp_path / "file" / "machine")


def test_a_wrong_nvidia_smi_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sim.SimError, match="there is no nvidia-smi at"):
        sim.Machine.create(tmp_path / "machine", nvidia_smi=tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_opening_what_is_no_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sim.SimError, match="holds no simulated machine"):
        sim.Machine(tmp_path)
    machine = sim.Machine.create(tmp_path / "machine")
    (machine.state / "machine.conf").write_text("driver version=1\ncard index=zero\n")
    with pytest.raises(sim.SimError, match="line 2 is damaged"):
        sim.Machine(tmp_path / "machine")


def test_without_built_libraries_the_way_to_build_them_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "BUILT", tmp_path / "sim")
    with pytest.raises(sim.SimError, match=r"python -m vcuda\._build"):
        sim.Machine.create(tmp_path / "machine")


def test_the_newest_rule_of_a_kernel_wins_and_bad_ones_are_refused(tmp_path: Path) -> None:
    machine = sim.Machine.create(tmp_path / "machine")
    machine.set_kernel_time("spin*", 1000)
    machine.set_kernel_time("other", 5, 7)
    machine.set_kernel_time("spin*", 2000)
    assert (machine.state / "kernels").read_text().splitlines() == ["spin* 2000 0", "other 5 7"]
    for pattern, ns in (("two words", 1), ("", 1), ("#", 1), ("a", -1)):
        with pytest.raises(sim.SimError):
            machine.set_kernel_time(pattern, ns)


def test_faults_reach_the_driver_and_bad_ones_are_refused(tmp_path: Path) -> None:
    machine = sim.Machine.create(tmp_path / "machine", [sim.SimCard(mig=["1g"]), sim.SimCard()])
    machine.inject(sim.CardLost(0), sim.Xid(1, 48))
    cards = machine.report().cards
    assert [(card.lost, card.xid_count) for card in cards] == [(True, 1), (False, 1), (True, 0)]
    machine.inject(sim.CardRecovered(0))
    assert not any(card.lost for card in machine.report().cards)
    with pytest.raises(sim.SimError, match="refused"):
        machine.inject(sim.CardLost(9))


def test_capability_minors_follow_the_genuine_numbering() -> None:
    """From a genuine machine's /proc/driver/nvidia-caps/mig-minors: gpu0/gi0 3, gpu0/gi0/ci0 4, gpu1/gi0 138."""
    assert capability_minor(0, 0) == 3
    assert capability_minor(0, 0, 0) == 4
    assert capability_minor(0, 1) == 12
    assert capability_minor(1, 0) == 138


def test_what_a_container_needs_is_the_state_and_where_it_is(tmp_path: Path) -> None:
    machine = sim.Machine.create(tmp_path / "machine")
    (mount,) = machine.container_mounts()
    assert mount.host_path == machine.state and not mount.read_only
    assert mount.container_path == machine.container_environment()["VCUDA_SIM_DIR"] + "/state"


def test_tenants_of_any_user_can_read_the_state(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        machine = sim.Machine.create(tmp_path / "machine")
        machine.set_kernel_time("spin*", 1)
    finally:
        os.umask(old)
    assert machine.state.stat().st_mode & 0o777 == 0o777
    for name in ("machine.conf", "kernels"):
        assert (machine.state / name).stat().st_mode & 0o444 == 0o444


def test_an_allocation_error_hits_the_next_allocation_only(tmp_path: Path) -> None:
    machine = sim.Machine.create(tmp_path / "machine", [sim.SimCard()] * 2)
    machine.inject(sim.AllocationError(0, count=1))
    with simulated.tenant(machine, card=1, memory_bytes=1 << 20):
        pass
    refused = pytest.raises(AssertionError, match="cuMemAlloc_v2: CUresult 2")
    with refused, simulated.tenant(machine, memory_bytes=1 << 20):
        pass
    with simulated.tenant(machine, memory_bytes=1 << 20) as pid:
        assert [process.pid for process in machine.report().processes] == [pid]
