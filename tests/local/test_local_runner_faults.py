"""Containers that can't start or lose their monitor, isolations that do not work, and what a container of its own sees."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from localcluster import certificates
from localcluster.runner import path_rewrite, probe, runtime
from localcluster.runner.config import ContainerConfig, Isolation, Mount
from localcluster.runner.runtime import Container, Runtime, RuntimeFailure

REPOSITORY = Path(__file__).resolve().parents[2]
Start = Callable[..., Container]


@pytest.fixture(scope="module")
def real() -> Isolation:
    """The best isolation with mounts of its own that works here."""
    found = probe.best().isolation
    if not found.real_mounts:
        pytest.skip("this machine allows no mounts")
    return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    runtimes: list[Runtime] = []

    def run(
        script: str,
        isolation: Isolation = Isolation.HOST_PATHS,
        *,
        pid_namespace: bool = False,
        **fields: Any,
    ) -> Container:
        made = Runtime(tmp_path / "pods", isolation, pid_namespace=pid_namespace)
        runtimes.append(made)
        directory = str(made.directory_of("uid", "main", 0))
        visible = (sys.prefix, sys.base_prefix, str(REPOSITORY), *fields.pop("visible", ()))
        config = ContainerConfig(
            ("sh", "-c", script),
            {"PATH": "/usr/bin:/bin"},
            "/",
            directory,
            isolation,
            visible=visible,
            **fields,
        )
        return made.start("uid", "main", 0, config)

    yield run
    for made in runtimes:
        made.close()


def finish(container: Container) -> str:
    assert container.process is not None
    container.process.wait(timeout=30)
    return container.config.log_path.read_text()


# --- what a container sees ---
@pytest.mark.parametrize("pid_namespace", [False, True])
def test_a_container_has_its_own_name_and_its_status_is_passed_on(
    start: Start, real: Isolation, pid_namespace: bool
) -> None:
    script = 'cat /proc/sys/kernel/hostname; test "$$" = 1 && echo first; exit 5'
    container = start(script, real, pid_namespace=pid_namespace, hostname="box")
    assert finish(container).split() == (["box", "first"] if pid_namespace else ["box"])
    assert (container.state().exit_code, container.state().signal) == (5, 0)


def test_a_signal_that_ends_a_command_is_told_as_a_shell_does(start: Start) -> None:
    container = start("kill -USR1 $$")
    finish(container)
    assert (container.state().exit_code, container.state().signal) == (128 + signal.SIGUSR1, signal.SIGUSR1)


def test_a_file_of_the_host_is_replaced_beside_one_that_it_lacks(start: Start, real: Isolation, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine\n")
    mounts = (Mount(str(mine), "/etc/passwd", True), Mount(str(mine), "/etc/vcuda-test/new", True))
    container = start("cat /etc/passwd /etc/vcuda-test/new; test -e /etc/group && echo group", real, mounts=mounts)
    assert finish(container).split() == ["mine", "mine", "group"]
    assert "root" in Path("/etc/passwd").read_text() and not Path("/etc/vcuda-test").exists()


def test_a_visible_folder_below_tmp_can_be_read_and_not_written(start: Start, real: Isolation, tmp_path: Path) -> None:
    (tmp_path / "seen").mkdir()
    (tmp_path / "seen" / "file").write_text("x")
    script = f"cat {tmp_path}/seen/file; (echo y > {tmp_path}/seen/file) 2>/dev/null || echo kept"
    assert finish(start(script, real, visible=(str(tmp_path / "seen"),))) == "xkept\n"


# --- what goes wrong ---
def test_a_container_ends_with_its_monitor_and_counts_as_killed(start: Start, wait_for: Any) -> None:
    container = start("echo $$; exec sleep 600")
    assert container.process is not None
    command = int(wait_for(container.config.log_path.read_text, "the start"))
    os.kill(container.process.pid, signal.SIGKILL)
    container.process.wait(timeout=10)
    state = container.state()
    assert (state.phase, state.exit_code, state.signal) == ("exited", 137, 9)
    assert state.error == "the container's monitor ended unexpectedly"
    wait_for(lambda: not Path(f"/proc/{command}/exe").exists(), "the end of the command")
    container.tell("TERM")  # to nobody: no error


def test_a_monitor_that_cannot_run_is_told_with_its_last_words(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_BOOT", "raise SystemExit('no such module')")
    with pytest.raises(RuntimeFailure, match=r"(?s)monitor ended unexpectedly: .*no such module"):
        start("true")


def test_a_container_that_does_not_start_in_time_is_ended_and_named(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_START_SECONDS", -1.0)
    monkeypatch.setattr(runtime, "_BOOT", "import sys; sys.stdin.read(5)")
    with pytest.raises(RuntimeFailure, match="container main did not start within -1 s"):
        start("true")


def test_an_isolation_that_does_not_work_says_what_its_trial_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_BOOT", "raise SystemExit('mount denied')")
    with pytest.raises(RuntimeFailure) as error:
        probe.best(Isolation.MOUNT)
    assert str(error.value).startswith("isolation mount-namespace does not work here: ")
    assert "mount denied" in str(error.value)


def test_a_trial_that_does_not_see_its_mount_is_a_failure() -> None:
    """On host paths the trial's own file is seen where a container must not see it."""
    assert probe.try_isolation(Isolation.HOST_PATHS) == "the mounts are not as they should be inside"


def test_a_trial_that_hangs_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = subprocess.Popen.wait

    def hanging(process: Any, timeout: float | None = None) -> int:
        if timeout == probe._TRIAL_SECONDS:
            raise subprocess.TimeoutExpired("the trial", timeout)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", hanging)
    assert "timed out after 20.0 seconds" in probe.try_isolation(Isolation.HOST_PATHS)


def test_where_nothing_better_works_pods_run_on_host_paths_and_the_reasons_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "try_isolation", lambda isolation: f"no {isolation}")
    found = probe.best()
    assert found.isolation is Isolation.HOST_PATHS
    assert found.describe() == (
        "pods run on host paths, without mounts of their own [user-and-mount-namespaces: no "
        "user-and-mount-namespaces; mount-namespace: no mount-namespace]"
    )
    assert probe.best(Isolation.HOST_PATHS).describe() == "pods run on host paths, without mounts of their own"


def test_a_private_driver_copies_the_shims_and_links_everything_else(tmp_path: Path) -> None:
    driver, libraries = tmp_path / "driver", tmp_path / "driver" / "lib64"
    libraries.mkdir(parents=True)
    (driver / "VERSION").write_text("550")
    (driver / "bin").symlink_to("/usr/bin")
    (libraries / "libcuda.so.1").write_text("shim")
    (libraries / "libcuda.so").symlink_to("libcuda.so.1")
    (libraries / "libreal.so").symlink_to(driver / "VERSION")
    (libraries / "notes").write_text("n")
    (driver / "vcuda").mkdir()
    (driver / "vcuda/limits").symlink_to("/etc/vcuda/limits")
    mounts = (Mount(str(driver), "/usr/local/nvidia", True),)
    config = ContainerConfig(("true",), {}, "/usr/local/nvidia", str(tmp_path), Isolation.HOST_PATHS, mounts=mounts)
    made = path_rewrite.host_paths(config, "/dev")
    private = tmp_path / "fs" / "usr/local/nvidia"
    assert made.working_directory == str(private) and made.mounts == ()
    assert made.environment == {"LD_LIBRARY_PATH": f"{private}/lib64"}
    assert not (private / "lib64/libcuda.so.1").is_symlink()
    links = {name: str((private / name).readlink()) for name in ("VERSION", "bin", "lib64/libcuda.so", "lib64/notes")}
    assert links == {
        "VERSION": str(driver / "VERSION"),
        "bin": str(driver / "bin"),
        "lib64/libcuda.so": "libcuda.so.1",
        "lib64/notes": str(libraries / "notes"),
    }
    assert (private / "lib64/libreal.so").readlink() == libraries / "libreal.so"
    assert (private / "vcuda").readlink() == tmp_path / "fs" / "etc/vcuda"


@pytest.mark.parametrize("openssl", [None, "#!/bin/sh\necho unknown option -addext >&2; exit 1\n"])
def test_without_an_openssl_that_can_make_it_there_is_no_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, openssl: str | None
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if openssl is not None:
        (tmp_path / "openssl").write_text(openssl)
        (tmp_path / "openssl").chmod(0o755)
    assert certificates.make(tmp_path) is None
