"""The image's files run without anything of this machine, and `python -m tests.support.image` says what it can't write."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import vcuda
from tests.support import image as command
from tests.support import image_files, image_oci


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change into the image's root")
def test_both_commands_run_in_the_image_and_find_nothing_else(tmp_path: Path) -> None:
    image_files.runtime(tmp_path)
    image_files.product(tmp_path)
    for name in image_files.COMMANDS:
        done = subprocess.run(
            ["chroot", str(tmp_path), f"/usr/local/bin/{name}", "--version"],
            capture_output=True, text=True, timeout=60, check=False,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        assert vcuda.__version__ in done.stdout, done.stderr
    site = image_files.site_packages(tmp_path)
    # What the product requires is there with what that requires, its tests and the developers' tools are not.
    found = {
        distribution.metadata["Name"].lower() for distribution in importlib.metadata.distributions(path=[str(site)])
    }
    assert {"grpcio", "httptools", "uvloop", "mdurl"} <= found
    assert not {"pytest", "mypy", "vcuda-gpu-manager"} & found
    assert not list(site.glob("*/tests")) and not list(site.rglob("__pycache__"))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image of two files: how they come together is what counts here."""
    for name in ("runtime", "product"):
        monkeypatch.setattr(image_files, name, lambda root, name=name: (root / name).write_text(name))


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tests.support.image", *words])
    return command.main()


def test_the_command_writes_an_image_of_two_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], small: None
) -> None:
    archive = tmp_path / "image.tar"
    assert run(monkeypatch, str(archive), "--name", "example.com/vcuda:7") == 0
    assert capsys.readouterr().out == f"{archive}: example.com/vcuda:7, 0 MiB\n"
    assert len(image_oci.verify(archive)["layers"]) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["{folder}/image.tar", "--name", "example.com:5000/vcuda"],
            "--name example.com:5000/vcuda has no tag",
        ),
        ([], "the following arguments are required: archive"),
    ],
)
def test_a_command_that_can_name_no_image_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    told: str,
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *(word.format(folder=tmp_path) for word in words))
    assert told in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_without_shims_there_is_no_image_but_the_command_that_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(image_files, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, str(tmp_path / "image.tar"))
    assert "the shims are not built; run `python -m vcuda._build` first" in capsys.readouterr().err


def test_an_archive_that_cannot_be_written_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], small: None
) -> None:
    archive = tmp_path / "missing" / "image.tar"
    assert run(monkeypatch, str(archive)) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"the image can't be written to {archive}: ") and "No such file" in error


@pytest.mark.parametrize("damaged", ["index.json", "blobs"])
def test_an_archive_with_a_folder_in_a_files_place_is_no_image(tmp_path: Path, damaged: str) -> None:
    source, archive = tmp_path / "whole.tar", tmp_path / "image.tar"
    (tmp_path / "layer").mkdir()
    image_oci.write(source, "a:1", [image_oci.Layer.of(tmp_path / "layer", tmp_path / "layer.tar")], ["x"])
    with tarfile.open(source) as whole, tarfile.open(archive, "w") as tar:
        for item in whole:
            if item.name.startswith(damaged):
                item.type, item.size = tarfile.DIRTYPE, 0
            tar.addfile(item, whole.extractfile(item.name) if item.isreg() else None)
    with pytest.raises(ValueError, match=f"{damaged}.* is no file"):
        image_oci.verify(archive)
