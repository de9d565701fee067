"""Completion of the `vcuda` command: real shells complete commands, options and, after `--`, programs."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from vcuda.cli import main


@pytest.fixture
def script(tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Path:
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here; on Debian: apt-get install {shell}")
    assert main.main(["completion", shell]) == 0
    path = tmp_path / f"vcuda.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


def completed(script: Path, line: str) -> set[str]:
    """What bash offers at the end of a line."""
    words = line.split(" ")
    asked = (
        f"source {shlex.quote(str(script))}; COMP_WORDS=({' '.join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}; "
        'compopt() { :; }; _vcuda; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    found = subprocess.run(["bash", "--norc", "-c", asked], capture_output=True, text=True, check=True, timeout=60)
    assert found.stderr == ""
    return set(found.stdout.split())


@pytest.mark.parametrize("script", ["bash"], indirect=True)
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("vcuda ", {"run", "ls", "show", "top", "doctor", "sim", "completion", "--help", "--version"}),
        ("vcuda r", {"run"}),
        ("vcuda run --core", {"--core", "--core-limit"}),
        ("vcuda run --core 30 --me", {"--memory"}),
        ("vcuda sim cr", {"create"}),
        ("vcuda sim create --mi", {"--mig"}),
        ("vcuda completion ", {"bash", "zsh", "fish", "--help"}),
        ("vcuda top --nothing", set()),
    ],
)
def test_bash_completes_commands_and_options(script: Path, line: str, offered: set[str]) -> None:
    assert completed(script, line) == offered


@pytest.mark.parametrize("script", ["bash"], indirect=True)
def test_bash_completes_the_command_of_a_run(script: Path) -> None:
    assert "bash" in completed(script, "vcuda run --core 30 -- bas")
    assert "--core" not in completed(script, "vcuda run --core 30 -- --co")


@pytest.mark.parametrize(("script", "check"), [("zsh", "-n"), ("fish", "--no-execute")], indirect=["script"])
def test_other_shells_read_it(script: Path, check: str) -> None:
    found = subprocess.run(
        [script.suffix[1:], check, str(script)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize("script", ["fish"], indirect=True)
def test_fish_completes_commands_and_options(script: Path) -> None:
    def offered(line: str) -> set[str]:
        asked = f"source {script}; complete -C {shlex.quote(line)}"
        found = subprocess.run(
            ["fish", "--no-config", "-c", asked], capture_output=True, text=True, check=False, timeout=60
        )
        return {row.split("\t")[0] for row in found.stdout.splitlines()}

    assert {"run", "top", "sim"} <= offered("vcuda ") and offered("vcuda run --core-") == {"--core-limit"}
    assert offered("vcuda sim cre") == {"create"}
