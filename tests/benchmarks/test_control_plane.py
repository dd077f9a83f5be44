"""benchmarks/control_plane: one small run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.harness import ROOT
from tests import warm


@pytest.mark.slow
@pytest.mark.processes
def test_a_small_run_leaves_results_and_a_picture(tmp_path: Path) -> None:
    line = [warm.python(), "-m", "benchmarks.control_plane", "--workers", "8", "--quick", "--output", str(tmp_path)]
    printed = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=150, check=True).stdout
    assert "calls a tick" in printed
    (found,) = json.loads((tmp_path / "control_plane.json").read_text())["runs"]
    assert found["round"]["calls"] <= 8
    assert found["tick"]["calls"] <= 3
    assert 0 < found["epoch"]["pace"] < 1.2
    assert len(found["death_s"]) == len(found["join_s"]) == 1
    assert (tmp_path / "control_plane.png").exists()
