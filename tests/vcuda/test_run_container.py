"""`vcuda run --container` and `--cdi` with a real podman: limits hold inside, and the booking lives with the container."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import engines
from tests.support.engines import IMAGE, Podman
from tests.support.runs import Runner, wait_for
from vcuda import sim

pytestmark = pytest.mark.skipif(bool(engines.missing()), reason=engines.missing())
OUT_OF_MEMORY = 2
SHARE = ("--core", "30", "--memory", "1GiB", "--container", "podman")


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    made = engines.make(Path(tempfile.mkdtemp(prefix="podman-")))  # podman refuses long paths
    yield made
    made.remove()


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    sim.Machine.create(tmp_path / "machine", [sim.SimCard(memory_bytes=8 << 30)])
    made = Runner(tmp_path / "machine")
    if not sim.Machine(made.machine).character_devices:
        pytest.skip("device nodes of the simulated driver can't be made here: a container can be given none")
    return made


@pytest.fixture(autouse=True)
def _no_container_stays(podman: Podman) -> Iterator[None]:
    yield
    podman.call("rm", "--all", "--force", "--time", "0")


def run(
    runner: Runner, podman: Podman, *words: str, share: tuple[str, ...] = SHARE
) -> subprocess.CompletedProcess[str]:
    return runner.call("run", *share, "--", *words, PATH=podman.path)


def holders(runner: Runner) -> list[int]:
    """The processes that have the only booking's file open, and so its lock."""
    [name] = runner.entries()
    booking = (runner.ledger / name / "booking").stat()
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.path.samestat(link.stat(), booking):
                found.append(int(link.parts[2]))
    return found


def test_the_limit_holds_inside_and_the_total_is_the_share(runner: Runner, podman: Podman) -> None:
    told = run(runner, podman, "--rm", IMAGE, "/client", "alloc", "512", "600", "256")
    assert (told.returncode, told.stdout.split("\n")[:-1]) == (
        0,
        ["total 1024", "alloc 512: 0", f"alloc 600: {OUT_OF_MEMORY}", "alloc 256: 0"],
    ), told.stderr
    assert runner.entries() == []


def test_the_limit_holds_for_any_user_without_environment(runner: Runner, podman: Podman) -> None:
    told = run(runner, podman, "--rm", "--user=1000", IMAGE, "env", "-i", "/client", "alloc", "1100", "512")
    assert told.stdout.split("\n")[:-1] == ["total 1024", f"alloc 1100: {OUT_OF_MEMORY}", "alloc 512: 0"], told.stderr


def test_two_containers_share_a_card_and_a_third_is_refused(runner: Runner, podman: Podman) -> None:
    first = run(runner, podman, "-d", IMAGE, "/client", "hold", "700")
    assert first.returncode == 0, first.stderr
    second = run(runner, podman, "-d", IMAGE, "/client", "hold", "800")
    wait_for(
        "both hold memory",
        lambda: all(podman.call("logs", each.stdout.strip()).stdout.count(": 0") for each in (first, second)),
    )
    assert len(runner.bookings()) == 2
    third = run(
        runner, podman, "--rm", IMAGE, "true", share=("--core", "50", "--memory", "1GiB", "--container", "podman")
    )
    assert third.returncode == 125 and "50 cores" in third.stderr


@pytest.mark.parametrize(
    "attack",
    [
        "chmod 666 /etc/vcuda/limits",
        "rm /etc/vcuda/limits",
        "dd if=/dev/zero of=/etc/vcuda/limits bs=64 count=1",
        "mount -o remount,rw /etc/vcuda",
        "mount -t tmpfs none /etc/vcuda",
        "rm /usr/local/nvidia/lib64/libcuda.so.1",
        "dd if=/dev/zero of=/usr/local/nvidia/lib64/drv/libcuda-driver.so.1 bs=64 count=1 conv=notrunc",
        "rm /usr/lib/x86_64-linux-gnu/libcuda.so.1",
    ],
)
def test_the_owner_of_a_container_cannot_change_its_limits(runner: Runner, podman: Podman, attack: str) -> None:
    told = run(runner, podman, "--rm", IMAGE, "sh", "-c", f"{attack} && echo changed; /client alloc 1100 512")
    assert "changed" not in told.stdout
    assert told.stdout.split("\n")[:-1] == ["total 1024", f"alloc 1100: {OUT_OF_MEMORY}", "alloc 512: 0"], told.stderr


def test_others_on_the_machine_reach_the_usage_through_no_path(runner: Runner, podman: Podman) -> None:
    folder = Path(tempfile.mkdtemp(prefix="ledger-"))  # pytest's own folders nobody else may enter
    folder.chmod(0o755)
    try:
        run(runner, podman, "-d", IMAGE, "sleep", "600", share=(*SHARE, f"--ledger={folder}"))
        [usage] = folder.glob("run-*/vcuda/usage")
        assert usage.stat().st_mode & 0o777 == 0o666
        told = subprocess.run(["cat", usage], user=65534, group=65534, capture_output=True, text=True, check=False)
        assert told.returncode == 1 and "Permission denied" in told.stderr
    finally:
        podman.call("rm", "--all", "--force", "--time", "0")
        wait_for("the booking ends", lambda: list(folder.glob("*run-*")) == [])
        shutil.rmtree(folder)


def test_a_detached_container_keeps_its_share_until_it_ends(runner: Runner, podman: Podman) -> None:
    told = run(runner, podman, "-d", "--rm", IMAGE, "sleep", "600")
    container = told.stdout.strip()
    assert told.returncode == 0 and "the container keeps the share" in told.stderr
    assert len(runner.bookings()) == 1
    podman.call("kill", container)
    wait_for("the booking ends", lambda: runner.entries() == [])


def test_a_container_that_is_killed_leaves_nothing_in_the_books(runner: Runner, podman: Podman) -> None:
    container = run(runner, podman, "-d", IMAGE, "/client", "hold", "700").stdout.strip()
    pid = int(podman.call("inspect", "--format", "{{.State.Pid}}", container).stdout)
    os.kill(pid, signal.SIGKILL)
    wait_for("the booking ends", lambda: runner.entries() == [])


def test_a_container_that_is_restarted_keeps_its_share(runner: Runner, podman: Podman) -> None:
    container = run(runner, podman, "-d", IMAGE, "/client", "hold", "700").stdout.strip()
    [before] = runner.bookings()
    podman.call("stop", "--time", "0", container)
    time.sleep(1.0)  # within the time that it has; several looks see it ended
    told = podman.call("start", container)
    assert told.returncode == 0, told.stderr
    [after] = runner.bookings()
    assert after.name == before.name
    wait_for("it holds memory again", lambda: podman.call("logs", container).stdout.count("alloc 700: 0") == 2)
    podman.call("rm", "--force", "--time", "0", container)
    wait_for("the booking ends", lambda: runner.entries() == [])


def test_the_front_is_killed_and_the_container_goes_on_in_its_share(runner: Runner, podman: Podman) -> None:
    words = runner.words("run", *SHARE, "--", IMAGE, "/client", "hold", "700")
    front = subprocess.Popen(
        words, env=runner.environment(PATH=podman.path), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    wait_for("the container runs", lambda: "alloc" in podman.call("logs", "--latest").stdout)
    front.kill()
    front.wait()
    assert len(runner.bookings()) == 1
    podman.call("rm", "--all", "--force", "--time", "0")
    wait_for("the booking ends", lambda: runner.entries() == [])


def test_the_supervisor_is_killed_and_the_books_follow_the_container(runner: Runner, podman: Podman) -> None:
    """A sleeping container has no slot in the region and no lock: what is written of its first process counts."""
    container = run(runner, podman, "-d", IMAGE, "sleep", "600").stdout.strip()
    [supervisor] = holders(runner)  # and no process of the engine
    os.kill(supervisor, signal.SIGKILL)
    wait_for("its lock is gone", lambda: holders(runner) == [])
    assert len(runner.bookings()) == 1
    podman.call("kill", container)
    wait_for("the booking has ended", lambda: runner.bookings() == [])
    assert run(runner, podman, "--rm", IMAGE, "true").returncode == 0
    assert runner.entries() == []  # the next run of this user removed what was left


def test_the_exit_status_is_the_containers_and_an_image_that_is_missing_books_nothing(
    runner: Runner, podman: Podman
) -> None:
    assert run(runner, podman, "--rm", IMAGE, "sh", "-c", "exit 7").returncode == 7
    told = run(runner, podman, "--rm", "--pull=never", "localhost/no-such-image")
    assert told.returncode == 125 and runner.entries() == []


def test_a_cdi_device_gives_the_share_to_containers_of_any_command(runner: Runner, podman: Podman) -> None:
    name = f"test{os.getpid()}"
    device = f"--device=tencent.com/vcuda-run={name}"
    share = ("--core", "30", "--memory", "1GiB", "--cdi", name)
    told = run(runner, podman, "podman", "run", "--rm", device, IMAGE, "/client", "alloc", "1100", "512", share=share)
    assert told.stdout.split("\n")[:-1] == ["total 1024", f"alloc 1100: {OUT_OF_MEMORY}", "alloc 512: 0"], told.stderr
    assert "limits nothing" not in told.stderr and runner.entries() == []
    description = Path(f"/var/run/cdi/tencent.com-vcuda-run-{name}.json")
    assert not description.exists()
    told = run(runner, podman, "podman", "run", "-d", device, IMAGE, "sleep", "600", share=share)
    assert told.returncode == 0 and len(runner.bookings()) == 1 and description.exists()
    again = run(runner, podman, "true", share=share)
    assert again.returncode == 125 and f"another run has the device tencent.com/vcuda-run={name}" in again.stderr
    podman.call("kill", told.stdout.strip())
    wait_for("the booking ends", lambda: runner.entries() == [])
    assert not description.exists()
    refused = podman.call("start", told.stdout.strip())
    assert refused.returncode != 0  # its share is gone


def test_words_that_would_make_another_container_are_refused(runner: Runner, podman: Podman) -> None:
    told = run(runner, podman, "run", "--rm", IMAGE)
    assert told.returncode == 125 and "write only what stands behind `podman run`" in told.stderr
    told = run(runner, podman, "--cidfile=/tmp/x", IMAGE)
    assert told.returncode == 125 and "--cidfile" in told.stderr
    told = run(runner, podman, "true", share=("--core", "30", "--memory", "1GiB", "--cdi", "../x"))
    assert told.returncode == 125 and "is no device name" in told.stderr
    assert not runner.ledger.exists() or runner.entries() == []
