"""Fixtures that call the command in the test's process."""

from __future__ import annotations

import shlex

import pytest

from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import ON_NCCL, PlanSpec
from megatron_pp.tools.cli.command_line import main
from testkit.inputs.plan_text import save_plan

MODEL = ["--layers", "16", "--hidden-size", "1024", "--seq-length", "1024", "--vocab-size", "32000"]


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """A function that runs ``megatron-pp LINE ARGUMENTS`` in the test's folder. It returns (exit code, standard output,
    standard error)."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)

    def run(line="", *arguments):
        try:
            code = main([*shlex.split(line), *map(str, arguments)])
        except SystemExit as stop:  # argparse
            code = stop.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Files in the working folder: two compute orders, the first also with communication and as a whole plan."""
    monkeypatch.chdir(tmp_path)
    order = build_plan(PlanSpec("1f1b", 2, 1, 4, device=ON_NCCL))
    save_plan(order, "compute.csv")
    save_plan(order, "comms.csv", "torch-csv-comms")
    save_plan(order, "whole.json")
    save_plan(build_plan(PlanSpec("gpipe", 2, 1, 4)), "other.csv")


def assert_refused(result, code, *words):
    """Asserts that the command printed one line of error with ``words`` in it, and nothing else."""
    assert result[0] == code
    assert result[1] == ""
    assert result[2].count("\n") == 1
    for word in words:
        assert word in result[2]
