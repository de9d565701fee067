"""`benchmarks.card_memory`: each step of the table is taken on the simulated card, and what is given back is what was taken."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import card_memory

GIVEN_BACK = ("  destroyed", "  both freed", "  freed", "  all destroyed", "  unloaded")


def test_what_is_taken_is_given_back(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert card_memory.main(["--driver", "simulated", "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert written["machine"]["card"] == "simulated"
    rows = [tuple(row) for row in written["rows"]]
    assert rows[0][0] == "the first context" and rows[0][1] > 0
    assert dict(rows)["cuMemAlloc of 1048577 bytes"] == 2048
    plain = rows[1 : [what for what, _ in rows].index("an array of 32 x 32, 1 x 8 bits")]
    assert any(what in GIVEN_BACK and kib < 0 for what, kib in plain)
    assert sum(kib for _, kib in plain) == 0
