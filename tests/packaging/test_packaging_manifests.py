"""`python -m deploy.manifests`: writes what is out of date, and with --check only says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deploy import manifests


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(manifests, "FOLDER", tmp_path / "kubernetes")
    return tmp_path / "kubernetes"


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", [manifests.COMMAND, *words])
    return manifests.main()


def test_what_is_out_of_date_is_named_with_the_command_and_then_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = list(manifests.FILES)
    assert run(monkeypatch, "--check") == 1
    told = capsys.readouterr().err
    assert told == f"out of date: {', '.join(names)}; run {manifests.COMMAND}\n" and not list(folder.iterdir())
    assert run(monkeypatch) == 0
    assert sorted(file.name for file in folder.iterdir()) == sorted(names)
    assert run(monkeypatch, "--check") == 0
    changed = folder / names[1]
    changed.write_text(changed.read_text() + "# by hand\n")
    assert run(monkeypatch, "--check") == 1
    assert capsys.readouterr().err == f"out of date: {names[1]}; run {manifests.COMMAND}\n"
    assert run(monkeypatch) == 0 and "by hand" not in changed.read_text()
