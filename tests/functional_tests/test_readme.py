"""What the README and the quick start show works as it stands there, and what commands made in them is up to date."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUICK_START = ROOT / "docs" / "quick_start.md"


def run_example(folder: Path, code: str) -> list[str]:
    """The lines of losses that the example prints on two ranks."""
    script = folder / "example.py"
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if re.fullmatch(r"\d+ [\d.]+", line)]


def test_the_library_example_trains_the_same_under_any_schedule(tmp_path: Path) -> None:
    text = QUICK_START.read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    other_schedule = re.search(r'`(pipeline_schedule="\w+")`', text)
    assert code is not None
    assert other_schedule is not None
    lines = run_example(tmp_path, code[1])
    losses = [float(line.split()[1]) for line in lines]
    assert len(losses) == 5
    assert losses[-1] < 0.9 * losses[0]
    changed = code[1].replace("overlap_p2p_comm=True", f"overlap_p2p_comm=True, {other_schedule[1]}")
    assert changed != code[1]
    assert run_example(tmp_path, changed) == lines


@pytest.mark.parametrize("command", ["config_table.py", "readme_tables.py", "readme_picture.py"])
def test_what_a_command_made_is_up_to_date(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(ROOT / "scripts" / command)
    monkeypatch.setattr(sys, "argv", [script, "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    assert ended.value.code in (0, None)
