"""Where the machine allows no mounts: the same container on host paths, its environment and layout rewritten.

Below the container's own `fs` folder every mount and device appears at its container path as a link, and environment,
command and working directory are rewritten to it. The interposer finds its region at `$ORIGIN/../vcuda` of its own
file, so the driver directory is laid out privately: its shims are regular files of this container, `vcuda` leads to its
region.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from localcluster.runner.config import ContainerConfig, Mount

_REGION = "/etc/vcuda"
_DRIVER = "/usr/local/nvidia"
_LIBRARIES = f"{_DRIVER}/lib64"
_LIBRARY_PATH = "LD_LIBRARY_PATH"


def _private_driver(source: Path, region: Path, destination: Path) -> None:
    """Copy the driver directory's regular shims, link the rest, and put the region where the shims look."""
    destination.mkdir(parents=True)
    (destination / "vcuda").symlink_to(region)
    for entry in source.iterdir():
        target = destination / entry.name
        if entry.name == "vcuda":  # leads to /etc/vcuda, which is the host's here
            continue
        if entry.is_symlink() or not entry.is_dir():
            target.symlink_to(entry)
            continue
        target.mkdir()
        for file in entry.iterdir():
            place = target / file.name
            if file.is_symlink() and not file.readlink().is_absolute():
                place.symlink_to(file.readlink())
            elif file.is_file() and not file.is_symlink() and ".so" in file.name:
                shutil.copy2(file, place)
            else:
                place.symlink_to(file)


def _link_mounts(mounts: tuple[Mount, ...], root: Path) -> None:
    """Parents before children; a directory that has mounts inside becomes a folder of links."""
    ordered = sorted(mounts, key=lambda mount: mount.container_path.count("/"))
    for mount in ordered:
        place = root / mount.container_path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)  # what a parent showed there
        inside = any(other.container_path.startswith(mount.container_path + "/") for other in ordered)
        if inside and Path(mount.host_path).is_dir():
            place.mkdir()
            for entry in Path(mount.host_path).iterdir():
                (place / entry.name).symlink_to(entry)
        else:
            place.symlink_to(mount.host_path)


class _Rewriter:
    """Leads container paths into `root`, if it holds them."""

    def __init__(self, paths: list[str], root: Path) -> None:
        self._root = root
        # A path that leads to a mount counts too, unless the host has it: /run/x for a mount at /run/x/y.
        parents = {str(parent) for path in paths for parent in Path(path).parents if not parent.exists()}
        self._paths = sorted({*paths, *parents}, key=len, reverse=True)

    def path(self, part: str) -> str:
        inside = any(part == path or part.startswith(path + "/") for path in self._paths)
        return str(self._root) + part if inside else part

    def text(self, value: str) -> str:
        """Each part of a colon list, such as LD_LIBRARY_PATH."""
        return ":".join(self.path(part) for part in value.split(":"))


def host_paths(config: ContainerConfig, device_directory: str) -> ContainerConfig:
    """The configuration with every container path replaced by a host path. Raises OSError.

    `device_directory` is where, instead of /dev, the container's driver looks for the nodes.
    """
    root = Path(config.directory) / "fs"
    root.mkdir()
    driver = next((mount.host_path for mount in config.mounts if mount.container_path == _DRIVER), None)
    others = tuple(mount for mount in config.mounts if mount.container_path != _DRIVER)
    devices = tuple(
        Mount(device.host_path, f"{device_directory}/{device.container_path.removeprefix('/dev/')}")
        for device in config.devices
    )
    _link_mounts((*others, *devices), root)
    rewriter = _Rewriter([mount.container_path for mount in (*config.mounts, *devices)], root)
    environment = {name: rewriter.text(value) for name, value in config.environment.items()}
    if driver is not None:
        _private_driver(Path(driver), root / _REGION.lstrip("/"), root / _DRIVER.lstrip("/"))
        # Without mounts the loader's default directories are the host's: only this variable can lead to the shims.
        listed = [str(root) + _LIBRARIES, *environment.get(_LIBRARY_PATH, "").split(":")]
        environment[_LIBRARY_PATH] = ":".join(dict.fromkeys(part for part in listed if part))
    return replace(
        config, environment=environment, mounts=(), devices=(),
        command=tuple(rewriter.text(word) for word in config.command),
        working_directory=rewriter.path(config.working_directory),
    )  # fmt: skip
