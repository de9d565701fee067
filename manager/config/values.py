"""How the text of a setting that only the daemon has becomes its value; a ValueError says what to write instead."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vcuda import settings

DEVICE_PLUGIN, DRA = "device-plugin", "dra"


@dataclass(frozen=True)
class ContainerMount:
    """`--container-mount HOST:CONTAINER[:ro]`."""

    host_path: str
    container_path: str
    read_only: bool


seconds = settings.seconds(0.05, 86400)


def seconds_or_never(value: str) -> float:
    """Positive seconds, or 0."""
    return 0.0 if value in ("0", "0s") else seconds(value)


def directory(value: str) -> Path:
    """An absolute path; it need not exist yet."""
    if not value.startswith("/"):
        raise ValueError("give an absolute path")
    return Path(value)


def words(value: str) -> frozenset[str]:
    """Any words."""
    return frozenset(value.replace(",", " ").split())


def protocols(value: str) -> frozenset[str]:
    """One or both of the protocols."""
    names = words(value)
    if not names or names - {DEVICE_PLUGIN, DRA}:
        raise ValueError(f"choose {DEVICE_PLUGIN}, {DRA} or both")
    return names


def strategies(value: str) -> frozenset[str]:
    """Those names of NVIDIA's device plugin that go with shares; device-specs, which is always there, is ours."""
    names = frozenset(value.replace(",", " ").split())
    if names & {"envvar", "volume-mounts"}:
        raise ValueError(
            "envvar and volume-mounts let NVIDIA's runtime bring the real driver past the shim; "
            "choose device-specs, cdi-cri or cdi-annotations"
        )
    if not names or names - {"device-specs", "cdi-cri", "cdi-annotations"}:
        raise ValueError("choose of device-specs, cdi-cri, cdi-annotations, with commas between")
    return names


def environment_pair(value: str) -> tuple[str, str]:
    """NAME=VALUE; the value may be empty and hold further equals signs."""
    name, separator, content = value.partition("=")
    if not separator or not name:
        raise ValueError("write NAME=VALUE")
    return name, content


def mount(value: str) -> ContainerMount:
    """HOST:CONTAINER or HOST:CONTAINER:ro, both absolute."""
    parts = value.split(":")
    if len(parts) not in (2, 3) or (len(parts) == 3 and parts[2] not in ("ro", "rw")):
        raise ValueError("write HOST:CONTAINER or HOST:CONTAINER:ro")
    if not parts[0].startswith("/") or not parts[1].startswith("/"):
        raise ValueError("both paths must be absolute")
    return ContainerMount(parts[0], parts[1], parts[2:] == ["ro"])


def xids(value: str) -> frozenset[int]:
    """Numbers of Xid errors, with commas or spaces between."""
    items = value.replace(",", " ").split()
    if not all(item.isascii() and item.isdigit() for item in items):
        raise ValueError("write numbers with commas between")
    return frozenset(map(int, items))


def labels(value: str) -> tuple[tuple[str, str], ...]:
    """NAME=VALUE pairs with commas between."""
    pairs = tuple(environment_pair(item.strip()) for item in value.split(",") if item.strip())
    if any("=" in content for _, content in pairs):
        raise ValueError("a label's value has no '='")
    return tuple(sorted(pairs))
