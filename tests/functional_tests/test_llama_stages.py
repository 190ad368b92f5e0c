"""examples/llama_stages.py: a Llama of torch's own modules has the numbers of one process, under any schedule."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.pages import ROOT, PageOutput, run_page

EXAMPLE = str(ROOT / "examples" / "llama_stages.py")
SCHEDULES = ["interleaved_1f1b", "zb_v"]
_LINE = r"step \d rank \d: (torchtitan|own Llama), loss [\d.]+, largest difference (\S+)"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[PageOutput]]:
    run = f"import runpy, sys\nsys.argv[1:] = {{}}\nrunpy.run_path({EXAMPLE!r}, run_name='__main__')"
    files = {f"{name}.py": run.format(["--schedule", name, "--steps", "1"]) for name in SCHEDULES}
    folder: Path = tmp_path_factory.mktemp("llama")
    return run_page(files, list(files), folder, 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_its_numbers_are_those_of_one_process(outputs: dict[str, list[PageOutput]], schedule: str) -> None:
    for output in outputs[f"{schedule}.py"]:
        steps = re.findall(_LINE, output.printed)
        assert len(steps) == 1, output.printed
        assert [float(difference) for _, difference in steps] == [0.0]
