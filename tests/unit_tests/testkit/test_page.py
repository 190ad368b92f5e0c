"""The page of the testkit: its example prints what the page says, and the testkit imports no test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from testkit.pages import ROOT, code_blocks

PAGE = "docs/testkit.md"


@pytest.mark.slow
def test_the_example_prints_what_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "layer.py").write_text(code_blocks(PAGE)["layer.py"])
    done = subprocess.run(
        [sys.executable, "layer.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == code_blocks(PAGE, "text")["block1"], done.stderr


def test_only_tests_import_tests() -> None:
    imports = re.compile(r"^\s*(?:from|import) tests\b", re.MULTILINE)
    folders = ("testkit", "benchmarks", "scripts", "examples", "megatron_pp")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    assert [str(file.relative_to(ROOT)) for file in files if imports.search(file.read_text())] == []
