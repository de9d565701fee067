"""Containers as processes: what they see, that nothing of them gets away, and the host-path substitute."""

from __future__ import annotations

import os
import pwd
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from localcluster.runner import probe
from localcluster.runner.config import ContainerConfig, Device, Isolation, Mount
from localcluster.runner.runtime import Container, Runtime, RuntimeFailure

NAP = str(1_000_000 + os.getpid())  # seconds that no other program on this machine sleeps
REPOSITORY = Path(__file__).resolve().parents[2]
REAL = [isolation for isolation in Isolation if isolation.real_mounts]


@pytest.fixture(scope="module")
def reasons() -> dict[Isolation, str]:
    return {isolation: probe.try_isolation(isolation) for isolation in REAL}


@pytest.fixture
def start(tmp_path: Path, reasons: dict[Isolation, str]) -> Iterator[Callable[..., Container]]:
    runtimes: list[Runtime] = []

    def run(script: str, isolation: Isolation, *, pid_namespace: bool = False, **fields: Any) -> Container:
        if reasons.get(isolation):
            pytest.skip(f"this machine does not allow {isolation}: {reasons[isolation]}")
        runtime = Runtime(
            tmp_path / "pods", isolation, pid_namespace=pid_namespace, device_directory="/run/vcuda-test/dev"
        )
        runtimes.append(runtime)
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        fields = {"working_directory": "/", "environment": {"PATH": path}, **fields}
        config = ContainerConfig(
            ("sh", "-c", script), directory=str(runtime.directory_of("uid", "main", 0)), isolation=isolation,
            visible=(sys.prefix, sys.base_prefix, str(REPOSITORY)), **fields,
        )  # fmt: skip
        return runtime.start("uid", "main", 0, config)

    yield run
    for runtime in runtimes:
        runtime.close()


def running(command: str) -> list[str]:
    """The PIDs of all processes with exactly this command line."""
    done = subprocess.run(["pgrep", "-fx", command], capture_output=True, text=True, check=False)
    return done.stdout.split()


def finish(container: Container) -> str:
    assert container.process is not None
    container.process.wait(timeout=30)
    return container.config.log_path.read_text()


@pytest.fixture
def host_files(tmp_path: Path) -> dict[str, Path]:
    """A driver directory with a shim, a region with limits and a separate usage file, and a device."""
    driver, region = tmp_path / "driver", tmp_path / "region"
    (driver / "lib64").mkdir(parents=True)
    region.mkdir()
    (driver / "lib64" / "libcuda.so.1").write_text("shim")
    (driver / "lib64" / "libcuda.so").symlink_to("libcuda.so.1")
    (region / "limits").write_text("limits")
    (region / "usage").write_text("covered")
    usage, device = tmp_path / "usage", tmp_path / "nvidia0"
    usage.write_text("usage")
    usage.chmod(0o666)
    device.write_text("card")
    return {"driver": driver, "region": region, "usage": usage, "device": device}


def gpu_fields(files: dict[str, Path]) -> dict[str, Any]:
    return {
        "mounts": (
            Mount(str(files["usage"]), "/etc/vcuda/usage"),
            Mount(str(files["driver"]), "/usr/local/nvidia", read_only=True),
            Mount(str(files["region"]), "/etc/vcuda", read_only=True),
            Mount(
                str(files["driver"] / "lib64" / "libcuda.so.1"),
                "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
                read_only=True,
            ),
            Mount(str(files["driver"] / "lib64" / "libcuda.so.1"), "/usr/lib64/libcuda.so.1", read_only=True),
        ),
        "devices": (Device(str(files["device"]), "/dev/nvidia0"),),
    }


@pytest.mark.parametrize(("isolation", "flags"), [(Isolation.USER_AND_MOUNT, "-Urm"), (Isolation.MOUNT, "-m")])
def test_what_util_linux_can_do_here_we_can_too(
    reasons: dict[Isolation, str], isolation: Isolation, flags: str
) -> None:
    """Else a defect of the runner would only make the tests below skip."""
    possible = subprocess.run(
        ["unshare", flags, "mount", "-t", "tmpfs", "none", "/mnt"],
        capture_output=True,
        timeout=20,
        check=False,
    )
    assert bool(reasons[isolation]) == bool(possible.returncode), reasons[isolation]


@pytest.mark.parametrize("isolation", REAL)
def test_mounts_appear_where_the_host_has_no_mount_points(
    start: Any, host_files: dict[str, Path], isolation: Isolation
) -> None:
    script = """
    for f in /usr/local/nvidia/lib64/libcuda.so /etc/vcuda/limits /etc/vcuda/usage /dev/nvidia0 \
             /usr/lib/x86_64-linux-gnu/libcuda.so.1 /usr/lib64/libcuda.so.1; do echo $f=$(cat $f); done
    echo written > /etc/vcuda/usage
    (echo x > /etc/vcuda/limits) 2>/dev/null && echo limits writable
    (echo x > /usr/local/nvidia/new) 2>/dev/null && echo driver writable
    ls /dev | grep nvidia; ls /usr/lib/x86_64-linux-gnu/libc.so.6 /etc/passwd
    """
    container = start(script, isolation, **gpu_fields(host_files))
    lines = finish(container).splitlines()
    assert lines[:6] == [
        "/usr/local/nvidia/lib64/libcuda.so=shim", "/etc/vcuda/limits=limits", "/etc/vcuda/usage=usage", "/dev/nvidia0=card",
        "/usr/lib/x86_64-linux-gnu/libcuda.so.1=shim", "/usr/lib64/libcuda.so.1=shim",
    ]  # fmt: skip
    assert lines[6:] == ["nvidia0", "/etc/passwd", "/usr/lib/x86_64-linux-gnu/libc.so.6"]
    assert host_files["usage"].read_text() == "written\n"
    assert not Path("/usr/local/nvidia/lib64").exists() or Path("/usr/local/nvidia") != host_files["driver"]


@pytest.mark.parametrize("isolation", REAL)
def test_the_host_is_not_changed_and_its_tmp_is_not_seen(start: Any, tmp_path: Path, isolation: Isolation) -> None:
    marker = f"/usr/local/vcuda-test-{os.getpid()}"
    secret = tmp_path / "secret"
    secret.write_text("x")
    script = f"touch {marker} 2>/dev/null; test -e {secret} && echo seen; touch /tmp/mine && ls -A /tmp | grep mine; nproc >/dev/null"
    assert finish(start(script, isolation)) == "mine\n"
    assert not Path(marker).exists()


@pytest.mark.parametrize("isolation", REAL)
def test_a_containers_root_can_neither_mount_nor_make_devices(start: Any, isolation: Isolation) -> None:
    script = (
        "id -u; mount -t tmpfs x /mnt 2>/dev/null && echo mounted; mknod /dev/nvidia9 c 195 9 2>/dev/null && echo made"
    )
    assert finish(start(script, isolation)) == "0\n"


def test_python_is_the_interpreter_of_the_deployment(start: Any) -> None:
    text = finish(start("python -c 'import sys, grpc; print(sys.prefix)'", REAL[0], working_directory=str(REPOSITORY)))
    assert text.strip() == sys.prefix


@pytest.mark.parametrize("isolation", list(Isolation))
@pytest.mark.parametrize("pid_namespace", [False, True])
def test_stop_sends_term_first_and_kills_everything_after_the_grace(
    start: Any, wait_for: Any, isolation: Isolation, pid_namespace: bool
) -> None:
    if pid_namespace and not isolation.real_mounts:
        pytest.skip("a PID namespace comes with the mount namespaces only")
    # An orphan in a session of its own is the hard case.
    script = "trap 'echo term' TERM; setsid sh -c 'trap \"\" TERM; sleep NAP.1 & sleep NAP.1' & echo up; while true; do sleep 0.05; done"
    container = start(script.replace("NAP", NAP), isolation, pid_namespace=pid_namespace)
    wait_for(lambda: "up" in container.config.log_path.read_text(), "start")
    wait_for(lambda: len(running(f"sleep {NAP}.1")) >= 2, "the orphans")
    Runtime(Path(container.config.directory), isolation).stop(container, 0.5)
    assert "term" in container.config.log_path.read_text()
    assert (container.state().exit_code, container.state().signal) == (137, 9)
    wait_for(lambda: not running(f"sleep {NAP}.1"), "the end of every process")


def test_the_end_of_the_main_process_ends_its_children(start: Any, wait_for: Any) -> None:
    container = start("setsid sleep NAP.2 & sleep 0.2; exit 3".replace("NAP", NAP), REAL[0])
    finish(container)
    assert container.state().exit_code == 3 and container.state().phase == "exited"
    assert not running(f"sleep {NAP}.2")


def test_containers_end_when_their_runtime_dies(tmp_path: Path, wait_for: Any) -> None:
    """kill -9 of the deployment must leave no processes behind."""
    code = f"""
import sys, time; sys.path.insert(0, {str(REPOSITORY)!r})
from pathlib import Path
from localcluster.runner.config import ContainerConfig, Isolation
from localcluster.runner.runtime import Runtime
runtime = Runtime(Path({str(tmp_path)!r}), Isolation.HOST_PATHS)
c = ContainerConfig(("sleep", "{NAP}.3"), {{"PATH": "/usr/bin:/bin"}}, "/", {str(tmp_path / "c")!r}, Isolation.HOST_PATHS)
runtime.start("u", "n", 0, c); print("up", flush=True); time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.kill()
    process.wait(timeout=10)
    wait_for(
        lambda: not running(f"sleep {NAP}.3"),
        "the container's end",
    )


@pytest.mark.parametrize("isolation", list(Isolation))
def test_a_missing_command_or_directory_is_named(start: Any, isolation: Isolation, tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure, match="working directory /nowhere"):
        start("true", isolation, working_directory="/nowhere")
    runtime = Runtime(tmp_path / "other", isolation)
    config = ContainerConfig(("no-such-program",), {"PATH": "/usr/bin"}, "/", str(tmp_path / "d"), isolation)
    with pytest.raises(RuntimeFailure, match="exec 'no-such-program'"):
        runtime.start("uid", "main", 0, config)


def test_host_paths_lead_to_a_private_driver_beside_the_region(start: Any, host_files: dict[str, Path]) -> None:
    script = """
    IFS=:; set -- $LD_LIBRARY_PATH; cat $1/libcuda.so.1; echo; test -L $1/libcuda.so.1 || echo regular
    cat $1/../vcuda/limits; echo; cat $1/../vcuda/usage; echo; cat $CARDS/nvidia0; echo; cat $STATE/state; echo; echo $# $OTHER
    """
    environment = {
        "PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64:/opt/x", "STATE": "/run/vcuda-test",
        "CARDS": "/run/vcuda-test/dev", "OTHER": "/etc/passwd",
    }  # fmt: skip
    fields = gpu_fields(host_files)
    fields["mounts"] += (Mount(str(host_files["device"]), "/run/vcuda-test/state"),)
    container = start(script, Isolation.HOST_PATHS, environment=environment, **fields)
    wanted = ["shim", "regular", "limits", "usage", "card", "card", "2 /etc/passwd"]
    assert finish(container).splitlines() == wanted


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user to try it")
def test_an_ordinary_user_gets_real_mounts_too(tmp_path: Path, reasons: dict[Isolation, str]) -> None:
    """Run as nobody from a copy of the package: the checkout and this interpreter may be in a private folder."""
    if reasons[Isolation.USER_AND_MOUNT]:
        pytest.skip(f"no user namespaces here: {reasons[Isolation.USER_AND_MOUNT]}")
    interpreter = Path("/usr/bin/python3")
    if not interpreter.exists():
        pytest.skip("no system interpreter that an ordinary user may run")
    user = pwd.getpwnam("nobody")
    package = Path("/tmp") / f"vcuda-test-user-{os.getpid()}"
    script = (
        "from localcluster.runner import probe; from localcluster.runner.config import Isolation as I; "
        "print(repr(probe.try_isolation(I.USER_AND_MOUNT)), repr(probe.try_isolation(I.USER_AND_MOUNT, pid_namespace=True)))"
    )
    try:
        package.mkdir(exist_ok=True)
        subprocess.run(
            [
                "cp",
                "-r",
                "--parents",
                "localcluster/__init__.py",
                "localcluster/runner",
                package,
            ],
            cwd=REPOSITORY,
            check=True,
        )
        subprocess.run(["chmod", "-R", "a+rX", package], check=True)
        command = f"cd {package} && {interpreter} -c {shlex.quote(script)}"
        done = subprocess.run(
            ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups", "sh", "-c", command],
            capture_output=True, text=True, timeout=60, check=False, env={"PATH": "/usr/bin:/bin", "TMPDIR": "/tmp"},
        )  # fmt: skip
        assert done.stdout == "'' ''\n", done.stdout + done.stderr
    finally:
        subprocess.run(["rm", "-rf", package], check=False)
