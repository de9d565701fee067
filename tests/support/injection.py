"""Containers made of this machine's own root: an overlay of it, with exactly the mounts that the daemon asks kubelet for.

The rows are the ways in which a program may miss us; `python -m tests.support.injection` prints what becomes of each, as in
docs/clients.md. Needs root and overlayfs.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from manager.allocations.record import Allocation
from manager.config.settings import Settings
from manager.container import driver_dir, response
from tests.support import groups
from tests.support.groups import Group
from tests.support.share import LIB, MIB
from vcuda import region
from vcuda._build import native
from vcuda.driver.root import HostRoot
from vcuda.sim import Machine, SimCard
from vcuda.spec.placement import CardShare
from vcuda.spec.request import Kind

LIMIT = 256 * MIB
SECONDS = 60
COMPAT = "/usr/local/cuda/compat"

# Makes the root, in namespaces of its own that end with it, and runs the script below it.
_ENTER = r"""
set -eu
base=$1; mounts=$2; devices=$3; script=$4
mount --make-rprivate /
mount -t tmpfs none "$base"
mkdir "$base/upper" "$base/work" "$base/root"
mount -t overlay none -o "lowerdir=/,upperdir=$base/upper,workdir=$base/work" "$base/root"
root=$base/root
mount --rbind /proc "$root/proc"
mount -t tmpfs none "$root/dev"
for node in null zero random urandom full; do touch "$root/dev/$node"; mount --bind "/dev/$node" "$root/dev/$node"; done
mkdir "$root/dev/shm"; mount -t tmpfs none "$root/dev/shm"
while read -r from to; do
    if [ -d "$from" ]; then mkdir -p "$root$to"; else mkdir -p "$root${to%/*}"; [ -e "$root$to" ] || touch "$root$to"; fi
    mount --bind "$from" "$root$to"
done < "$mounts"
for node in "$devices"/*; do
    [ -d "$node" ] || { touch "$root/dev/${node##*/}"; mount --bind "$node" "$root/dev/${node##*/}"; }
done
exec chroot "$root" /bin/bash "$script"
"""

# Finds the driver in the way that its first argument names; prints what an allocation beyond the limit gives.
PROBE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
typedef int (*init_t)(unsigned);
typedef int (*create_t)(void **, unsigned, int);
typedef int (*alloc_t)(unsigned long long *, unsigned long);
#ifdef LINKED
int cuInit(unsigned);
int cuCtxCreate_v2(void **, unsigned, int);
int cuMemAlloc_v2(unsigned long long *, unsigned long);
#endif
int main(int count, char **words)
{
    init_t init; create_t create; alloc_t alloc;
#ifdef LINKED
    init = cuInit; create = cuCtxCreate_v2; alloc = cuMemAlloc_v2;
#else
    const char *way = words[1], *file = count > 2 ? words[2] : "libcuda.so.1";
    int plugin = strcmp(way, "plugin") == 0 || strcmp(way, "dlplugin") == 0;
    int flags = RTLD_NOW | (strcmp(way, "deepbind") == 0 || strcmp(way, "plugin") == 0 ? RTLD_DEEPBIND : 0);
    void *handle = strcmp(way, "dlmopen") == 0 || strcmp(way, "dlplugin") == 0 ? dlmopen(LM_ID_NEWLM, file, flags) : dlopen(file, flags);
    if (!handle) { printf("no driver: %s\n", dlerror()); return 4; }
    init = (init_t)dlsym(handle, "cuInit"); create = (create_t)dlsym(handle, "cuCtxCreate_v2");
    alloc = (alloc_t)dlsym(handle, "cuMemAlloc_v2");
    if (plugin) { int (*work)(void) = (int (*)(void))dlsym(handle, "work"); printf("%d\n", work()); return 0; }
    if (strcmp(way, "closed") == 0) dlclose(handle);
#endif
    void *context; unsigned long long pointer;
    if (init(0) || create(&context, 0, 0)) { printf("no context\n"); return 5; }
    printf("%d\n", alloc(&pointer, 300ul << 20));
    if (getenv("HOLD")) { fflush(stdout); getchar(); }
    return 0;
}
"""
PLUGIN = r"""
int cuInit(unsigned); int cuCtxCreate_v2(void **, unsigned, int); int cuMemAlloc_v2(unsigned long long *, unsigned long);
int work(void)
{
    void *context; unsigned long long pointer;
    return cuInit(0) || cuCtxCreate_v2(&context, 0, 0) ? -1 : cuMemAlloc_v2(&pointer, 300ul << 20);
}
"""


@dataclass(frozen=True)
class Row:
    """One way to come to the driver. `shim` and `preload`: whether the limit holds; `seen`: an escape shows in what is mapped."""

    name: str
    script: str
    shim: bool = True
    preload: bool = True
    seen: bool = True


# $P: the probe, opened dynamically; $L: linked with the driver; $U: setuid root; $C: a compat copy of the driver.
ROWS = (
    Row("`dlopen`, environment as the pod has it", "$P open"),
    Row("linked with libcuda", "$L"),
    Row("no environment at all", "env -i $P open"),
    Row("login shell", 'env -i HOME=/nonexistent /bin/bash -l -c "$P open"'),
    Row("pod sets its own LD_LIBRARY_PATH", "LD_LIBRARY_PATH=/opt/app/lib $P open"),
    Row("after `ldconfig` inside", "ldconfig && env -i $P open"),
    Row(
        "after `ldconfig` with the driver directory in its configuration",
        "echo /usr/local/nvidia/lib64 > /etc/ld.so.conf.d/000.conf && ldconfig && env -i $P open",
    ),
    Row(
        "setuid program, started by another user",
        "setpriv --reuid 65534 --regid 65534 --clear-groups env LD_LIBRARY_PATH=$C $U",
    ),
    Row("another user", "setpriv --reuid 65534 --regid 65534 --clear-groups $P open"),
    Row("`dlclose` after the look-ups", "$P closed"),
    Row("`RTLD_DEEPBIND`", "$P deepbind"),
    Row("`dlmopen` of libcuda", "$P dlmopen"),
    Row("library that needs libcuda, by `dlopen` with `RTLD_DEEPBIND`", "$P plugin $PLUGIN"),
    Row(
        "image with a `compat` libcuda in the linker's cache, our LD_LIBRARY_PATH",
        f"mkdir -p {COMPAT} && cp $REAL {COMPAT}/libcuda.so.1 && echo {COMPAT} > /etc/ld.so.conf.d/000.conf && ldconfig && $P open",
    ),
    Row(
        "the same without any environment",
        f"mkdir -p {COMPAT} && cp $REAL {COMPAT}/libcuda.so.1 && echo {COMPAT} > /etc/ld.so.conf.d/000.conf && ldconfig && env -i $P open",
        shim=False,
    ),
    Row(
        "the same with our file in place of the copy",
        f"mkdir -p {COMPAT} && cp /usr/local/nvidia/lib64/libcuda.so.1 {COMPAT} && echo {COMPAT} > /etc/ld.so.conf.d/000.conf && ldconfig && "
        "env -i $P open",
    ),
    Row(
        "LD_LIBRARY_PATH begins with a `compat` libcuda",
        f"mkdir -p {COMPAT} && cp $REAL {COMPAT}/libcuda.so.1 && LD_LIBRARY_PATH={COMPAT} $P open",
        shim=False,
    ),
    Row("libcuda opened by its versioned path", "$P open $REAL", shim=False),
    Row(
        "library that needs libcuda, by `dlmopen` into a namespace of its own",
        "$P dlplugin $PLUGIN",
        preload=False,
        seen=False,
    ),
    Row("static program with a driver of its own", "$STATIC", shim=False, preload=False),
)


class NoContainers(Exception):
    """This machine can't make them; the message says why."""


@dataclass(frozen=True)
class Place:
    """A machine with one card, a share of it as the daemon lays it out, and the probes."""

    folder: Path
    machine: Machine
    item: Allocation
    driver: driver_dir.DriverDir

    def words(self, script: str, injection: str, group: Group | None = None) -> list[str]:
        """The command line that runs the script in a container, in this control group. The root is made below a folder of its own."""
        settings = replace(Settings(), injection=injection)
        mounts = [
            (mount.host_path, mount.container_path)
            for mount in [*response.own_mounts(self.item), *response.common_mounts(self.driver, settings)]
        ]
        mounts += [(str(mount.host_path), mount.container_path) for mount in self.machine.container_mounts()]
        variables = response.environment(settings)
        real = f"/usr/local/nvidia/lib64/drv/{dict(self.driver.reals)['libcuda.so.1'].rpartition('/')[2]}"
        named = {
            "P": self.folder / "probe",
            "L": self.folder / "linked",
            "U": self.folder / "setuid",
            "PLUGIN": self.folder / "plugin.so",
            "STATIC": self.folder / "static",
            "C": COMPAT,
            "REAL": real,
        }
        lines = [f"export {name}={shlex.quote(str(value))}" for name, value in {**named, **variables}.items()]
        work = Path(tempfile.mkdtemp(prefix="container-", dir=self.folder))
        (work / "base").mkdir()
        (work / "script").write_text("\n".join((*lines, script)) + "\n")
        (work / "mounts").write_text("".join(f"{source} {target}\n" for source, target in mounts))
        (work / "enter").write_text(_ENTER)
        devices = self.machine.root / "dev"
        enter = ["bash", str(work / "enter"), str(work / "base"), str(work / "mounts"), str(devices)]
        return [*(group.enter if group is not None else ()), "unshare", "--mount", *enter, str(work / "script")]

    def run(self, script: str, injection: str, group: Group | None = None) -> subprocess.CompletedProcess[str]:
        kept = {"PATH": os.environ["PATH"]}
        return subprocess.run(
            self.words(script, injection, group),
            env=kept,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )

    def outcome(self, row: Row, injection: str, group: Group | None = None) -> str:
        """ "limited", "escapes", or the words of what went wrong."""
        result = self.run(row.script, injection, group)
        last = result.stdout.strip().splitlines()[-1:] or [""]
        known = {"2": "limited", "0": "escapes"}
        return known.get(last[0], f"fails: {(last[0] + ' ' + result.stderr.strip())[-300:]}")


def make(folder: Path) -> Place:
    """Lay everything out below `folder`. Raises NoContainers."""
    if os.geteuid() != 0:
        raise NoContainers("containers of this kind need root")
    machine = Machine.create(folder / "machine", [SimCard()], newer=True)
    card = machine.cards[0]
    directory = folder / "region"
    directory.mkdir()
    region.create(directory, [region.CardLimit(card.uuid, card.minor, LIMIT, 50, 50)])
    driver = driver_dir.make(folder / "manager", HostRoot(machine.root), LIB / "shim")
    shares = (CardShare(card.uuid, 50, 1),)
    item = Allocation(
        pod_uid="uid", namespace="default", pod_name="pod", container="main", kind=Kind.APP, cores=50, memory_blocks=1, core_limit=50,
        priority="normal", shares=shares, minors={card.uuid: card.minor}, region=str(directory), mirror=str(driver.directory),
    )  # fmt: skip
    _compile(folder)
    for parent in (folder, *folder.parents):
        if not parent.stat().st_mode & 0o001 and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)  # other users start the probes, too
    place = Place(folder, machine, item, driver)
    result = place.run("echo in; id -u", "shim")
    if result.stdout != "in\n0\n":
        raise NoContainers(f"no overlay of the root can be mounted here: {result.stderr.strip()[-200:]}")
    return place


def _compile(folder: Path) -> None:
    (folder / "probe.c").write_text(PROBE)
    (folder / "plugin.c").write_text(PLUGIN)
    stubs = [f"-L{LIB / 'stubs'}", "-lcuda"]
    linked = ["-DLINKED", *stubs]
    jobs: dict[str, tuple[str, Sequence[str]]] = {
        "probe": ("probe.c", ["-ldl"]),
        "linked": ("probe.c", linked),
        "setuid": ("probe.c", linked),
        "plugin.so": ("plugin.c", ["-shared", "-fPIC", *stubs]),
        # What speaks to the card without any library of ours or NVIDIA's: the simulated driver's own sources, linked in.
        "static": ("probe.c", ["-DLINKED", "-static", *_driver_sources(), "-lpthread", "-lm"]),
    }
    for name, (source, flags) in jobs.items():
        command = ["gcc", "-w", "-o", str(folder / name), str(folder / source), *flags]
        result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        if result.returncode != 0:
            raise NoContainers(f"gcc can't build {name}: {result.stderr.strip()[-200:]}")
    (folder / "setuid").chmod(0o4755)


def _driver_sources() -> list[str]:
    folder = native.ROOT / "vcuda/sim/src"
    sources = [str(path) for part in ("core", "cuda") for path in sorted((folder / part).glob("*.c"))]
    version = f'-DVC_SIM_DRIVER_VERSION="{native.SIM_DRIVER_VERSION}"'
    return [
        "-std=c11",
        "-D_GNU_SOURCE",
        version,
        *(f"-I{native.ROOT / part}" for part in native.SIM_INCLUDES),
        *sources,
    ]


def matrix(place: Place, group: Group) -> str:
    """The table of docs/clients.md, by running every row. `group`: one that has the driver's limit."""
    lines = ["| way to the driver | shim | preload | shim and the driver's own limit |", "|---|---|---|---|"]
    for row in ROWS:
        cells = []
        for injection, expected in (("shim", row.shim), ("preload", row.preload)):
            outcome = place.outcome(row, injection)
            if not expected and outcome == "escapes":
                outcome += ", seen by its mapped files" if row.seen else ", seen by its bytes only"
            cells.append(outcome)
        cells.append(place.outcome(row, "shim", group))
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="vcuda-injection-"))
    try:
        place = make(folder)
        with groups.made("vcuda-injection") as group:
            groups.limit(place.machine, group, LIMIT)
            print(matrix(place, group))
    except NoContainers as reason:
        print(f"no matrix: {reason}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
