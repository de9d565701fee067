"""Commands in running containers: real kubectl where it is new enough, our own client, and the two kinds of isolation."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import websocket

from localcluster import api as apis
from localcluster.cluster import Cluster, ClusterOptions
from localcluster.runner import probe
from localcluster.runner.config import Isolation
from localcluster.runner.supervisor import descendants

REPOSITORY = Path(__file__).resolve().parents[2]
PODS = "/api/v1/namespaces/default/pods"
SECONDS = 60.0
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def isolations() -> list[Isolation]:
    best = probe.best(None).isolation
    return [best] if best is Isolation.HOST_PATHS else [best, Isolation.HOST_PATHS]


def eventually(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.fixture(scope="module", params=isolations())
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with Cluster(ClusterOptions(cards=1, isolation=request.param)) as made:
        made.supervise()
        limits = {"tencent.com/vcuda-core": "20", "tencent.com/vcuda-memory": "4"}
        container = {"name": "main", "image": "x", "command": ["sleep", "3600"], "resources": {"limits": limits}}
        spec = {"containers": [container], "terminationGracePeriodSeconds": 1}
        made.api.call("POST", PODS, {"metadata": {"name": "tenant"}, "spec": spec})
        eventually(lambda: made.api.call("GET", f"{PODS}/tenant")["status"].get("phase") == "Running", "the pod runs")
        yield made


def kubectl() -> str | None:
    """A kubectl that speaks WebSockets by itself: 1.31 or newer."""
    program = shutil.which("kubectl")
    if program is None:
        return None
    told = subprocess.run([program, "version", "--client"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"v1\.(\d+)", told)
    return program if version is not None and int(version[1]) >= 31 else None


@pytest.fixture(params=["kubectl", "ours"])
def execute(cluster: Cluster, request: pytest.FixtureRequest) -> Run:
    if request.param == "kubectl":
        program = kubectl()
        if program is None:
            pytest.skip("no kubectl of 1.31 or newer is here")
        words = [program, "exec"]
    else:
        words = [sys.executable, "-m", "localcluster", "exec"]

    def run(*command: str, pod: tuple[str, ...] = ("tenant",), **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*words, *pod, "--", *command], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
            env={**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}, **options,
        )  # fmt: skip

    return run


def test_a_command_has_the_containers_environment_and_its_own_streams_and_status(
    cluster: Cluster, execute: Run
) -> None:
    done = execute("sh", "-c", "echo out; echo err >&2; exit 7")
    assert done.returncode == 7
    assert done.stdout == "out\n"
    assert done.stderr.startswith("err\n")
    inside = execute("python", "-c", "from cuda.bindings import driver as d; d.cuInit(0); "
                     "c = d.cuCtxCreate(None, 0, d.cuDeviceGet(0)[1])[1]; print(d.cuMemGetInfo()[2] >> 20)")  # fmt: skip
    assert inside.stdout.split() == ["1024"], inside
    if cluster.runtime.isolation.real_mounts:
        assert execute("cat", "/proc/sys/kernel/hostname").stdout == "tenant\n"
        assert sorted(execute("ls", "/etc/vcuda").stdout.split()) == ["limits", "usage"]


def test_much_output_arrives_whole(execute: Run) -> None:
    done = execute("sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x")
    assert done.returncode == 0
    assert len(done.stdout) == 3_000_000


def test_what_can_not_run_is_said(execute: Run) -> None:
    done = execute("no-such-program")
    assert done.returncode != 0
    assert "exec 'no-such-program': No such file or directory" in done.stderr
    gone = execute("true", pod=("no-pod",))
    assert gone.returncode == 1
    assert 'pods "no-pod" not found' in gone.stderr


def test_the_doctor_beside_the_daemon_finds_it(execute: Run) -> None:
    done = execute("gpu-manager", "doctor", pod=("-n", "vcuda-system", "gpu-manager-local"))
    assert "with the settings of the daemon that runs here" in done.stderr
    assert re.search("ok +kubelet", done.stdout), done


def test_kubectls_standard_input_and_terminal(cluster: Cluster) -> None:
    program = kubectl()
    if program is None:
        pytest.skip("no kubectl of 1.31 or newer is here")
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
    text = "line\n" * 100_000
    piped = subprocess.run(
        [program, "exec", "-i", "tenant", "--", "cat"], input=text, capture_output=True, text=True, env=environment,
        timeout=60, check=False,
    )  # fmt: skip
    assert (piped.returncode, piped.stdout) == (0, text)
    own, theirs = pty.openpty()
    process = subprocess.Popen(
        [program, "exec", "-it", "tenant", "--", "sh", "-c", "test -t 0 && read answer && echo got $answer"],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
    )  # fmt: skip
    os.close(theirs)
    os.write(own, b"it\n")
    assert process.wait(timeout=60) == 0
    assert b"got it" in os.read(own, 4096)
    os.close(own)


def begin(cluster: Cluster, *words: str) -> websocket.WebSocket:
    query = "&".join(["stdout=true", "stderr=true", *(f"command={word}" for word in words)])
    return cluster.api.websocket(f"{PODS}/tenant/exec?{query}")


def sleepers(cluster: Cluster) -> list[int]:
    found = []
    for pid in descendants(os.getpid()):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[:2] == [b"sleep", b"4321"]:
            found.append(pid)
    return found


def test_a_command_ends_with_its_client(cluster: Cluster) -> None:
    connection = begin(cluster, "sleep", "4321")
    eventually(lambda: sleepers(cluster), "the command runs")
    connection.shutdown()
    eventually(lambda: not sleepers(cluster), "the command ends")


def test_a_command_ends_with_its_container(cluster: Cluster) -> None:
    connection = begin(cluster, "sleep", "4321")
    eventually(lambda: sleepers(cluster), "the command runs")
    cluster.api.call("DELETE", f"{PODS}/tenant?gracePeriodSeconds=1")
    last = b""
    while True:
        opcode, data = connection.recv_data()
        if opcode == websocket.ABNF.OPCODE_CLOSE:
            break
        last = data
    status = json.loads(last[1:])
    assert (last[0], status["status"]) == (3, "Failure")
    assert not sleepers(cluster)
    with pytest.raises(apis.ApiFailure):
        begin(cluster, "true")
