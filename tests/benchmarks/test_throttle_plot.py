"""The plots of benchmarks/throttle.py are files that one can look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks._throttle_plot import plot_caps

pytest.importorskip("matplotlib")


def test_the_caps_are_drawn(tmp_path: Path) -> None:
    samples = {"kernels of 10 us": {10: [9.5, 10.5], 90: [90.0, 89.0]}, "a graph": {10: [10.0], 90: []}}
    said = plot_caps(tmp_path / "made", samples, "simulated")
    picture = tmp_path / "made" / "caps.png"
    assert str(picture) in said
    assert picture.read_bytes().startswith(b"\x89PNG")
