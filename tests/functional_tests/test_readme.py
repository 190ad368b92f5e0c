"""What the quick start shows works as it stands there, and what commands made in the README and docs/ is up to date."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.pages import ROOT, code_blocks, run_page

QUICK_START = "docs/quick_start.md"


def test_the_quick_start_trains_the_same_under_any_schedule(tmp_path: Path) -> None:
    example = code_blocks(QUICK_START)["example.py"]
    named = re.search(r'`(SCHEDULE = "\w+")`', (ROOT / QUICK_START).read_text())
    assert named is not None
    other = re.sub(r'SCHEDULE = "\w+"', named[1], example)
    assert other != example
    outputs = run_page({"example.py": example, "other.py": other}, ["example.py", "other.py"], tmp_path, 2)
    first, last = (output.printed for output in outputs["example.py"])
    losses = [float(line.split()[1]) for line in last.splitlines()]
    assert first == ""
    assert len(losses) == 5
    assert losses[-1] < 0.9 * losses[0]
    assert [output.printed for output in outputs["other.py"]] == [last, first]  # in a V the last stage is on rank 0


@pytest.mark.parametrize("command", ["config_table.py", "readme_tables.py", "readme_picture.py"])
def test_what_a_command_made_is_up_to_date(command: str) -> None:
    arguments = [sys.executable, str(ROOT / "scripts" / command), "--check"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
