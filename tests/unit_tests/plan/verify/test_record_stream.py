"""What the allocator keeps back of messages over NCCL, along a program."""

from __future__ import annotations

import pytest

from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import BATCHED, OVERLAP, PLAIN, PlanSpec
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.simulate.memory import FULL, ModelShape, rank_memory
from megatron_pp.plan.verify.lifetime import LifetimeWalk
from megatron_pp.plan.verify.record_stream import recorded_timeline

ONE_LAYER = ModelShape(2, 64, 32, recompute=FULL)


def kept(spec: PlanSpec, rank: int) -> dict[str, int]:
    plan = build_plan(spec)
    return {str(at): count for at, count in zip(plan.timed(rank), recorded_timeline(plan, rank), strict=True)}


def test_an_input_stays_until_the_receive_posted_ahead_of_its_backward_is_there() -> None:
    on_the_last = kept(PlanSpec("1f1b", 2, 1, 4, policy=OVERLAP), 1)
    assert (on_the_last["RECV_F0.1"], on_the_last["B0.0"], on_the_last["SEND_B0.0"]) == (0, 1, 1)
    assert on_the_last["WAIT_F0.1"] == 0
    assert on_the_last["B0.3"] == 0  # nothing is posted behind the last one


def test_an_output_stays_until_the_send_behind_its_own_is_done() -> None:
    on_the_first = kept(PlanSpec("1f1b", 2, 1, 4, policy=OVERLAP), 0)
    assert (on_the_first["SEND_F0.1"], on_the_first["FREE_F0.0"], on_the_first["FREE_F0.1"]) == (0, 1, 0)


@pytest.mark.parametrize("policy", [PLAIN, BATCHED])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zb_v"])
def test_nothing_stays_if_transfers_are_waited_for_right_after_posting(name: str, policy: str) -> None:
    chunks = SCHEDULES[name].chunks or (1 if name in ("gpipe", "1f1b") else 2)
    plan = build_plan(PlanSpec(name, 4, chunks, 8, policy=policy))
    assert not any(count for rank in range(4) for count in recorded_timeline(plan, rank))


@pytest.mark.parametrize("channels", ["one_way", "shared"])
def test_the_prediction_counts_memory_kept_by_record_stream(channels: str) -> None:
    plan = build_plan(PlanSpec("1f1b", 2, 1, 4, policy=OVERLAP, channels=channels))
    for rank in range(2):
        recorded, tensors = list(recorded_timeline(plan, rank)), list(LifetimeWalk(plan, rank).tensors())
        after = rank_memory(plan, rank, ONE_LAYER).after
        assert max(recorded) >= 1
        # With all of a layer recomputed, a stage keeps its input only; the first one's is no message.
        own = [value / ONE_LAYER.message_bytes - r - t for value, r, t in zip(after, recorded, tensors, strict=True)]
        assert set(own) <= ({0.0} if rank == 1 else {0.0, 1.0, 2.0})
