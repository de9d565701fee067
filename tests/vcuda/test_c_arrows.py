"""Who includes whom in the C code: what the check accepts and what it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from vcuda._build import arrows

FLOORS = {"low": (), "high": ("low",)}


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_our_own_code_points_downward() -> None:
    assert arrows.violations() == []


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"low/a.c": '#include "high/b.h"\n', "high/b.h": ""},
            'low/a.c: "high/b.h" is in high, which low may not',
        ),
        (
            {"low/a.h": '#include "low/b.h"\n', "low/b.c": '#include "low/a.h"\n', "low/b.h": ""},
            "in a circle",
        ),
        ({"low/a.c": '#include "low/gone.h"\n'}, '"low/gone.h" does not exist'),
        ({"cellar/a.c": ""}, "the folder cellar has no floor"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, files: dict[str, str], words: str) -> None:
    assert words in "\n".join(arrows.violations(tree(tmp_path, files), FLOORS))


def test_an_arrow_downward_is_right(tmp_path: Path) -> None:
    files = {"high/b.c": '#include "low/a.h"\n#include <stdio.h>\n', "low/a.h": ""}
    assert arrows.violations(tree(tmp_path, files), FLOORS) == []
