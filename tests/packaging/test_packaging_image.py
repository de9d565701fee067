"""The image: an OCI archive written without an engine, and a Dockerfile whose every source is in the checkout."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.support import image_files, image_oci

ROOT = image_files.ROOT
DOCKERFILE = ROOT / "deploy/images/Dockerfile"
NAME = "example.com/team/vcuda:1.2"


@pytest.fixture
def layers(tmp_path: Path) -> list[image_oci.Layer]:
    made = []
    for name, text in (("below", "old"), ("above", "new")):
        folder = tmp_path / name
        (folder / "usr/bin").mkdir(parents=True)
        (folder / "usr/bin/program").write_text(text)
        (folder / "usr/bin/program").chmod(0o4755)
        (folder / "usr/bin/link").symlink_to("program")
        made.append(image_oci.Layer.of(folder, tmp_path / f"{name}.tar"))
    return made


def test_the_archive_is_an_image_layout_whose_blobs_have_their_digests(
    tmp_path: Path, layers: list[image_oci.Layer]
) -> None:
    archive = tmp_path / "image.tar"
    image_oci.write(archive, NAME, layers, ["gpu-manager"])
    manifest = image_oci.verify(archive)
    assert [layer["digest"] for layer in manifest["layers"]] == [layer.digest for layer in layers]
    with tarfile.open(archive) as tar:
        members = {item.name: item for item in tar}
        assert json.loads(tar.extractfile("oci-layout").read()) == {"imageLayoutVersion": "1.0.0"}  # type: ignore[union-attr]
        (described,) = json.loads(tar.extractfile("index.json").read())["manifests"]  # type: ignore[union-attr]
        config = json.loads(tar.extractfile("blobs/" + manifest["config"]["digest"].replace(":", "/")).read())  # type: ignore[union-attr]
    assert described["annotations"]["io.containerd.image.name"] == NAME
    assert described["annotations"]["org.opencontainers.image.ref.name"] == "1.2"
    assert config["rootfs"]["diff_ids"] == [layer.digest for layer in layers]
    assert config["config"]["Cmd"] == ["gpu-manager"]
    assert {item.uid for item in members.values()} == {0}
    with tarfile.open(layers[0].file) as tar:
        program, link = tar.getmember("usr/bin/program"), tar.getmember("usr/bin/link")
    assert program.mode == 0o4755
    assert (program.uid, program.gid, program.mtime, program.uname) == (0, 0, 0, "")
    assert link.issym()


def test_the_same_files_are_the_same_bytes(tmp_path: Path, layers: list[image_oci.Layer]) -> None:
    first, second = tmp_path / "first.tar", tmp_path / "second.tar"
    image_oci.write(first, NAME, layers, ["x"])
    (tmp_path / "below/usr/bin/program").touch()
    again = image_oci.Layer.of(tmp_path / "below", tmp_path / "again.tar")
    image_oci.write(second, NAME, [again, layers[1]], ["x"])
    assert first.read_bytes() == second.read_bytes()


def test_damage_is_seen(tmp_path: Path, layers: list[image_oci.Layer]) -> None:
    archive = tmp_path / "image.tar"
    image_oci.write(archive, NAME, layers, ["x"])
    data = archive.read_bytes()
    archive.write_bytes(data.replace(b"old", b"odd"))
    with pytest.raises(ValueError, match="damaged"):
        image_oci.verify(archive)


def test_nothing_is_left_of_an_archive_that_could_not_be_written(tmp_path: Path, layers: list[image_oci.Layer]) -> None:
    layers[1].file.unlink()
    with pytest.raises(FileNotFoundError):
        image_oci.write(tmp_path / "image.tar", NAME, layers, ["x"])
    assert not list(tmp_path.glob("*image.tar*"))


def test_our_layer_has_the_commands_and_the_shims(tmp_path: Path) -> None:
    image_files.product(tmp_path)
    site = image_files.site_packages(tmp_path)
    assert (site / "vcuda/lib/shim/libcuda.so.1").is_file()
    assert not (site / "vcuda/src").exists()
    for name in image_files.COMMANDS:
        assert (tmp_path / "usr/local/bin" / name).stat().st_mode & 0o111


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", DOCKERFILE.read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def test_every_file_that_the_dockerfile_copies_is_in_the_checkout_and_reaches_the_engine() -> None:
    known = {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "CMD"}
    assert {name for name, _ in instructions()} == known
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=20
    ).stdout.splitlines()
    if not tracked:
        pytest.skip("not a git checkout: which files belong to it can't be told")
    ignored = [
        line
        for line in (ROOT / "deploy/images/Dockerfile.dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]

    def reaches(file: str) -> bool:
        parts = [file, *(str(parent) for parent in Path(file).parents)]
        return not any(
            fnmatch.fnmatch(f"/{part}", f"*/{rule.removeprefix('**/')}") for part in parts for rule in ignored
        )

    copied: list[str] = []
    for name, words in instructions():
        if name == "COPY" and "--from" not in words:
            copied += words.split()[:-1]
    for source in copied:
        files = [file for file in tracked if file == source or file.startswith(f"{source}/")]
        assert files, f"COPY {source}: nothing of that name"
        assert all(reaches(file) for file in files), f"COPY {source}: .dockerignore keeps a part of it out"
    # What setuptools packages must be there, or the wheel in the image lacks it.
    for package in (*image_files.PACKAGES, "setup.py", "pyproject.toml", "MANIFEST.in"):
        assert package in copied
    # The stand-ins of a cluster have no place in a cluster.
    assert not {"localcluster", "deploy", "tests", "."} & set(copied)


def test_both_stages_of_the_dockerfile_have_the_same_distribution() -> None:
    """The interpreter's path is in the virtual environment that the last stage copies."""
    bases = [words.split()[0] for name, words in instructions() if name == "FROM"]
    assert len(bases) == 2
    assert len(set(bases)) == 1
    assert instructions()[-1] == ("CMD", '["gpu-manager"]')
