"""The API server of the daemon's tests: the stand-in, with this node in it, what the daemon wrote, and faults on demand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localcluster.apiserver.faults import Fault, Request
from localcluster.apiserver.server import Server


class FakeApi(Server):
    """`patches`, `events` (all that was created, evictions too) and `deletions` as they came. `failing`: every request fails."""

    def __init__(self) -> None:
        super().__init__(token="secret")
        self.patches: list[tuple[str, dict[str, Any]]] = []
        self.events: list[dict[str, Any]] = []
        self.deletions: list[tuple[str, dict[str, Any]]] = []
        self.failing = False
        self.delay_s = 0.0
        self.hook = self._note
        self.put("nodes", {"metadata": {"name": "node-1"}, "status": {}})
        self.start()

    def _note(self, request: Request) -> Fault | None:
        if self.failing:
            return Fault(500, message="the store is away")
        if request.method == "PATCH":
            self.patches.append((request.path, request.body))
        elif request.method == "POST":
            self.events.append(request.body)
        elif request.method == "DELETE":
            self.deletions.append((request.path, request.body))
        return Fault(late_s=self.delay_s)

    def kubeconfig(self, directory: Path) -> Path:  # type: ignore[override]
        self.write_kubeconfig(directory / "kubeconfig")
        return directory / "kubeconfig"

    def delete(self, pod: dict[str, Any]) -> None:
        self.remove("pods", f"{pod['metadata']['namespace']}/{pod['metadata']['name']}")

    def node(self) -> dict[str, Any]:
        """The last patch of the node."""
        found = [body for path, body in self.patches if "/nodes/" in path]
        return found[-1]["metadata"] if found else {}
