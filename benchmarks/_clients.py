"""Where a Python with PyTorch, CuPy and the like may be: of `make gpu-clients`, of the machine, or named by who runs us."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

OWN = Path(__file__).resolve().parents[1] / ".venv" / "gpu-clients" / "bin" / "python"  # `make gpu-clients`
SETTING = "GPU_CLIENTS_PYTHON"


def pythons() -> list[str]:
    """Those to look at, in this order: the one in GPU_CLIENTS_PYTHON, ours, this one, the machine's first on PATH and /usr/bin/python3."""
    outside = [folder for folder in os.get_exec_path() if not folder.startswith(sys.prefix)]
    first = shutil.which("python3", path=":".join(outside))
    found = [os.environ.get(SETTING), str(OWN), sys.executable, first, "/usr/bin/python3"]
    return list(dict.fromkeys(python for python in found if python))


def why_none(module: str) -> str:
    return f"no Python here has {module}: `make gpu-clients` installs it, {SETTING} names another"
