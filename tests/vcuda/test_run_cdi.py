"""What lies in the folder of `--cdi-folder`: others' files there neither hang a run nor are followed, and it is not made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vcuda.runs import container
from vcuda.runs.container import Setup
from vcuda.runs.errors import RunError


def describe(folder: Path) -> Path:
    return container.describe("x", Setup((), {}, {}), folder / "no-entry", folder)


def test_a_pipe_beside_it_does_not_hang_the_run(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tencent.com-vcuda-run-y.json")
    assert describe(tmp_path).is_file()


def test_what_is_in_the_way_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tencent.com-vcuda-run-x.json")
    with pytest.raises(RunError, match=r"x\.json is in the way and no file of ours; remove it"):
        describe(tmp_path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text(describe(tmp_path).read_text())
    link = tmp_path / "tencent.com-vcuda-run-y.json"
    link.symlink_to(tmp_path / "elsewhere")
    container._sweep(tmp_path)
    assert link.is_symlink()
    assert not (tmp_path / "tencent.com-vcuda-run-x.json").exists()  # a description whose booking is gone


def test_a_folder_that_is_none_is_refused_and_not_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"--cdi-folder .*file is no folder"):
        describe(tmp_path / "file")
    with pytest.raises(RunError, match=r"--cdi-folder .*none does not exist"):
        describe(tmp_path / "none")
    assert not (tmp_path / "none").exists()
