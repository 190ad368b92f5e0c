"""The program of docs/recipes/megatron.md trains under ZB-H1 with the losses of Megatron's own schedule, and does so
without a line of ours under ``megatron-pp run``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_pp.plan.ir.spec import OVERLAP
from megatron_pp.tracing.run import load_run
from testkit.pages import PageOutput, code_blocks, run_page, run_torchrun
from tests.functional_tests.megatron_support import needs_megatron

pytestmark = needs_megatron

OUR_LINE = 'megatron_core.install(pipeline_schedule="zb_h1")\n'
OUR_IMPORTS = re.compile(r"^from megatron_pp\.integrations.*\n", re.MULTILINE)
# One write: both ranks write to the launcher's pipe.
FIELDS = """
import sys
fields = config.overlap_p2p_comm, config.batch_p2p_comm, hasattr(config, "trace_dir")
sys.stdout.write(" ".join(map(str, ("config", *fields))) + "\\n")
"""


@pytest.fixture(scope="module")
def code() -> str:
    return code_blocks("docs/recipes/megatron.md")["megatron_cpu.py"]


@pytest.fixture(scope="module")
def outputs(code: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[PageOutput]]:
    """Return each rank's output, with our line and under Megatron's own schedule."""
    assert code.count(OUR_LINE) == 1
    assert code.count("cpu_stand_in.redirect()") == 1
    theirs = code.replace("cpu_stand_in.redirect()", "").replace(OUR_LINE, "megatron_core.uninstall()\n")
    files = {"ours.py": code, "theirs.py": theirs}
    return run_page(files, list(files), tmp_path_factory.mktemp("recipe"), 2)


def test_the_program_has_the_losses_of_megatrons_schedule(outputs: dict[str, list[PageOutput]]) -> None:
    ours, megatron = ([output.printed for output in outputs[name]] for name in ("ours.py", "theirs.py"))
    assert ours[0] == "", "the first stage reports nothing"
    losses = [float(line.split()[1]) for line in ours[1].splitlines()]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert ours == megatron
    assert not outputs["ours.py"][0].warnings.count("does not serve")
    assert not outputs["ours.py"][0].warnings.count("splits backwards, but")


def test_an_unchanged_program_overlaps_without_virtual_stages(
    code: str, outputs: dict[str, list[PageOutput]], tmp_path: Path
) -> None:
    """Settings come from a flag before the file and from the environment; the program's config is not changed.
    test_run_under_torchrun.py tests torchrun itself."""
    program = OUR_IMPORTS.sub("", code.replace(OUR_LINE, "")) + FIELDS
    assert "megatron_pp" not in program.replace("megatron_pp.tools.parity", "")
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "settings.toml").write_text('trace_steps = "2-3"\noverlap_p2p_comm = false\n')
    flags = "--settings settings.toml --overlap-p2p-comm --strict"
    torchrun = "MEGATRON_PP_TRACE_DIR=traces torchrun --standalone --nproc-per-node 2"
    ours = run_torchrun(f"{torchrun} -m megatron_pp run {flags} train.py", tmp_path)
    megatrons = [line for output in outputs["theirs.py"] for line in output.printed.splitlines()]
    lines = [line for output in ours for line in output.printed.splitlines()]
    assert sorted(lines) == sorted([*megatrons, *["config False True False"] * 2])
    run = load_run(tmp_path / "traces")
    assert run.steps == (2, 3)
    spec = run.plan(2).spec
    assert (spec.policy, spec.num_chunks, spec.pipeline_size) == (OVERLAP, 1, 2)
