"""A self-signed certificate for loopback, made by openssl if there is one: kubectl sends its token only over TLS."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_DAYS = "30"


@dataclass(frozen=True)
class Certificate:
    """Files of one certificate; it is its own authority."""

    certificate: Path
    key: Path


def make(directory: Path) -> Certificate | None:
    """Make a certificate for 127.0.0.1 and localhost in `directory`; None where openssl is missing or too old."""
    openssl = shutil.which("openssl")
    if openssl is None:
        return None
    result = Certificate(directory / "server.crt", directory / "server.key")
    command = [
        openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", _DAYS,
        "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost",
        "-keyout", str(result.key), "-out", str(result.certificate),
    ]  # fmt: skip
    finished = subprocess.run(command, capture_output=True, check=False, timeout=30)
    if finished.returncode != 0:
        return None
    result.key.chmod(0o600)
    return result
