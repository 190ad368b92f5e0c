"""scripts/launch_multinode.sh: what it makes of its environment. Nothing is started but the script."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "launch_multinode.sh"
STEP = "SLURM_JOB_ID=31234 SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_NODEID=1"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def launch(variables: str, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """The script in an environment of nothing but ``variables`` (``NAME=value NAME=value``)."""
    given = dict(pair.split("=", 1) for pair in variables.split())
    search = f"{path}:{os.environ['PATH']}" if path else os.environ["PATH"]
    environment = {"PATH": search, "MEGATRON_PP_PYTHON": sys.executable, **given}
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=30
    )


def command(variables: str, *arguments: str, path: str = "") -> str:
    done = launch(variables, "--dry-run", *arguments, path=path)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ("NNODES=two", "NNODES is 'two'; it must be a whole number from 1"),
        ("NNODES=0", "NNODES is '0'"),
        ("NNODES=2", "NODE_RANK is not set; give this node's number, from 0 to 1"),
        ("NNODES=2 NODE_RANK=1", "MASTER_ADDR is not set; give the name or address of node 0"),
        ("NNODES=2 NODE_RANK=2 MASTER_ADDR=127.0.0.1", "NODE_RANK is '2'; it must be a whole number from 0 to 1"),
        ("NNODES=2 NODE_RANK=-1 MASTER_ADDR=127.0.0.1", "NODE_RANK is '-1'"),
        ("NNODES=2 NODE_RANK=1 MASTER_ADDR=no.such.host.invalid", "which no name service resolves"),
        ("MASTER_PORT=65536", "MASTER_PORT is '65536'; it must be a whole number from 1 to 65535"),
        ("NPROC_PER_NODE=0", "NPROC_PER_NODE is '0'"),
        ("MAX_RESTARTS=often", "MAX_RESTARTS is 'often'"),
        ("SCRIPT=/no/such/file", "SCRIPT is '/no/such/file', which is not a file"),
        ("GLOO_SOCKET_IFNAME=eth777", "this node has no interface 'eth777'"),
        (STEP.replace("TASKS=2", "TASKS=4"), "Slurm starts this script 4 times on 2 nodes; it must be once on each"),
        (STEP, "MASTER_ADDR is not set, and Slurm gives no list of nodes"),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_a_wrong_value_is_reported_before_anything_starts(variables: str, sentence: str, dry: bool) -> None:
    if "IFNAME" in variables and not Path("/sys/class/net").is_dir():
        pytest.skip("interfaces cannot be listed here")
    done = launch(variables, *(["--dry-run"] if dry else []), "--help-of-the-program")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("launch_multinode.sh: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_command_of_a_node() -> None:
    said = command("NNODES=3 NODE_RANK=2 MASTER_ADDR=127.0.0.1 NPROC_PER_NODE=4", "--data", "a b")
    assert "--nnodes 3 --node-rank 2 --nproc-per-node 4 --master-addr 127.0.0.1 --master-port 29500" in said
    assert "--max-restarts 0" in said
    assert said.rstrip().endswith("scripts/train.py --data a\\ b")
    assert "OMP_NUM_THREADS=1 " in said


def test_one_node_needs_nothing() -> None:
    assert "--nnodes 1 --node-rank 0" in command("NPROC_PER_NODE=2")


def test_the_help_names_every_variable() -> None:
    done = launch("", "--help")
    assert done.returncode == 0
    for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE", "MAX_RESTARTS", "SCRIPT"):
        assert f"  {name} " in done.stdout
    assert "set -euo" not in done.stdout


def test_in_a_job_of_slurm_it_starts_itself_once_on_each_node() -> None:
    said = command("SLURM_JOB_ID=31234 SLURM_JOB_NUM_NODES=2", "--train-steps", "5")
    assert said.startswith("srun --nodes 2 --ntasks 2 --ntasks-per-node 1 ")
    assert said.rstrip().endswith(f"{SCRIPT} --train-steps 5")


def test_in_a_step_of_slurm_it_asks_slurm(tmp_path: Path) -> None:
    """scontrol is the one thing of Slurm's that it calls; here it is a script that knows one list."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames n[1-2]" ] && printf "localhost\\nn2\\n"\n')
    scontrol.chmod(0o755)
    said = command(f"{STEP} SLURM_STEP_NODELIST=n[1-2] SLURM_GPUS_ON_NODE=8", path=str(tmp_path))
    assert "--nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr localhost --master-port 21234" in said
