"""``megatron-pp run`` under torchrun, on a machine without a GPU, and with a rank that fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from testkit.sweeps import drawn
from tests.conftest import PROJECT_ROOT
from tests.functional_tests.megatron_support import needs_megatron

pytestmark = needs_megatron

ASKS_FOR_A_GPU = """
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron_pp.integrations import megatron_core

assert megatron_core.is_installed()
dist.init_process_group("nccl")
torch.cuda.set_device(0)
parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
weight = torch.ones(4, device="cuda").cuda()
dist.all_reduce(weight, group=parallel_state.get_pipeline_model_parallel_group())
print(f"summed {weight.device.type} {float(weight.sum())}\\n", end="", flush=True)  # in one piece
parallel_state.destroy_model_parallel()
dist.destroy_process_group()
"""
FAILS = """
import os, time
import megatron.core
if os.environ["RANK"] == "1":
    raise ValueError("the data of this rank are short")
time.sleep(60)
"""


def torchrun(tmp_path: Path, text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(text)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return run(tmp_path, launcher, *flags)


def run(tmp_path: Path, launcher: list[str], *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [*launcher, "-m", "megatron_pp", "run", *flags, "train.py"]
    env = os.environ | {"PYTHONPATH": str(PROJECT_ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env |= environment
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)


def test_a_script_that_asks_for_gpus_runs_on_the_cpu(tmp_path: Path) -> None:
    ran = torchrun(tmp_path, ASKS_FOR_A_GPU, "--cpu")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("summed cpu 8.0") == 2
    alone = run(tmp_path, [sys.executable], RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    assert alone.returncode != 0, "the test needs no --cpu"
    assert "NCCL" in alone.stderr or "nccl2 requires at least one CUDA device" in alone.stderr


@pytest.mark.parametrize("flags", drawn([[], ["--cpu"]], 1))
def test_torchrun_shows_the_error_of_the_rank_that_failed(tmp_path: Path, flags: list[str]) -> None:
    """torchrun ends the other ranks at once, and reports the cause only if it is in the rank's error file."""
    ran = torchrun(tmp_path, FAILS, *flags)
    assert ran.returncode != 0
    _, found, report = ran.stderr.partition("Root Cause")
    assert found
    assert "ValueError: the data of this rank are short" in report
    assert "error_file: <N/A>" not in report
