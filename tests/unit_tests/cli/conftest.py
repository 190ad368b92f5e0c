"""The command, called in this process."""

from __future__ import annotations

import pytest

from megatron_pp.cli.command_line import main

MODEL = ["--layers", "16", "--hidden-size", "1024", "--seq-length", "1024", "--vocab-size", "32000"]


@pytest.fixture
def command(capsys, monkeypatch):
    """Run ``megatron-pp ARGUMENTS``: (exit code, what it printed, what it complained about)."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments):
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as stop:  # argparse
            code = stop.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def assert_refused(result, code, *words):
    """One line of complaint with ``words`` in it, and nothing else."""
    assert result[0] == code
    assert result[1] == ""
    assert result[2].count("\n") == 1
    for word in words:
        assert word in result[2]
