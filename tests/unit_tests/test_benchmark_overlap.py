"""The variants that `benchmark.py overlap` compares do the same work: they differ only in when an output is given back."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from benchmarks.engines import Work
from benchmarks.exposed import Sweep
from benchmarks.overlap import FREE_AT_ONCE, OURS, VARIANTS, WAIT_AT_ONCE, Setting, VariantStep, wait_at_once

from megatron_pp.plan import instruction as ins
from megatron_pp.plan.build import build_plan
from megatron_pp.plan.spec import PlanSpec
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.threads import ThreadGroup, run_ranks


def gradients(variant: str, setting: Setting) -> list[torch.Tensor]:
    """The weight gradients of all stages after one step of ``variant``, ranks as threads."""
    network = MemoryNetwork(setting.work.pipeline_size)

    def rank_main(rank: int) -> list[torch.Tensor]:
        step = VariantStep(variant, setting, rank, ThreadGroup(rank, network.size), network.transport(rank))
        step()
        return [p.grad for chunk in step.chunks for p in chunk.parameters() if p.grad is not None]

    return [grad for grads in run_ranks(network.size, rank_main, network.abort) for grad in grads]


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2)])
@pytest.mark.parametrize("size", [2, 4])
def test_variants_do_the_same_work(schedule: str, chunks: int, size: int) -> None:
    setting = Setting(Work(schedule, size, chunks, 8, (2, 1, 8)), Sweep(0.0, 0.0, 1000.0, 1))
    found = {variant: gradients(variant, setting) for variant in VARIANTS}
    assert len(found[OURS]) == size * chunks
    for variant in (FREE_AT_ONCE, WAIT_AT_ONCE):
        assert all(torch.equal(a, b) for a, b in zip(found[variant], found[OURS], strict=True))


def test_waiting_at_once_moves_releases_of_outputs_only() -> None:
    plan = build_plan(PlanSpec("interleaved_1f1b", 4, 2, 8))
    early = wait_at_once(plan)
    for before, after in zip(plan.programs, early.programs, strict=True):
        assert sorted(before) == sorted(after)
        assert [at for at in before if at.op != ins.RELEASE_ACT] == [at for at in after if at.op != ins.RELEASE_ACT]
        sends = [k for k, at in enumerate(after) if at.op == ins.SEND_ACT]
        assert all(after[k + 1].op == ins.RELEASE_ACT for k in sends)
