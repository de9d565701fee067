"""The check of our tables against a header, and the build command: what can't be had or read is named, with the way out."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.native import hook_coverage as coverage
from vcuda._build import ffi, gcc, native


@pytest.fixture
def interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> coverage.Interface:
    """An interface of two functions, one hooked and one passed through."""
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "memory.def").write_text("VC_HOOK(cuMemAlloc)\n")
    (tmp_path / "table" / "passed.def").write_text('VC_PASSED("asks only", cuInit)\n')
    (tmp_path / "headers").mkdir()
    (tmp_path / "headers" / "cuda.h").write_text("int cuMemAlloc(int); int cuInit(int);\n")
    made = coverage.Interface(
        "CUDA driver", "cuda.h", "nvidia-cuda-runtime", "cu[A-Z]", tmp_path / "table", tmp_path / "page.md"
    )
    monkeypatch.setattr(coverage, "INTERFACES", (made,))
    monkeypatch.setattr(native, "ROOT", tmp_path)
    return made


def test_the_page_is_compared_and_written_only_when_that_is_asked(
    interface: coverage.Interface, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--header", str(tmp_path / "headers")]
    assert coverage.main(words) == 1
    told = f"coverage: {interface.page} is not what the table makes: run this with --write\n"
    assert capsys.readouterr().err == told and not interface.page.exists()
    assert coverage.main([*words, "--write"]) == 0
    assert "**Asks only.** `cuInit`" in interface.page.read_text()
    assert coverage.main(words) == 0
    assert "cuda.h: 2 entry points: 1 hooked, the others passed through" in capsys.readouterr().out
    interface.page.write_text("by hand")
    assert coverage.main(words) == 1


def test_a_name_that_is_listed_twice_is_told_with_the_file(
    interface: coverage.Interface, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (interface.folder / "passed.def").open("a") as file:
        file.write('VC_PASSED("for another reason", cuInit)\n')
    assert coverage.main(["--header", str(tmp_path / "headers")]) == 2
    told = f"coverage: cuInit is listed twice in {interface.folder / 'passed.def'}: keep one of them\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "headers holds neither cuda.h nor nvml.h"),
        ("#error too old a compiler\n", "cannot read cuda.h in "),
    ],
)
def test_a_header_that_cannot_be_read_is_named(
    interface: coverage.Interface,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    told: str,
) -> None:
    header = tmp_path / "headers" / "cuda.h"
    header.unlink() if text is None else header.write_text(text)
    assert coverage.main(["--header", str(tmp_path / "headers")]) == 2
    error = capsys.readouterr().err
    assert told in error and ("too old a compiler" in error or text is None)


def pip(monkeypatch: pytest.MonkeyPatch, files: dict[str, str] | None) -> None:
    """A pip that downloads a package of these files, or none."""
    run = subprocess.run

    def pretend(command: list[str], **options: Any) -> Any:
        if command[1:4] != ["-m", "pip", "download"]:
            return run(command, **options)
        if files is None:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found\n")
        with zipfile.ZipFile(Path(command[command.index("-d") + 1]) / "a-1-py3-none-any.whl", "w") as wheel:
            for name, text in files.items():
                wheel.writestr(name, text)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pretend)


def test_without_a_folder_the_header_comes_out_of_its_package(
    interface: coverage.Interface, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip(monkeypatch, {"nvidia/include/cuda.h": "int cuMemAlloc(int); int cuInit(int); int cuNew(void);\n"})
    assert coverage.main(["--write"]) == 1
    assert capsys.readouterr().err == "coverage: cuNew is new: hook it, or list it in passed.def with the reason\n"


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (
            None,
            "nvidia-cuda-runtime can't be downloaded: ERROR: No matching distribution found; give a folder with --header",
        ),
        ({"x.h": ""}, "nvidia-cuda-runtime holds no cuda.h: look for the package that has it now"),
    ],
)
def test_a_package_without_the_header_is_named_with_the_way_out(
    interface: coverage.Interface, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    files: dict[str, str] | None, told: str,
) -> None:  # fmt: skip
    pip(monkeypatch, files)
    assert coverage.main([]) == 2
    assert capsys.readouterr().err == f"coverage: {told}\n"


def test_variants_of_the_default_stream_are_said_to_come_with_a_function(
    interface: coverage.Interface,
) -> None:
    table = coverage.read_table(interface.folder)
    several = dataclasses.replace(interface, faces=("", "-DX"))
    said = "per-thread-default-stream variants"
    assert said in coverage.page(several, table) and said not in coverage.page(interface, table)


# --- the build command ---
def test_an_unknown_library_is_told_with_those_there_are() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vcuda._build", "no-such"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1 and "no-such" in done.stderr and "Traceback" not in done.stderr
    for library in native.LIBRARIES:
        assert library.name in done.stderr
    assert done.stderr.rstrip().endswith("native)")


def test_the_module_is_built_once_and_again_only_when_the_core_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ffi, "FLAGS", [*ffi.FLAGS, "-O0"])  # soon is better than fast
    assert ffi.build_in_place(tmp_path) == ["native"]
    module = tmp_path / "_native.abi3.so"
    built = module.stat().st_mtime_ns
    assert ffi.build_in_place(tmp_path) == [] and module.stat().st_mtime_ns == built
    (tmp_path / "lib" / ffi.STAMP).write_text("of another core")
    monkeypatch.setattr(gcc, "compiler", lambda: ["false"])
    with pytest.raises(gcc.BuildError, match=r"cannot build vcuda\._native .*python3-dev"):
        ffi.build_in_place(tmp_path)
    assert module.stat().st_mtime_ns == built  # what worked is still there
