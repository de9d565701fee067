"""`vcuda sim`: what people type, and what they are told."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import pytest

from vcuda import sim
from vcuda.cli import sim_command


def vcuda_sim(*words: str | Path) -> int:
    parser = argparse.ArgumentParser(prog="vcuda")
    sim_command.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["sim", *map(str, words)])
    status = arguments.run(arguments)
    assert isinstance(status, int)
    return status


@pytest.fixture
def machine(tmp_path: Path) -> sim.Machine:
    return sim.Machine.create(tmp_path / "machine", [sim.SimCard()] * 2)


def test_create_makes_the_cards_that_were_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new"
    assert vcuda_sim("create", folder, "--cards", "2", "--memory", "8GiB", "--mig", "1g,2g") == 0
    cards = sim.Machine(folder).cards
    assert [card.memory_bytes for card in cards] == [8 * 2**30] * 2
    assert [part.slices for part in cards[1].mig] == [1, 2]
    said = capsys.readouterr().out
    assert all(card.uuid in said and card.mig[0].uuid in said for card in cards)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--memory", "lots"), "InvalidMemory"),
        (("--cards", "0"), "1 to 32 cards"),
        (("--cards", "-3"), "1 to 32 cards"),
        (("--mig", "9g"), "no MIG profile '9g'"),
        (("--nvidia-smi", "/nonexistent"), "there is no nvidia-smi at /nonexistent"),
    ],
)
def test_create_refuses_in_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], reason: str
) -> None:
    assert vcuda_sim("create", tmp_path / "new", *words) == 1
    said = capsys.readouterr().err
    assert said.startswith("vcuda sim: ") and reason in said and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_show_tells_what_was_injected(machine: sim.Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert vcuda_sim("inject", machine.directory, "0", "lost") == 0
    assert vcuda_sim("inject", machine.directory, "1", "xid", "48") == 0
    assert vcuda_sim("show", machine.directory) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert machine.cards[0].uuid in first and "LOST, 1 Xids" in first
    assert machine.cards[1].uuid in second and "1 Xids" in second and "LOST" not in second
    assert vcuda_sim("inject", machine.directory, "0", "recovered") == 0
    assert not machine.report().cards[0].lost


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("7", "lost"), "refused"),
        (("0", "xid"), "CODE"),
        (("0", "lost", "5"), "no number"),
        (("0", "slow-call"), "MICROSECONDS"),
    ],
)
def test_inject_refuses_what_makes_no_sense(
    machine: sim.Machine, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], reason: str
) -> None:
    assert vcuda_sim("inject", machine.directory, *words) == 1
    assert reason in capsys.readouterr().err


def test_a_folder_without_a_machine_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("show", "env"):
        assert vcuda_sim(verb, tmp_path) == 1
        assert "holds no simulated machine" in capsys.readouterr().err


def test_kernel_sets_a_rule(machine: sim.Machine) -> None:
    assert vcuda_sim("kernel", machine.directory, "spin*", "1000", "2") == 0
    assert (machine.state / "kernels").read_text() == "spin* 1000 2\n"
    assert vcuda_sim("kernel", machine.directory, "a b", "1000") == 1


@pytest.mark.parametrize("before", ["", "/some/where"])
def test_a_shell_can_take_the_environment_over(tmp_path: Path, capsys: pytest.CaptureFixture[str], before: str) -> None:
    machine = sim.Machine.create(tmp_path / "it's here")
    assert vcuda_sim("env", machine.directory) == 0
    script = capsys.readouterr().out + 'printf "%s\\n" "$VCUDA_SIM_DIR" "$LD_LIBRARY_PATH"'
    shell = subprocess.run(
        ["/bin/sh", "-euc", script],
        env={"LD_LIBRARY_PATH": before} if before else {},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    wanted = f"{machine.library_folder}:{before}" if before else str(machine.library_folder)
    assert shell.stdout.splitlines() == [str(machine.directory), wanted]
