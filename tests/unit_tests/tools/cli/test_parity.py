"""``megatron-pp parity``: refusals before anything runs."""

from __future__ import annotations

import json

import pytest

from tests.unit_tests.tools.cli.conftest import assert_refused


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('it ran')")
    return str(path)


@pytest.mark.parametrize(
    ("options", "flags", "words"),
    [
        ("--nproc 3", "--tensor-model-parallel-size 2", "--nproc 3 is not a multiple of TP x PP x CP = 2"),
        ("", "--tensor-model-parallel-size two", "a size among the script's flags is not a number"),
        ("--engine their", "", "engine 'their' is not known"),
        ("--nproc 0", "", "argument --nproc: '0' is not a whole number from 1 to 999999999"),
        ("--steps many", "", "argument --steps: 'many' is not a whole number from 1 to 999999999"),
        ("--deadline 0", "", "argument --deadline: '0' is not a number of seconds above 0 and up to 1e9"),
        ("--deadline soon", "", "argument --deadline: 'soon' is not a number of seconds above 0 and up to 1e9"),
        ("--deadline inf", "", "argument --deadline: 'inf' is not a number of seconds above 0 and up to 1e9"),
        ("--junit no/such/folder.xml", "", "no/such/folder.xml: cannot be written"),
        ("--html .", "", ".: cannot be written"),
        ("--checkpoint often", "", "'often'"),
        ("--p2p-timeout soon", "", "p2p-timeout"),
    ],
)
def test_parity_refuses_wrong_arguments(command, script, options, flags, words):
    assert_refused(command("parity", *options.split(), script, *flags.split()), 2, "megatron-pp parity: ", words)


def test_a_script_that_is_not_there_has_no_verdict(command):
    code, said, complaint = command("parity", "--json", "none.py")
    assert (code, json.loads(said)["verdict"]) == (2, None)
    assert "none.py: there is no such file" in complaint


def test_parity_help_lists_its_options(command):
    code, said, _ = command("parity", "--help")
    assert code == 0
    for word in ("--nproc", "--shrink", "--engine", "--json", "--junit", "--html", "exit codes"):
        assert word in said
    assert "parity " in command("--help")[1]
