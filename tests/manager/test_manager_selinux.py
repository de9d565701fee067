"""Where SELinux is on, containers may read and write what they mount from us, and the host's own files keep their labels."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from manager.process import selinux
from tests.manager.manager_pods import container, pod
from tests.manager.manager_support import Node
from vcuda.sim import Machine


def label_of(path: Path) -> bytes:
    try:
        return os.getxattr(path, "security.selinux", follow_symlinks=False)
    except OSError:
        return b""


@pytest.mark.parametrize("on", [True, False])
def test_regions_and_driver_directory_have_the_containers_label(
    node: Node, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: bool
) -> None:
    probe = tmp_path / "probe"
    probe.touch()
    try:
        os.setxattr(probe, "security.selinux", selinux.LABEL)
    except OSError as error:
        pytest.skip(f"this file system takes no such label: {error}")
    (tmp_path / "filesystems").write_text("nodev\tproc\nnodev\tselinuxfs\n" if on else "nodev\tproc\n")
    monkeypatch.setattr(selinux, "FILESYSTEMS", tmp_path / "filesystems")
    node.start(wait=200)
    item = pod("a", container("c", 30, 4))
    node.kubelet.admit(item)
    region = node.region(item, "c")
    driver = (node.directory / "vm/driver/current").resolve()
    ours = [
        region,
        region / "limits",
        region / "usage",
        driver,
        driver / "lib64",
        driver / "lib64/libcuda.so.1",
        driver / "lib64/libcuda.so",
    ]
    assert {label_of(path) for path in ours} == ({selinux.LABEL} if on else {b""})
    library = (driver / "lib64/drv/libcuda-driver.so.1").resolve()
    if library.stat().st_nlink > 1:
        assert label_of(library) == b""
