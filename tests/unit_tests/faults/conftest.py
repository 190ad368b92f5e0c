"""What tests of the guard share."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_pp.faults.liveness import process_of
from megatron_pp.faults.records import Process


@pytest.fixture
def gone() -> Process:
    """A process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    process = process_of(child.pid)
    child.communicate()
    return process
