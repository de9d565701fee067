"""What limits a program: nothing, a share of ours, or somebody else's library that is preloaded."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from vcuda.arbiter import Arbiter
from vcuda.runs.errors import RunError

if TYPE_CHECKING:
    from benchmarks._throttle_bench import Bench, Load

MIB = 1 << 20

# As the projects' public sources read them (Project-HAMi/HAMi-core, src/multiprocess; coldzerofear/vgpu-manager, library).
PRESETS: dict[str, dict[str, str]] = {
    "hami": {
        "CUDA_DEVICE_MEMORY_LIMIT": "{memory_mib}m",
        "CUDA_DEVICE_SM_LIMIT": "{cores}",
        # The first process writes the limits into this file, and later ones take them from there.
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": "{folder}/cudevshr.cache",
        "GPU_CORE_UTILIZATION_POLICY": "FORCE",  # else the limit rests while one container has the card
        "LIBCUDA_LOG_LEVEL": "0",
    },
    "vgpu-manager": {
        "CUDA_MEM_LIMIT_0": "{memory_mib}m",
        "CUDA_CORE_LIMIT": "{cores}",
        "GPU_DEVICES_UUID": "{uuid}",
        "LOGGER_LEVEL": "1",
    },
}


@contextmanager
def before_the_loads() -> Iterator[None]:
    """At usual priority a thread that only looks and sleeps goes before those that work; at real-time priority it would wait for them."""
    usual, policy = os.sched_getparam(0), os.sched_getscheduler(0)
    with suppress(PermissionError):
        if policy in (os.SCHED_RR, os.SCHED_FIFO):
            os.sched_setparam(0, os.sched_param(usual.sched_priority + 1))
    try:
        yield
    finally:
        os.sched_setparam(0, usual)


@dataclass(frozen=True)
class Share:
    """A container: what its programs' environment is; `folder`: the one of its files, where it is ours."""

    environment: dict[str, str]
    folder: Path | None = None

    @property
    def region(self) -> Path | None:
        """Where its limits and what it was charged are."""
        return self.folder / "vcuda" if self.folder else None


class System(Protocol):
    """A way to limit programs."""

    @property
    def name(self) -> str: ...

    def shares(
        self, bench: Bench, loads: Sequence[Load], *, shared: bool = False, driver: Path | None = None
    ) -> AbstractContextManager[list[Share]]:
        """A container for each load, with its limits, as long as the context lasts.

        `shared`: they are on one card together. `driver`: a libcuda.so.1 instead of the card's.
        """


@dataclass(frozen=True)
class Nothing:
    name: str = "no share"

    @contextmanager
    def shares(
        self,
        bench: Bench,
        loads: Sequence[Load],
        *,
        shared: bool = False,  # noqa: ARG002
        driver: Path | None = None,
    ) -> Iterator[list[Share]]:
        yield [Share(bench.native_environment(driver)) for _ in loads]


@dataclass(frozen=True)
class Ours:
    name: str = "vcuda"

    @contextmanager
    def shares(
        self,
        bench: Bench,
        loads: Sequence[Load],
        *,
        shared: bool = False,
        driver: Path | None = None,
    ) -> Iterator[list[Share]]:
        with before_the_loads():
            started = Arbiter()  # its thread keeps the priority
        with started as arbiter:
            made = []
            for load in loads:
                folder, environment = bench.share(load, shared, driver)
                arbiter.add(folder.name, folder / "vcuda")
                made.append(Share(environment, folder))
            yield made


@dataclass(frozen=True)
class Peer:
    """Somebody else's library, preloaded, with its variables."""

    name: str
    library: Path
    variables: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def shares(
        self,
        bench: Bench,
        loads: Sequence[Load],
        *,
        shared: bool = False,  # noqa: ARG002
        driver: Path | None = None,
    ) -> Iterator[list[Share]]:
        yield [Share(self._environment(bench, load, driver)) for load in loads]

    def _environment(self, bench: Bench, load: Load, driver: Path | None) -> dict[str, str]:
        known = {
            "memory_mib": load.memory_bytes // MIB,
            "memory_bytes": load.memory_bytes,
            "cores": load.cores,
            "uuid": bench.card.uuid,
            "folder": tempfile.mkdtemp(prefix=f"{self.name}-", dir=bench.folder),
        }
        made = {name: value.format(**known) for name, value in self.variables.items()}
        return {**bench.native_environment(driver), **made, "LD_PRELOAD": str(self.library)}


def peer(words: Sequence[str]) -> Peer:
    """A peer of the command line. Raises RunError that says what is wrong with it."""
    if len(words) < 2:
        raise RunError(f"--peer {' '.join(words)}: give a name and the path of the built library")
    name, library, *variables = words
    if not Path(library).is_file():
        raise RunError(f"--peer {name}: there is no library {library}")
    pairs = [variable.partition("=") for variable in variables]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise RunError(f"--peer {name}: {wrong[0]!r} is no VARIABLE=VALUE")
    try:
        for _, _, value in pairs:
            value.format(memory_mib=0, memory_bytes=0, cores=0, uuid="", folder="")
    except (KeyError, IndexError, ValueError) as error:
        raise RunError(
            f"--peer {name}: {error} is no placeholder; there are {{memory_mib}}, {{memory_bytes}}, {{cores}}, {{uuid}}, {{folder}}"
        ) from error
    given = {key: value for key, _, value in pairs}
    preset = PRESETS.get(name.partition("@")[0], {})
    if not given and not preset:
        raise RunError(
            f"--peer {name}: give its limit variables; only those of {', '.join(sorted(PRESETS))} are known here"
        )
    return Peer(name, Path(library).resolve(), {**preset, **given})
