"""The notebooks run from top to bottom, without torch, and are kept without outputs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from testkit.pages import ROOT

NOTEBOOKS = ROOT / "examples" / "notebooks"

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


@pytest.fixture
def cells() -> list[dict[str, Any]]:
    """The code cells of the only notebook."""
    (notebook,) = NOTEBOOKS.glob("*.ipynb")
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_the_notebook_runs(cells: list[dict[str, Any]]) -> None:
    code = "\n".join("".join(cell["source"]) for cell in cells)
    command = [sys.executable, "-c", PRELUDE + code + END]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    pictures = done.stdout.splitlines()[-1]
    assert pictures == str(["{http://www.w3.org/2000/svg}svg"] * code.count("display(SVG("))
    assert "1f1b " in done.stdout


def test_the_notebook_is_stored_without_outputs(cells: list[dict[str, Any]]) -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
