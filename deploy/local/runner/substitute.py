"""Where the machine allows no mounts: the same container on host paths, its environment and layout rewritten.

The interposer finds its region at `$ORIGIN/../vcuda` of its own file, so the driver directory is laid out privately:
`nvidia/lib64` holds the shims as regular files of this container, `nvidia/vcuda` leads to its region.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from deploy.local.runner.config import ContainerConfig, Mount

_REGION = "/etc/vcuda"
_DRIVER = "/usr/local/nvidia"
_LIBRARY_PATH = "LD_LIBRARY_PATH"


def _private_driver(source: Path, region: dict[str, str], destination: Path) -> None:
    """Copy the driver directory's regular shims, link the rest, and put the region where the shims look."""
    destination.mkdir()
    for entry in source.iterdir():
        target = destination / entry.name
        if not entry.is_dir() or entry.is_symlink():
            target.symlink_to(entry)
            continue
        target.mkdir()
        for file in entry.iterdir():
            place = target / file.name
            if file.is_file() and not file.is_symlink() and ".so" in file.name:
                shutil.copy2(file, place)
            elif file.is_symlink() and not file.readlink().is_absolute():
                place.symlink_to(file.readlink())
            else:
                place.symlink_to(file)
    (destination / "vcuda").mkdir()
    for name, host_path in region.items():
        (destination / "vcuda" / name).symlink_to(host_path)


def _region_files(mounts: tuple[Mount, ...]) -> dict[str, str]:
    """Every file of the region by name: those in the mounted directory, then what is mounted below it."""
    files: dict[str, str] = {}
    for mount in sorted(mounts, key=lambda mount: len(mount.container_path)):
        if mount.container_path == _REGION:
            files.update({entry.name: str(entry) for entry in Path(mount.host_path).iterdir()})
        elif mount.container_path.startswith(_REGION + "/"):
            files[mount.container_path.removeprefix(_REGION + "/")] = mount.host_path
    return files


def _rewrite(value: str, table: dict[str, str]) -> str:
    parts = []
    for part in value.split(":"):
        found = next((path for path in table if part == path or part.startswith(path + "/")), None)
        parts.append(table[found] + part[len(found) :] if found else part)
    return ":".join(parts)


def host_paths(config: ContainerConfig) -> ContainerConfig:
    """The configuration with every container path replaced by a host path. Raises OSError."""
    directory = Path(config.directory)
    table = {mount.container_path: mount.host_path for mount in config.mounts}
    table.update({device.container_path: device.host_path for device in config.devices})
    driver = table.get(_DRIVER)
    if driver is not None:
        private = directory / "nvidia"
        _private_driver(Path(driver), _region_files(config.mounts), private)
        table[_DRIVER] = str(private)
    table = dict(sorted(table.items(), key=lambda item: -len(item[0])))
    environment = {name: _rewrite(value, table) for name, value in config.environment.items()}
    if driver is not None:
        # Without mounts the loader's default directories are the host's: only this variable can lead to the shims.
        library_path = [str(directory / "nvidia" / "lib64"), *environment.get(_LIBRARY_PATH, "").split(":")]
        environment[_LIBRARY_PATH] = ":".join(dict.fromkeys(part for part in library_path if part))
    command = tuple(_rewrite(argument, table) for argument in config.command)
    working_directory = _rewrite(config.working_directory, table)
    return replace(
        config,
        command=command,
        environment=environment,
        working_directory=working_directory,
        mounts=(),
        devices=(),
    )
