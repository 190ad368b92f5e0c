"""What the README shows works as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.harness.pages import ROOT, code_blocks, run_page


def test_the_library_example_trains(tmp_path: Path) -> None:
    files = {"example.py": code_blocks("README.md")["block1"]}
    outputs = run_page(files, ["example.py"], tmp_path, 2)["example.py"]
    printed = "".join(output.printed for output in outputs)
    losses = [float(line.split()[1]) for line in printed.splitlines() if re.fullmatch(r"\d+ [\d.]+", line)]
    assert len(losses) == 5
    assert losses[-1] < 0.9 * losses[0]


def test_the_config_table_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "config_table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
