"""The command as operators run it: clear messages instead of tracebacks, exit codes, signals, memory."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

import vcuda
from manager.allocations.state_file import StateFile
from manager.process import sdnotify
from tests.manager.manager_pods import NAMES, container, eventually, pod
from tests.manager.manager_support import Node
from vcuda import region
from vcuda.sim import Machine

ROOT = Path(vcuda.__file__).parents[1]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "manager.main", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_bare_command_explains_itself_and_touches_no_kubelet() -> None:
    """It registered with whatever kubelet was there."""
    result = subprocess.run(
        [sys.executable, "-m", "manager.main"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2 and result.stdout == "" and len(result.stderr.splitlines()) == 1
    assert "install the chart" in result.stderr and "vcuda run" in result.stderr and "doctor" in result.stderr


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in result.stderr
    return result.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--no-such-flag"], {}, "unrecognized arguments: --no-such-flag; --help lists all flags"),
        (["--query-por", "1"], {}, "unrecognized arguments: --query-por 1"),
        (["--query-port", "x"], {}, "--query-port: 'x' is not valid"),
        (["--config", "/does/not/exist"], {}, "cannot read the settings file /does/not/exist"),
        ([], {"GPU_MANAGER_LD_LIBRARY_PATH": "maybe"}, "choose one of set, omit"),
        (["--plugins-path", "/x/\udcff"], {}, "--plugins-path: '/x/\\udcff' is not valid (it is not UTF-8; name it"),
    ],
)
def test_wrong_settings_exit_2_with_one_line(arguments: list[str], environment: dict[str, str], message: str) -> None:
    result = run(*arguments, **environment)
    assert result.returncode == 2
    assert message in last_line(result)


def own_paths(directory: Path) -> list[str]:
    return [
        f"--virtual-manager-path={directory}/vm",
        f"--checkpoint-path={directory}/checkpoint",
        f"--device-plugin-path={directory}/plugins",
        f"--driver-root={directory}",
        "--query-port=0",
    ]


def test_a_port_in_use_exits_2_with_one_line(short_directory: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run(*own_paths(short_directory), "--query-addr=127.0.0.1", f"--query-port={port}")
    assert result.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in last_line(result)


@pytest.mark.parametrize("flag", ["--virtual-manager-path", "--checkpoint-path"])
def test_an_unwritable_directory_exits_2_with_one_line(short_directory: Path, flag: str) -> None:
    (short_directory / "file").touch()
    result = run(*own_paths(short_directory), f"{flag}={short_directory}/file/below")
    assert result.returncode == 2
    assert f"point {flag} elsewhere" in last_line(result)


def test_an_unreadable_kubeconfig_exits_2_with_one_line(short_directory: Path) -> None:
    result = run(*own_paths(short_directory), "--kubeconfig=/does/not/exist")
    assert result.returncode == 2
    assert "cannot read the kubeconfig /does/not/exist" in last_line(result)


def test_version() -> None:
    result = run("--version")
    assert (result.returncode, result.stdout) == (0, f"gpu-manager {vcuda.__version__}\n")


def test_real_regions_real_arbiter_memory_and_a_quick_end(
    process: Callable[..., subprocess.Popen[str]], node: Node
) -> None:
    running = process()
    pods = [pod(f"p{number}", container("c", 20, 2)) for number in range(8)]
    for item in pods:
        node.kubelet.admit(item)
    status = Path(f"/proc/{running.pid}/status").read_text()
    resident_kib = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
    assert resident_kib < 80 * 1024  # TARGETS.md T22
    assert region.read_limits(node.region(pods[0], "c"))[0].shared
    started = time.monotonic()
    running.send_signal(signal.SIGTERM)
    assert running.wait(20) == 0
    assert time.monotonic() - started < 10  # two seconds on an idle machine
    log = (node.directory / "manager.log").read_text()
    assert "Traceback" not in log and "ERROR" not in log
    assert region.read_limits(node.region(pods[0], "c"))[0].cores == 20  # running containers keep theirs
    assert not (node.kubelet.directory / "vcore.sock").exists()


def test_kill_9_between_calls_loses_and_doubles_nothing(
    process: Callable[..., subprocess.Popen[str]], node: Node
) -> None:
    running = process()
    pods = [pod(f"p{number}", container("c", 10, 1 + number)) for number in range(6)]
    for number, item in enumerate(pods):
        steps = list(node.kubelet.devices.steps(item))
        node.kubelet.pods.append(item)
        node.kubelet.devices.give(item, *steps[0])
        if number % 2:
            running.kill()
            running.wait()
            running = process()
        node.kubelet.devices.give(item, *steps[1])
        node.kubelet.start_containers(item)
    for number, item in enumerate(pods):
        assert region.read_limits(node.region(item, "c"))[0].memory_bytes == (1 + number) * 256 * 2**20
    assert len(StateFile(node.directory / "checkpoint").read()) == len(pods)


def test_systemd_is_told_and_secrets_are_not_logged(process: Callable[..., subprocess.Popen[str]], node: Node) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(node.directory / "notify"))
        listener.settimeout(20)
        running = process("--container-env=TOKEN=hunter2", NOTIFY_SOCKET=str(node.directory / "notify"))
        assert listener.recv(256).startswith(b"READY=1")
        running.send_signal(signal.SIGTERM)
        assert listener.recv(256) == b"STOPPING=1"
        assert running.wait(20) == 0
    log = (node.directory / "manager.log").read_text()
    assert "TOKEN=…" in log and "hunter2" not in log


def test_notify_without_or_with_a_dead_socket_is_silent(tmp_path: Path) -> None:
    sdnotify.notify(None, "READY=1")
    sdnotify.notify(str(tmp_path / "nobody"), "READY=1")


def test_old_flags_are_accepted(process: Callable[..., subprocess.Popen[str]], node: Node) -> None:
    process(
        "--driver=nvidia", "--share-mode=true", "--logtostderr", "--v=4", "--container-runtime=docker",
        "--container-runtime-endpoint=/x.sock", "--cgroup-driver=systemd", "--runtime-request-timeout=5s",
        "--wait-timeout=1m", "--extra-config=/x", "--volume-config=/y", "--log-dir=/z",
    )  # fmt: skip
    log = (node.directory / "manager.log").read_text()
    assert log.count("is accepted but has no effect") == 11


def test_http_pages(node: Node, machine: Machine) -> None:
    node.start(wait=200)
    item = pod("a", container("c", 30, 10), annotations={NAMES.core_limit: "50"})
    node.kubelet.admit(item)
    usage = json.loads(node.get("/usage")[1])
    (found,) = usage["containers"]
    assert (found["namespace"], found["pod_name"], found["container"]) == ("default", "a", "c")
    assert found["cards"][0]["core_limit"] == 50
    graph = node.get("/graph")[1]
    assert "default/a/c: 30 cores (up to 50)" in graph and machine.cards[0].uuid in graph
    assert json.loads(node.get("/version")[1]) == {"version": vcuda.__version__}
    eventually(lambda: node.get("/readyz")[0] == 200, "ready")
    assert node.get("/healthz") == (200, "ok\n")
    assert node.get("/nothing")[0] == 404
    assert node.daemon is not None
    with urllib.request.urlopen(f"http://127.0.0.1:{node.daemon.port}/metric", timeout=10) as answer:
        old = answer.read().decode()
    labels = 'container_name="c",{}="total",namespace="default",node="node-1",pod_name="a"'
    assert f"container_request_gpu_memory{{{sorted_labels(labels.format('req_of_gpu_memory'))}}} 2560.0" in old
    assert f"container_request_gpu_utilization{{{sorted_labels(labels.format('req_of_gpu'))}}} 0.3" in old
    for name in ("container_gpu_utilization", "container_gpu_memory_total"):
        assert f"\n{name}{{" in old


def sorted_labels(text: str) -> str:
    """prometheus-client writes labels sorted by name."""
    return ",".join(sorted(text.split(",")))


def test_a_signal_that_another_thread_takes_ends_the_daemon_all_the_same() -> None:
    """The kernel chooses the thread; the one that waits for signals may sleep on, or be about to fall asleep."""
    program = """
import signal, sys, threading, time
from manager import daemon, main

def run(settings, environment, next_signal, reread, look):
    def taken():
        time.sleep(0.3)
        signal.pthread_kill(threading.get_ident(), signal.SIGHUP)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        time.sleep(30)
    threading.Thread(target=taken, daemon=True).start()
    print([next_signal(None), next_signal(None)], flush=True)

daemon.run = run
sys.argv = ["gpu-manager", "--v=1"]
main.main()
"""
    ended = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=20)
    assert ended.stdout == f"[{int(signal.SIGHUP)}, {int(signal.SIGTERM)}]\n"
