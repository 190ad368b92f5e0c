"""A process that is forked from one with pipelines has none of its communicators."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.conftest import PROJECT_ROOT

FORKING = """
import os, sys
import torch.distributed as dist
from megatron_pp import ModelParallelConfig
from megatron_pp.runtime import communicators

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
communicators.communicator_for(dist.new_group([0]), ModelParallelConfig())
dist.destroy_process_group()
if os.fork() == 0:
    assert not communicators.KEPT.items()
    communicators.close_communicators()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
os._exit(0)
"""


def test_a_forked_process_ends_no_group_of_its_parent() -> None:
    """The end of such a group would wait for threads that the forked process does not have."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    program = [sys.executable, "-c", FORKING]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=30, env=environment, check=False)
    assert ran.stdout == "7\n", ran.stderr
