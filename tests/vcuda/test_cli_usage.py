"""The `vcuda` command line: bad words are explained with exit status 2, refusals with 125, and never with a traceback."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import vcuda
from tests.support.runs import Runner, wait_for
from vcuda import sim
from vcuda.cli import main, run_command
from vcuda.runs.card_choice import RunRequest
from vcuda.spec.errors import InvalidRequest

GIB = 2**30


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder = tmp_path_factory.mktemp("cli") / "machine"
    card = sim.SimCard(memory_bytes=8 * GIB)
    sim.Machine.create(folder, [card, card])
    return Runner(folder)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("30", "4GiB", None, []), RunRequest(30, 30, 4 * GIB)),
        (("30", "4GiB", "50", ["0"]), RunRequest(30, 50, 4 * GIB, 1, ("0",))),
        (("100", None, None, []), RunRequest(100, 100, None, 1)),
        (("200", None, "100", []), RunRequest(100, 100, None, 2)),
        (("100", "1GiB", None, ["0"]), RunRequest(100, 100, GIB, 1, ("0",))),
    ],
)
def test_words_become_a_request(words: tuple[str, str | None, str | None, list[str]], expected: RunRequest) -> None:
    assert run_command.wish(*words) == expected


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("0", "1GiB", None, []), "--core"),
        (("-5", "1GiB", None, []), "--core"),
        (("150", "1GiB", None, []), "--core"),
        (("many", "1GiB", None, []), "--core"),
        (("30", None, None, []), "--memory"),
        (("30", "0", None, []), "--memory"),
        (("30", "lots", None, []), "--memory"),
        (("30", "4", None, []), "--memory 4 has no unit; write 4GiB"),
        (("30", "1.5", None, []), "--memory 1.5 has no unit; write 1.5GiB"),
        (("30", "1073741824", None, []), "--memory 1073741824 has no unit"),
        (("30", "1GiB", "29", []), "--core-limit"),
        (("30", "1GiB", "101", []), "--core-limit"),
        (("30", "1GiB", "0", []), "--core-limit"),
        (("30", "1GiB", "half", []), "--core-limit"),
        (("100", None, "99", []), "--core-limit"),
        (("200", None, None, ["0"]), "--device"),
    ],
)
def test_impossible_wishes_name_the_option(words: tuple[str, str | None, str | None, list[str]], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        run_command.wish(*words)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (
            ["run", "--sim", "--core", "3", "--", "x", "--sim"],
            ["run", "--sim=", "--core", "3", "--", "x", "--sim"],
        ),
        (["run", "--core", "--sim", "x"], ["run", "--core", "--sim", "x"]),
        (["run", "--core=3", "--sim", "x", "--sim"], ["run", "--core=3", "--sim=", "x", "--sim"]),
        (["run", "--sim=/d", "x"], ["run", "--sim=/d", "x"]),
        (["ls", "--json", "--sim"], ["ls", "--json", "--sim="]),
    ],
)
def test_a_lone_sim_takes_no_value_and_the_commands_own_words_are_left_alone(
    written: list[str], meant: list[str]
) -> None:
    assert run_command.prepare(written) == meant


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["fly"],
        ["run"],
        ["run", "--core", "30", "--memory", "1GiB"],
        ["run", "--core", "30", "--memory", "1GiB", "--"],
        ["run", "--core", "30", "--memory", "1GiB", "--speed", "9", "--", "true"],
        ["ls", "--interval", "soon"],
    ],
)
def test_bad_usage_is_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(words)
    assert caught.value.code == 2
    assert "usage: vcuda" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "usage", "named"),
    [
        (
            ["run", "--cores", "30", "--memory", "1GiB", "--", "x"],
            "vcuda run",
            "there is no option --cores; did you mean --core?",
        ),
        (
            ["run", "--core", "30", "--memroy=1GiB", "--", "x"],
            "vcuda run",
            "there is no option --memroy; did you mean --memory?",
        ),
        (["run", "--core", "30", "--zzz", "--", "x"], "vcuda run", "there is no option --zzz\n"),
        (["run", "train.py", "--cores", "30"], "vcuda run", "required: --core"),
        (["ls", "--jsn"], "vcuda ls", "there is no option --jsn; did you mean --json?"),
        (["show", "run-1", "--jsno"], "vcuda show", "--jsno; did you mean --json?"),
        (["sim", "create", "/nowhere/d", "--card", "2"], "vcuda sim create", "--card 2; did you mean --cards?"),
        (["shwo"], "vcuda", "did you mean show?"),
        (["run", "--injection", "prelaod", "x"], "vcuda run", "did you mean preload?"),
        (["ls", "--interval", "-1"], "vcuda ls", "'-1' is no time; write seconds, 0 to 60"),
        (["ls", "--interval", "nan"], "vcuda ls", "'nan' is no time"),
    ],
)
def test_a_typo_is_named_with_the_nearest_word_under_the_commands_own_usage(
    words: list[str], usage: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(words)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"usage: {usage} ")
    assert named in said


def test_looking_at_a_ledger_that_is_not_there_makes_none(runner: Runner, tmp_path: Path) -> None:
    for command in ("ls", "show"):
        result = runner.call(command, "--ledger", str(tmp_path / "typo"))
        assert (result.returncode, result.stderr) == (
            125,
            f"vcuda: there is no ledger {tmp_path / 'typo'}; the first `vcuda run --ledger` makes it\n",
        )
    assert list(tmp_path.iterdir()) == []
    fresh = tmp_path / "machine"
    sim.Machine.create(fresh, [sim.SimCard()])
    assert Runner(fresh).call("ls").stdout == "no run holds a share on this machine\n"
    assert not (fresh / "ledger").exists()


@pytest.mark.parametrize(
    ("command", "warns"),
    [
        (["docker", "run", "--gpus", "all", "image"], True),
        (["/usr/bin/podman", "--log-level", "info", "run", "image"], True),
        (["docker-compose", "up"], True),
        (["docker", "ps"], False),
        (["python", "run"], False),
    ],
)
def test_who_starts_a_container_is_told_that_it_is_not_limited(command: list[str], warns: bool) -> None:
    assert ("limits nothing" in run_command.unlimited(command)) is warns


def test_the_warning_is_on_stderr_and_the_command_runs(runner: Runner, tmp_path: Path) -> None:
    engine = tmp_path / "docker"
    engine.write_text("#!/bin/sh\necho started $1\n")
    engine.chmod(0o755)
    found = runner.call("run", "--core", "10", "--memory", "1GiB", "--", str(engine), "run", "image")
    assert (found.returncode, found.stdout) == (0, "started run\n") and "limits nothing in them" in found.stderr


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"vcuda {vcuda.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--core", "150", "--memory", "1GiB"], 2, "--core is 150"),
        (["--core", "30", "--core-limit", "20", "--memory", "1GiB"], 2, "--core-limit is 20"),
        (["--core", "30", "--memory", "9GiB"], 125, "no card has 30 cores and 9 GiB free"),
        (["--core", "300"], 125, "3 cards are asked for"),
        (
            ["--core", "30", "--memory", "1GiB", "--device", "7"],
            125,
            "--device 7 is no card of this machine; it has card 0 (GPU-",
        ),
        (["--core", "30", "--memory", "4"], 2, "--memory 4 has no unit; write 4GiB or 4MiB (or 4B: bytes)"),
        (["--core", "30", "--memory", "4B"], 125, "--memory 4 B is too little: a CUDA context alone takes 64 MiB"),
        (
            ["--core", "30", "--memory", "64MiB"],
            125,
            "--memory 64 MiB is too little: a CUDA context alone takes 64 MiB",
        ),
        (["--core", "30", "--memory", "1", "GiB"], 2, "--memory 1 GiB are two words; write --memory 1GiB"),
        (
            ["--memory", "1", "GiB", "--core", "30", "--", "true"],
            2,
            "--memory 1 GiB are two words; write --memory 1GiB",
        ),
        (["--memory=1", "MiB", "--core", "30", "--", "true"], 2, "--memory 1 MiB are two words"),
        (["--core", "30", "--memory", "1GiB", "--oversell", "2", "gb"], 2, "--oversell 2 gb are two words"),
        (
            ["--core", "30", "--memory", "1GiB", "--ledger", "/proc/nothing"],
            125,
            "/proc/nothing can't be used",
        ),
    ],
)
def test_refusals_are_one_message_and_book_nothing(
    runner: Runner, arguments: list[str], status: int, text: str
) -> None:
    result = runner.call(*runner.run("true", share=arguments))
    assert result.returncode == status, result.stderr
    assert text in result.stderr
    assert result.stderr.startswith("vcuda: ") and "Traceback" not in result.stderr
    assert runner.bookings() == []


def test_a_simulated_machine_that_is_none_is_refused(tmp_path: Path) -> None:
    result = Runner(tmp_path / "nowhere").call("run", "--core", "30", "--memory", "1GiB", "--", "true")
    assert result.returncode == 125
    assert "holds no simulated machine" in result.stderr


def test_ls_and_show_tell_who_holds_what(runner: Runner) -> None:
    nobody = runner.call("ls")
    assert (nobody.returncode, nobody.stdout) == (0, "no run holds a share on this machine\n")
    share = ["--core", "60", "--core-limit", "80", "--memory", "2GiB", "--device", "1"]
    script = "print('ready', flush=True); input()"
    front = runner.start(*runner.run(sys.executable, "-c", script, share=share), stdin=-1)
    assert front.stdout is not None
    front.stdout.readline()

    table = runner.call("ls", "--interval", "0")
    assert table.returncode == 0, table.stderr
    assert all(word in table.stdout for word in (str(front.pid), "60-80", "2 GiB", f"{Path(sys.executable).name} -c"))
    (row,) = json.loads(runner.call("ls", "--json").stdout)
    assert (row["pid"], row["shares"][0]["cores"], row["shares"][0]["memory_used_bytes"]) == (
        front.pid,
        60,
        0,
    )
    assert row["shares"][0]["uuid"] == sim.Machine(runner.machine).cards[1].uuid

    cards = json.loads(runner.call("show", "--json").stdout)
    assert [(card["free_cores"], card["free_bytes"]) for card in cards] == [(100, 8 * GIB), (40, 6 * GIB)]
    assert "40 / 100" in runner.call("show").stdout
    (times,) = row["shares"]
    assert times["granted_cores"] in (60, 80)  # 80 while the supervisor's arbiter is heard
    assert (times["gpu_time_ns"], times["waited_ns"], times["launches"]) == (0, 0, 0)
    assert row["limits_impossible"] == 0
    one = runner.call("show", str(front.pid))
    assert one.returncode == 0
    time = next(line for line in one.stdout.splitlines() if "0.000 s" in line).split()
    assert time[1] in ("60", "80") and time[2:] == ["0.000", "s", "0.000", "s", "0"]
    assert runner.call("show", "1").returncode == 125

    refused = runner.call(*runner.run("true", share=["--core", "50", "--memory", "1GiB", "--device", "1"]))
    assert refused.returncode == 125
    assert f"pid {front.pid} of " in refused.stderr and "60 cores, 2 GiB" in refused.stderr
    front.communicate("\n", timeout=60)
    wait_for("the end of the booking", lambda: not runner.bookings())


@pytest.mark.parametrize("option", ["--memory", "--oversell"])
def test_a_size_below_zero_is_named_with_its_value(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--memory", "1GiB"] if option == "--oversell" else []
    assert main.main(["run", "--core", "30", *sizes, option, "-1GiB", "--", "true"]) == 2
    told = capsys.readouterr().err
    assert option in told and "-1GiB" in told and "expected one argument" not in told
