"""The command: serving in a process of its own, settings that can't work, the simulator."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from scheduler_ext.lab import simulate, trace
from scheduler_ext.main import main
from tests.scheduler_ext.extender_support import FakeApi, Served, cards, eventually, node, pod
from tests.scheduler_ext.test_extender_writing import certificate
from tests.support import web
from vcuda.spec.request import Policy

TRACE = Path(__file__).parents[2].parent / "shared" / "trace"


def test_serves_expires_and_ends_cleanly(api: FakeApi, tmp_path: Path) -> None:
    api.put("nodes", node("a", cards("a", 1)))
    served = Served("--kubeconfig", api.kubeconfig(tmp_path))
    try:
        with web.Client(base_url=served.url, timeout=20) as client:
            eventually(lambda: client.get("/readyz").status_code == 200)
            assert client.get("/healthz").status_code == 200
            body = {"Pod": pod("p", 100, None), "NodeNames": ["a"]}
            assert client.post("/scheduler/filter", json=body).json()["NodeNames"] == ["a"]
            eventually(lambda: "vcuda_extender_expired_total 1.0" in client.get("/metrics").text)
            assert client.post("/scheduler/filter", json=body | {"Pod": pod("q", 100, None)}).json()["NodeNames"] == [
                "a"
            ]
    finally:
        status = served.stop()
    assert status == 0 and "Traceback" not in "".join(served.log)


def test_waits_for_an_api_server_that_is_not_there_yet(tmp_path: Path) -> None:
    gone = FakeApi()
    config = gone.kubeconfig(tmp_path)
    gone.stop()
    served = Served("--kubeconfig", config)
    try:
        answer = web.get(served.url + "/readyz")
        assert answer.status_code == 503 and "nodes and pods" in answer.text
        assert web.get(served.url + "/healthz").status_code == 200
    finally:
        status = served.stop()
    assert status == 0 and "Traceback" not in "".join(served.log)


@pytest.fixture
def certificates(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    _make_certificate(tmp_path, "first")
    return tmp_path / "tls.crt", tmp_path / "tls.key"


def _make_certificate(directory: Path, name: str) -> None:
    for path in certificate(directory, name):
        path.replace(directory / f"tls{path.suffix}")


def _subject(url: str) -> bytes:
    host, port = url.removeprefix("https://").split(":")
    return ssl.get_server_certificate((host, int(port))).encode()


def test_https_reloads_a_changed_certificate(api: FakeApi, tmp_path: Path, certificates: tuple[Path, Path]) -> None:
    chain, key = certificates
    served = Served("--kubeconfig", api.kubeconfig(tmp_path), "--tls-cert", str(chain), "--tls-key", str(key))
    try:
        assert served.url.startswith("https://")
        assert httpx.get(served.url + "/healthz", verify=False).text == "ok\n"
        before = _subject(served.url)
        whole = key.read_text()
        key.write_text("half a k")
        assert served.process.stderr is not None
        while "what was in use before stays so" not in served.process.stderr.readline():
            assert served.process.poll() is None
        assert _subject(served.url) == before
        key.write_text(whole)
        _make_certificate(tmp_path, "second")
        eventually(lambda: _subject(served.url) != before)
    finally:
        served.stop()


def test_settings_that_cannot_work_end_with_one_clear_line(
    api: FakeApi, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    config = api.kubeconfig(tmp_path)
    garbage = tmp_path / "garbage"
    garbage.write_text("{{{")
    empty = tmp_path / "empty"
    empty.write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        here = ["--bind-address", "127.0.0.1"]
        cases = [
            (["--kubeconfig", config, "--bind-address", "127.0.0.1", "--port", port], f"port {port}"),
            (
                ["--kubeconfig", config, "--bind-address", "203.0.113.7", "--port", "0", "--allow-anyone"],
                "203.0.113.7",
            ),
            (
                [
                    "--kubeconfig",
                    config,
                    "--bind-address",
                    "no-such.invalid",
                    "--port",
                    "0",
                    "--allow-anyone",
                ],
                "no-such.invalid",
            ),
            (["--kubeconfig", str(tmp_path / "none"), *here], "none"),
            (["--kubeconfig", str(garbage), *here], "garbage"),
            (["--kubeconfig", str(empty), *here], "empty"),
            (here, "service account"),
            (
                [
                    "serve",
                    "--kubeconfig",
                    config,
                    *here,
                    "--port",
                    "0",
                    "--tls-cert",
                    str(garbage),
                    "--tls-key",
                    str(garbage),
                ],
                "certificate",
            ),
            (["simulate", "--nodes", str(garbage), "--pods", str(garbage)], "garbage"),
            (["simulate", "--nodes", str(tmp_path / "none"), "--pods", str(garbage)], "none"),
        ]
        for arguments, named in cases:
            assert main(arguments) == 2, arguments
            line = capfd.readouterr().err
            assert line.startswith("gpu-scheduler-extender: ") and named in line and line.count("\n") == 1, (
                arguments,
                line,
            )


@pytest.mark.parametrize(
    "arguments",
    [["--unknown"], ["serve", "extra"], ["simulate"],
     ["simulate", "--nodes", "x"], ["simulate", "--recording", "x", "--seeds", "1-2"]],
)  # fmt: skip
def test_unusable_options_end_with_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--port", "99999"], ["--port", "x"], ["--policy", "best"], ["--tls-cert", "x"], ["--assume-seconds", "0"],
     ["--body-mib", "-1"], ["--resource-domain", "a/b"], ["--record-mib", "0"], ["--lease", "/\udcff"],
     ["--config", "/does/not/exist"], ["webhook", "--port", "x"], ["webhook", "--tls-cert", "/\udcff"]],
)  # fmt: skip
def test_settings_that_can_not_work_end_with_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """25 lines of usage came before it, also where a file was what was wrong."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("gpu-scheduler-extender: ") and said.count("\n") == 1


NODES_CSV = "sn,cpu_milli,memory_mib,gpu,model\nn1,32000,262144,2,T4\nn2,32000,262144,2,T4\nn3,64000,262144,0,\n"
PODS_CSV = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\np1,1000,1024,1,500,\np2,1000,1024,1,500,T4|V100\n"
    "p3,1000,1024,1,1000,\np4,2000,1024,2,1000,\np5,500,512,0,0,\n"
)


@pytest.fixture
def small_trace(tmp_path: Path) -> tuple[Path, Path]:
    nodes, pods = tmp_path / "nodes.csv", tmp_path / "pods_default.csv"
    nodes.write_text(NODES_CSV)
    pods.write_text(PODS_CSV)
    return nodes, pods


def test_simulate_prints_all_policies_and_the_published_figures(
    small_trace: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["simulate", "--nodes", str(small_trace[0]), "--pods", str(small_trace[1]), "--seeds", "1-2"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert all(policy in shown for policy in Policy) and "95.23" in shown
    assert main([*arguments, "--policy", "fgd", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [run["seed"] for run in data["runs"]] == [1, 2] and data["runs"][0]["policy"] == "fgd"
    assert 0 < data["runs"][0]["allocated"] <= 1 + 1e-9


def test_a_reader_that_has_seen_enough_ends_a_command_without_a_traceback(small_trace: tuple[Path, Path]) -> None:
    """As `gpu-scheduler-extender explain … --json | head` does."""
    nodes, pods = small_trace
    reading, writing = os.pipe()
    os.close(reading)
    command = [
        sys.executable,
        "-m",
        "scheduler_ext.main",
        "simulate",
        "--nodes",
        str(nodes),
        "--pods",
        str(pods),
        "--json",
    ]
    try:
        ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_a_simulation_is_the_same_every_time(small_trace: tuple[Path, Path]) -> None:
    nodes, pods = trace.read_nodes(small_trace[0]), trace.read_pods(small_trace[1])
    first, second = (simulate.run(nodes, pods, Policy.FGD, 42) for _ in range(2))
    assert (first.allocated, first.fragmented, first.refused) == (
        second.allocated,
        second.fragmented,
        second.refused,
    )


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("a,b\n1,2\n", "line 1: the columns cpu_milli"),
        ("name,cpu_milli,memory_mib,num_gpu,gpu_milli\n", "line 2: "),
        (PODS_CSV + "p,x,1,1,1,\n", "line 7, column cpu_milli: 'x' is not a whole number"),
        (PODS_CSV + "p,1,1,1,5000,\n", "line 7, column gpu_milli: 5000 is not between"),
        (PODS_CSV + "p,1,1,-1,5,\n", "line 7, column num_gpu: -1 "),
        (PODS_CSV + "p,1,1,1,0,\n", "line 7, column gpu_milli: it is 0"),
        (PODS_CSV + "p,1\n", "line 7, column num_gpu: the line ends"),
        (PODS_CSV + "p,1,99999999999999999999,1,5,\n", "line 7, column memory_mib"),
    ],
)
def test_a_broken_list_of_pods_is_named_by_file_line_and_column(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "broken.csv"
    path.write_text(text)
    with pytest.raises(trace.TraceError, match=r"broken\.csv") as error:
        trace.read_pods(path)
    assert where in str(error.value)


@pytest.mark.parametrize(
    ("line", "where"),
    [("n1,1,1,1,T4", "line 5, column sn: 'n1' is there already"), (",1,1,1,T4", "line 5, column sn: it is empty"),
     ("n4,1,1,many,T4", "line 5, column gpu: 'many'"), ("n4,1,1,4", "line 5, column model: the line ends")],
)  # fmt: skip
def test_a_broken_list_of_nodes_is_named_by_file_line_and_column(tmp_path: Path, line: str, where: str) -> None:
    path = tmp_path / "broken.csv"
    path.write_text(f"{NODES_CSV}{line}\n")
    with pytest.raises(trace.TraceError, match=r"broken\.csv") as error:
        trace.read_nodes(path)
    assert where in str(error.value)
    path.write_text("sn,cpu_milli,memory_mib,gpu,model\nn3,64000,262144,0,\n")
    with pytest.raises(trace.TraceError, match="no node has a card"):
        trace.read_nodes(path)


def test_simulate_draws_all_policies_in_one_picture(
    small_trace: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["simulate", "--nodes", str(small_trace[0]), "--pods", str(small_trace[1]), "--seeds", "1-2"]
    picture = tmp_path / "picture.png"
    assert main([*arguments, "--plot", str(picture), "--published", "--json"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size < 100 * 1024
    curve = json.loads(capsys.readouterr().out)["runs"][0]["curve"]
    assert curve[0] == [0, 0, 0] and curve[-1][0] >= 1 and curve[-1][1] > 0
    assert main([*arguments, "--plot", str(tmp_path / "none" / "picture.png")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_without_matplotlib_only_plots_are_missing(
    small_trace: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = ["simulate", "--nodes", str(small_trace[0]), "--pods", str(small_trace[1]), "--policy", "fgd"]
    assert main(arguments) == 0
    assert main([*arguments, "--plot", "never written.png"]) == 2
    assert "vcuda-gpu-manager[plot]" in capsys.readouterr().err


def test_fgd_reaches_the_published_order_on_the_public_trace() -> None:
    if not TRACE.is_dir():
        pytest.skip("the public trace is not beside the checkout (../shared/trace)")
    nodes = trace.read_nodes(TRACE / "openb_node_list_gpu_node.csv")
    pods = trace.read_pods(TRACE / "openb_pod_list_default.csv")
    assert sum(len(one.cards) for one in nodes) == 6212
    nodes = nodes[::8]  # the whole trace takes the benchmark's time, not a test's
    fgd, spread = (simulate.run(nodes, pods, policy, 42).allocated for policy in (Policy.FGD, Policy.SPREAD))
    assert fgd > 0.93 and fgd > spread + 0.05


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_all_addresses_are_those_of_ipv6_too(api: FakeApi, tmp_path: Path, host: str) -> None:
    """Probes and kube-scheduler of a cluster that has IPv6 alone reach it by no other."""
    served = Served("--kubeconfig", api.kubeconfig(tmp_path), "--bind-address", "0.0.0.0", "--allow-anyone")
    try:
        port = served.url.rpartition(":")[2]
        assert web.get(f"http://{host}:{port}/version", timeout=10).status_code == 200
    finally:
        served.stop()


@pytest.mark.parametrize("module", ["numpy", "uvloop", "scheduler_ext.commands.serve"])
def test_sigterm_while_it_is_being_imported_is_no_failure(module: str) -> None:
    """It ended with -15; as a container's first process it did not end at all."""
    program = f"""
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Finder())
from scheduler_ext.main import main
sys.exit(main(["serve"]) or 7)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
