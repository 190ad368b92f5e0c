"""The runs that a comparison needs: the run that saves a checkpoint, and the run that restores it."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_pp.tools.flags.flags import Flags
from megatron_pp.tools.parity.answers.comparison import ROUNDING
from megatron_pp.tools.parity.command import compare_engines
from megatron_pp.tools.parity.layout import Layout
from megatron_pp.tools.parity.records.parameters import Place
from megatron_pp.tools.parity.records.recorder import FORWARD, PARAMETER, RESTORED, Key, Record, Value
from megatron_pp.tools.parity.runs import Program, Runs

TP2 = ["--tensor-model-parallel-size", "2"]
KEYS = [Key(1, FORWARD, "x"), *(Key(2, kind, "x") for kind in (RESTORED, FORWARD, PARAMETER)), Key(3, FORWARD, "x")]


class Listed(Runs):
    """Lists the runs instead of making them."""

    def _run(self, run):
        if run not in self.done:
            self.done[run] = [Record(Place({}, {}), values={key: Value(None) for key in KEYS})] * run.layout.world
        return self.done[run]


def runs_for(tmp_path, checkpoint: str, *flags: str) -> tuple[Listed, list[tuple[int, str]], Record]:
    """The runs, as (number of processes, folder that is restored), and the record of one process."""
    runs = Listed(Program("train.py", False, 2, 10.0, False, None), tmp_path)
    layout = Layout(Flags.read([*TP2, *flags]), 2, checkpoint=checkpoint)
    runs.layout(layout, "megatron", "float32")
    return runs, [(run.layout.world, run.restored) for run in runs.done], runs.alone(layout, "float32")


@pytest.mark.parametrize(
    ("checkpoint", "processes", "writer"), [("restore", [1, 2], 0), ("save", [1, 2, 1], 1), ("resume", [1, 2, 2], 1)]
)
def test_one_run_saves_a_checkpoint_and_another_restores_it(tmp_path, checkpoint, processes, writer):
    runs, made, alone = runs_for(tmp_path, checkpoint)
    assert [world for world, _ in made] == processes
    assert made[-1][1] == runs._file(list(runs.done)[writer])
    assert not any(restored for _, restored in made[:-1])
    assert list(alone.values) == KEYS[1:], "one process goes on where the others begin again"


def test_without_a_checkpoint_nothing_is_restored(tmp_path):
    _, made, alone = runs_for(tmp_path, "")
    assert made == [(1, ""), (2, "")]
    assert list(alone.values) == KEYS


def test_without_the_optimizers_state_its_next_step_is_not_compared(tmp_path):
    _, _, alone = runs_for(tmp_path, "restore", "--no-load-optim")
    assert list(alone.values) == KEYS[1:3]


@pytest.mark.parametrize("same", [True, False], ids=["the same bits", "other bits"])
def test_an_engine_with_the_bits_of_the_other_is_not_run_in_float64(tmp_path, same):
    class Rounded(Runs):
        def _run(self, run):
            error = {None: 0.0, "megatron": 1e-7, "ours": 1e-7 if same else 2e-7}[run.engine]
            data = np.array([1.0 + error * (run.dtype == "float32")], run.dtype)
            place = Place({"CP": 0}, {"CP": 1})
            self.done[run] = [Record(place, values={KEYS[0]: Value(data)})] * run.layout.world
            return self.done[run]

    runs = Rounded(Program("train.py", False, 2, 10.0, False, None), tmp_path)
    layout = Layout(Flags.read(TP2), 2)
    found, alike = compare_engines(runs, layout, ("megatron", "ours"), lambda _: None)
    assert [one.verdict for one in found.values()] == [ROUNDING, ROUNDING]
    assert alike is same
    in_float64 = {run.engine for run in runs.done if run.dtype == "float64"}
    assert in_float64 == ({None, "megatron"} if same else {None, "megatron", "ours"})
