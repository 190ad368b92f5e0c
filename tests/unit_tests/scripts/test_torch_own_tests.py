"""scripts/torch_own_tests.py: tests in the form of torch's, run with torch's schedules and with ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "torch_own_tests.py"
TESTS = """
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.testing._internal.common_distributed import MultiProcContinuousTest, skip_if_lt_x_gpu
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

device_type = "cuda"


class ScheduleTest(MultiProcContinuousTest):
    @skip_if_lt_x_gpu(2)
    @parametrize("kind", [ScheduleGPipe, Schedule1F1B])
    def test_a_step(self, kind):
        module = torch.nn.Linear(4, 4, device=device_type)
        stage = PipelineStage(module, self.rank, self.world_size, self.device)
        schedule = kind(stage, 2, loss_fn=lambda output, target: (output - target).sum())
        schedule.step(*([torch.ones(4, 4)] if self.rank == 0 else []), target=torch.zeros(4, 4))
        assert module.weight.grad is not None
        dist.barrier(device_ids=[self.rank])

    def test_a_private_field(self):
        stage = PipelineStage(torch.nn.Linear(4, 4), self.rank, self.world_size, self.device)
        assert Schedule1F1B(stage, 2)._stage is stage


instantiate_parametrized_tests(ScheduleTest)
"""
ALONE = """
from torch.distributed.pipelining import Schedule1F1B
from torch.testing._internal.common_utils import TestCase


class ScheduleTest(TestCase):
    def test_the_class(self):
        self.assertEqual(Schedule1F1B.__name__, "Schedule1F1B")

    def test_with_a_device(self):
        self.skipTest("no device")
"""


def run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(folder), "--ranks", "2", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=300.0, check=False)


def test_another_folder_is_refused(tmp_path: Path) -> None:
    refused = run(tmp_path)
    assert refused.returncode == 2
    assert "has no test_schedule_multiproc.py; give test/distributed/pipelining" in refused.stderr


@pytest.mark.slow
def test_tests_that_pass_only_with_torchs_classes_are_named(tmp_path: Path) -> None:
    pytest.importorskip("expecttest")
    (tmp_path / "test_schedule_multiproc.py").write_text(TESTS)
    (tmp_path / "test_schedule.py").write_text(ALONE)
    both = run(tmp_path)
    assert both.stdout.splitlines()[0] == "torch: 4 passed, 1 skipped, 0 failed"
    assert "ours: 2 passed, 1 skipped, 2 failed" in both.stdout.splitlines()
    lost = "test_a_private_field", "test_schedule.test_the_class"
    assert both.stdout.endswith("\n    ".join(["2 pass with torch's classes alone", *lost]) + "\n")
    assert both.returncode == 1
    assert run(tmp_path, "--only", "a_step").returncode == 0
