"""Where a region's files live."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from manager.regions import storage


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_regions_on_a_tmpfs_of_their_own(tmp_path: Path) -> None:
    chosen_storage = storage.choose(tmp_path, "tmpfs")
    assert chosen_storage.tmpfs
    directory = tmp_path / "r"
    chosen_storage.make(directory)
    try:
        assert os.path.ismount(directory)
        with pytest.raises(OSError, match="No space left"), (directory / "x").open("wb") as file:
            file.write(b"0" * (storage.TMPFS_BYTES + 4096))
        chosen_storage.make(directory)  # a left-over is replaced, not mounted over
        assert list(directory.iterdir()) == []
    finally:
        storage.Storage.remove(directory)
    assert not directory.exists()


@pytest.mark.parametrize(
    ("mountinfo", "expected"),
    [
        ("27 1 0:24 / / rw shared:1 - ext4 /dev/sda rw", True),
        ("27 1 0:24 / / rw - ext4 /dev/sda rw", True),
        ("27 1 0:24 / / rw - overlay overlay rw", False),
        ("27 1 0:24 / / rw - overlay overlay rw\n28 27 8:1 /x /vm rw - ext4 /dev/sda rw", False),
        ("27 1 0:24 / / rw - overlay overlay rw\n28 27 8:1 /x /vm rw shared:9 - ext4 /dev/sda rw", True),
        ("27 1 0:24 / / rw - overlay overlay rw\n28 27 8:1 /x /vmx rw shared:9 - ext4 /dev/sda rw", False),
    ],
)
def test_whether_a_mount_would_reach_the_host(mountinfo: str, expected: bool) -> None:
    assert storage.reaches_host(Path("/vm"), mountinfo) is expected
