"""What kubelet is told to give a container: device nodes, mounts, environment, annotations.

Everything hangs on the answer for cores, which every share has; the one for memory says nothing: kubelet merges both,
unmodified runtimes must get no mount twice, and kubelet prints each byte of all answers at each admission (the checksum
of its checkpoint), while the pods of a burst wait.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable

from manager.allocations.record import Allocation
from manager.cards.device_nodes import DeviceNode
from manager.config.settings import Settings
from manager.container import driver_dir
from manager.container.driver_dir import DriverDir
from manager.proto import deviceplugin_pb2 as api
from manager.regions import regions
from vcuda.driver import companions
from vcuda.driver.layout import LOADER_FOLDERS, SHIMS
from vcuda.spec.names import Names
from vcuda.spec.units import BLOCK_BYTES

LIBRARY_PATH = f"{driver_dir.CONTAINER_PATH}/lib64"
PRELOAD_LIST = "/etc/ld.so.preload"
PERMISSIONS = "rw"
_OURS = (f"{regions.CONTAINER_PATH}/", f"{driver_dir.CONTAINER_PATH}/")


def recorded(allocation: Allocation, names: Names) -> dict[str, str]:
    """What kubelet's checkpoint keeps with the answer; the state is rebuilt from it when it is lost."""
    memory = sum(share.memory_blocks for share in allocation.shares) * BLOCK_BYTES
    return {
        names.core: str(allocation.cores),
        names.memory: str(memory),
        names.device: ",".join(share.uuid for share in allocation.shares),
    }


def environment(settings: Settings) -> dict[str, str]:
    """Variables of every container with a share."""
    # Where libcuda.so.1 is: for the preload library the real one, which LD_LIBRARY_PATH must not hide behind the shim.
    preload = settings.injection == "preload"
    found = {"TRITON_LIBCUDA_PATH": LOADER_FOLDERS[0] if preload else LIBRARY_PATH}
    if settings.nvidia_visible_devices:
        found["NVIDIA_VISIBLE_DEVICES"] = settings.nvidia_visible_devices
    if settings.ld_library_path == "set" and not preload:
        found["LD_LIBRARY_PATH"] = LIBRARY_PATH
    found.update(settings.container_env)
    return found


def own_mounts(allocation: Allocation) -> list[api.Mount]:
    """In the order in which they must be made: the usage file lies inside the region's read-only folder."""
    folder = regions.container_path(allocation)
    return [
        api.Mount(container_path=folder, host_path=allocation.region, read_only=True),
        api.Mount(container_path=f"{folder}/usage", host_path=f"{allocation.region}/usage", read_only=False),
    ]


def common_mounts(driver: DriverDir, settings: Settings) -> list[api.Mount]:
    """What every container mounts, whatever its share."""
    found = [
        api.Mount(container_path=driver_dir.CONTAINER_PATH, host_path=str(driver.directory), read_only=True),
    ]
    # Found without any environment: login shells and setuid programs drop LD_LIBRARY_PATH, pods replace it.
    files = {name: str(driver.lib64 / name) for name in driver.loader_files}
    if settings.injection == "preload":
        files.update(driver.reals)
        found.append(api.Mount(container_path=PRELOAD_LIST, host_path=str(driver.preload_list), read_only=True))
    for name, file in files.items():
        found += [
            api.Mount(container_path=f"{folder}/{name}", host_path=file, read_only=True) for folder in LOADER_FOLDERS
        ]
    found += [
        api.Mount(container_path=f"/usr/bin/{name}", host_path=str(driver.directory / "bin" / name), read_only=True)
        for name in driver.programs
    ]
    found += [
        api.Mount(container_path=extra.container_path, host_path=extra.host_path, read_only=extra.read_only)
        for extra in settings.container_mount
    ]
    return found


def in_the_way(paths: Iterable[str]) -> str | None:
    """Of the paths of a container's volumes one that hides what we mount, or None: kubelet mounts them after ours."""
    for path in paths:
        clean = posixpath.normpath("/" + path.lstrip("/"))  # runtimes take each from the root
        folder, _, name = clean.rpartition("/")
        file = folder in LOADER_FOLDERS and name in (*SHIMS, *companions.LOADER_COMPANIONS)
        if file or clean == PRELOAD_LIST or f"{clean}/".startswith(_OURS):
            return path
    return None


def build(
    resource: str,
    allocation: Allocation,
    device_nodes: Iterable[DeviceNode],
    driver: DriverDir,
    settings: Settings,
    names: Names,
) -> api.ContainerAllocateResponse:
    """Kubelet's answer for one container: complete device nodes, mounts, variables and annotations."""
    if resource != "core":
        return api.ContainerAllocateResponse()
    return api.ContainerAllocateResponse(
        envs=environment(settings),
        mounts=[*own_mounts(allocation), *common_mounts(driver, settings)],
        devices=[
            api.DeviceSpec(container_path=node.container_path, host_path=node.host_path, permissions=PERMISSIONS)
            for node in device_nodes
        ],
        annotations=recorded(allocation, names),
    )
