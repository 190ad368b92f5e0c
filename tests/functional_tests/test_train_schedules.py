"""The training program takes the steps of 1F1B under schedules of every kind, with split backwards and all placements.

The same processes run all schedules in turn, in one process group. ``MEGATRON_PP_EXHAUSTIVE=1`` runs every schedule.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.orders import SCHEDULES
from testkit.inputs.plan_text import save_plan
from testkit.sweeps import EXHAUSTIVE
from testkit.training_ranks import train
from tests.functional_tests.test_train_script import ROOT, SHORT, losses, numbers

RANKS, STEPS, MICROBATCHES = 2, 2, 5
SIZES = [*SHORT, "--num-microbatches", str(MICROBATCHES), "--train-steps", str(STEPS), "--eval-interval", "0"]

# Schedules that differ from others only in the order of their operations.
ALIKE = {"eager_1f1b", "gis", "gis_h", "breadth_first", "zb_h2", "v_half", "v_min", "auto"}
RUN = [name for name in SCHEDULES if EXHAUSTIVE or name not in ALIKE]
SLICED = [name for name in RUN if SCHEDULES[name].sliced]
SPLIT_OUTPUT = [name for name in RUN if SCHEDULES[name].barriers]
FILES = {"own.json": "json", "pytorch.csv": "torch-csv"}
NO_SCHEDULE = {  # settings that choose a schedule without its name
    "one chunk": ["--virtual-pipeline-model-parallel-size", "1"],
    "slices": ["--virtual-pipeline-model-parallel-size", "2", "--sequence-slices", "4"],
}


def flags_of(name: str, folder: Path) -> list[str]:
    schedule = str(folder / name) if name in FILES else name
    more = ["--overlap-pairs", "in_turn"] if name == "dualpipe_v" else []
    more += ["--sequence-slices", "4"] if name in SLICED else []
    named = NO_SCHEDULE.get(name, ["--pipeline-schedule", schedule])
    return [*SIZES, "--overlap-p2p-comm", *named, "--run-dir", str(folder / "runs" / name), *more]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("schedules")
    plan = build_plan(PlanSpec("zb_v", RANKS, 2, MICROBATCHES, policy="overlap"))
    for name, form in FILES.items():
        save_plan(plan, folder / name, form)
    output = train(RANKS, folder, *(flags_of(name, folder) for name in (*RUN, *FILES, *NO_SCHEDULE)))
    (folder / "output.txt").write_text(output)
    return folder


@pytest.mark.parametrize(
    "name", [*(name for name in RUN if name not in ("1f1b", *SLICED, *SPLIT_OUTPUT)), *FILES, "one chunk"]
)
def test_every_schedule_takes_the_steps_of_1f1b(name: str, folder: Path) -> None:
    """Losses, gradient norms and validation losses are equal to the last bit."""
    expected = numbers(folder / "runs" / "1f1b")
    assert len(losses(folder / "runs" / "1f1b")) == STEPS
    assert numbers(folder / "runs" / name) == expected


def test_slices_take_the_steps_of_1f1b_but_for_rounding(folder: Path) -> None:
    """All schedules of slices take equal steps, to the last bit."""
    runs = [numbers(folder / "runs" / name) for name in (*SLICED, "slices")]
    assert runs == [runs[0]] * len(runs)
    assert losses(folder / "runs" / SLICED[0]) == pytest.approx(losses(folder / "runs" / "1f1b"), rel=1e-5)


def test_a_split_output_layer_takes_the_steps_of_1f1b_but_for_rounding(folder: Path) -> None:
    """The output layer is tied to the embedding, which is the default."""
    expected = numbers(folder / "runs" / "1f1b")
    for name in SPLIT_OUTPUT:
        assert losses(folder / "runs" / name) == pytest.approx(losses(folder / "runs" / "1f1b"), rel=1e-5)
        assert len(numbers(folder / "runs" / name)) == len(expected)


def test_a_run_reports_its_chunks_and_libraries_and_how_it_splits_the_backward(folder: Path) -> None:
    lines = (folder / "output.txt").read_text().splitlines()
    schedule = f"{folder / 'pytorch.csv'}, overlap communication, on cpu: 2 ranks x 2 chunks x 1 replica, "
    (first,) = [number for number, line in enumerate(lines) if line.startswith(schedule)]
    # The first and the last stage have two layers of four linear maps, the embedding, the output and five norms.
    backward = "of rank 0, 10 layers defer their weight gradients, 0 do so themselves, 5 compute all gradients at once"
    assert lines[first + 2 : first + 5] == [
        "layers: torch; norms: torch LayerNorm",
        "optimizer: torch AdamW (fused=False)",
        f"backward: split; {backward}",
    ]


def test_the_script_starts_two_chunks_unless_a_schedule_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"  # prints what the script would start
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    monkeypatch.setenv("MEGATRON_PP_PYTHON", str(python))
    monkeypatch.setenv("NPROC", str(RANKS))
    script, launcher, program = (str(ROOT / "scripts" / name) for name in ("train.sh", "launch.py", "train.py"))
    common = [launcher, "--standalone", "--nproc-per-node", "2", program, "--overlap-p2p-comm", "--num-layers", "4"]
    for asked, added in ((["--sequence-slices", "4"], NO_SCHEDULE["slices"][:2]), (["--pipeline-schedule", "x"], [])):
        started = subprocess.run(["bash", script, *asked], capture_output=True, text=True, check=True).stdout
        assert started.splitlines() == [*common, *added, *asked]
