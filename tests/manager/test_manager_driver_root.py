"""Where the driver is found below a host's root: the linker's cache, NVML's version, mounts."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from manager.container import driver_dir
from manager.regions.storage import Storage
from tests.support.ldcache import ELF, I386, X86_64, cache
from vcuda.driver import ldcache
from vcuda.driver.ldcache import LdCacheError
from vcuda.driver.mounts import is_mount_point, points
from vcuda.driver.root import HostRoot


def test_entries_of_this_machine_in_their_order() -> None:
    data = cache(
        (I386, "libcuda.so.1", "/usr/lib/i386/libcuda.so.1"),
        (X86_64, "libcuda.so.1", "/opt/a/libcuda.so.1"),
        (X86_64, "libcuda.so.1", "/opt/b/libcuda.so.1"),
        (X86_64, "libc.so.6", "/lib/libc.so.6"),
    )
    expected = {
        "libcuda.so.1": ("/opt/a/libcuda.so.1", "/opt/b/libcuda.so.1"),
        "libc.so.6": ("/lib/libc.so.6",),
    }
    assert ldcache.parse(data, "x86_64") == expected
    old = struct.pack("<11sxI", b"ld.so-1.7.0", 0)
    assert ldcache.parse(old + data, "x86_64") == expected


@pytest.mark.parametrize("keep", [0, 10, 30, 60, 100])
def test_a_cache_that_is_cut_off_is_an_error(keep: int) -> None:
    data = cache((X86_64, "libcuda.so.1", "/opt/a/libcuda.so.1"))
    assert keep < len(data)
    with pytest.raises(LdCacheError):
        ldcache.parse(data[:keep], "x86_64")


@pytest.mark.skipif(
    shutil.which("ldconfig") is None or not Path("/etc/ld.so.cache").exists(),
    reason="this machine has no ldconfig with a cache",
)
def test_this_machines_cache_says_what_ldconfig_says() -> None:
    said: dict[str, list[str]] = {}
    for line in subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout.splitlines():
        name, arrow, path = line.partition(" => ")
        if arrow and "libc6,x86-64" in name:
            said.setdefault(name.split()[0], []).append(path)
    assert len(said) > 10
    found = ldcache.read(Path("/etc/ld.so.cache"))
    assert {name: list(paths) for name, paths in found.items()} == said


def library(root: Path, path: str) -> Path:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(ELF + path)
    return target


def test_the_cache_finds_what_lies_in_no_usual_folder(tmp_path: Path) -> None:
    real = library(tmp_path, "opt/vendor/gpu/libcuda.so.550.54.15")
    (tmp_path / "opt/vendor/gpu/libcuda.so.1").symlink_to(real.name)
    usual = library(tmp_path, "usr/lib/x86_64-linux-gnu/libcuda.so.535.1.2")
    root = HostRoot(tmp_path)
    assert root.find_library("libcuda.so.1") == usual
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/ld.so.cache").write_bytes(cache((X86_64, "libcuda.so.1", "/opt/vendor/gpu/libcuda.so.1")))
    assert root.find_library("libcuda.so.1") == real
    assert root.find_library("libcuda.so.1", "535.1.2") == usual  # the version that the kernel runs
    assert root.find_library("libcuda.so.1", "1.2.3") == real
    (tmp_path / "etc/ld.so.cache").write_bytes(b"something else")
    assert root.find_library("libcuda.so.1") == usual
    real.unlink()
    (tmp_path / "etc/ld.so.cache").write_bytes(cache((X86_64, "libcuda.so.1", "/opt/vendor/gpu/libcuda.so.1")))
    assert root.find_library("libcuda.so.1") == usual  # the cache is older than the removal


def test_the_mirror_takes_the_driver_that_runs_with_all_that_lies_beside_it(tmp_path: Path) -> None:
    shims = tmp_path / "shims"
    for name in driver_dir.SHIMS:
        library(shims, name)
    library(tmp_path, "preload/libvcuda-preload.so")
    library(tmp_path, "bin/vcuda")
    host = tmp_path / "host"
    for version, folder in (("535.1.2", "opt/vendor"), ("550.54.15", "usr/lib/x86_64-linux-gnu")):
        for name in ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler"):
            library(host, f"{folder}/{name}.so.{version}")
            link = host / folder / f"{name}.so.1"
            link.symlink_to(f"{name}.so.{version}")
    (host / "etc").mkdir()
    entries = [(X86_64, f"{name}.so.1", f"/opt/vendor/{name}.so.1") for name in ("libcuda", "libnvidia-ml")]
    (host / "etc/ld.so.cache").write_bytes(cache(*entries))
    for running in ("535.1.2", "550.54.15"):
        made = driver_dir.make(tmp_path / "vm", HostRoot(host), shims, running)
        assert made.driver_version == running
        assert (made.lib64 / "libnvidia-ptxjitcompiler.so.1").resolve().name.endswith(running)


def test_mount_points_with_spaces() -> None:
    line = "36 35 98:0 /mnt1 /mnt\\040two rw,noatime master:1 - ext3 /dev/root rw"
    assert points(line) == ["/mnt two"]


def test_a_bind_mount_on_the_same_file_system_is_a_mount_point(tmp_path: Path) -> None:
    """A DaemonSet's /host may be one; os.path.ismount does not see it, and paths would be given to the runtime as they are here."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    assert not is_mount_point(target)
    assert HostRoot(target).on_host == target
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(os.fsencode(source), os.fsencode(target), None, 4096, None) != 0:  # MS_BIND
        pytest.skip(f"nothing can be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        assert not target.is_mount()
        assert is_mount_point(target)
        assert HostRoot(target).on_host == Path("/")
    finally:
        libc.umount2(os.fsencode(target), 2)
    assert not is_mount_point(target)
    Storage.remove(target)
