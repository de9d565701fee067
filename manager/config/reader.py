"""Reading the settings of the daemon, and the flags of older releases."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manager.config.settings import ENV_PREFIX, Settings
from manager.errors import StartError
from vcuda import settings
from vcuda.settings import InvalidSettings

# Flags of tkestack gpu-manager that mean nothing here: accepted, with one line that says so.
OLD_FLAGS: Mapping[str, str] = {
    "driver": "there is one driver, NVIDIA's",
    "share-mode": "cards are always shared by request",
    "container-runtime": "the container runtime is not asked",
    "container-runtime-endpoint": "the container runtime is not asked",
    "runtime-request-timeout": "the container runtime is not asked",
    "cgroup-driver": "cgroups are not searched for containers",
    "wait-timeout": "the daemon waits for kubelet as long as it takes",
    "extra-config": "use --container-env and --container-mount",
    "volume-config": "the driver's files are found below --driver-root",
    "log-dir": "logs go to standard error",
    "logtostderr": "logs always go to standard error",
}


@dataclass(frozen=True)
class Parsed:
    """The settings and what the operator should be told about how they came to be."""

    settings: Settings
    warnings: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise StartError(f"{message}; --help lists all flags")


def parser() -> argparse.ArgumentParser:
    """Flags as the command line has them; all are optional, for file and environment may say them."""
    made = _Parser(
        prog="gpu-manager",
        usage="gpu-manager [flags]          serve this node's kubelet\n"
        "       gpu-manager doctor [flags]   look at the node, say what is wrong and what to do; 1 if something fails",
        description="Share this node's NVIDIA GPUs between pods.",
        allow_abbrev=False,
    )
    made.add_argument("--version", action="store_true", help="print the version and exit")
    settings.add_options(made, Settings)
    old = made.add_argument_group("flags of older releases, accepted without effect")
    for name, why in OLD_FLAGS.items():
        old.add_argument(f"--{name}", dest=f"old_{name}", nargs="?", const="true", help=why, metavar="VALUE")
    return made


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Parsed | None:
    """Parse the command line, environment and file. None: --version was asked. Raises StartError."""
    given = vars(parser().parse_args(arguments))
    if given["version"]:
        return None
    # The downward API's usual name in manifests.
    also = {"NODE_NAME": "hostname_override"}
    try:
        found = settings.read(Settings, given, environment, ENV_PREFIX, also=also)
    except InvalidSettings as error:
        raise StartError(str(error)) from None
    warnings = [
        f"--{name} is accepted but has no effect: {why}"
        for name, why in OLD_FLAGS.items()
        if given[f"old_{name}"] is not None
    ]
    return Parsed(found, tuple(warnings))
