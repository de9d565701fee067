"""A node for the daemon's tests: the daemon in this process, its kubelet and perhaps an API server."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manager.allocations.record import Allocation
from manager.allocations.state_file import StateFile
from manager.config.reader import parse
from manager.daemon import Daemon
from manager.observe.report import WATCHED, ContainerReport, NodeReport
from tests.manager.manager_api import FakeApi
from tests.manager.manager_kubelet import FakeKubelet


class FakeArbiter:
    """Remembers which regions it has."""

    def __init__(self) -> None:
        self.regions: dict[str, Path] = {}
        self.closed = False

    def add(self, name: str, directory: Path) -> None:
        self.regions[name] = directory

    def remove(self, name: str) -> None:
        del self.regions[name]

    def close(self) -> None:
        self.closed = True


class Node:
    """A node: the daemon in this process, its kubelet and perhaps an API server, below one directory."""

    def __init__(self, directory: Path, root: Path, *, with_api: bool = False, with_kubelet_url: bool = True) -> None:
        self.directory = directory
        self.root = root
        self.kubelet = FakeKubelet(directory / "device-plugins")
        self.api = FakeApi() if with_api else None
        self.arbiter = FakeArbiter()
        self.with_kubelet_url = with_kubelet_url
        self.daemon: Daemon | None = None
        self.shims = directory / "shims"
        self.shims.mkdir()
        for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
            (self.shims / name).write_text(f"shim {name}")
        for name in ("preload/libvcuda-preload.so", "bin/vcuda"):
            (directory / name).parent.mkdir()
            (directory / name).write_text(name)
        (directory / "token").write_text("kubelet-token\n")

    def arguments(self, *more: str) -> list[str]:
        found = [
            "--hostname-override=node-1",
            f"--device-plugin-path={self.kubelet.directory}",
            f"--pod-resources-socket={self.directory}/none.sock",
            f"--driver-root={self.root}",
            f"--virtual-manager-path={self.directory}/vm",
            f"--checkpoint-path={self.directory}/checkpoint",
            f"--cdi-root={self.directory}/cdi",
            "--query-addr=127.0.0.1",
            "--query-port=0",
            "--health-check-interval=0.3",
            "--allocation-check-period=0.2",
            "--sample-period=0.05",
        ]
        if self.with_kubelet_url:
            found += [f"--kubelet-url={self.kubelet.url}", f"--kubelet-token-file={self.directory}/token"]
        if self.api is not None:
            found.append(f"--kubeconfig={self.api.kubeconfig(self.directory)}")
        return [*found, *more]

    def start(self, *more: str, wait: int | None = None) -> Daemon:
        """`wait`: how many healthy vcuda-core devices kubelet must see before this returns."""
        parsed = parse(self.arguments(*more), {})
        assert parsed is not None
        self.arbiter = FakeArbiter()
        self.daemon = Daemon(parsed.settings, {}, lambda: self.arbiter, shims=self.shims)
        self.daemon.start()
        if wait is not None:
            self.kubelet.wait_devices(wait)
        return self.daemon

    def stop(self) -> None:
        if self.daemon is not None:
            self.daemon.stop()
            self.daemon = None

    def get(self, path: str) -> tuple[int, str]:
        assert self.daemon is not None
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.daemon.port}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def booked(self) -> dict[str, tuple[int, int]]:
        """Cores and memory bytes booked per card, as /usage says."""
        report = json.loads(self.get("/usage")[1])
        return {card["uuid"]: (card["booked_cores"], card["booked_memory_bytes"]) for card in report["cards"]}

    def region(self, item: dict[str, Any], name: str) -> Path:
        return self.directory / "vm/regions" / item["metadata"]["uid"] / name

    def close(self) -> None:
        self.stop()
        self.kubelet.close()
        if self.api is not None:
            self.api.stop()


def node_report(*containers: ContainerReport) -> NodeReport:
    """Of a node without a card."""
    return NodeReport(
        node="node-1",
        driver="none",
        driver_version="",
        problem="",
        device_cgroups=WATCHED,
        cards=(),
        containers=containers,
    )


def save_state(file: StateFile, items: Sequence[Allocation]) -> None:
    """Append what differs from what the file says."""
    known, now = file.load(), {item.key: item for item in items}
    put = [item for key, item in now.items() if known.get(key) != item]
    file.append(put, [key for key in known if key not in now], now.values)
