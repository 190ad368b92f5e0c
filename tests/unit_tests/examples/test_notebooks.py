"""The notebooks run from top to bottom, without torch, and are kept without outputs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.pages import ROOT

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))

# Jupyter's display is stood in for: what a cell shows must be a picture that parses.
PRELUDE = """
import sys, types
from xml.etree import ElementTree
sys.modules["torch"] = None
shown = []
display = types.ModuleType("IPython.display")
display.SVG = ElementTree.fromstring
display.display = shown.append
ipython = types.ModuleType("IPython")
ipython.version_info = (9, 0)  # matplotlib asks
sys.modules["IPython"], sys.modules["IPython.display"] = ipython, display
"""
END = "\nprint([picture.tag for picture in shown])\n"


def _cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_there_is_one() -> None:
    assert [path.name for path in NOTEBOOKS] == ["schedules.ipynb"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path) -> None:
    code = "\n".join("".join(cell["source"]) for cell in _cells(path))
    command = [sys.executable, "-c", PRELUDE + code + END]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    pictures = done.stdout.splitlines()[-1]
    assert pictures == str(["{http://www.w3.org/2000/svg}svg"] * code.count("display(SVG("))
    assert "1f1b " in done.stdout


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_has_no_outputs(path: Path) -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in _cells(path))
