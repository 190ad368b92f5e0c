#!/usr/bin/env python
"""Train with Megatron-LM's unchanged pretrain_gpt.py, under its own schedule and under this engine, and compare.

    python scripts/megatron_pretrain_gpt.py ~/Megatron-LM [--schedules interleaved_1f1b,zb_v]

Two ranks with two chunks each train a small GPTModel on mock data. Megatron's own schedule runs two steps and saves a
distributed checkpoint. Each schedule loads it, so all start with equal parameters, and runs the third step. It saves
another checkpoint, from which 1f1b without virtual stages runs the fourth step. Build the helpers of Megatron's data
sets first: `make -C megatron/core/datasets`, which needs pybind11. The exit status is 1 if a logged loss differs from
that of Megatron's schedule, or a gradient norm by more than 1e-4 of its value.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
MODEL = (
    "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-bias-dropout-fusion --no-bias-gelu-fusion --no-rope-fusion --attention-dropout 0 --hidden-dropout 0"
)
TRAINING = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 98,1,1 --micro-batch-size 1 "
    "--global-batch-size 8 --train-iters 4 --lr 1e-3 --min-lr 1e-4 --log-interval 1 --eval-iters 1 "
    "--eval-interval 1000 --save-interval 2 --ckpt-format torch_dist --pipeline-model-parallel-size 2"
)
CHUNKS = ["--num-virtual-stages-per-pipeline-rank", "2"]
ON_CPU = """
import contextlib, typing, typing_extensions
from megatron_pp.tools.parity import cpu_stand_in

cpu_stand_in.redirect()
triton = contextlib.ExitStack()
triton.enter_context(cpu_stand_in.triton_stand_in())
typing.override = typing_extensions.override  # Megatron's main branch is written for Python 3.12
"""
LOGGED = re.compile(r"iteration +(\d+)/.*lm loss: (\S+) .*grad norm: (\S+)")
Steps = dict[int, tuple[str, float]]


def on_this_machine(checkout: Path, folder: str) -> tuple[dict[str, str], list[str]]:
    """The environment and flags of a run. Without a GPU, `sitecustomize` redirects each Python process to the CPU."""
    variables, flags = {**os.environ, "OMP_NUM_THREADS": "1"}, []
    if not torch.cuda.is_available():
        (Path(folder) / "sitecustomize.py").write_text(ON_CPU)
        variables["PYTHONOPTIMIZE"] = "1"  # Megatron asserts that there is a GPU
        flags = ["--distributed-backend", "gloo"]
    paths = [folder, str(ROOT), str(checkout), os.environ.get("PYTHONPATH")]
    return {**variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))}, flags


def train(checkout: Path, variables: dict[str, str], schedule: str | None, flags: list[str], deadline: float) -> Steps:
    """Step -> (its loss as logged, its gradient norm). ``schedule`` None is Megatron's own schedule."""
    launcher = [str(ROOT / "scripts" / "launch.py"), "--standalone", "--nproc-per-node", "2"]
    engine = ["-m", "megatron_pp", "run", "--pipeline-schedule", schedule] if schedule else []
    job = subprocess.Popen(
        [sys.executable, *launcher, *engine, "pretrain_gpt.py", *MODEL.split(), *TRAINING.split(), *flags],
        cwd=checkout,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=deadline)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    steps = {int(step): (loss, float(norm)) for step, loss, norm in LOGGED.findall(output)}
    if job.returncode or not steps:
        raise SystemExit(f"{output[-9000:]}\n{schedule or 'Megatron-LM'}: exit code {job.returncode}")
    return steps


def equal(one: Steps, other: Steps) -> bool:
    """Whether losses are equal, and norms to 1e-4: a norm is summed in the order of ranks, and a V placement changes
    it."""
    return one.keys() == other.keys() and all(
        loss == other[step][0] and abs(norm - other[step][1]) <= 1e-4 * norm for step, (loss, norm) in one.items()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--schedules", default="interleaved_1f1b,zb_v,dualpipe_v")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds for each run")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    schedules = options.schedules.split(",")
    if not (checkout / "pretrain_gpt.py").is_file():
        parser.error(f"{checkout} has no pretrain_gpt.py; give a checkout of Megatron-LM")
    differing = False
    with tempfile.TemporaryDirectory() as folder:
        variables, flags = on_this_machine(checkout, folder)

        def run(schedule: str | None, *more: str) -> Steps:
            return train(checkout, variables, schedule, [*flags, *more], options.deadline)

        def two_steps(schedule: str | None) -> Steps:
            saved = f"{folder}/{schedule}"
            third = run(schedule, *CHUNKS, "--load", f"{folder}/first", "--save", saved, "--exit-interval", "3")
            return {**third, **run(schedule and "1f1b", "--load", saved)}

        run(None, *CHUNKS, "--save", f"{folder}/first", "--exit-interval", "2")
        wanted = two_steps(None)
        print(f"Megatron-LM's own schedules: {wanted}", flush=True)
        for schedule in schedules:
            found = two_steps(schedule)
            same = equal(found, wanted)
            differing |= not same
            print(f"{schedule}, then 1f1b: {'equal' if same else f'differs, {found}'}", flush=True)
    return int(differing)


if __name__ == "__main__":
    sys.exit(main())
