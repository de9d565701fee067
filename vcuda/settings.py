"""Settings of a program: a frozen dataclass whose fields say how they are read; flag > environment > file > default.

A setting `query_port` of a program with the prefix GPU_MANAGER_ is the flag `--query-port`, the variable
`GPU_MANAGER_QUERY_PORT` and the key `query-port` of the YAML file that `--config` names. What a setting is read by
raises ValueError that says what to write instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from vcuda import addresses, plain_file
from vcuda.quoted import quoted

T = TypeVar("T")
Member = TypeVar("Member", bound=enum.StrEnum)
_DOMAIN = (
    r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"  # RFC 1123, as Kubernetes' names
)


class InvalidSettings(Exception):
    """A setting can't be read: where it stands, what stands there, and what to write instead."""


def option(
    default: Any,
    parse: Callable[[str], Any],
    text: str,
    *,
    metavar: str = "VALUE",
    repeated: bool = False,
    separated: bool = False,
    secret: bool = False,
    live: bool = False,
) -> Any:
    """A field. `repeated`: the flag may come several times; `separated`: it takes values with commas between.

    `secret`: its values are not printed; `live`: it may change while running.
    """
    metadata = {
        "parse": parse, "help": text, "metavar": metavar, "repeated": repeated, "separated": separated,
        "secret": secret, "live": live,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)


def flag_of(name: str) -> str:
    """A field's name as the command line and the file have it."""
    return name.replace("_", "-")


def add_options(parser: argparse.ArgumentParser, kind: type[Any]) -> None:
    """A flag for each field of `kind`; what is given stays text."""
    for field in dataclasses.fields(kind):
        given = field.metadata
        text = f"{given['help']} (default: {_shown(field.default)})".replace("%", "%%")
        how: dict[str, Any] = {"action": "append"} if given["repeated"] else {}
        if given["parse"] is switch:
            how = {"nargs": "?", "const": "true"}
        parser.add_argument(f"--{flag_of(field.name)}", dest=field.name, help=text, metavar=given["metavar"], **how)


def _shown(default: Any) -> str:
    if default is None or default in ("", ()):
        return "none"
    return ",".join(map(str, sorted(default))) if isinstance(default, frozenset) else str(default)


def read(
    kind: type[T],
    given: Mapping[str, Any],
    environment: Mapping[str, str],
    prefix: str,
    *,
    also: Mapping[str, str] | None = None,
) -> T:
    """The settings.

    `given`: the parsed command line; `also`: variables without the prefix that stand for a field. Raises
    InvalidSettings.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    variables = {variable: name for variable, name in (also or {}).items() if variable in environment}
    variables |= {variable: field.name for field in fields if (variable := prefix + field.name.upper()) in environment}
    layers: list[dict[str, tuple[str, Any]]] = [
        {
            field.name: (f"--{flag_of(field.name)}", given[field.name])
            for field in fields
            if given.get(field.name) is not None
        },
        {name: (variable, environment[variable]) for variable, name in variables.items()},
    ]
    config = next((layer["config"][1] for layer in layers if "config" in layer), None)
    if config:
        layers.append(_from_file(Path(config), {field.name for field in fields}))
    values = {}
    for field in fields:
        for layer in layers:
            if field.name in layer:
                values[field.name] = _value(field, *layer[field.name])
                break
    return kind(**values)


def _value(field: dataclasses.Field[Any], origin: str, raw: Any) -> Any:
    how = field.metadata
    several = raw if isinstance(raw, list) else raw.splitlines() if how["repeated"] and isinstance(raw, str) else [raw]
    try:
        if isinstance(raw, list) and not (how["repeated"] or how["separated"]):
            raise ValueError("a list; write one value")
        if any(isinstance(item, dict | list) for item in several):
            raise ValueError("it is nested; write plain values")
        if not _is_text(" ".join(map(str, several))):
            raise ValueError("it is not UTF-8; name it otherwise")
        if how["repeated"]:
            return tuple(how["parse"](str(item)) for item in several)
        return how["parse"](",".join(map(str, several)))
    except ValueError as error:
        shown = " ".join(map(str, several))
        raise InvalidSettings(f"{origin}: {quoted(shown, 80)} is not valid ({error})") from None


def _is_text(value: str) -> bool:
    """Python keeps bytes of the command line that are no UTF-8 as halves of characters, which nobody takes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _from_file(path: Path, names: set[str]) -> dict[str, tuple[str, Any]]:
    import yaml

    from vcuda import plain_yaml

    class Loader(plain_yaml.Loader):
        def spelling(self, name: str) -> str:
            return name.replace("-", "_")

    try:
        data = yaml.load(plain_file.read(path).decode(), Loader)
    except plain_yaml.Repeated as twice:
        said = f"line {twice.line} of {path} sets {flag_of(twice.name)} again; keep one of them"
        raise InvalidSettings(said) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"cannot read the settings file {path}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        why = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise InvalidSettings(f"the settings file {path} is not YAML: {where}{why}") from None
    except RecursionError:
        raise InvalidSettings(f"the settings file {path} is nested too deep; write `name: value` lines") from None
    if data is not None and not isinstance(data, dict):
        raise InvalidSettings(f"the settings file {path} must hold `name: value` lines, not {type(data).__name__}")
    found = {str(key).replace("-", "_"): value for key, value in (data or {}).items()}
    unknown = sorted(set(found) - names)
    if unknown:
        raise InvalidSettings(f"the settings file {path} has unknown settings: {', '.join(map(flag_of, unknown))}")
    return {key: (f"{path}: {flag_of(key)}", value) for key, value in found.items() if value is not None}


def describe(settings: Any) -> list[str]:
    """One `name: value` per setting, without the values of secret ones.

    No `name=value`: a setting may be called as a field of log lines is, and what looks like one is escaped there.
    """
    lines = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.metadata["secret"]:
            value = tuple(f"{name}=…" for name, _ in value)
        if isinstance(value, frozenset):
            value = ",".join(map(str, sorted(value)))
        lines.append(f"{flag_of(field.name)}: {value}")
    return lines


# How the text of a setting becomes its value.


def text(value: str) -> str:
    """Any text, the empty one too."""
    return value


def optional_text(value: str) -> str | None:
    """None for the empty text."""
    return value or None


def optional_path(value: str) -> Path | None:
    """None for the empty text."""
    return Path(value) if value else None


def switch(value: str) -> bool:
    """true or false, in any case."""
    if value.lower() not in ("true", "false"):
        raise ValueError("write true or false")
    return value.lower() == "true"


def port(value: str) -> int:
    """0 to 65535. Raises ValueError with what to write, as all of these do."""
    if not (value.isascii() and value.isdigit() and len(value) <= 5 and int(value) <= 65535):
        raise ValueError("a port is 0 to 65535")
    return int(value)


def domain(value: str) -> str:
    """A DNS name in lower case."""
    if not re.fullmatch(_DOMAIN, value):
        raise ValueError("write a domain such as example.com, in small letters")
    return value


def optional_name(value: str) -> str:
    """A DNS name in lower case, or nothing."""
    if value and not re.fullmatch(_DOMAIN, value):
        raise ValueError("write a name of a Kubernetes object: small letters, digits, `-` and `.`")
    return value


def host(value: str) -> str:
    """An address to listen on; empty: all."""
    if value:
        try:
            addresses.bracketed(value)
        except ValueError:
            raise ValueError("write an IP address, or a name of this machine") from None
    return value


def choice(*allowed: str) -> Callable[[str], str]:
    """One of these words."""

    def parse(value: str) -> str:
        if value not in allowed:
            raise ValueError(f"choose one of {', '.join(allowed)}")
        return value

    return parse


def member_of(kind: type[Member]) -> Callable[[str], Member]:
    """One of the values of an enumeration."""

    def parse(value: str) -> Member:
        return kind(choice(*kind)(value))

    return parse


def number(least: int, most: int) -> Callable[[str], int]:
    """A whole number within these bounds."""

    def parse(value: str) -> int:
        if not (value.isascii() and value.isdigit() and len(value) <= 12 and least <= int(value) <= most):
            raise ValueError(f"give a whole number from {least} to {most}")
        return int(value)

    return parse


def seconds(least: float, most: float) -> Callable[[str], float]:
    """A number of seconds within these bounds."""

    def parse(value: str) -> float:
        found = float(value.removesuffix("s")) if re.fullmatch(r"[0-9.e]+s?", value, re.ASCII) else math.nan
        if not least <= found <= most:
            raise ValueError(f"give seconds between {least:g} and {most:g}")
        return found

    return parse
