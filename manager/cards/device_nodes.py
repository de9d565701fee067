"""Device nodes of the driver: the full set for a container's cards, made when missing, or a problem, never a part.

Probed at every Allocate: /dev/nvidia-uvm may appear after the daemon (or vanish, or get another major at a reboot).
Minors: nvidia N = the card, 254 = modeset, 255 = ctl; uvm 0 = uvm, 1 = uvm-tools. Majors come from /proc/devices.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from manager.cards.driver import NodeCard
from vcuda.driver.root import HostRoot

CONTROL_MINOR, MODESET_MINOR = 255, 254


class NodeProblem(Exception):
    """A required node can't be had. `node` is its path on a host, str() says why and what to do."""

    def __init__(self, node: str, message: str) -> None:
        super().__init__(message)
        self.node = node


@dataclass(frozen=True)
class DeviceNode:
    """A node as the container sees it and as the container runtime finds it."""

    container_path: str
    host_path: str


@dataclass(frozen=True)
class _Wanted:
    name: str
    drivers: tuple[str, ...]  # names in /proc/devices, any of them; newer drivers say nvidia, older nvidia-frontend
    minor: int
    mode: int = 0o666


_NVIDIA = ("nvidia", "nvidia-frontend", "nvidiactl")
_COMMON = (
    _Wanted("nvidiactl", ("nvidiactl", "nvidia", "nvidia-frontend"), CONTROL_MINOR),
    _Wanted("nvidia-uvm", ("nvidia-uvm",), 0),
    _Wanted("nvidia-uvm-tools", ("nvidia-uvm",), 1),
)
_MODESET = _Wanted("nvidia-modeset", ("nvidia-modeset", "nvidia", "nvidia-frontend"), MODESET_MINOR)


def majors(root: HostRoot) -> Mapping[str, int]:
    """Character majors by driver name. Raises NodeProblem if the list can't be read."""
    # A driver container's root has no /proc of its own; the kernel is the same.
    for path in (f"{root.path}/proc/devices", "/proc/devices"):
        try:
            return _majors(_read(path))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise NodeProblem("/proc/devices", f"cannot read {path}: {error.strerror}") from error
    raise NodeProblem("/proc/devices", "there is no /proc/devices; is /proc mounted?")


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123  (at every Allocate)
        return file.read()


@functools.lru_cache(maxsize=4)
def _majors(text: bytes) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for line in text.decode(errors="replace").splitlines():
        if line.startswith("Block devices"):
            break
        words = line.split()
        if len(words) == 2 and words[0].isdigit():
            found.setdefault(words[1], int(words[0]))
    return found


def common(root: HostRoot, known: Mapping[str, int] | None = None) -> tuple[DeviceNode, ...]:
    """The nodes that every container needs, whatever its cards. Raises NodeProblem.

    `known`: the majors of a reading of this very moment.
    """
    known = majors(root) if known is None else known
    found = [_require(root, wanted, known) for wanted in _COMMON]
    # Only some hosts have modeset; one that has it must be given, one that has not is complete without.
    if _status(_places(root, _MODESET.name)[0]) is not None:
        found.append(_require(root, _MODESET, known))
    return tuple(found)


def of_card(root: HostRoot, card: NodeCard, known: Mapping[str, int] | None = None) -> tuple[DeviceNode, ...]:
    """The nodes of one card or MIG instance. Raises NodeProblem. `known`: as for `common`."""
    known = majors(root) if known is None else known
    return tuple(_require(root, wanted, known) for wanted in _of_card(card))


def _of_card(card: NodeCard) -> list[_Wanted]:
    return [
        _Wanted(f"nvidia{card.device_minor}", _NVIDIA, card.device_minor),
        *(
            _Wanted(f"nvidia-caps/nvidia-cap{minor}", ("nvidia-caps",), minor, 0o444)
            for minor in card.capability_minors
        ),
    ]


def numbers(root: HostRoot, cards: Iterable[NodeCard]) -> dict[str, tuple[int, int]]:
    """Major and minor of what `full_set` would give, by path in the container, without making anything.

    Raises NodeProblem.
    """
    known = majors(root)
    wanted = list(_COMMON)
    if (root.path / "dev" / _MODESET.name).exists():
        wanted.append(_MODESET)
    for card in cards:
        wanted += _of_card(card)
    return {f"/dev/{item.name}": (_major(item, known), item.minor) for item in wanted}


def full_set(root: HostRoot, cards: Iterable[NodeCard]) -> tuple[DeviceNode, ...]:
    """All nodes for a container with these cards, each once. Raises NodeProblem: then none is given."""
    known = majors(root)
    found = dict.fromkeys(common(root, known))
    for card in cards:
        found.update(dict.fromkeys(of_card(root, card, known)))
    return tuple(found)


def _require(root: HostRoot, wanted: _Wanted, known: Mapping[str, int]) -> DeviceNode:
    path, node = _places(root, wanted.name)
    major = _major(wanted, known)
    status = _status(path)
    if status is None or not _right(root, status, major, wanted.minor):
        _make(Path(path), major, wanted, node.container_path)
        status = _status(path)
    if status is not None and stat.S_ISCHR(status.st_mode):
        _link_char(root, path, major, wanted.minor)
    return node


@functools.lru_cache(maxsize=256)
def _places(root: HostRoot, name: str) -> tuple[str, DeviceNode]:
    """Where a node is for us, and for container and runtime."""
    path = root.path / "dev" / name
    return str(path), DeviceNode(f"/dev/{name}", root.host_path(path))


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)  # noqa: PTH116  (a Path would take as long as the call, at every Allocate)
    except OSError:
        return None


def _major(wanted: _Wanted, known: Mapping[str, int]) -> int:
    major = next((known[name] for name in wanted.drivers if name in known), None)
    if major is None:
        raise NodeProblem(
            f"/dev/{wanted.name}",
            f"/dev/{wanted.name} can't be given: /proc/devices lists no {' or '.join(wanted.drivers)}; "
            f"load the kernel module ({_module(wanted)}), for instance by nvidia-modprobe",
        )
    return major


def _module(wanted: _Wanted) -> str:
    return "nvidia-uvm" if "nvidia-uvm" in wanted.drivers else "nvidia"


def _right(root: HostRoot, status: os.stat_result, major: int, minor: int) -> bool:
    """Whether a node has the right numbers.

    Below a root that only stands for a host, plain files stand for nodes that could not be made there.
    """
    if stat.S_ISCHR(status.st_mode):
        return status.st_rdev == os.makedev(major, minor)
    return stat.S_ISREG(status.st_mode) and not root.is_host


def _make(path: Path, major: int, wanted: _Wanted, container_path: str) -> None:
    """Make the node as nvidia-modprobe would, in one step, replacing one with outdated numbers."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o755, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        os.mknod(temporary, stat.S_IFCHR | wanted.mode, os.makedev(major, wanted.minor))
        temporary.chmod(wanted.mode)
        temporary.replace(path)
    except OSError as error:
        raise NodeProblem(
            container_path,
            f"{container_path} is missing and can't be made ({error.strerror}); run gpu-manager privileged with the "
            "host's /dev writable, or nvidia-modprobe on the host",
        ) from error


def _link_char(root: HostRoot, path: str, major: int, minor: int) -> None:
    """Link /dev/char/MAJOR:MINOR to the node: without it runc 1.1.3 to 1.1.6 drops the device at daemon-reload."""
    link = f"{root.path}/dev/char/{major}:{minor}"
    try:
        if not os.path.islink(link):  # noqa: PTH114
            Path(link).parent.mkdir(exist_ok=True)
            Path(link).symlink_to(os.path.relpath(path, Path(link).parent))
    except OSError:
        return  # a help against one runtime's defect, never a reason to refuse a container
