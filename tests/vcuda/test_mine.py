"""The program that shows a container its share: the figures of the Python commands, in any image, whatever the files say."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import engines
from tests.support.runs import Runner, wait_for
from tests.support.sim_cuda import PRELUDE
from vcuda import region, sim
from vcuda.driver import layout
from vcuda.region import CardLimit

MINE = layout.mine_of(layout.SHIMS_FOLDER)
MIB, GIB = 1 << 20, 1 << 30


def call(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([MINE, *words], env=environment, capture_output=True, text=True, timeout=60, check=False)


def make(folder: Path, *limits: CardLimit) -> Path:
    folder.mkdir(parents=True)
    region.create(folder, limits or [CardLimit("GPU-0123456789", 0, GIB, 30, 50, shared=True)])
    return folder


def test_it_needs_no_library() -> None:
    assert b"ld-linux" not in MINE.read_bytes()[:4096]


def test_a_share_that_is_not_used(tmp_path: Path) -> None:
    folder = make(tmp_path / "etc")
    told = call("ls", "--region", str(folder), "--interval", "0")
    assert told.stdout.splitlines() == [
        "CARD     GPU TIME            MEMORY                WAIT PIDS",
        "GPU-0123 ........ 0/30-50    ........ 0B/1G          0%    0",
    ]
    blocks = call("top", "--once", "--region", str(folder), "--interval", "0", LANG="C.UTF-8")
    assert blocks.stdout.splitlines()[1] == "GPU-0123 ········ 0/30-50    ········ 0B/1G          0%    0"


def test_the_figures_are_those_of_the_python_commands(tmp_path: Path) -> None:
    sim.Machine.create(tmp_path / "machine", [sim.SimCard(memory_bytes=8 * GIB)])
    runner = Runner(tmp_path / "machine")
    script = (
        PRELUDE
        + f"open('/proc/self/comm', 'w').write('\\x1b[2J\"'); context(); ok(cu.cuMemAlloc({300 * MIB})); print('held', flush=True); time.sleep(600)\n"
    )
    words = runner.words(*runner.run(sys.executable, "-c", script))
    with subprocess.Popen(words, env=runner.environment(), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            [name] = runner.entries()
            folder = str(runner.ledger / name / "vcuda")
            [mine] = json.loads(call("show", "--json", "--region", folder).stdout)
            [theirs] = json.loads(runner.call("ls", "--json").stdout)
            [share], [expected] = mine["shares"], theirs["shares"]
            known = set(share) & set(expected)
            assert {"uuid", "memory_used_bytes", "cores", "gpu_time_ns", "achieved_cores", "waited_percent"} <= known
            assert {key: share[key] for key in known} == {key: expected[key] for key in known}
            assert share["memory_used_bytes"] > 300 * MIB
            [of_mine], [of_theirs] = mine["processes"], theirs["processes"]
            assert of_mine == {key: of_theirs[key] for key in of_mine}
            shown = call("show", "--region", folder).stdout
            assert "peak memory" in shown and f'{of_mine["pid"]:>8} ?[2J"' in shown
            assert of_mine["command"] == '\x1b[2J"' and "\x1b" not in shown  # a terminal would obey it
        finally:
            process.terminate()


def test_all_shares_of_claims_are_shown(tmp_path: Path) -> None:
    make(tmp_path / "claims/b", CardLimit("GPU-b", 1, GIB, 10, 10))
    make(tmp_path / "claims/a", CardLimit("GPU-a", 0, GIB, 10, 10), CardLimit("GPU-c", 2, GIB, 10, 10))
    told = call("ls", "--json", "--region", str(tmp_path), "--interval", "0")
    assert [[share["uuid"] for share in each["shares"]] for each in json.loads(told.stdout)] == [
        ["GPU-a", "GPU-c"],
        ["GPU-b"],
    ]


@pytest.mark.parametrize("damage", ["short", "garbage", "absent", "pipe", "link"])
def test_a_damaged_account_is_said_and_nothing_else_happens(tmp_path: Path, damage: str) -> None:
    folder = make(tmp_path / "etc")
    usage = folder / "usage"
    content = usage.read_bytes()
    usage.unlink()
    if damage == "short":
        usage.write_bytes(content[:1000])
    elif damage == "garbage":
        usage.write_bytes(os.urandom(len(content)))
    elif damage == "pipe":
        os.mkfifo(usage)
    elif damage == "link":
        usage.symlink_to("/etc/passwd")
    told = call("show", "--region", str(folder), "--interval", "0")
    assert told.returncode == 1 and str(usage) in told.stdout
    [said] = json.loads(call("ls", "--json", "--region", str(folder), "--interval", "0").stdout)
    assert said["shares"] == [] and str(usage) in said["error"]


def test_names_of_processes_reach_no_terminal(tmp_path: Path) -> None:
    """The slots are the tenant's to write; so long as nothing locks them they count as dead, and are not shown."""
    folder = make(tmp_path / "etc")
    content = bytearray((folder / "usage").read_bytes())
    content[2048:] = (b'\x1b[2J"\\\xff' * len(content))[: len(content) - 2048]
    with (folder / "usage").open("r+b") as file:
        file.write(content)
    for words in (["show"], ["ls"], ["show", "--json"]):
        told = subprocess.run(
            [MINE, *words, "--region", folder, "--interval", "0"], env={}, capture_output=True, check=False
        )
        assert b"\x1b" not in told.stdout and told.returncode == 0
        assert all(byte in b"\n" or 32 <= byte < 127 for byte in told.stdout)


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["run", "true"], 2, "there is no command run"),
        (["ls", "--all"], 2, "--all"),
        (["ls", "--interval", "x"], 2, "not x"),
        (["ls", "--interval"], 2, "--interval"),
        (["ls", "--region", "/nowhere"], 125, "this container has no share: there are no limits in /nowhere"),
    ],
)
def test_words_that_it_does_not_know(words: list[str], status: int, text: str) -> None:
    told = call(*words)
    assert told.returncode == status and text in told.stderr and told.stdout == ""


def test_top_lives_on_a_terminal_until_q_and_leaves_it_as_it_was(tmp_path: Path) -> None:
    folder = make(tmp_path / "etc")
    near, far = pty.openpty()
    words = [str(MINE), "top", "--interval", "0.1", "--region", str(folder)]
    process = subprocess.Popen(words, env={"TERM": "xterm"}, stdin=far, stdout=far, stderr=far)
    os.close(far)
    shown = b""
    deadline = time.monotonic() + 30
    asked = False
    while time.monotonic() < deadline and process.poll() is None:
        if select.select([near], [], [], 0.1)[0]:
            try:
                shown += os.read(near, 4096)
            except OSError:
                break
        if shown.count(b"GPU-0123") >= 3 and not asked:
            asked = bool(os.write(near, b"q"))
    assert process.wait(10) == 0 and asked
    assert shown.startswith(b"\x1b[?1049h") and shown.rstrip().endswith(b"\x1b[?1049l")
    os.close(near)


@pytest.fixture
def podman() -> Iterator[engines.Podman]:
    if why := engines.missing():
        pytest.skip(why)
    made = engines.make(Path(tempfile.mkdtemp(prefix="podman-")))
    yield made
    made.remove()


def test_it_shows_a_container_its_share_without_flags(tmp_path: Path, podman: engines.Podman) -> None:
    sim.Machine.create(tmp_path / "machine", [sim.SimCard(memory_bytes=8 * GIB)])
    if not sim.Machine(tmp_path / "machine").character_devices:
        pytest.skip("device nodes of the simulated driver can't be made here: a container can be given none")
    runner = Runner(tmp_path / "machine")
    share = ("--core", "30", "--memory", "1GiB", "--container", "podman")
    words = runner.run("-d", engines.IMAGE, "/client", "hold", "700", share=share)
    container = runner.call(*words, PATH=podman.path).stdout.strip()
    wait_for("it holds memory", lambda: "alloc" in podman.call("logs", container).stdout)
    [told] = json.loads(podman.call("exec", container, "vcuda", "ls", "--json").stdout)
    assert told["name"] == "/etc/vcuda" and told["shares"][0]["memory_bytes"] == GIB
    assert told["shares"][0]["memory_used_bytes"] >= 700 * MIB
    assert [(process["command"], process["pid"]) for process in told["processes"]] == [("client", 1)]
    podman.call("rm", "--all", "--force", "--time", "0")
    wait_for("the booking ends", lambda: runner.entries() == [])
