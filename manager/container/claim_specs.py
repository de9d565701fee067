"""A CDI specification for each claim: what the containers that name it are given, one device per request.

Its name has the claim's UID and is never used again: runtimes read what they don't know when they are asked for it. No
LD_LIBRARY_PATH: CDI's environment would go before the pod's own; our library is found where linkers look by default.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from manager.allocations.record import Allocation
from manager.cards import device_nodes
from manager.cards.driver import NodeCard
from manager.config.settings import Settings
from manager.container import response
from manager.container.cdi import VERSION, mount_edits, node_edits, put
from manager.container.driver_dir import DriverDir
from manager.errors import Reason, Refusal
from vcuda import plain_file
from vcuda.driver.root import HostRoot
from vcuda.spec.names import Names

_CLASS = "claim"
_NOT_BY_CDI = "LD_LIBRARY_PATH"
_UNFINISHED_S = 60.0

log = logging.getLogger(__name__)


def _content(path: Path) -> bytes:
    """Nothing where no file can be read: the folder is everybody's."""
    try:
        return plain_file.read(path, links=False)
    except OSError:
        return b""


class ClaimSpecs:
    """The claims' files in the folder of specifications."""

    def __init__(self, directory: Path, names: Names, root: HostRoot, regions: Path) -> None:
        """`regions`: the folder of this daemon's."""
        self._directory, self._root, self._regions = directory, root, regions
        self._kind = f"{names.driver}/{_CLASS}"
        self._prefix = f"{names.domain}-{_CLASS}-"

    def _path(self, uid: str) -> Path:
        return self._directory / f"{self._prefix}{uid}.json"

    def device_id(self, item: Allocation) -> str:
        """By which kubelet names the device of a claim's request to the runtime."""
        return f"{self._kind}={item.pod_uid}-{item.container}"

    def write(
        self, items: Sequence[tuple[Allocation, Sequence[NodeCard]]], driver: DriverDir, settings: Settings
    ) -> None:
        """Write one claim's file if it does not say the same already; each request comes with its cards.

        Raises Refusal, NodeProblem.
        """
        path, text = self._path(items[0][0].pod_uid), json.dumps(self._specification(items, driver, settings)) + "\n"
        try:
            if _content(path) != text.encode():
                put(path, text)
        except OSError as error:
            raise Refusal(
                Reason.CDI_UNAVAILABLE,
                f"the claim's CDI specification {path} can't be written: {error}; make room in {path.parent} "
                "(--cdi-root) or make it writable",
            ) from error

    def _specification(
        self, items: Sequence[tuple[Allocation, Sequence[NodeCard]]], driver: DriverDir, settings: Settings
    ) -> dict[str, Any]:
        environment = response.environment(settings)
        environment.pop(_NOT_BY_CDI, None)
        environment.update((name, value) for name, value in settings.container_env if name == _NOT_BY_CDI)
        return {
            "cdiVersion": VERSION,
            "kind": self._kind,
            "devices": [
                {
                    "name": f"{item.pod_uid}-{item.container}",
                    "containerEdits": {
                        "deviceNodes": node_edits(
                            device_nodes.full_set(self._root, cards), device_nodes.numbers(self._root, cards)
                        ),
                        "mounts": mount_edits(response.own_mounts(item)),
                    },
                }
                for item, cards in items
            ],
            "containerEdits": {
                "env": [f"{name}={value}" for name, value in environment.items()],
                "mounts": mount_edits(response.common_mounts(driver, settings)),
            },
        }

    def remove(self, uid: str) -> None:
        """Take a claim's file away, and those that a kill has left unfinished. Raises Refusal."""
        path = self._path(uid)
        try:
            for one in (*self._directory.glob(f".{path.name}.*"), path):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    one.unlink()
        except OSError as error:
            raise Refusal(
                Reason.CDI_UNAVAILABLE, f"{path} can't be removed: {error.strerror}; make its folder writable"
            ) from error

    def remove_others(self, uids: Collection[str]) -> None:
        """Take away what a kill has left: our files of claims that nobody knows, and those that were not finished."""
        known = {self._path(uid) for uid in uids}
        for path in self._directory.glob(f"{self._prefix}*.json"):
            if path not in known and self._is_ours(path):
                with contextlib.suppress(OSError):
                    path.unlink()
                    log.info("removed %s, which belongs to no claim", path)
        for path in self._directory.glob(f".{self._prefix}*.json.*"):
            with contextlib.suppress(OSError):  # the folder is all drivers': one that is being written is young
                if time.time() - path.stat().st_mtime > _UNFINISHED_S:
                    path.unlink()

    def _is_ours(self, path: Path) -> bool:
        """Whether it mounts regions of this daemon: another one, with other folders, may serve claims here, too."""
        try:
            written = json.loads(_content(path))
            mounts = [mount for device in written["devices"] for mount in device["containerEdits"]["mounts"]]
            return any(Path(mount["hostPath"]).is_relative_to(self._regions) for mount in mounts)
        except (OSError, ValueError, KeyError, TypeError):
            return False
