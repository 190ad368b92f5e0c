"""A small run of scripts/soak.py finds no fault, and writes its own part of a page and no other part."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).resolve().parents[2] / "scripts" / "soak.py"
BEGIN = "<!-- made by scripts/soak.py; do not edit -->"
END = "<!-- end of what scripts/soak.py made -->"


def test_a_short_soak_writes_its_part_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{BEGIN}\nof the last run\n{END}\n\nafter\n")
    counts = ["--episodes", "1", "--steps", "3", "--clean-steps", "3", "--ranks", "2", "--p2p-timeout", "20"]
    small = ["--kinds", "exception", "--schedules", "1f1b", *counts]
    run = subprocess.run(
        [sys.executable, str(SOAK), *small, "--output", str(page)], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith("0 complaints\n")
    text = page.read_text()
    assert text.startswith(f"before\n\n{BEGIN}\n")
    assert text.endswith(f"{END}\n\nafter\n")
    assert "of the last run" not in text
    assert "| exception | 1F1B | gloo | 1 | 1 |" in text
