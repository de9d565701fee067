"""The native build: sources are compiled side by side and once each, and a failure tells whose it is in gcc's words."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from vcuda._build import ffi, gcc, native


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that notes each of its calls in the file returned."""
    log, program = tmp_path / "calls", tmp_path / "cc"
    program.write_text(f'#!/bin/sh\necho "$@" >>{shlex.quote(str(log))}\nexec gcc "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("CC", str(program))
    return log


def source(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_source_is_compiled_once_for_all_that_ask_with_the_same_flags(tmp_path: Path, calls: Path) -> None:
    one, two = source(tmp_path, "one.c", "int one;"), source(tmp_path, "two.c", "int two;")
    with gcc.Objects(tmp_path) as objects:
        first = objects.begin([one, two], ["-O1"], "a")
        second = objects.begin([one], ["-O1"], "b")
        other = objects.begin([one], ["-O2"], "c")
        assert first[0].result() == second[0].result() != other[0].result()
        made = [each.result() for each in (*first, *other)]
    assert all(path.stat().st_size for path in made)
    assert len(calls.read_text().splitlines()) == 3


def test_sources_are_compiled_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two compilers fails unless the other one has begun before it ends."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    program = tmp_path / "cc"
    program.write_text(
        "#!/bin/sh\n: >$5.begun\n"
        f"for try in $(seq 100); do [ $(ls {shlex.quote(str(tmp_path))}/*.begun | wc -l) = 2 ] && exit; sleep 0.1; done\n"
        "echo alone >&2; exit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("CC", str(program))
    with gcc.Objects(tmp_path) as objects:
        for each in objects.begin([source(tmp_path, name, "") for name in ("one.c", "two.c")], ["-O1"], "x"):
            each.result()


def test_a_broken_source_names_the_library_and_shows_the_compilers_words(tmp_path: Path) -> None:
    broken = source(tmp_path, "broken.c", "int main(void) { return nothing; }")
    with pytest.raises(gcc.BuildError) as error, gcc.Objects(tmp_path) as objects:
        objects.begin([broken], ["-O1"], "cannot build this")[0].result()
    assert str(error.value).startswith("cannot build this: gcc -O1 -c")
    assert "nothing" in str(error.value) and "undeclared" in str(error.value)


def test_a_compiler_that_is_not_there_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(gcc.BuildError, match=r"no-such-compiler can't be executed .*; install gcc"):
        native.build(tmp_path, ["nvml-driver-stub"])


def test_a_library_is_built_when_stale_only_and_replaced_whole(tmp_path: Path, calls: Path) -> None:
    assert native.build(tmp_path, ["nvml-driver-stub"]) == ["nvml-driver-stub"]
    library = tmp_path / "build/libnvidia-ml-driver.so"
    begun, inode = calls.read_text(), library.stat().st_ino
    assert native.build(tmp_path, ["nvml-driver-stub"]) == []
    assert calls.read_text() == begun
    with library.open() as mapped:  # as by a process that runs: its file stays what it was
        library.with_name(f".{library.name}.inputs").write_text("of older sources")
        assert native.build(tmp_path, ["nvml-driver-stub"]) == ["nvml-driver-stub"]
        assert os.fstat(mapped.fileno()).st_ino == inode != library.stat().st_ino
    assert not [path for path in library.parent.iterdir() if path.is_dir()]


def test_an_unknown_library_is_refused_with_the_known_ones() -> None:
    command = [sys.executable, "-m", "vcuda._build", "no-such-library"]
    result = subprocess.run(command, cwd=native.ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "no-such-library" in result.stderr and "cuda-shim" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_module_is_stale_when_other_sources_make_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that joins the module changes none of the files in it."""
    before = ffi.fingerprint()
    assert ffi.fingerprint() == before
    monkeypatch.setattr(native, "NATIVE_FOLDERS", native.NATIVE_FOLDERS[1:])
    assert ffi.fingerprint() != before
