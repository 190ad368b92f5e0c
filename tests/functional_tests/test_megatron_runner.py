"""The process that runs cases of Megatron for tests leaves nothing behind, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from testkit.megatron.cases import Case, Job, Model
from testkit.megatron.runner import ROOT
from tests.functional_tests.megatron_support import needs_megatron

pytestmark = [needs_megatron, pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends them on Linux")]


def descendants(pid: int) -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found |= {int(path.parent.name), *descendants(int(path.parent.name))}
    return found


def wait_for(condition, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
    return condition()


def test_ranks_end_when_the_runner_is_killed() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "testkit.megatron.runner"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    started: set[int] = set()
    try:
        assert process.stdin is not None
        job = Job(Case(Model(layers=2), pp=2, engine="ours", microbatches=4, steps=10_000))
        process.stdin.write(json.dumps([job.to_dict()]).encode() + b"\n")
        process.stdin.flush()
        assert wait_for(lambda: len(descendants(process.pid)) >= 3), "a list and two ranks"
        started = descendants(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started)), started
    finally:
        process.kill()
        for pid in started:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
