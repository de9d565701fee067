"""The simulated machine as a folder: `state/`, all that a client needs, and `root/`, the host's files around it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vcuda.quoted import quoted
from vcuda.sim import conf, libraries
from vcuda.sim.cards import SimCard, resolve
from vcuda.sim.errors import SimError
from vcuda.sim.faults import CardLost, CardRecovered, Fault
from vcuda.sim.hostroot import LIBRARY_FOLDER, HostRoot
from vcuda.sim.report import Report, parse_report

CONTAINER_DIRECTORY = "/run/vcuda-sim"  # where the driver looks when nothing else is said
MEMORY_LIMITS = ("dmem", "misc", "none")
_RULE_PATTERN = re.compile(r"[^\s#]\S*")


@dataclass(frozen=True)
class Mount:
    """A bind mount that a container needs."""

    host_path: Path
    container_path: str
    read_only: bool = False


class Machine:
    """A simulated machine that exists in `directory`. Raises SimError if there is none or it is damaged.

    Any number of processes may hold one; nothing runs in the background, and removing the folder removes the machine.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory).absolute()
        path = self.state / "machine.conf"
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise SimError(
                f"{self.directory} holds no simulated machine ({error}); `vcuda sim create` or Machine.create makes one"
            ) from error
        self.driver_version, self.cards = conf.parse_machine_conf(text)
        self._host = HostRoot(self.root, self.cards, self.driver_version)
        self._control: libraries.Control | None = None

    @classmethod
    def create(
        cls,
        directory: str | os.PathLike[str],
        cards: Sequence[SimCard] = (SimCard(),),
        *,
        nvidia_smi: str | os.PathLike[str] | None = None,
        newer: bool = False,
        memory_limits: str = "dmem",
    ) -> Machine:
        """Make a machine in a folder that does not exist yet or is empty; all or nothing.

        `nvidia_smi` is the path of a genuine one, to be found below the root's usr/bin. `newer` takes a driver of CUDA
        13.3 instead of the 550's and NVML of 13.615 (vcuda/sim/src/newer, nvml_newer); only a checkout has it.
        `memory_limits`: what counts there for limits of control groups: the kernel ("dmem"), the driver ("misc"),
        nobody ("none"). Raises SimError.
        """
        target = Path(directory).absolute()
        version = libraries.newer_version() if newer else libraries.version()
        cuda_version = libraries.NEWER_CUDA_VERSION if newer else libraries.CUDA_VERSION
        resolved = resolve(target, cards)
        if memory_limits not in MEMORY_LIMITS:
            raise SimError(f"memory_limits is {quoted(memory_limits, 40)}; it is one of {', '.join(MEMORY_LIMITS)}")
        temporary = target.with_name(f".{target.name}.{os.getpid()}.new")
        try:
            if target.exists() and (not target.is_dir() or any(target.iterdir())):
                raise SimError(f"{target} is not an empty folder; give another one, or remove it first")
            target.parent.mkdir(parents=True, exist_ok=True)
            state = temporary / "state"
            state.mkdir(parents=True)
            state.chmod(0o777)  # tenants run under any user; a simulated machine guards nothing
            _write_readable(
                state / "machine.conf",
                conf.machine_conf(resolved, version, cuda_version, memory_limits if newer else "none"),
            )
            _write_readable(state / "kernels", "")
            HostRoot(temporary / "root", resolved, version).create(None if nvidia_smi is None else Path(nvidia_smi))
            temporary.replace(target)
        except OSError as error:
            raise SimError(f"no simulated machine can be made in {target}: {error}; give a writable folder") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return cls(target)

    @property
    def root(self) -> Path:
        """The host root: what a daemon is given as its driver root."""
        return self.directory / "root"

    @property
    def state(self) -> Path:
        return self.directory / "state"

    @property
    def library_folder(self) -> Path:
        """The folder with libcuda and libnvidia-ml."""
        return self.root / LIBRARY_FOLDER

    @property
    def character_devices(self) -> bool:
        """Whether the device nodes are character devices; else regular files, which no container can be given."""
        return self._host.character_devices

    def environment(self) -> dict[str, str]:
        """What a client on this host needs to use the machine's cards, to be added to its environment."""
        return {"VCUDA_SIM_DIR": str(self.directory), "LD_LIBRARY_PATH": str(self.library_folder)}

    def container_environment(self) -> dict[str, str]:
        """What a container needs in its environment, besides the mounts and the device nodes."""
        return {"VCUDA_SIM_DIR": CONTAINER_DIRECTORY}

    def container_mounts(self) -> tuple[Mount, ...]:
        """What a container needs mounted besides the driver's libraries; cards are seen by their nodes in its /dev."""
        return (Mount(self.state, f"{CONTAINER_DIRECTORY}/state"),)

    # Behaviour.

    def set_kernel_time(
        self, pattern: str, ns: int, ns_per_block: int = 0, *, other_ns: int = 0, every_ns: int = 0
    ) -> None:
        """Kernels whose name matches the shell pattern take ns + ns_per_block x blocks, in running clients too.

        With `every_ns`, `ns` and `other_ns` take turns each `every_ns` of wall time, by the moment of the launch. The
        rule set last wins; clients see it within 10 ms. Raises SimError for a pattern with spaces or negative times.
        """
        if not _RULE_PATTERN.fullmatch(pattern) or len(pattern) > 200:
            raise SimError(f"the kernel pattern {quoted(pattern)} must be one word, for instance 'spin*'")
        if min(ns, ns_per_block, other_ns, every_ns) < 0:
            raise SimError(f"kernel {pattern}: {ns} ns + {ns_per_block} ns per block; neither can be negative")
        path = self.state / "kernels"
        others = [line for line in path.read_text().splitlines() if line.split()[:1] != [pattern]]
        turns = f" {other_ns} {every_ns}" if every_ns else ""
        _write_readable(path, "\n".join([f"{pattern} {ns} {ns_per_block}{turns}", *others]) + "\n")

    def inject(self, *faults: Fault) -> None:
        """Make the faults happen now, for every client. Raises SimError for a card that the machine does not have.

        A card that is lost or recovers takes its MIG instances along.
        """
        for fault in faults:
            commands = [*fault.commands()]
            if isinstance(fault, CardLost | CardRecovered) and 0 <= fault.card < len(self.cards):
                lost = int(isinstance(fault, CardLost))
                commands += [f"lost {instance.index} {lost}" for instance in self.cards[fault.card].mig]
            for command in commands:
                self._driver().inject(command)

    def report(self) -> Report:
        """The ground truth per card and process, as the card itself counts it. Raises SimError."""
        return parse_report(self._driver().report())

    def watch(self, seconds: float) -> None:
        """See clients end for so long: what they had running lasts until somebody looks. Raises SimError."""
        self._driver().watch(seconds)

    def _driver(self) -> libraries.Control:
        if self._control is None:
            library = self.library_folder / f"libcuda.so.{self.driver_version}"
            self._control = libraries.Control(self.directory, library)
        return self._control

    # The kernel driver and its nodes, for those who must cope with their absence.

    def majors(self) -> dict[str, int]:
        """Device majors by driver name, as the root's proc/devices says them; empty while the driver is unloaded."""
        return self._host.majors()

    def nodes(self) -> dict[str, tuple[int, int]]:
        """Device nodes of the loaded driver, present or not: path below dev -> (major, minor)."""
        return self._host.node_numbers()

    def remove_node(self, name: str) -> None:
        """Remove a device node, for instance "nvidia-uvm" or "nvidia0". Raises SimError for one the driver has not."""
        self._host.remove_node(name)

    def restore_node(self, name: str) -> None:
        """Make a device node anew, with the numbers it has now. Raises SimError for one the driver has not."""
        self._host.make_node(name)

    def set_uvm_major(self, major: int) -> None:
        """Change nvidia-uvm's major in proc/devices, as a reboot may; its nodes keep the old one until restored."""
        self._host.set_uvm_major(major)

    def unload_driver(self) -> None:
        """Take the kernel driver away: nodes, proc/devices entries and proc/driver; clients get "driver not loaded"."""
        self._host.unload_driver()

    def load_driver(self, uvm_major: int | None = None) -> None:
        """Bring the kernel driver back, by choice with another nvidia-uvm major."""
        self._host.load_driver(uvm_major)


def _write_readable(path: Path, text: str) -> None:
    """Write a file of `state/` whole, for tenants of any user to read, whatever the umask."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.chmod(0o644)
    temporary.replace(path)
