"""Reads a recipe function of Megatron-Bridge: calls it, and reads the config that it returns like a YAML file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from megatron_pp.tools.check.jobs import files
from megatron_pp.tools.check.jobs.errors import UnreadableError
from megatron_pp.tools.check.jobs.job import Job


def read_recipe(name: str, changes: Sequence[str], gpus: int, patience: float) -> Job:
    """The job of the recipe ``name``, MODULE:FUNCTION. ``changes`` are written as Hydra's. Raises UnreadableError."""
    command = [sys.executable, "-m", "megatron_pp.tools.check.jobs.recipe_process", name, str(gpus)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience, check=False)
    except subprocess.TimeoutExpired:
        raise UnreadableError(
            f"{name} did not return within {patience:g} s; --patience SECONDS gives it more time"
        ) from None
    if done.returncode or not done.stdout:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise UnreadableError(f"{name} cannot be called: {last[0]}")
    values = files.flat(json.loads(done.stdout)) | files.changes_of(changes, name)
    return files.job_of_values("megatron-bridge", values, gpus, name)
