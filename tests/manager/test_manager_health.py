"""What /healthz fails for: a driver, a stream or a thread that is stuck, each named, and well again afterwards."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import threading
from collections.abc import Callable

import grpc
import pytest

from localcluster.cluster import free_port
from manager import probes
from manager.cards.driver import Probe
from manager.cards.nvml import NvmlDriver
from manager.plugin import registration
from manager.proto import deviceplugin_pb2 as api
from manager.proto import deviceplugin_pb2_grpc
from tests.manager.manager_kubelet import Rejected
from tests.manager.manager_pods import NAMES, container, eventually, pod
from tests.manager.manager_support import Node
from tests.support import web


class Reader:
    """A call of kubelet's that stays open."""

    def is_active(self) -> bool:
        return True


def failing(node: Node, words: str) -> Callable[[], bool]:
    return lambda: (answer := node.get("/healthz"))[0] == 503 and words in answer[1]


def well(node: Node) -> bool:
    return node.get("/healthz") == (200, "ok\n")


def test_a_driver_that_does_not_answer(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.start(wait=200)
    assert well(node)
    monkeypatch.setattr(probes, "STUCK_S", 0.3)
    stuck, release = threading.Event(), threading.Event()
    ask = NvmlDriver.probe

    def probe(self: NvmlDriver) -> Probe:
        with self._lock:  # as a call into a hung library would hold it
            stuck.set()
            assert release.wait(30)
        return ask(self)

    monkeypatch.setattr(NvmlDriver, "probe", probe)
    try:
        assert stuck.wait(20)
        eventually(failing(node, "the driver has not answered a probe for "), "the failure")
        assert node.get("/readyz")[0] == 503
    finally:
        release.set()
        monkeypatch.setattr(NvmlDriver, "probe", ask)
    eventually(lambda: well(node), "health")


def test_a_device_list_that_nobody_reads(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = node.start(wait=200)
    # The streams' own look is once a second.
    monkeypatch.setattr(probes, "STUCK_S", 2.0)
    (core, _) = daemon.registrar._plugins
    with contextlib.closing(core.ListAndWatch(api.Empty(), Reader())) as stream:
        assert len(next(stream).devices) == 200
        eventually(failing(node, "kubelet has not read the list of core devices for "), "the failure")
        eventually(lambda: "memory" not in node.get("/healthz")[1], "the other resource's health")
    eventually(lambda: well(node), "health")


def test_a_kubelet_that_has_stopped_watching_is_told_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    core = node.start(wait=200).registrar._plugins[0]
    core._unwatched_since -= 1000  # the time before kubelet's first stream does not count
    monkeypatch.setattr(probes, "STUCK_S", 0.2)
    before = node.kubelet.registrations
    node.kubelet.hang_up(NAMES.core)
    eventually(failing(node, "kubelet has not watched the core devices for "), "the failure")
    assert 0 < core.unwatched_s < 900
    assert node.kubelet.registrations == before and node.kubelet.healthy(NAMES.core) == 0
    monkeypatch.setattr(registration, "_UNWATCHED_S", 0.3)
    node.kubelet.wait_devices(200)
    eventually(lambda: well(node), "health")  # as soon as it is about to tell
    eventually(lambda: node.kubelet.registrations >= before + 2, "both resources registered again")


def test_waiting_for_kubelet_is_no_illness(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart would not bring it."""
    monkeypatch.setattr(probes, "STUCK_S", 0.2)
    monkeypatch.setattr(registration, "_UNWATCHED_S", 0.1)
    node.kubelet.stop()
    for path in node.kubelet.directory.glob("*.sock"):
        path.unlink()
    node.start("--health-check-interval=60")  # probes may be late on a busy machine
    eventually(lambda: node.get("/readyz")[0] == 503, "not ready")
    for plugin in node.daemon.registrar._plugins if node.daemon else ():
        plugin._unwatched_since -= 1000
    assert well(node)
    node.kubelet.start()
    node.kubelet.wait_devices(200)
    eventually(lambda: well(node), "health")


def test_streams_of_strangers_take_neither_the_calls_threads_nor_kubelets_stream(node: Node) -> None:
    """Each holds a thread of the server's for as long as it lasts; nobody's may keep pods from being admitted."""
    node.start(wait=200)
    with grpc.insecure_channel(f"unix:{node.kubelet.directory / registration.SOCKETS['core']}") as channel:
        stub = deviceplugin_pb2_grpc.DevicePluginStub(channel)
        streams = [stub.ListAndWatch(api.Empty()) for _ in range(30)]
        ends: list[grpc.StatusCode] = []

        def read(stream: grpc.Call) -> None:
            try:
                for _ in stream:
                    pass
            except grpc.RpcError as error:
                ends.append(error.code())

        readers = [threading.Thread(target=read, args=(stream,)) for stream in streams]
        for reader in readers:
            reader.start()
        eventually(lambda: len(ends) >= 27, "the refusals", 5.0)
        assert set(ends) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        node.kubelet.admit(pod("p", container("c", 30, 4)))
        assert node.kubelet.healthy(NAMES.core) == 200
        # A kubelet that starts anew finds room for its own.
        node.kubelet.restart()
        node.kubelet.wait_devices(200)
        node.kubelet.admit(pod("q", container("c", 30, 4)))
        for stream in streams:
            stream.cancel()
        for reader in readers:
            reader.join(5)
    assert well(node)


def test_a_full_disk_is_named_before_and_when_a_pod_meets_it(
    node: Node, process: Callable[..., subprocess.Popen[str]]
) -> None:
    port = free_port()
    daemon = process(f"--query-port={port}", "--usage-storage=directory")

    def ready() -> tuple[int, str]:
        answer = web.get(f"http://127.0.0.1:{port}/readyz", timeout=10)
        return answer.status_code, answer.text

    eventually(lambda: ready()[0] == 200, "readiness")
    # No file may grow any more, as on a full disk.
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    _, text = eventually(lambda: (found := ready())[0] == 503 and found, "the reason")
    assert f"no 400 KiB can be written to {node.directory}/vm: " in text and "make room" in text
    assert f"no 64 KiB can be written to {node.directory}/checkpoint: " in text
    with pytest.raises(Rejected, match=r"RegionUnavailable.* make room below .*/vm/regions or make it writable"):
        node.kubelet.admit(pod("p", container("c", 30, 4)))
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    eventually(lambda: ready()[0] == 200, "readiness")
    node.kubelet.admit(pod("q", container("c", 30, 4)))
    assert not list(node.directory.glob("*/.room.*"))
