"""Reading the settings: command line over environment over file over default, and the flags of older releases."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manager.config.settings import ENV_PREFIX, Settings, flag_of
from manager.errors import StartError

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
    made = _Parser(
        prog="gpu-manager", description="Share this node's NVIDIA GPUs between pods.", allow_abbrev=False
    )
    made.add_argument("--version", action="store_true", help="print the version and exit")
    for field in dataclasses.fields(Settings):
        action = "append" if field.metadata["repeated"] else "store"
        text = f"{field.metadata['help']} (default: {_shown(field.default)})".replace("%", "%%")
        made.add_argument(
            f"--{flag_of(field.name)}", dest=field.name, action=action, help=text, metavar="VALUE"
        )
    old = made.add_argument_group("flags of older releases, accepted without effect")
    for name, why in OLD_FLAGS.items():
        old.add_argument(f"--{name}", dest=f"old_{name}", nargs="?", const="true", help=why, metavar="VALUE")
    return made


def _shown(default: Any) -> str:
    if default is None or default in ("", ()):
        return "none"
    return ",".join(map(str, sorted(default))) if isinstance(default, frozenset) else str(default)


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Parsed | None:
    """Parse the command line, environment and file. None: --version was asked. Raises StartError."""
    given = vars(parser().parse_args(arguments))
    if given["version"]:
        return None
    names = {field.name for field in dataclasses.fields(Settings)}
    layers: list[tuple[str, dict[str, Any]]] = [
        ("--{flag}", {name: given[name] for name in names if given[name] is not None}),
        (ENV_PREFIX + "{variable}", _from_environment(environment, names)),
    ]
    config = next((layer["config"] for _, layer in layers if "config" in layer), None)
    if config:
        layers.append((f"{config}: {{flag}}", _from_file(Path(config), names)))
    values = {}
    for field in dataclasses.fields(Settings):
        for where, layer in layers:
            if field.name in layer:
                origin = where.format(flag=flag_of(field.name), variable=field.name.upper())
                values[field.name] = _value(field, layer[field.name], origin)
                break
    warnings = [
        f"--{name} is accepted but has no effect: {why}"
        for name, why in OLD_FLAGS.items()
        if given[f"old_{name}"] is not None
    ]
    return Parsed(Settings(**values), tuple(warnings))


def _value(field: dataclasses.Field[Any], raw: Any, origin: str) -> Any:
    parse_one = field.metadata["parse"]
    try:
        if field.metadata["repeated"]:
            return tuple(parse_one(str(item)) for item in (raw if isinstance(raw, list) else [raw]))
        if isinstance(raw, list):
            raw = ",".join(map(str, raw))
        return parse_one(str(raw))
    except ValueError as error:
        shown = (
            raw if isinstance(raw, str) else " ".join(map(str, raw)) if isinstance(raw, list) else str(raw)
        )
        raise StartError(f"{origin}: {shown!r:.80} is not valid ({error})") from None


def _from_environment(environment: Mapping[str, str], names: set[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(Settings):
        value = environment.get(ENV_PREFIX + field.name.upper())
        if value is not None and field.name in names:
            found[field.name] = value.splitlines() if field.metadata["repeated"] else value
    if "NODE_NAME" in environment and "hostname_override" not in found:
        found["hostname_override"] = environment["NODE_NAME"]  # the downward API's usual name in manifests
    return found


def _from_file(path: Path, names: set[str]) -> dict[str, Any]:
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"cannot read the settings file {path}: {error}") from None
    except yaml.YAMLError as error:
        raise StartError(f"the settings file {path} is not YAML: {str(error).splitlines()[0]}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise StartError(f"the settings file {path} must hold `name: value` lines, not {type(data).__name__}")
    found = {str(key).replace("-", "_"): value for key, value in data.items()}
    unknown = sorted(set(found) - names)
    if unknown:
        raise StartError(f"the settings file {path} has unknown settings: {', '.join(map(flag_of, unknown))}")
    return {key: value for key, value in found.items() if value is not None}
