"""A stand-in for /proc: processes in pods' control groups, with the mounts that a runtime makes."""

from __future__ import annotations

import os
from pathlib import Path

from manager.audit.owners import Owners
from manager.cgroups import pods


def group(uid: str, container: str = "0123", *, systemd: bool = False) -> str:
    """The control group of a container as kubelet's two drivers name it."""
    if systemd:
        escaped = uid.replace("-", "_")
        return f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{escaped}.slice/cri-containerd-{container}.scope"
    return f"/kubepods/burstable/pod{uid}/{container}"


class Proc:
    """One folder of processes."""

    def __init__(self, directory: Path) -> None:
        self.path, self.groups = directory / "proc", directory / "cgroup"

    def owners(self) -> Owners:
        return Owners(self.path, self.groups)

    def add(
        self,
        pid: int,
        cgroup: str = "/",
        *,
        region: Path | str = "",
        link: Path | str = "",
        parent: int = 0,
        namespace: int = 1,
        inner: int = 1,
        comm: str = "python3",
    ) -> Path:
        """The kernel lists it in its group, too. `region`: what the runtime mounted at /etc/vcuda; `link`: where the process's own root leads there."""
        folder = self.path / str(pid)
        (folder / "root/etc").mkdir(parents=True)
        (folder / "ns").mkdir()
        (folder / "fd").mkdir()
        if link:
            (folder / "root/etc/vcuda").symlink_to(link)
        (folder / "cgroup").write_text(f"12:cpuset:/\n5:devices:{cgroup}\n0::{cgroup}\n")
        found = pods.hierarchy(self.groups)
        if found is None:
            self.groups.mkdir(exist_ok=True)
            (self.groups / "cgroup.controllers").touch()
        base = found[0] if found is not None else self.groups
        members = base / cgroup.strip("/") / "cgroup.procs"
        members.parent.mkdir(parents=True, exist_ok=True)
        with members.open("a") as file:
            file.write(f"{pid}\n")
        mounts = ["21 1 0:19 / /proc rw,nosuid - proc proc rw"]
        if region:
            device = Path(region).stat().st_dev
            number = f"{os.major(device)}:{os.minor(device)}"
            own = os.path.ismount(region)
            mounts += [
                f"30 1 {number} {'/' if own else region} /etc/vcuda ro - tmpfs vcuda ro",
                f"31 1 {number} {'' if own else region}/usage /etc/vcuda/usage rw - tmpfs vcuda rw",
            ]
        (folder / "mountinfo").write_text("".join(f"{line}\n" for line in mounts))
        (folder / "ns/pid").symlink_to(f"pid:[{namespace}]")
        (folder / "status").write_text(f"Name:\t{comm}\nPPid:\t{parent}\nNSpid:\t{pid}\t{inner}\n")
        (folder / "comm").write_text(f"{comm}\n")
        (folder / "exe").symlink_to(f"/usr/bin/{comm}")
        return folder
