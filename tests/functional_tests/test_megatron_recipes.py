"""docs/recipes/megatron.md: its program trains under ZB-H1, with the losses of Megatron's own schedule."""

from __future__ import annotations

from pathlib import Path

from tests.functional_tests.megatron_support import needs_megatron
from tests.harness.pages import code_blocks, run_page

pytestmark = needs_megatron

THREE_LINES = """\
megatron_core.install()
config.pipeline_schedule = "zb_h1"
split_weight_grad([gpt])
"""


def test_the_program_has_the_losses_of_megatrons_schedule(tmp_path: Path) -> None:
    code = code_blocks("docs/recipes/megatron.md")["megatron_cpu.py"]
    assert code.count(THREE_LINES) == 1
    assert code.count("cpu_shim.redirect()") == 1
    theirs = code.replace("cpu_shim.redirect()", "").replace(THREE_LINES, "megatron_core.uninstall()\n")
    outputs = run_page({"ours.py": code, "theirs.py": theirs}, ["ours.py", "theirs.py"], tmp_path, 2)
    ours, megatron = ([output.printed for output in outputs[name]] for name in ("ours.py", "theirs.py"))
    assert ours[0] == "", "the first stage reports nothing"
    losses = [float(line.split()[1]) for line in ours[1].splitlines()]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert ours == megatron
    assert not outputs["ours.py"][0].warnings.count("does not serve")
    assert not outputs["ours.py"][0].warnings.count("splits backwards, but")
