"""A script that reads its flags with its own parser."""

from __future__ import annotations

from pathlib import Path

from megatron_pp.tools.check.jobs.megatron_flags import read_script

SCRIPT = """
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--num-layers", type=int)
parser.add_argument("--mine")
"""


def test_its_flags_are_read_by_the_table_and_its_own_are_known(tmp_path: Path) -> None:
    """Megatron's parser would refuse a command line without flags that this script does not need."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    job = read_script([str(script), "--num-layers", "4", "--mine", "3", "--numm-layers", "2"], 8)
    assert (job.given, job.validated) == ({"num_layers": 4}, False)
    assert job.unknown == ("--numm-layers",)
    assert job.found[0].text.startswith(f"{script} has its own parser; a table of Megatron's flags was used")
