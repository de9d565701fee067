"""Cards that are not ours to give: held by another device plugin or a resource claim, or under a foreign MPS daemon.

Such a card is unhealthy to kubelet and to the extender, with the reason, until it is free again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from manager.cards.driver import CardProcess, NodeCard
from manager.kubelet.records import RecordsError

# The kernel keeps 15 characters: the server's and the control daemon's names are the same there.
_MPS = "nvidia-cuda-mps"


class ForeignUse:
    """Looks for others on the cards of this node."""

    def __init__(
        self,
        processes: Callable[[str], Sequence[CardProcess] | None],
        held_elsewhere: Callable[[], Mapping[str, str]],
        tenant: Callable[[int], bool],
        proc: Path = Path("/proc"),
    ) -> None:
        """`tenant`: whether a process is of a pod with a share, which may call itself as it likes.

        `held_elsewhere`: others' devices, by UUID or `gpu-MINOR`, and who holds them by what; may raise RecordsError,
        then the last answer counts.
        """
        self._processes = processes
        self._held_elsewhere = held_elsewhere
        self._tenant = tenant
        self._proc = proc
        self._held: Mapping[str, str] = {}

    def blocked(self, cards: Iterable[NodeCard]) -> dict[str, str]:
        """Why which cards can't be given, by UUID."""
        with contextlib.suppress(RecordsError):  # admission says so in the log; what is held does not change with it
            self._held = self._held_elsewhere()
        found = {}
        for item in cards:
            names = (item.card.uuid, item.parent_uuid, f"gpu-{item.device_minor}")
            holder = next((self._held[name] for name in names if name in self._held), None)
            if holder:
                found[item.card.uuid] = f"it is held by {holder}"
            elif self._under_mps(item.physical_uuid):
                found[item.card.uuid] = (
                    "a foreign MPS daemon serves it, which changes how its time is sliced; stop nvidia-cuda-mps-control"
                )
        return found

    def _under_mps(self, uuid: str) -> bool:
        return any(
            self._comm(process.pid) == _MPS and not self._tenant(process.pid) for process in self._processes(uuid) or ()
        )

    def _comm(self, pid: int) -> str:
        try:
            return (self._proc / str(pid) / "comm").read_text().strip()[: len(_MPS)]
        except OSError:
            return ""
