"""Runs under CUDA load on the simulated driver: limits hold over the process tree, use is shown, neighbours are seen."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from tests.support.runs import Runner, wait_for
from vcuda import region, sim
from vcuda.cli import main

MIB = 2**20
LIMIT_MIB = 512
# Two processes fill the share together in blocks of 32 MiB, say how far they came, and wait.
FILL = """
import os, sys
from cuda.bindings import driver as cuda
def ok(result):
    assert result[0] == 0, result
    return result[1:]
def enter():
    ok(cuda.cuInit(0))
    device, = ok(cuda.cuDeviceGet(0))
    context, = ok(cuda.cuDevicePrimaryCtxRetain(device))
    ok(cuda.cuCtxSetCurrent(context))
def fill():
    count = 0
    while True:
        status, _ = cuda.cuMemAlloc(32 << 20)
        if status != 0:
            return count, int(status)
        count += 1
from_child, to_parent = os.pipe()
from_parent, to_child = os.pipe()
child = os.fork()
if child == 0:
    enter()
    os.write(to_parent, b"entered")
    os.read(from_parent, 9)
    os.write(to_parent, b"%d %d" % fill())
    os.close(to_child)
    os.read(from_parent, 9)
    os._exit(0)
os.close(to_parent)
enter()
os.read(from_child, 9)
os.write(to_child, b"go")
own = fill()
other = tuple(map(int, os.read(from_child, 100).split()))
print(own[0] + other[0], own[1], other[1], flush=True)
sys.stdin.read()
os.close(to_child)
os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shares") / "machine"
    sim.Machine.create(folder, [sim.SimCard(memory_bytes=8 * 2**30)])
    return folder


@pytest.fixture
def vcuda(machine: Path) -> Iterator[Runner]:
    runner = Runner(machine)
    yield runner
    wait_for("the end of every booking", lambda: not runner.bookings())


def test_all_processes_of_a_run_share_one_memory_limit(vcuda: Runner) -> None:
    share = ["--core", "30", "--memory", f"{LIMIT_MIB}MiB"]
    front = vcuda.start(*vcuda.run(sys.executable, "-c", FILL, share=share), stdin=subprocess.PIPE)
    assert front.stdout is not None
    blocks, first, second = map(int, front.stdout.readline().split())
    out_of_memory = 2
    assert (first, second) == (out_of_memory, out_of_memory)
    assert 0 < blocks * 32 <= LIMIT_MIB

    (row,) = json.loads(vcuda.call("ls", "--json").stdout)
    assert blocks * 32 * MIB <= row["shares"][0]["memory_used_bytes"] <= LIMIT_MIB * MIB
    assert len(row["processes"]) == 2
    on_card = sim.Machine(vcuda.machine).report().cards[0].used_bytes
    assert blocks * 32 * MIB <= on_card <= LIMIT_MIB * MIB
    front.communicate("", timeout=60)
    assert front.returncode == 0


def test_a_neighbour_is_seen_when_it_comes_and_when_it_goes(vcuda: Runner) -> None:
    script = "print('ready', flush=True); input()"

    def begin(*share: str) -> subprocess.Popen[str]:
        front = vcuda.start(*vcuda.run(sys.executable, "-c", script, share=share), stdin=subprocess.PIPE)
        assert front.stdout is not None and front.stdout.readline() == "ready\n"
        return front

    first = begin("--core", "30", "--core-limit", "100", "--memory", "1GiB")
    folder = vcuda.ledger / vcuda.bookings()[0].name / "vcuda"

    def limit() -> region.CardLimit:
        return region.read_limits(folder)[0]

    assert (limit().cores, limit().core_limit, limit().shared) == (30, 100, False)
    second = begin("--core", "70", "--memory", "1GiB")
    wait_for("the first run to learn of the second", lambda: limit().shared)
    assert limit().core_limit == 100
    second.communicate("\n", timeout=60)
    wait_for("the first run to be alone again", lambda: not limit().shared)
    first.communicate("\n", timeout=60)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become an ordinary user")
def test_an_ordinary_user_needs_no_rights(tmp_path: Path) -> None:
    for path in (tmp_path, *tmp_path.parents[:3]):
        path.chmod(path.stat().st_mode | 0o011)
    home, said = tmp_path / "home", tmp_path / "said"
    home.mkdir()
    os.chown(home, 65534, 65534)
    said.touch()
    said.chmod(0o666)

    def ordinary_user() -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        output = os.open(said, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - not pytest's
        # The fork remembers the functions of the libraries that earlier tests have loaded; a new process would not.
        pynvml._nvmlGetFunctionPointer_cache.clear()
        sim.Machine.create(home / "machine")
        share = ["--core", "30", "--core-limit", "60", "--memory", "1GiB"]
        # Long enough for the supervisor's first round as the arbiter, whose complaints would be in `said`.
        words = [
            "run",
            f"--sim={home / 'machine'}",
            *share,
            "--",
            "sh",
            "-c",
            "sleep 0.5; echo uid $(id -u); exit 4",
        ]
        os._exit(main.main(words))

    process = multiprocessing.get_context("fork").Process(target=ordinary_user)
    process.start()
    process.join(60)
    assert (process.exitcode, said.read_text()) == (4, "uid 65534\n")
    assert [path.name for path in (home / "machine" / "ledger").iterdir() if path.name.startswith("run-")] == []
