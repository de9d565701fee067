"""A run whose memory the driver holds, too: in a control group of its own, where there may be one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import groups
from tests.support.groups import Group
from tests.support.runs import Runner, wait_for
from vcuda import sim
from vcuda.runs import group as run_group
from vcuda.runs import processes
from vcuda.runs.booking import Share

MIB = 2**20
# The results of allocating twice the share, by our library and past it, by the driver's versioned path; what ours shows; the group.
PAST = """
import ctypes as C, pathlib, sys
shown = []
for path in ("libcuda.so.1", sys.argv[1]):  # the other way round the linker would take the driver for ours
    past = path != "libcuda.so.1"
    cuda, device, context, pointer = C.CDLL(path), C.c_int(), C.c_void_p(), C.c_uint64()
    assert not (cuda.cuInit(0) or cuda.cuDeviceGet(C.byref(device), 0) or cuda.cuCtxCreate_v2(C.byref(context), 0, device))
    print(cuda.cuMemAlloc_v2(C.byref(pointer), C.c_size_t(2 << 30)), flush=True)
    free, total = C.c_size_t(), C.c_size_t()
    past or cuda.cuMemGetInfo_v2(C.byref(free), C.byref(total)) or shown.append(total.value >> 20)
print(shown[0], pathlib.Path("/proc/self/cgroup").read_text().rpartition("0::")[2].strip())
"""


@pytest.fixture
def group() -> Iterator[Group]:
    with groups.made("vcuda-run-test") as made:
        yield made


def past(tmp_path: Path, group: Group, *, newer: bool) -> tuple[Runner, subprocess.CompletedProcess[str]]:
    machine = sim.Machine.create(tmp_path / "machine", [sim.SimCard(memory_bytes=8 * 2**30)], newer=newer)
    runner = Runner(tmp_path / "machine")
    library = machine.library_folder / f"libcuda.so.{machine.driver_version}"
    words = runner.words(*runner.run(sys.executable, "-c", PAST, str(library)))
    done = subprocess.run(
        [*group.enter, *words], env=runner.environment(), capture_output=True, text=True, timeout=60, check=False
    )
    wait_for("the end of every booking", lambda: not runner.bookings())
    return runner, done


def test_what_goes_past_our_library_is_held_by_the_driver(tmp_path: Path, group: Group) -> None:
    _, done = past(tmp_path, group, newer=True)
    ours, held, seen = done.stdout.splitlines()
    assert (ours, held, done.returncode) == ("2", "2", 0), done.stderr
    total, inside = seen.split()
    assert total == "1024" and f"/{group.path.name}/vcuda-run-" in inside
    assert not list(group.path.glob("vcuda-run-*"))  # its group went with it


def test_a_driver_without_limits_leaves_the_run_where_it_was(tmp_path: Path, group: Group) -> None:
    _, done = past(tmp_path, group, newer=False)
    ours, escaped, seen = done.stdout.splitlines()
    assert (ours, escaped, done.returncode) == ("2", "0", 0), done.stderr
    assert seen.endswith(f"/{group.path.name}")


def test_who_may_make_no_group_runs_as_before(group: Group) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are for nobody else
        Path(folder).chmod(0o777)
        machine = sim.Machine.create(Path(folder, "machine"), newer=True)
        machine.directory.chmod(0o777)
        runner = Runner(machine.directory)
        words = runner.words(*runner.run("cat", "/proc/self/cgroup"))
        done = subprocess.run(
            [*group.enter, "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *words],
            env=runner.environment(HOME=folder),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stdout.strip().endswith(f"/{group.path.name}"), done.stderr


def test_a_group_that_a_killed_supervisor_left_is_swept(tmp_path: Path, group: Group) -> None:
    (group.path / "vcuda-run-left").mkdir()
    past(tmp_path, group, newer=True)
    assert not list(group.path.glob("vcuda-run-*"))


@pytest.fixture
def make(tmp_path: Path, group: Group, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path | None]:
    """Makes a run's group below `group`, of whatever ledger."""
    monkeypatch.setattr(run_group, "own", lambda: group.path)
    machine = sim.Machine.create(tmp_path / "machine", newer=True)
    for name, value in machine.environment().items():
        monkeypatch.setenv(name, value)
    library = machine.library_folder / f"libnvidia-ml.so.{machine.driver_version}"
    share = Share(uuid=machine.cards[0].uuid, minor=0, cores=10, core_limit=10, memory_bytes=2**30)
    return lambda name: run_group.make(name, [share], library)


def test_a_run_that_begins_leaves_the_group_of_another_in_which_nobody_is_yet(
    group: Group, make: Callable[[str], Path | None]
) -> None:
    left = group.child("vcuda-run-run-left")
    first = make("run-first")  # of a ledger that the second one does not know
    assert first == group.path / "vcuda-run-run-first" and not left.path.exists()
    assert make("run-second") == group.path / "vcuda-run-run-second"
    assert first.is_dir()


def test_a_group_that_a_sweep_removed_before_it_was_locked_is_made_again(
    group: Group, make: Callable[[str], Path | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[Path] = []
    mkdir = Path.mkdir

    def and_sweep(path: Path, *arguments: object, **named: object) -> None:
        mkdir(path, *arguments, **named)  # type: ignore[arg-type]
        if path.parent == group.path and len(swept) < 2:
            swept.append(path)
            run_group._sweep(group.path)

    monkeypatch.setattr(Path, "mkdir", and_sweep)
    made = make("run-first")
    assert len(swept) == 2 and made is not None and made.is_dir()


def test_a_run_that_can_not_be_put_into_its_group_says_so_and_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pid = processes.start(["echo", "it ran"], dict(os.environ), (), tmp_path / "gone")
    os.waitpid(pid, 0)
    shown = capfd.readouterr()
    assert shown.out == "it ran\n"
    assert "the driver does not" in shown.err and f"{tmp_path}/gone: No such file" in shown.err


def test_root_whose_groups_are_read_only_runs_with_our_library_alone(tmp_path: Path, group: Group) -> None:
    machine = sim.Machine.create(tmp_path / "machine", [sim.SimCard(memory_bytes=8 * 2**30)], newer=True)
    runner = Runner(tmp_path / "machine")
    library = machine.library_folder / f"libcuda.so.{machine.driver_version}"
    words = runner.words(*runner.run(sys.executable, "-c", PAST, str(library)))
    mount = groups.mount()
    closed = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        f'mount --bind {mount} {mount} && mount -o remount,bind,ro {mount} && exec "$@"',
        "sh",
    ]
    done = subprocess.run(
        [*group.enter, *closed, *words],
        env=runner.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    ours, escaped, seen = done.stdout.splitlines()
    assert (ours, escaped, done.returncode) == ("2", "0", 0), done.stderr
    assert seen.split() == ["1024", f"/{group.path.name}"]


@pytest.mark.parametrize("line", ["0::/../other", "0::/a/../../b", "1:name=systemd:/", ""])
def test_a_group_that_this_mount_does_not_show_is_nobody_s_parent(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    texts = {"/proc/self/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n", "/proc/self/cgroup": f"{line}\n"}
    monkeypatch.setattr(run_group, "_text", texts.__getitem__)
    assert run_group.own() is None
