"""SELinux: what containers mount from us carries the label that they may read and write, in whatever folder it lies.

Kubelet relabels the volumes of a pod, but nothing that a device plugin names, and a tmpfs or a folder below /etc has a
label of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

# container-selinux's, at a level that every container's categories dominate.
LABEL = b"system_u:object_r:container_file_t:s0\0"
FILESYSTEMS = Path("/proc/filesystems")  # has selinuxfs while SELinux is on, in containers too


def label(paths: Iterable[Path]) -> None:
    """Label files, folders and links where SELinux is on; never a file that another name leads to. Raises OSError."""
    if "selinuxfs" not in FILESYSTEMS.read_text():
        return
    for path in paths:
        status = path.lstat()
        if (
            path.is_dir() or status.st_nlink == 1
        ):  # a linked library is the host's, and has a label that containers may read
            os.setxattr(path, "security.selinux", LABEL, follow_symlinks=False)
