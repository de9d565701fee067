"""How the text of one setting becomes its value; each function raises ValueError with what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ContainerMount:
    """`--container-mount HOST:CONTAINER[:ro]`."""

    host_path: str
    container_path: str
    read_only: bool


def text(value: str) -> str:
    return value


def port(value: str) -> int:
    number = int(value)
    if not 0 <= number <= 65535:
        raise ValueError("a port is 0 to 65535")
    return number


def seconds(value: str) -> float:
    number = float(value.removesuffix("s"))
    if not 0.05 <= number <= 86400:
        raise ValueError("give seconds between 0.05 and 86400")
    return number


def mebibytes(value: str) -> int:
    number = int(value)
    if number < 0:
        raise ValueError("give MiB, 0 or more")
    return number


def points(value: str) -> int:
    number = int(value)
    if not 1 <= number <= 100:
        raise ValueError("give hundredths of a card, 1 to 100")
    return number


def blocks(value: str) -> int:
    number = int(value)
    if number < 1:
        raise ValueError("give blocks of 256 MiB, 1 or more")
    return number


def seconds_or_never(value: str) -> float:
    return 0.0 if value in ("0", "0s") else seconds(value)


def level(value: str) -> int:
    return int(value)


def directory(value: str) -> Path:
    if not value.startswith("/"):
        raise ValueError("give an absolute path")
    return Path(value)


def optional_path(value: str) -> Path | None:
    return Path(value) if value else None


def choice(*allowed: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value not in allowed:
            raise ValueError(f"choose one of {', '.join(allowed)}")
        return value

    return parse


def strategies(value: str) -> frozenset[str]:
    """Of the names of NVIDIA's device plugin those that go with shares; device-specs, which is always there, is ours."""
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
    name, separator, content = value.partition("=")
    if not separator or not name:
        raise ValueError("write NAME=VALUE")
    return name, content


def mount(value: str) -> ContainerMount:
    parts = value.split(":")
    if len(parts) not in (2, 3) or (len(parts) == 3 and parts[2] not in ("ro", "rw")):
        raise ValueError("write HOST:CONTAINER or HOST:CONTAINER:ro")
    if not parts[0].startswith("/") or not parts[1].startswith("/"):
        raise ValueError("both paths must be absolute")
    return ContainerMount(parts[0], parts[1], parts[2:] == ["ro"])


def xids(value: str) -> frozenset[int]:
    return frozenset(int(item) for item in value.replace(",", " ").split())


def labels(value: str) -> tuple[tuple[str, str], ...]:
    pairs = tuple(environment_pair(item.strip()) for item in value.split(",") if item.strip())
    return tuple(sorted(pairs))
