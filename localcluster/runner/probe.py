"""Finds out, by doing it, how well this machine can isolate a container."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from localcluster.runner.config import ContainerConfig, Isolation, Mount
from localcluster.runner.runtime import Runtime, RuntimeFailure

_TRIAL_SECONDS = 20.0
_DESCRIPTION = {
    Isolation.USER_AND_MOUNT: "pods get real mounts, each in its own user and mount namespace",
    Isolation.MOUNT: "pods get real mounts, each in its own mount namespace",
    Isolation.HOST_PATHS: "pods run on host paths, without mounts of their own",
}


@dataclass(frozen=True)
class Finding:
    """The best isolation that works, and why the better ones do not."""

    isolation: Isolation
    failures: tuple[tuple[Isolation, str], ...]

    def describe(self) -> str:
        reasons = "; ".join(f"{isolation}: {reason}" for isolation, reason in self.failures)
        return _DESCRIPTION[self.isolation] + (f" [{reasons}]" if reasons else "")


def try_isolation(isolation: Isolation, *, pid_namespace: bool = False) -> str:
    """Run a container whose mount points the host lacks. Returns an empty string, or why it did not work."""
    with tempfile.TemporaryDirectory(prefix="vcuda-probe-") as scratch:
        marker = Path(scratch, "marker")
        marker.write_text("seen", encoding="ascii")
        mount = Mount(str(marker), "/usr/local/vcuda-probe/marker", read_only=True)
        config = ContainerConfig(
            ("/bin/sh", "-c", f'test "$(cat {mount.container_path})" = seen && ! test -e {marker}'),
            {"PATH": "/usr/bin:/bin"},
            "/",
            f"{scratch}/container",
            isolation,
            mounts=(mount,),
        )
        runtime = Runtime(Path(scratch), isolation, pid_namespace=pid_namespace)
        try:
            container = runtime.start("probe", "probe", 0, config)
            container.process.wait(timeout=_TRIAL_SECONDS)
        except (RuntimeFailure, subprocess.TimeoutExpired) as error:
            return str(error)
        finally:
            runtime.close()
        state = container.state()
        return "" if state.exit_code == 0 else "the mounts are not as they should be inside"


def best(wanted: Isolation | None = None) -> Finding:
    """The best isolation that works here; with `wanted`, that one, or RuntimeFailure with the reason."""
    failures: list[tuple[Isolation, str]] = []
    for isolation in [wanted] if wanted else list(Isolation):
        reason = try_isolation(isolation) if isolation.real_mounts else ""
        if not reason:
            return Finding(isolation, tuple(failures))
        failures.append((isolation, reason))
    raise RuntimeFailure(f"isolation {wanted} does not work here: {failures[-1][1]}")
