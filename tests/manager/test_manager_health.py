"""What /healthz fails for: a driver, a stream or a thread that is stuck, each named, and well again afterwards."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest

from manager import daemon as daemon_module
from manager.cards.driver import Probe
from manager.cards.nvml import NvmlDriver
from manager.plugin import registration
from manager.proto import deviceplugin_pb2 as api
from tests.manager.manager_pods import NAMES, eventually
from tests.manager.manager_support import Node


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
    monkeypatch.setattr(daemon_module, "STUCK_S", 0.3)
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
    monkeypatch.setattr(daemon_module, "STUCK_S", 2.0)
    (core, _) = daemon.registrar._plugins
    with contextlib.closing(core.ListAndWatch(api.Empty(), Reader())) as stream:
        assert len(next(stream).devices) == 200
        eventually(failing(node, "kubelet has not read the list of core devices for "), "the failure")
        eventually(lambda: "memory" not in node.get("/healthz")[1], "the other resource's health")
    eventually(lambda: well(node), "health")


def test_a_kubelet_that_has_stopped_watching_is_told_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    core = node.start(wait=200).registrar._plugins[0]
    core._unwatched_since -= 1000  # the time before kubelet's first stream does not count
    monkeypatch.setattr(daemon_module, "STUCK_S", 0.2)
    before = node.kubelet.registrations
    node.kubelet.hang_up(NAMES.core)
    eventually(failing(node, "kubelet has not watched the core devices for "), "the failure")
    assert 0 < core.unwatched_s < 900
    assert node.kubelet.registrations == before and node.kubelet.healthy(NAMES.core) == 0
    monkeypatch.setattr(registration, "_UNWATCHED_S", 0.3)
    node.kubelet.wait_devices(200)
    eventually(lambda: well(node), "health")
    assert node.kubelet.registrations >= before + 2


def test_waiting_for_kubelet_is_no_illness(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart would not bring it."""
    monkeypatch.setattr(daemon_module, "STUCK_S", 0.2)
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
