"""What share the containers of running pods really hold: the limits that are mounted in them, read beside everybody's books."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vcuda import region
from vcuda.spec.names import Names
from vcuda.spec.units import BLOCK_BYTES

# In cgroupfs' names (podUID) and in systemd's (podUID with underscores).
_UID = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")


def mounted(proc: Path = Path("/proc")) -> dict[str, int]:
    """Memory in bytes of the first card in the limits that a process of each pod sees, by the pod's UID.

    Pods without a share and processes that end meanwhile are left out. Needs root. Raises vcuda.region.RegionError for damaged limits.
    """
    found = {}
    for process in proc.glob("[0-9]*"):
        try:
            uid = _UID.search((process / "cgroup").read_text())
            folder = process / "root/etc/vcuda"
            if uid is None or not (folder / "limits").exists():
                continue
        except OSError:
            continue
        found[uid[1].replace("_", "-")] = region.read_limits(folder)[0].memory_bytes
    return found


def mismatches(pods: Iterable[Mapping[str, Any]], held: Mapping[str, int], names: Names) -> list[str]:
    """One sentence for each pod, as the API server shows it, that holds another amount than it asked for, or nothing."""
    wrong = []
    for pod in pods:
        limits = pod["spec"]["containers"][0]["resources"]["limits"]
        asked, has = int(limits[names.memory]) * BLOCK_BYTES, held.get(pod["metadata"]["uid"])
        if has != asked:
            wrong.append(f"{pod['metadata']['name']}: asked for {asked} bytes, holds {has}")
    return wrong
