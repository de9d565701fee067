"""Run an unmodified client program natively and in a share, as this user or as an ordinary one, and read its one line of JSON."""

from __future__ import annotations

import functools
import json
import os
import shutil
import site
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _clients
from tests.gpu.gpu_place import Place

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = Path(__file__).resolve().parent / "clients"
ORDINARY_USER = 60_123
SECONDS = 110
LIMIT_MIB = 2048


@dataclass(frozen=True)
class Share:
    """What a client gets: of one card, and for which user; `folder` holds the ledger and the user's home."""

    place: Place
    folder: Path
    memory_mib: int = LIMIT_MIB
    cores: int = 50
    user: int | None = None

    def command(self, *words: str) -> list[str]:
        """The words that run a command in the share."""
        share = ["--core", str(self.cores), "--memory", f"{self.memory_mib}MiB"]
        python, environment = own_python(self.user)
        variables = [
            f"{name}={value}" for name, value in {"HOME": str(self.folder), "USER": "tenant", **environment}.items()
        ]
        run = [*as_user(self.user), "env", *variables, python, "-m", "vcuda.cli.main", "run", *share]
        return [*run, *self.place.words, "--ledger", str(self.folder / "ledger"), "--", *words]

    def run(self, *words: str, **environment: str) -> Any:
        """Run a command in the share to its end; its last line as JSON, or AssertionError with what it said."""
        return _answer(self.command(*words), environment)


def native(place: Place, *words: str, **environment: str) -> Any:
    """Run a command on the same card without any share; the test is skipped with its last words if it fails there too."""
    try:
        return _answer(list(words), {**place.environment, **environment})
    except AssertionError as error:
        pytest.skip(f"{' '.join(words)} fails without a share too: {str(error).splitlines()[-1]}")


def as_user(user: int | None) -> list[str]:
    """The words that run a command as another user; none for this one."""
    if user is None:
        return []
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]


@functools.cache
def why_not_as(user: int) -> str:
    """Empty if this process can run our programs as that user, else the reason."""
    if os.geteuid() != 0:
        return "only root can become another user"
    if shutil.which("setpriv") is None:
        return "setpriv is not installed here"
    if own_python(user)[0]:
        return ""
    return f"an ordinary user can execute neither {sys.executable} nor another Python of its version"


@functools.cache
def own_python(user: int | None = None) -> tuple[str, dict[str, str]]:
    """The Python that runs `vcuda` for the user, and its environment; ("", {}) if the user may execute none."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    # One of the same version can take this one's packages: of use where only root may enter the folder this one is in.
    packages = {"PYTHONPATH": ":".join([str(ROOT), *site.getsitepackages()])}
    return _first([(sys.executable, {}), (f"/usr/bin/{version}", packages)], "import vcuda._native", user)


@functools.cache
def python_with(module: str, user: int | None = None) -> tuple[str, str]:
    """A Python that has a client's module and that the user may execute; or the reason why there is none."""
    own, environment = own_python(user)
    # For another user there is a Python beside this one, which he may execute.
    candidates = [own if python == sys.executable else python for python in _clients.pythons()]
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    python, _ = _first([(each, environment) for each in candidates if each], probe, user)
    return python, _clients.why_none(module)


def _first(candidates: list[tuple[str, dict[str, str]]], probe: str, user: int | None) -> tuple[str, dict[str, str]]:
    """The first Python in which the probe succeeds for the user."""
    for python, environment in candidates:
        # The shell is there because setpriv keeps root's rights until it has executed something.
        command = [*as_user(user), "sh", "-c", '"$0" -c "$1"', python, probe]
        variables = {**os.environ, **environment}
        result = subprocess.run(command, cwd=ROOT, env=variables, stderr=subprocess.DEVNULL, check=False)
        if result.returncode == 0:
            return python, environment
    return "", {}


def nvcc() -> tuple[Path | None, str]:
    """NVIDIA's compiler, of the toolkit or of its packages for Python; or why there is none."""
    places = [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    for python in _clients.pythons():
        places += [str(path) for path in Path(python).parents[1].glob("lib/python3*/site-packages/nvidia/cu*/bin/nvcc")]
    for place in filter(None, places):
        if os.access(place, os.X_OK):
            return Path(place), ""
    return (
        None,
        "no nvcc on PATH, in /usr/local/cuda/bin or among Python's packages: `make gpu-clients` installs it",
    )


def build_runtime_client(compiler: Path, folder: Path, cudart: str) -> Path:
    """Build the program of the CUDA runtime in `folder`, with the `static` or the `shared` cudart."""
    program = folder / f"runtime_client_{cudart}"
    flags = [f"-cudart={cudart}"]
    packaged = compiler.parents[1] / "lib"
    shared = next(iter(sorted(packaged.glob("libcudart.so.*"))), None)
    if shared is not None:  # Python's packages have no name without a version, which is what the linker looks for
        (folder / "libcudart.so").unlink(missing_ok=True)
        (folder / "libcudart.so").symlink_to(shared)
        flags += [f"-L{folder}", f"-L{packaged}", "-Xlinker", f"-rpath={packaged}"]
    source = str(CLIENTS / "runtime_client.cu")
    subprocess.run([str(compiler), "-O2", source, "-o", str(program), *flags], check=True, timeout=SECONDS)
    return program


def client(name: str) -> str:
    """The path of a client program in tests/gpu/clients."""
    return str(CLIENTS / name)


def _answer(command: list[str], environment: dict[str, str]) -> Any:
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert result.returncode == 0, f"status {result.returncode}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return json.loads(result.stdout.splitlines()[-1])
