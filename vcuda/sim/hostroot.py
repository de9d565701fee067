"""The host root of a simulated machine: device nodes, /proc/devices and the driver's files, as on a node.

Nodes are character devices where this process may make them, else regular files of the same names. Majors are the
genuine ones where they are constants; nvidia-uvm's and nvidia-caps' are dynamic and chosen free on this machine, so
that opening such a node never reaches a device of another driver.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from vcuda.quoted import quoted
from vcuda.sim import libraries
from vcuda.sim.cards import Card, capability_minor
from vcuda.sim.errors import SimError

LIBRARY_FOLDER = Path("usr/lib/x86_64-linux-gnu")
NVIDIA_MAJOR = 195
CONTROL_MINOR, MODESET_MINOR = 255, 254
HOST_DEVICES = Path("/proc/devices")
# Where Linux takes dynamic character majors from (Documentation/admin-guide/devices.rst).
DYNAMIC_MAJORS = (*range(234, 255), *range(511, 383, -1))
_ORDINARY_MAJORS = ("1 mem", "5 /dev/tty", "5 /dev/console", "5 /dev/ptmx", "10 misc", "136 pts")


class HostRoot:
    """The files below `path` for these cards."""

    def __init__(self, path: Path, cards: Sequence[Card], driver_version: str) -> None:
        self.path = path
        self.cards = tuple(cards)
        self.driver_version = driver_version

    def create(self, nvidia_smi: Path | None) -> None:
        """Lay out everything below an empty folder. Raises OSError, or SimError for an unusable `nvidia_smi`."""
        libraries.install(self.path / LIBRARY_FOLDER, self.driver_version)
        if nvidia_smi is not None:
            self._install_nvidia_smi(nvidia_smi)
        for card in self.cards:
            self._write(f"sys/bus/pci/devices/{card.bus}/numa_node", f"{card.numa_node}\n")
            self._write(f"sys/bus/pci/devices/{card.bus}/vendor", "0x10de\n")
        self.load_driver()

    def _install_nvidia_smi(self, program: Path) -> None:
        if not program.is_file():
            raise SimError(f"there is no nvidia-smi at {program}; leave it out, or give the path of a genuine one")
        target = self.path / "usr/bin/nvidia-smi"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(program, target)
        target.chmod(0o755)

    # The driver: its entries below proc and its nodes.

    def load_driver(self, uvm_major: int | None = None) -> None:
        """What `modprobe nvidia nvidia-uvm` and nvidia-modprobe leave behind; the uvm major may be chosen."""
        taken = majors_of(HOST_DEVICES)
        free = [major for major in DYNAMIC_MAJORS if major not in taken and major != uvm_major]
        self._write_majors({"nvidia-uvm": free[0] if uvm_major is None else uvm_major, "nvidia-caps": free[1]})
        proc = "proc/driver/nvidia"
        self._write(
            f"{proc}/version",
            f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {self.driver_version}  simulated by vcuda\n",
        )
        for card in self.cards:
            self._write(
                f"{proc}/gpus/{card.bus}/information",
                f"Model: \t\t {card.name}\nIRQ:   \t\t {16 + card.index}\nGPU UUID: \t {card.uuid}\n"
                f"Bus Type: \t PCIe\nBus Location: \t {card.bus}\nDevice Minor: \t {card.minor}\nGPU Excluded:\t No\n",
            )
        for path, minor in self._capabilities().items():
            self._write(
                f"{proc}/capabilities/{path}",
                f"DeviceFileMinor: {minor}\nDeviceFileMode: 438\nDeviceFileModify: 1\n",
            )
        self._write(
            "proc/driver/nvidia-caps/mig-minors",
            "".join(f"{path.replace('/mig', '', 1)} {minor}\n" for path, minor in self._capabilities().items()),
        )
        for name in self.node_numbers():
            self.make_node(name)

    def unload_driver(self) -> None:
        """Nodes and entries of the driver are gone, the libraries stay."""
        for name in self.node_numbers():
            (self.path / "dev" / name).unlink(missing_ok=True)
        for folder in ("nvidia", "nvidia-caps"):
            shutil.rmtree(self.path / "proc/driver" / folder, ignore_errors=True)
        self._write("proc/devices", _devices_text({}))

    def majors(self) -> dict[str, int]:
        """Majors by driver name as the root's own proc/devices has them; empty while the driver is unloaded."""
        text = (self.path / "proc/devices").read_text()
        pairs = (line.split() for line in text.splitlines())
        return {words[1]: int(words[0]) for words in pairs if len(words) == 2 and words[1].startswith("nvidia")}

    def _write_majors(self, dynamic: dict[str, int]) -> None:
        fixed = dict.fromkeys(("nvidia", "nvidia-modeset", "nvidiactl"), NVIDIA_MAJOR)
        self._write("proc/devices", _devices_text({**fixed, **dynamic}))

    def set_uvm_major(self, major: int) -> None:
        """As after a reboot that gave nvidia-uvm another major; the node has the old one until it is made anew."""
        majors = self.majors()
        if not majors:
            raise SimError("the simulated driver is unloaded; load it first")
        self._write_majors({"nvidia-uvm": major, "nvidia-caps": majors["nvidia-caps"]})

    def _capabilities(self) -> dict[str, int]:
        """Path below capabilities/ -> minor of the node that grants it."""
        found = {"mig/config": 1, "mig/monitor": 2} if any(card.mig_mode for card in self.cards) else {}
        for card in self.cards:
            for part in card.mig:
                base = f"gpu{card.minor}/mig/gi{part.gpu_instance}"
                found[f"{base}/access"] = capability_minor(card.minor, part.gpu_instance)
                found[f"{base}/ci{part.compute_instance}/access"] = part.caps[1]
        return found

    # Nodes.

    def node_numbers(self) -> dict[str, tuple[int, int]]:
        """Every node the loaded driver has: path below dev -> (major, minor)."""
        majors = self.majors()
        uvm, caps = majors.get("nvidia-uvm", 0), majors.get("nvidia-caps", 0)
        return {
            "nvidiactl": (NVIDIA_MAJOR, CONTROL_MINOR),
            "nvidia-modeset": (NVIDIA_MAJOR, MODESET_MINOR),
            "nvidia-uvm": (uvm, 0),
            "nvidia-uvm-tools": (uvm, 1),
            **{f"nvidia{card.minor}": (NVIDIA_MAJOR, card.minor) for card in self.cards},
            **{f"nvidia-caps/nvidia-cap{minor}": (caps, minor) for minor in self._capabilities().values()},
        }

    def make_node(self, name: str) -> None:
        """Make (anew) one node of the driver. Raises SimError for a name it does not have."""
        path, (major, minor) = self._node(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if self._real_driver_here():
            path.touch()  # a character device with these numbers would be the genuine card
        else:
            try:
                os.mknod(path, stat.S_IFCHR, os.makedev(major, minor))
            except PermissionError:
                path.touch()
        path.chmod(0o666)  # the umask took bits away

    def remove_node(self, name: str) -> None:
        """Raises SimError for a name the driver does not have."""
        self._node(name)[0].unlink(missing_ok=True)

    def _node(self, name: str) -> tuple[Path, tuple[int, int]]:
        numbers = self.node_numbers()
        if name not in numbers:
            raise SimError(f"the simulated driver has no node {quoted(name)}; it has {', '.join(numbers)}")
        return self.path / "dev" / name, numbers[name]

    @property
    def character_devices(self) -> bool:
        """Whether the nodes are character devices; else they are regular files, which no container can be given."""
        nodes = (self.path / "dev" / name for name in self.node_numbers())
        return any(stat.S_ISCHR(path.stat().st_mode) for path in nodes if path.exists())

    @staticmethod
    def _real_driver_here() -> bool:
        return NVIDIA_MAJOR in majors_of(HOST_DEVICES)

    def _write(self, name: str, text: str) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text(text)
        temporary.replace(path)  # a reader sees the old text or the new one


def majors_of(devices: Path) -> set[int]:
    """All majors, of character and block devices, that a /proc/devices lists; none if it can't be read."""
    try:
        lines = devices.read_text().splitlines()
    except OSError:
        return set()
    return {int(words[0]) for words in (line.split() for line in lines) if len(words) == 2 and words[0].isdigit()}


def _devices_text(majors: dict[str, int]) -> str:
    rows = [
        *_ORDINARY_MAJORS,
        *(f"{major:3d} {name}" for name, major in sorted(majors.items(), key=lambda item: item[1])),
    ]
    return "\n".join(["Character devices:", *rows, "", "Block devices:", "  7 loop", "259 blkext", ""])
