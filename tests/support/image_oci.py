"""Writes an OCI image archive (image-spec 1.0: layout, index, manifest, config, tar layers) from folders, without an engine.

The same folders give the same bytes: owners are root, times are the epoch, names are sorted.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_EPOCH = "1970-01-01T00:00:00Z"
_KIND = "application/vnd.oci.image"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Layer:
    """A layer in a file of its own, which several images may share. `digest` is that of the uncompressed tar."""

    file: Path
    digest: str

    @classmethod
    def of(cls, folder: Path, file: Path) -> Layer:
        """Pack what is below `folder` into `file`. Raises OSError."""
        with file.open("wb") as target:
            writer = _Hashing(target)
            with tarfile.open(fileobj=writer, mode="w|") as tar:  # type: ignore[call-overload]  # only write is used
                for entry in sorted(folder.iterdir()):
                    tar.add(entry, arcname=entry.name, filter=_plain)
        return cls(file, f"sha256:{writer.digest.hexdigest()}")


class _Hashing:
    def __init__(self, target: IO[bytes]) -> None:
        self._target = target
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._target.write(data)


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


def write(archive: Path, name: str, layers: Sequence[Layer], command: Sequence[str]) -> None:
    """Write the image `name` (registry/repository:tag) to `archive`; complete or not at all. Raises OSError."""
    config = _json(
        {
            "created": _EPOCH,
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": [f"PATH={_PATH}"], "Cmd": list(command)},
            "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers]},
            "history": [{"created": _EPOCH} for _ in layers],
        }
    )
    described = [
        {
            "mediaType": f"{_KIND}.layer.v1.tar",
            "digest": layer.digest,
            "size": layer.file.stat().st_size,
        }
        for layer in layers
    ]
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": f"{_KIND}.manifest.v1+json",
            "config": _descriptor(f"{_KIND}.config.v1+json", config),
            "layers": described,
        }
    )
    # The first annotation is the specification's, the second one what containerd's import takes a whole name from.
    names = {"org.opencontainers.image.ref.name": name.rpartition(":")[2], "io.containerd.image.name": name}
    index = _json(
        {
            "schemaVersion": 2,
            "mediaType": f"{_KIND}.index.v1+json",
            "manifests": [{**_descriptor(f"{_KIND}.manifest.v1+json", manifest), "annotations": names}],
        }
    )
    temporary = archive.with_name(f".{archive.name}.new")
    try:
        with tarfile.open(temporary, "w") as tar:
            _add(tar, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
            _add(tar, "index.json", index)
            for blob in (config, manifest):
                _add(tar, _blob(_digest(blob)), blob)
            for layer in {layer.digest: layer for layer in layers}.values():
                tar.add(layer.file, arcname=_blob(layer.digest), filter=_plain)
        temporary.replace(archive)
    finally:
        temporary.unlink(missing_ok=True)


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _descriptor(kind: str, data: bytes) -> dict[str, Any]:
    return {"mediaType": kind, "digest": _digest(data), "size": len(data)}


def _blob(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def verify(archive: Path) -> dict[str, Any]:
    """The manifest of an archive whose every blob has the digest and the size that it is named by. Raises ValueError."""
    with tarfile.open(archive) as tar:
        index = json.loads(_read(tar, "index.json"))
        (described,) = index["manifests"]
        manifest: dict[str, Any] = json.loads(_checked(tar, described))
        _checked(tar, manifest["config"])
        for layer in manifest["layers"]:
            _checked(tar, layer, keep=False)
    return manifest


def _read(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    if file is None:
        raise ValueError(f"{name} is no file")
    return file.read()


def _checked(tar: tarfile.TarFile, described: Mapping[str, Any], *, keep: bool = True) -> bytes:
    name = _blob(described["digest"])
    file = tar.extractfile(name)
    if file is None:
        raise ValueError(f"{name} is no file")
    digest, size, kept = hashlib.sha256(), 0, []
    while data := file.read(_CHUNK):
        digest.update(data)
        size += len(data)
        if keep:
            kept.append(data)
    if (f"sha256:{digest.hexdigest()}", size) != (described["digest"], described["size"]):
        raise ValueError(f"{name} is damaged")
    return b"".join(kept)
