"""Examples that compare themselves with one process: a Llama of torch's own modules, under any schedule, and attention
residuals, whose blocks skip stages.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.pages import ROOT, PageOutput, run_page

RESIDUALS = "attention_residuals.py"
SCHEDULES = ["interleaved_1f1b", "zb_v"]
_LINE = r"step \d rank \d: (torchtitan|own Llama), loss [\d.]+, largest difference (\S+)"


def _run(example: str, *arguments: str) -> str:
    path = str(ROOT / "examples" / example)
    return f"import runpy, sys\nsys.argv[1:] = {list(arguments)}\nrunpy.run_path({path!r}, run_name='__main__')"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[PageOutput]]:
    files = {f"{name}.py": _run("llama_stages.py", "--schedule", name, "--steps", "1") for name in SCHEDULES}
    files[RESIDUALS] = _run(RESIDUALS, "--chunks", "2", "--steps", "1")
    folder: Path = tmp_path_factory.mktemp("llama")
    return run_page(files, list(files), folder, 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_its_numbers_are_those_of_one_process(outputs: dict[str, list[PageOutput]], schedule: str) -> None:
    for output in outputs[f"{schedule}.py"]:
        steps = re.findall(_LINE, output.printed)
        assert len(steps) == 1, output.printed
        assert [float(difference) for _, difference in steps] == [0.0]


def test_blocks_that_skip_stages(outputs: dict[str, list[PageOutput]]) -> None:
    printed = [output.printed for output in outputs[RESIDUALS]]
    assert "blocks sent per microbatch, and on the busiest hop: (5, 2)" in printed[0]
    for rank, text in enumerate(printed):
        found = re.search(rf"step 1 rank {rank}: loss [\d.]+, largest difference (\S+)", text)
        assert found is not None, text
        assert float(found[1]) < 1e-12
