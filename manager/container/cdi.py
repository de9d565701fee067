"""This node's cards as a CDI specification, for runtimes that inject devices by name (--device-list-strategy).

The answer to Allocate stays complete without it: a runtime that takes no notice of CDI must not start a container
without its shim or with a part of its nodes. One that does replaces what it is told twice, by path, and brings every
restart of a container the nodes and the driver directory of that moment. The environment is not in it: there it would
go before the pod's own. Rules: SPEC.md of the Container Device Interface, 0.5.0 (the first with a node's path on the
host).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from manager.cards import device_nodes
from manager.cards.device_nodes import DeviceNode, NodeProblem
from manager.cards.driver import NodeCard
from manager.cards.inventory import Snapshot
from manager.config.settings import Settings
from manager.container import response
from manager.container.driver_dir import DriverDirKeeper
from manager.errors import Reason, Refusal
from manager.kubelet import device_ids
from manager.process.logs import Conditions
from manager.proto import deviceplugin_pb2 as api
from vcuda.driver.root import HostRoot
from vcuda.spec.names import Names

VERSION = "0.5.0"
CLASS = "vcuda"
# Runtimes look below this prefix in a container's annotations; behind it the plugin's own name.
ANNOTATION = "cdi.k8s.io/vcuda"
CRI, ANNOTATIONS = "cdi-cri", "cdi-annotations"
_DEVICE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")

log = logging.getLogger(__name__)


def device_name(uuid: str) -> str:
    """A card's name in the specification: its UUID, or our device IDs' key where that has forbidden characters."""
    return uuid if _DEVICE_NAME.fullmatch(uuid) else device_ids.card_key(uuid)


def node_edits(given: Iterable[DeviceNode], numbers: Mapping[str, tuple[int, int]]) -> list[dict[str, Any]]:
    """Device nodes as a specification has them; `numbers`: major and minor by the path in the container."""
    return [
        {
            "path": node.container_path,
            "hostPath": node.host_path,
            "type": "c",
            "major": numbers[node.container_path][0],
            "minor": numbers[node.container_path][1],
            "permissions": response.PERMISSIONS,
        }
        for node in given
    ]


def mount_edits(mounts: Iterable[api.Mount]) -> list[dict[str, Any]]:
    """Mounts as a specification has them."""
    return [
        {
            "hostPath": mount.host_path,
            "containerPath": mount.container_path,
            "options": ["ro" if mount.read_only else "rw", "nosuid", "nodev", "rbind"],
        }
        for mount in mounts
    ]


def put(path: Path, text: str) -> None:
    """Write a specification, all of it or nothing. Raises OSError."""
    # Runtimes watch the folder for *.json: the unfinished file must not look like one.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


class CdiKeeper:
    """The specification file of this node, kept current; without a CDI strategy none."""

    def __init__(
        self,
        directory: Path,
        strategies: frozenset[str],
        names: Names,
        root: HostRoot,
        driver_dir: DriverDirKeeper,
    ) -> None:
        self._strategies = strategies & {CRI, ANNOTATIONS}
        self.kind = f"{names.domain}/{CLASS}"
        self.path = directory / f"{names.domain}-{CLASS}.json"
        self._root = root
        self._driver_dir = driver_dir
        self._lock = threading.Lock()
        self._written = ""
        self._known: frozenset[str] = frozenset()
        self._problem = "no card has been seen yet"
        self._conditions = Conditions(log)

    def refresh(self, snapshot: Snapshot, settings: Settings) -> None:
        """Write the file if cards, nodes, driver directory or mounts have changed or it is gone. Never raises."""
        with self._lock:
            try:
                if not self._strategies:
                    self._remove()
                elif snapshot.cards:
                    self._write(self._specification(snapshot.cards, settings))
            except (NodeProblem, Refusal, OSError) as error:
                # What was written stays: containers that run need it for their restart.
                self._problem = str(error)
                self._conditions.set("cdi", f"the CDI specification {self.path} is not current: {error}")
            else:
                self._conditions.clear("cdi", f"the CDI specification {self.path} is current")

    def names(self, cards: Iterable[NodeCard]) -> list[str]:
        """The cards' full names, none without a CDI strategy.

        Raises Refusal when a runtime would not find them by these.
        """
        if not self._strategies:
            return []
        wanted = [device_name(item.card.uuid) for item in cards]
        missing = [name for name in wanted if name not in self._known]
        if missing:
            raise Refusal(
                Reason.CDI_UNAVAILABLE,
                f"{self.path} does not describe {', '.join(missing)}: {self._problem}; mend that, or run without "
                "--device-list-strategy",
            )
        return [f"{self.kind}={name}" for name in wanted]

    def extend(self, answer: api.ContainerAllocateResponse, named: Sequence[str]) -> None:
        """Put the names into an answer to Allocate, as the strategies say."""
        if CRI in self._strategies:
            answer.cdi_devices.extend(api.CDIDevice(name=name) for name in named)
        if ANNOTATIONS in self._strategies:
            answer.annotations[ANNOTATION] = ",".join(named)

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
            log.info("removed %s: --device-list-strategy names no CDI strategy", self.path)

    def _specification(self, cards: Sequence[NodeCard], settings: Settings) -> dict[str, Any]:
        driver = self._driver_dir.current()
        common = device_nodes.common(self._root)
        found = []
        for item in cards:
            # A card that has lost its node is unhealthy and given to nobody; the others are described all the same.
            with contextlib.suppress(NodeProblem):
                edits = node_edits(device_nodes.of_card(self._root, item), device_nodes.numbers(self._root, [item]))
                found.append({"name": device_name(item.card.uuid), "containerEdits": {"deviceNodes": edits}})
        if not found:
            raise NodeProblem("", "no card has its device nodes")
        mounts = mount_edits(response.common_mounts(driver, settings))
        edits = node_edits(common, device_nodes.numbers(self._root, []))
        return {
            "cdiVersion": VERSION,
            "kind": self.kind,
            "devices": found,
            "containerEdits": {"deviceNodes": edits, "mounts": mounts},
        }

    def _write(self, specification: Mapping[str, Any]) -> None:
        text = json.dumps(specification, indent=1) + "\n"
        known = frozenset(str(item["name"]) for item in specification["devices"])
        if text == self._written and self.path.exists():
            return
        put(self.path, text)
        self._written, self._known = text, known
        self._problem = "the driver does not show it"
        log.info("%s describes %d cards", self.path, len(known))
