"""The platform in a wheel's name, read from the libraries in it: the oldest glibc that has all that they ask for (PEP 600)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from vcuda._build import gcc

_OLDEST = (2, 17)  # manylinux_2_17 is the first whose tag our oldest Python knows; the shims ask for no more
_VERSION = re.compile(r"\bGLIBC_([0-9]+)\.([0-9]+)")


def asked_for(library: Path) -> set[tuple[int, int]]:
    """The versions of glibc's symbols that a shared library needs. Raises BuildError."""
    command = [os.environ.get("OBJDUMP", "objdump"), "-p", str(library)]
    told = gcc.run(command, f"cannot read what {library} needs").stdout
    # What a library defines under such a version, as the preload library does, is in another table.
    references = told.partition("Version References:")[2]
    return {(int(major), int(minor)) for major, minor in _VERSION.findall(references)}


def platform(default: str, libraries: Iterable[Path]) -> str:
    """`default`, such as linux_x86_64, or the manylinux tag that is true of all the libraries. Raises BuildError."""
    versions = {version for library in libraries for version in asked_for(library)}
    if not versions or not default.startswith("linux_"):
        return default  # not with glibc
    major, minor = max(versions | {_OLDEST})
    return f"many{default.replace('_', f'_{major}_{minor}_', 1)}"
