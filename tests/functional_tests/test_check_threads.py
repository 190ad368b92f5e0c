"""Flags that public threads report as broken, read by Megatron's own parser and checks: `check` finds their fault.

`MEGATRON_CHECKOUT` names a checkout of Megatron-LM; its parser needs the Python and torch of its release.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_pp.tools.check.command import check
from megatron_pp.tools.check.findings import ERROR
from megatron_pp.tools.check.jobs.read import Given, read_job
from tests.unit_tests.tools.check.test_threads import NAMED, Broken

CHECKOUT = Path(os.environ.get("MEGATRON_CHECKOUT", "-"))
REST = "--tokenizer-type NullTokenizer --vocab-size 100 --train-iters 4 --lr 0.001 --mock-data"


@pytest.fixture(scope="module", autouse=True)
def checkout_that_this_python_runs() -> None:
    if not (CHECKOUT / "pretrain_gpt.py").is_file():
        pytest.skip("MEGATRON_CHECKOUT names no checkout of Megatron-LM")
    command = [sys.executable, "-c", "import typing; typing.override"]
    if subprocess.run(command, capture_output=True, timeout=60, check=False).returncode:
        pytest.skip("Megatron-LM's main branch needs Python 3.12")


@pytest.mark.parametrize("broken", [one for one in NAMED if not one.file], ids=lambda one: one.name)
def test_check_names_what_broke_it_by_megatrons_parser(broken: Broken) -> None:
    """A refusal by Megatron counts as a finding of the rule for the same fault."""
    words = [str(CHECKOUT / "pretrain_gpt.py"), *broken.given.split(), *REST.split()]
    job = read_job(Given(words, broken.gpus))
    assert job.validated
    if broken.release != "0.19.2":  # the checkout is of 0.19.2
        job = broken.with_release(job)
    section = next(one for one in check(job, None).sections if one.name == broken.section)
    named = [one for one in section.findings if one.name == broken.finding]
    refused = [one for one in section.findings if one.level == ERROR]
    assert named or (broken.section == "start" and refused)
