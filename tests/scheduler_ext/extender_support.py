"""Nodes, pods and the API server of the extender's tests, and the command in a process of its own."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from localcluster.apiserver.faults import Fault, Request
from localcluster.apiserver.server import Server
from vcuda.spec import inventory
from vcuda.spec.inventory import Card
from vcuda.spec.names import Names
from vcuda.spec.units import BLOCK_BYTES

NAMES = Names()
BLOCKS = 40


def cards(node: str, count: int = 2, blocks: int = BLOCKS, **fields: Any) -> tuple[Card, ...]:
    return tuple(
        Card(f"GPU-{node}-{index}", index, fields.get("model", "A100"), blocks * BLOCK_BYTES) for index in range(count)
    )


def codes(said: dict[str, str]) -> dict[str, str]:
    """By node the reason alone of what a refusal says."""
    return {name: text.partition(":")[0] for name, text in said.items()}


def node(name: str, its_cards: tuple[Card, ...] | None, cpu: str = "64", memory: str = "256Gi") -> dict[str, Any]:
    annotations = {} if its_cards is None else {NAMES.inventory: inventory.encode(its_cards)}
    return {
        "metadata": {"name": name, "annotations": annotations},
        "status": {"allocatable": {"cpu": cpu, "memory": memory}},
    }


def container(name: str, cores: object, blocks: object, **fields: Any) -> dict[str, Any]:
    limits = {key: value for key, value in ((NAMES.core, cores), (NAMES.memory, blocks)) if value is not None}
    return {"name": name, "resources": {"limits": limits}, **fields}


def pod(name: str, cores: object = 30, blocks: object = 10, *, uid: str | None = None, **fields: Any) -> dict[str, Any]:
    """A pod with one container; `annotations`, `containers`, `init` and `node` may be given."""
    spec: dict[str, Any] = {"containers": fields.get("containers", [container("main", cores, blocks)])}
    if "init" in fields:
        spec["initContainers"] = fields["init"]
    if "node" in fields:
        spec["nodeName"] = fields["node"]
    metadata = {"name": name, "namespace": "default", "uid": uid or str(uuid.uuid4())}
    if "annotations" in fields:
        metadata["annotations"] = fields["annotations"]
    return {"metadata": metadata, "spec": spec, "status": {"phase": "Pending"}}


def plain_pod(name: str, **fields: Any) -> dict[str, Any]:
    return pod(name, containers=[{"name": "main", "resources": {}}], **fields)


def eventually(check: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Poll until `check` gives something true."""
    deadline = time.monotonic() + seconds
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < deadline, f"not true within {seconds} s"
        time.sleep(0.01)


class FakeApi(Server):
    """The stand-in API server, with what these tests do to it.

    `binding_faults`: taken one per Binding: an HTTP status to answer without doing anything, "lost" (do it, then cut the
    connection) or "cut" (cut it without doing anything). `list_faults`: how many lists fail.
    """

    def __init__(self) -> None:
        super().__init__(token="secret")
        self.bindings: list[dict[str, Any]] = []
        self.binding_faults: list[int | str] = []
        self.list_faults = 0
        self.hook = self._fault
        self.start()

    def kubeconfig(self, directory: Path) -> str:  # type: ignore[override]
        self.write_kubeconfig(directory / "kubeconfig")
        return str(directory / "kubeconfig")

    def _fault(self, request: Request) -> Fault | None:
        if request.path.endswith("/binding"):
            with self.operations.lock:
                self.bindings.append(request.body)
                fault = self.binding_faults.pop(0) if self.binding_faults else None
            if isinstance(fault, int):
                return Fault(fault)
            return Fault(0, done=fault == "lost") if fault else None
        if self.list_faults and request.method == "GET" and not request.watches:
            self.list_faults -= 1
            return Fault(500, message="no list today")
        return None

    def set_phase(self, key: str, phase: str) -> None:
        thing = self.find("pods", key)
        thing["status"]["phase"] = phase
        self.put("pods", thing)

    @contextlib.contextmanager
    def deaf(self) -> Iterator[None]:
        """What happens inside is never shown by a watch: only a new list shows it."""
        yield
        self.break_watches(forget=True)


class Served:
    """The command in a process of its own."""

    def __init__(self, *options: str) -> None:
        arguments = [
            sys.executable,
            "-m",
            "scheduler_ext.main",
            "--bind-address",
            "127.0.0.1",
            "--port",
            "0",
            "--assume-seconds",
            "0.4",
            *options,
        ]
        self.process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.log: list[str] = []
        while not (found := re.search(r"serving on (https?://[^,]+),", "".join(self.log[-1:]))):
            line = self.process.stderr.readline()
            assert line, "".join(self.log)
            self.log.append(line)
        self.url = found[1]

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        _, rest = self.process.communicate(timeout=20)
        self.log.append(rest)
        return self.process.returncode
