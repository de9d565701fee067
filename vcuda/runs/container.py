"""What a container gets of a run: the folder with our libraries, the region, the cards' device nodes, the environment.

As the node daemon gives it to pods: what a container's owner must not change is mounted read-only. Written as an
engine's arguments or as a device of the Container Device Interface (SPEC.md of CDI 0.5.0).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vcuda import plain_file
from vcuda.driver import companions, layout
from vcuda.driver.companions import LOADER_COMPANIONS
from vcuda.driver.layout import CUDA, LOADER_FOLDERS, NVML, SHIMS
from vcuda.driver.root import HostRoot
from vcuda.quoted import quoted
from vcuda.region import LIMITS_NAME, USAGE_NAME
from vcuda.runs.booking import Booking
from vcuda.runs.driver import Driver
from vcuda.runs.errors import RunError

CDI_KIND = "tencent.com/vcuda-run"
CDI_FOLDER = Path("/var/run/cdi")  # docker and podman read it and /etc/cdi; a reboot empties it
_CDI_VERSION = "0.5.0"
_CDI_PREFIX = "tencent.com-vcuda-run-"
_DEVICE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")
_DRIVER_PATH = "/usr/local/nvidia"
_REGION_PATH = "/etc/vcuda"
_NODES, _NODES_IF_ANY = ("nvidiactl", "nvidia-uvm"), ("nvidia-uvm-tools", "nvidia-modeset")


@dataclass(frozen=True)
class Mount:
    """A bind mount of a file or folder."""

    source: str
    target: str
    read_only: bool = True


@dataclass(frozen=True)
class Setup:
    """All that a container needs. `nodes`: path in the container -> on the host; mounts in the order to be made."""

    mounts: tuple[Mount, ...]
    nodes: Mapping[str, str]
    environment: Mapping[str, str]

    def arguments(self) -> list[str]:
        """For `docker run` and `podman run`. Raises RunError for a path that these can't be given."""
        for path in [*(mount.source for mount in self.mounts), *self.nodes.values()]:
            if set(path) & set(',:"\n'):
                raise RunError(f"{path} can't be given to an engine: a comma, colon or quote; give another --ledger")
        words = []
        for mount in self.mounts:
            end = ",readonly" if mount.read_only else ""
            words.append(f"--mount=type=bind,source={mount.source},target={mount.target}{end}")
        words += [f"--device={host}:{path}:rw" for path, host in self.nodes.items()]
        return words + [f"--env={name}={value}" for name, value in self.environment.items()]


def set_up(
    entry: Booking,
    region: Path,
    driver: Driver,
    root: HostRoot,
    own: tuple[Sequence[Mount], Mapping[str, str]] = ((), {}),
    shims: Path = layout.SHIMS_FOLDER,
) -> Setup:
    """Fill the booking's folder for its containers; the driver's own files are mounted into it, never copied.

    `own`: mounts and environment that this driver's clients need besides. Raises RunError.
    """
    folder = Path(entry.folder) / "container"
    lib64 = folder / "lib64"
    reals = {CUDA: driver.cuda, NVML: driver.nvml}
    beside = tuple(companions.of(root, companions.version_of(driver.cuda.name), {driver.cuda.parent}))
    try:
        Path(entry.folder).chmod(0o755)
        layout.lay_out(lib64, shims, reals)
        layout.fit(lib64)
        for alias in SHIMS.values():
            (lib64 / "drv" / alias).unlink()
            (lib64 / "drv" / alias).touch()  # something to mount on
        for source in beside:
            (lib64 / source.name).touch()
        (folder / "bin").mkdir()
        layout.copy(layout.mine_of(shims), folder / "bin" / layout.MINE)
        (folder / "vcuda").mkdir()
        (folder / "vcuda" / LIMITS_NAME).symlink_to(
            f"{_REGION_PATH}/{LIMITS_NAME}"
        )  # as in pods: unreadable limits refuse
    except OSError as error:
        raise RunError(f"the libraries of the run can't be laid out in {folder}: {error}") from error
    mounts = [
        Mount(str(region), _REGION_PATH),
        Mount(str(region / USAGE_NAME), f"{_REGION_PATH}/{USAGE_NAME}", read_only=False),
        Mount(str(folder), _DRIVER_PATH),
        *(Mount(str(reals[name]), f"{_DRIVER_PATH}/lib64/drv/{alias}") for name, alias in SHIMS.items()),
        *(Mount(str(source.path), f"{_DRIVER_PATH}/lib64/{source.name}") for source in beside),
    ]
    # Found without any environment: login shells and setuid programs drop LD_LIBRARY_PATH.
    by_name = {name: str(lib64 / name) for name in SHIMS}
    by_name |= {source.name: str(source.path) for source in beside if source.name in LOADER_COMPANIONS}
    mounts += [Mount(file, f"{place}/{name}") for name, file in by_name.items() for place in LOADER_FOLDERS]
    mounts.append(Mount(str(folder / "bin" / layout.MINE), f"/usr/bin/{layout.MINE}"))
    if (smi := root.find_program("nvidia-smi")) is not None:
        mounts.append(Mount(str(smi), "/usr/bin/nvidia-smi"))
    environment = {
        "LD_LIBRARY_PATH": f"{_DRIVER_PATH}/lib64",
        "TRITON_LIBCUDA_PATH": f"{_DRIVER_PATH}/lib64",
        "CUDA_VISIBLE_DEVICES": ",".join(share.uuid for share in entry.shares),
        "NVIDIA_VISIBLE_DEVICES": "void",  # NVIDIA's own runtime gives nothing besides
    }
    return Setup((*mounts, *own[0]), _nodes(entry, root), environment | dict(own[1]))


def _nodes(entry: Booking, root: HostRoot) -> dict[str, str]:
    """The share's cards and what every client opens. Raises RunError that names the missing one."""
    if any(share.uuid.startswith("MIG-") for share in entry.shares):
        raise RunError("a share of a MIG instance can't be given to a container yet; choose a whole card with --device")
    folder = root.path / "dev"
    wanted = [*_NODES, *(f"nvidia{share.minor}" for share in entry.shares)]
    for name in wanted:
        if not (folder / name).is_char_device():
            what = "is missing" if not (folder / name).exists() else "is no device node"
            raise RunError(f"{folder / name} {what}; `nvidia-modprobe -u -c0` as root makes the driver's nodes")
    wanted += [name for name in _NODES_IF_ANY if (folder / name).is_char_device()]
    return {f"/dev/{name}": str(folder / name) for name in wanted}


def check_device_name(name: str) -> None:
    """Raises RunError."""
    if len(name) > 100 or not _DEVICE_NAME.fullmatch(name):
        raise RunError(f"--cdi {quoted(name)} is no device name: letters, digits and - _ . : between them")


def describe(name: str, setup: Setup, entry: Path, folder: Path) -> Path:
    """Write the CDI device `name` for the booking at `entry`; return its file. Raises RunError.

    A runtime calls our hook whenever it makes a container with it. Files of runs that were killed are removed.
    """
    path = folder / f"{_CDI_PREFIX}{name}.json"
    hook = {
        "hookName": "createRuntime",
        "path": sys.executable,
        "args": [sys.executable, "-m", "vcuda.runs.container_hook", str(entry)],
        "env": [f"PYTHONPATH={Path(layout.__file__).parents[2]}"],
    }
    edits = {
        "env": [f"{key}={value}" for key, value in setup.environment.items()],
        "deviceNodes": [{"path": path, "hostPath": host, "permissions": "rw"} for path, host in setup.nodes.items()],
        "mounts": [
            {
                "hostPath": mount.source,
                "containerPath": mount.target,
                "options": ["ro" if mount.read_only else "rw", "nosuid", "nodev", "rbind"],
            }
            for mount in setup.mounts
        ],
        "hooks": [hook],
    }
    spec = {"cdiVersion": _CDI_VERSION, "kind": CDI_KIND, "devices": [{"name": name, "containerEdits": edits}]}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if folder == CDI_FOLDER:
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        elif not folder.is_dir():
            what = "is no folder" if folder.exists() else "does not exist"
            raise RunError(f"--cdi-folder {folder} {what}; name the folder where your engine reads CDI devices")
        _sweep(folder)
        temporary.write_text(json.dumps(spec, indent=1) + "\n")
        temporary.chmod(0o644)
        os.link(temporary, path)  # of two that begin at once one has the name
    except FileExistsError as error:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise RunError(f"{path} is in the way and no file of ours; remove it") from error
        raise RunError(f"another run has the device {CDI_KIND}={name} ({path}); give another name") from error
    except OSError as error:
        raise RunError(
            f"the device can't be described in {folder}: {error.strerror}; "
            "only root may there, --cdi-folder names another folder that your engine reads"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return path


def _sweep(folder: Path) -> None:
    """Remove descriptions whose booking is gone."""
    for path in folder.glob(f"{_CDI_PREFIX}*.json"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            spec = json.loads(plain_file.read(path, links=False))
            entry = Path(spec["devices"][0]["containerEdits"]["hooks"][0]["args"][-1])
            if not entry.exists():
                path.unlink()
