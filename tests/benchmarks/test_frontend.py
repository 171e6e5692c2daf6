"""The load benchmark of the frontend runs and counts every token."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "frontend.py"


def test_a_quick_run(tmp_path: Path) -> None:
    path = tmp_path / "frontend.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--case", "paced", "--json", str(path), "--profile", str(tmp_path / "profile")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    written = json.loads(path.read_text())["cases"]["paced"]
    assert set(written) == {"canter", "echo"} and (tmp_path / "profile.paced").stat().st_size > 0
    for figures in written.values():
        assert all(value > 0 for value in figures.values())
    assert written["canter"]["tokens_per_chunk"] >= 1
