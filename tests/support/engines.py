"""A real podman for tests: an image made from nothing, storage of the test's own, and how it works on this machine.

Root without systemd and within another engine's limits: plain folders as storage, runc (crun refuses hybrid control
groups), no network, limits on files and processes that are below this process's own.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from vcuda.driver import layout

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "localhost/vcuda-test"
# What the client, the shims and the simulated driver need of the C library.
_LIBRARIES = ("libc.so.6", "libdl.so.2", "libpthread.so.0", "libm.so.6", "librt.so.1", "ld-linux-x86-64.so.2")
_FOLDERS = (Path("/lib/x86_64-linux-gnu"), Path("/lib64"))


@functools.cache
def missing() -> str:
    """Why podman can't be tested here; "" where it can."""
    for program, package in (("podman", "podman"), ("runc", "runc"), ("busybox", "busybox-static"), ("gcc", "gcc")):
        if shutil.which(program) is None:
            return f"no {program}: apt-get install {package}"
    if os.geteuid() != 0:
        return "not root: podman needs mounts that an ordinary user has not without newuidmap"
    if subprocess.run(["busybox", "true"], check=False).returncode or _is_dynamic(shutil.which("busybox") or ""):
        return "busybox is not static: apt-get install busybox-static"
    return ""


def _is_dynamic(program: str) -> bool:
    return b"ld-linux" in Path(program).read_bytes()[:4096]  # the interpreter stands behind the headers


@dataclass(frozen=True)
class Podman:
    """`folder`/bin/podman is podman with a storage of its own below `folder`."""

    folder: Path

    @property
    def path(self) -> str:
        """For PATH."""
        return f"{self.folder / 'bin'}:{os.environ['PATH']}"

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Raises AssertionError if it hangs."""
        return subprocess.run(
            [str(self.folder / "bin/podman"), *words], capture_output=True, text=True, timeout=120, check=False
        )

    def remove(self) -> None:
        """All containers, and the storage."""
        self.call("rm", "--all", "--force", "--time", "0")
        shutil.rmtree(self.folder, ignore_errors=True)


def make(folder: Path) -> Podman:
    """Podman with the image `IMAGE`: busybox, the C library, and the client as /client. Raises AssertionError."""
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin/podman"
    engine = (
        f"{shutil.which('podman')} --root {folder}/root --runroot {folder}/run --tmpdir {folder}/tmp "
        "--storage-driver vfs --cgroup-manager cgroupfs --runtime runc --events-backend file"
    )
    limits = "--network none --ulimit nofile=1024:1024 --ulimit nproc=1000:1000"
    program.write_text(
        f'#!/bin/sh\nif [ "$1" = run ]; then shift; exec {engine} run {limits} "$@"; fi\nexec {engine} "$@"\n'
    )
    program.chmod(0o755)
    _fill(folder / "image")
    made = Podman(folder)
    archive = folder / "image.tar"
    subprocess.run(["tar", "-C", folder / "image", "-cf", archive, "."], check=True)
    told = made.call("import", str(archive), IMAGE)
    assert told.returncode == 0, told.stderr
    tried = made.call("run", "--rm", IMAGE, "true")
    assert tried.returncode == 0, tried.stderr
    return made


def _fill(root: Path) -> None:
    for name in ("bin", "etc", "tmp", "lib64", "lib/x86_64-linux-gnu"):
        (root / name).mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "", root / "bin/busybox")
    for name in ("sh", "cat", "sleep", "true", "id", "mount", "chmod", "dd", "env", "rm", "ls"):
        (root / "bin" / name).symlink_to("busybox")
    (root / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/:/bin/sh\n")
    for name in _LIBRARIES:
        source = next(folder / name for folder in _FOLDERS if (folder / name).exists())
        target = "lib64" if name.startswith("ld-") else "lib/x86_64-linux-gnu"
        shutil.copy(source, root / target / name)
    stubs = layout.LIB / "stubs"
    subprocess.run(
        ["gcc", ROOT / "tests/vcuda/container_client.c", "-o", root / "client", "-L", stubs, "-lcuda"], check=True
    )
