"""The variants that `benchmark.py overlap` compares do the same work; they differ in when an output is given back."""

from __future__ import annotations

import pytest

from benchmarks.overlap import VARIANTS, Setting, VariantStep, wait_at_once
from benchmarks.sweep import Sweep
from benchmarks.work import Work, first_input, loss_of
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.testing.adversarial_transports import LastMomentNetwork
from megatron_pp.testing.threads import ThreadGroup, run_ranks


def losses(variant: str, setting: Setting) -> list[float]:
    """The losses of one step of ``variant``, ranks as threads, over a network that reads freed memory as NaN."""
    network = LastMomentNetwork(setting.work.pipeline_size, seed=1)

    def rank_main(rank: int) -> list[float]:
        step = VariantStep(variant, setting, rank, ThreadGroup(rank, network.size), network.transport(rank))
        with network.running(rank):
            step()
        return step.losses

    return [loss for found in run_ranks(network.size, rank_main, network.abort) for loss in found]


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2)])
@pytest.mark.parametrize("size", [2, 4])
def test_variants_do_the_same_work(schedule: str, chunks: int, size: int) -> None:
    setting = Setting(Work(schedule, size, chunks, 8, (2, 1, 8)), Sweep(0.0, 0.0, 1000.0, 1))
    expected = [float(loss_of(first_input(setting.work)))] * 8  # the stages hand on what they are given
    for variant in VARIANTS:
        assert losses(variant, setting) == expected


def test_waiting_right_after_the_send_moves_only_releases_of_outputs() -> None:
    plan = build_plan(PlanSpec("interleaved_1f1b", 4, 2, 8))
    early = wait_at_once(plan)
    for before, after in zip(plan.programs, early.programs, strict=True):
        assert sorted(before) == sorted(after)
        assert [at for at in before if at.op != ins.FREE_F] == [at for at in after if at.op != ins.FREE_F]
        sends = [k for k, at in enumerate(after) if at.op == ins.SEND_F]
        assert all(after[k + 1].op == ins.FREE_F for k in sends)
