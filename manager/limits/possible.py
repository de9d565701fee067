"""Whether this node's driver can limit the memory of control groups at all: as far as one sees, and by trying it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from manager.cards.driver import NodeCard
from manager.cgroups import pods
from manager.config.settings import Settings
from vcuda.driver.memory_limits import CannotLimit, MemoryLimit
from vcuda.spec.units import BLOCK_BYTES


class Limiter(Protocol):
    """Whoever can ask the driver."""

    def limit_memory(self, uuid: str, group: Path, hard_bytes: int | None) -> None:
        """Raises CannotLimit."""

    def memory_limit(self, uuid: str, group: Path) -> MemoryLimit | None:
        """Raises CannotLimit."""


def impossible(settings: Settings, driver: Limiter, cards: Sequence[NodeCard]) -> str:
    """Why these cards can't have limits of the driver's, as far as that is known before one is set; else ""."""
    if settings.driver_limits == "off":
        return "--driver-limits=off"
    if why := no_version_2(settings.cgroup_root):
        return why
    try:
        for item in cards:
            driver.memory_limit(item.card.uuid, settings.cgroup_root)
    except CannotLimit as error:
        return str(error)
    return ""


def tried(settings: Settings, driver: Limiter, cards: Sequence[NodeCard]) -> dict[str, str]:
    """Why not, by card, also after a limit was set on it for a group made for it, which is removed again.

    Empty: all can have limits. A reason that is no card's, where there are no cards, is at "".
    """
    if why := impossible(settings, driver, ()):
        return dict.fromkeys((item.card.uuid for item in cards), why) or {"": why}
    return {item.card.uuid: why for item in cards if (why := _tried(settings, driver, item))}


def _tried(settings: Settings, driver: Limiter, item: NodeCard) -> str:
    """The group is made beside those of pods: what is handed down to them is handed down to it."""
    if why := impossible(settings, driver, (item,)):
        return why
    above = next(iter(pods.trees(settings.cgroup_root)), settings.cgroup_root)
    group = above / f"vcuda-doctor-{os.getpid()}"
    try:
        group.mkdir()
        set_and_read(driver, item.card.uuid, group, BLOCK_BYTES)
        driver.limit_memory(item.card.uuid, group, None)
    except CannotLimit as error:
        return str(error)
    except OSError as error:
        return f"no control group can be made in {above}: {error.strerror}; it must be mounted writable (--cgroup-root)"
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()
    return ""


def set_and_read(driver: Limiter, uuid: str, group: Path, hard_bytes: int) -> MemoryLimit:
    """Set a limit, and believe the driver only what it says afterwards. Raises CannotLimit."""
    driver.limit_memory(uuid, group, hard_bytes)
    now = driver.memory_limit(uuid, group)
    if now is None or now.hard_bytes != hard_bytes:
        says = "there is none" if now is None else f"it is {now.hard_bytes}"
        raise CannotLimit(f"a limit of {hard_bytes} bytes was set, and the driver says that {says}")
    return now


def no_version_2(root: Path) -> str:
    """Why no group below `root` can have limits: there are none of version 2; else ""."""
    if (root / "cgroup.controllers").exists():
        return ""
    return f"there are no control groups of version 2 at {root} (--cgroup-root)"
