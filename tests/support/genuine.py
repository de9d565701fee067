"""NVIDIA's genuine driver programs, and browsers, for tests: fetched from Debian's archive, unpacked, never installed.

They are not ours to ship, so each machine fetches them once through apt, with an apt state of its own (the system's
sources and package lists are neither read for packages nor changed), into `$XDG_CACHE_HOME/vcuda-tests/genuine`.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Driver series -> the Debian suite whose non-free component holds it (packages.debian.org, nvidia-graphics-drivers).
SUITES = {"535": "bookworm", "550": "trixie"}
# What is no part of the driver has no series.
FREE = "bookworm", "contrib"
# Programs that bring along what this machine lacks of the packages that they depend on.
WITH_LIBRARIES = {"chromium-headless-shell": ("bookworm", "main")}
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SECONDS = 180


class Unavailable(Exception):
    """The genuine file can't be had on this machine; the message says why. Tests skip with it."""


def nvidia_smi(series: str) -> Path:
    """The genuine `nvidia-smi` of driver series "535" or "550". Raises Unavailable."""
    return _only(_package("nvidia-smi", series), "usr/lib/**/nvidia-smi")


def libcuda(series: str) -> Path:
    """The genuine `libcuda.so.<version>`; it loads and answers look-ups without a card. Raises Unavailable."""
    return _only(_package("libcuda1", series), "usr/**/libcuda.so.*.*")


def libnvidia_ml(series: str) -> Path:
    """The genuine `libnvidia-ml.so.<version>`. Raises Unavailable."""
    return _only(_package("libnvidia-ml1", series), "usr/**/libnvidia-ml.so.*.*")


def nvtop() -> Path:
    """Debian's `nvtop`, of the suite that this project's images are made of. Raises Unavailable."""
    return _only(_package("nvtop", ""), "usr/bin/nvtop")


def chromium() -> tuple[Path, dict[str, str]]:
    """A headless Chromium, and the environment that it needs: this machine's, else Debian's. Raises Unavailable."""
    for name in ("chromium-headless-shell", "chromium"):
        if (found := shutil.which(name)) is not None:
            return Path(found), {}
    folder = _package("chromium-headless-shell", "")
    libraries = {path.parent for path in (folder / "usr/lib/x86_64-linux-gnu").rglob("*.so*")}
    environment = {"LD_LIBRARY_PATH": ":".join(map(str, sorted(libraries)))}
    return _only(folder, "usr/lib/chromium/chromium-headless-shell"), environment


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(path for path in folder.glob(pattern) if path.is_file() and not path.is_symlink())
    if len(found) != 1:
        raise Unavailable(f"{folder} holds {len(found)} files like {pattern}; remove the folder to fetch it again")
    return found[0]


@functools.cache
def _package_or_error(name: str, series: str) -> Path | Unavailable:
    """Remember failures too: without an archive, one time-out per test run is enough."""
    try:
        return _fetched(name, series)
    except Unavailable as error:
        return error


def _package(name: str, series: str) -> Path:
    result = _package_or_error(name, series)
    if isinstance(result, Unavailable):
        raise result
    return result


def _fetched(name: str, series: str) -> Path:
    if series and series not in SUITES:
        raise Unavailable(f"driver series {series!r} is not known; known: {', '.join(SUITES)}")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vcuda-tests" / "genuine"
    target = base / (series or FREE[1]) / name
    if target.is_dir():
        return target
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise Unavailable(f"there is no {tool} here to fetch {name} {series} with")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(base / "lock"):
            if not target.is_dir():
                _fetch(name, series, base, target)
    except OSError as error:
        raise Unavailable(f"the cache {base} can't be written: {error}") from error
    return target


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(name: str, series: str, base: Path, target: Path) -> None:
    suite, component = (SUITES[series], "non-free") if series else WITH_LIBRARIES.get(name, FREE)
    with tempfile.TemporaryDirectory(dir=base, prefix=".fetch-") as text:
        folder = Path(text)
        apt = _private_apt(folder, suite, component)
        _run([*apt, "update"], folder)
        if name in WITH_LIBRARIES:
            _fetch_with_libraries(apt, name, suite, folder)
            (folder / "files").replace(target)
            return
        _run([*apt, "download", name], folder)
        packages = list(folder.glob("*.deb"))
        if len(packages) != 1 or not packages[0].name.startswith(f"{name}_{series}" + ("." if series else "")):
            raise Unavailable(f"{suite}/{component} offers {[p.name for p in packages]}, not {name} {series}")
        _run(["dpkg-deb", "--extract", str(packages[0]), str(folder / "files")], folder)
        (folder / "files").replace(target)


def _fetch_with_libraries(apt: list[str], name: str, suite: str, folder: Path) -> None:
    """Unpack a program and those packages it depends on that this machine, of the same suite, has not installed."""
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    if release.get("VERSION_CODENAME") != suite:
        raise Unavailable(f"{name} comes from Debian {suite} with its libraries, and this machine is another system")
    status = ["-o", "Dir::State::status=/var/lib/dpkg/status", "-o", "Debug::NoLocking=true"]
    wanted = ["--download-only", "--no-install-recommends", "--yes", "install", name]
    _run([*apt, *status, *wanted], folder)
    for package in sorted((folder / "cache/archives").glob("*.deb")):
        _run(["dpkg-deb", "--extract", str(package), str(folder / "files")], folder)


def _private_apt(folder: Path, suite: str, component: str) -> list[str]:
    """An apt-get command line whose sources, lists and cache all live below `folder`."""
    for part in ("lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True)
    (folder / "status").touch()
    signed = f"[arch=amd64 signed-by={KEYRING}] " if KEYRING.exists() else "[arch=amd64] "
    (folder / "sources.list").write_text(f"deb {signed}{_archive()} {suite} {component}\n")
    options = {
        "Dir::State::Lists": folder / "lists",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder / "cache",
        "Dir::Etc::SourceList": folder / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "APT::Sandbox::User": "root",  # the folder is private to us; apt's own user could not enter it
        "Acquire::Retries": "1",
        "Acquire::http::Timeout": "20",
        "APT::Architecture": "amd64",
        "APT::Update::Error-Mode": "any",  # else an unreachable archive is only a warning
    }
    return ["apt-get", "-q", *(part for key, value in options.items() for part in ("-o", f"{key}={value}"))]


def _archive() -> str:
    """The Debian archive that this machine's apt is configured with (it may be a mirror). Raises Unavailable."""
    listing = subprocess.run(
        # Without what `apt-get update` downloads, which a fresh machine does not have yet.
        ["apt-get", "indextargets", "--no-release-info", "--format", "$(REPO_URI) $(COMPONENT)"],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    for line in listing.stdout.splitlines():
        archive, component = line.split()
        # Debian and its mirrors keep the distribution below `debian`; other vendors' archives have a main, too.
        if component == "main" and archive.rstrip("/").endswith("/debian"):
            return archive.rstrip("/")
    raise Unavailable("apt on this machine is configured with no Debian archive")


def _run(command: list[str], folder: Path) -> None:
    try:
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} did not answer within {SECONDS} s") from error
    if result.returncode != 0:
        words = (result.stderr or result.stdout).strip().splitlines()
        raise Unavailable(f"{command[0]} {command[-1]} failed: {' / '.join(words)[:400]}")
