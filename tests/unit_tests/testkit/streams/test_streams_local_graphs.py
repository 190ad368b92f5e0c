"""Graphs that share a pool: replayed out of the order of capture they overwrite each other, and the engine keeps it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_pp.errors import ScheduleInputError
from megatron_pp.features.pairs.pair_runner import on_two_streams
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.toy import ToyData
from megatron_pp.weight_grad import split_weight_grad
from testkit.device_runs.local_graphs import Step, steps_with_graphs
from testkit.device_runs.stream_runs import POLICIES, on_one_device
from testkit.streams import StreamReport
from testkit.streams.torch_calls.capture import give_back

LOCAL = {"cuda_graph_impl": "local"}
SCHEDULES = [("1f1b", 3, 1), ("interleaved_1f1b", 2, 2), ("gpipe", 3, 1), ("zb_v", 2, 2)]


SLOW = {policy: policy != "overlap" for policy in POLICIES}


def training(num_microbatches: int, **changed: Any) -> Step:
    return ToyData(num_microbatches), False, changed


def evaluation(num_microbatches: int) -> Step:
    return ToyData(num_microbatches), True, {}


def unchecked(size: int, *steps: Step, **fields: Any) -> StreamReport:
    """The engine is not told that layers run in graphs."""
    return steps_with_graphs(size, 1, steps, **fields)[0]


@pytest.mark.parametrize(
    ("schedule", "size", "chunks", "policy"),
    [pytest.param(*one, policy, marks=[pytest.mark.slow] * slow) for one in SCHEDULES for policy, slow in SLOW.items()],
)
def test_the_engine_replays_graphs_in_the_order_of_capture(schedule: str, size: int, chunks: int, policy: str) -> None:
    steps = [evaluation(3), training(6), training(6), evaluation(6), training(6), evaluation(12), training(6)]
    fields = {**LOCAL, **POLICIES[policy], "pipeline_schedule": schedule}
    report, difference = steps_with_graphs(size, chunks, steps, **fields)
    assert not report.races + report.overwritten, str(report)
    assert difference == 0.0


OTHER_ORDERS: dict[str, tuple[int, list[Step], str]] = {
    "fewer": (2, [training(4), training(3), training(3)], "this step has another order"),
    "schedule": (3, [training(4), training(4, pipeline_schedule="gpipe")], "this step has another order"),
    "out of turn": (2, [training(3), evaluation(4), training(3)], "an evaluation of 4 microbatches leaves them out of"),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", OTHER_ORDERS)
def test_another_order_overwrites_what_is_needed_and_is_refused(case: str, policy: str) -> None:
    size, steps, words = OTHER_ORDERS[case]
    report = unchecked(size, *steps, **POLICIES[policy])
    assert report.overwritten, str(report)
    assert {found.read.what for found in report.overwritten} == {"a graph"}
    assert all(found.write.instruction[0] in "FB" for found in report.overwritten)
    with pytest.raises(ScheduleInputError, match=f"'local', and {words}.* of {steps[0][0].num_microbatches} microb"):
        steps_with_graphs(size, 1, steps, **LOCAL, **POLICIES[policy])


@pytest.mark.parametrize("case", ["fewer", "schedule"])
def test_other_checks_do_not_find_the_wrong_replay_order(case: str) -> None:
    """Sends that are waited for at their round race with nothing."""
    size, steps, _ = OTHER_ORDERS[case]
    report = unchecked(size, *steps, **POLICIES["batched"])
    assert report.overwritten
    assert not report.races, str(report)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_evaluation_sends_copies(policy: str) -> None:
    """No backward comes between two forwards whose graphs have the same memory."""
    steps = [training(3), evaluation(3)]
    report = unchecked(2, *steps, **POLICIES[policy])
    assert {race.kind for race in report.races} == {"read/reuse"}
    assert all("SEND_F" in race.first.instruction and race.second.what == "a graph" for race in report.races)
    assert not steps_with_graphs(2, 1, steps, **LOCAL, **POLICIES[policy])[0].races


def test_pairs_and_split_backwards_are_refused() -> None:
    fields: dict[str, Any] = {**LOCAL, "overlap_p2p_comm": True}
    with pytest.raises(ScheduleInputError, match="two halves of a pair"):
        run_in_threads(2, 2, ToyData(4), overlapped_forward_backward=on_two_streams, **fields)
    for impl in ("local", "transformer_engine"):
        fields["cuda_graph_impl"] = impl
        with pytest.raises(
            ScheduleInputError, match=f"is '{impl}', whose graphs run backwards whole, and schedule zb_h"
        ):
            run_in_threads(2, 1, ToyData(4), pipeline_schedule="zb_h1", prepare=split_weight_grad, **fields)


def test_a_graph_has_what_the_one_before_gave_back() -> None:
    def program(replays: str) -> None:
        pool, graphs, outputs = torch.cuda.graph_pool_handle(), [], []
        x = torch.ones(4)
        for _ in range(2):
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool)
            outputs.append(x + 1)
            graphs[-1].capture_end()
            give_back(outputs[-1])
        for one in replays:
            graphs[int(one)].replay()
        outputs[0] + 1

    assert not on_one_device(lambda: program("0")).overwritten
    (found,) = on_one_device(lambda: program("01")).overwritten
    assert str(found).startswith(
        "read by add (rank 0, default stream), of what is overwritten by then: write by a graph"
    )
    assert not on_one_device(lambda: program("10")).overwritten


def test_a_graph_without_a_pool_shares_nothing() -> None:
    def program() -> None:
        graphs, outputs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()], []
        for graph in graphs:
            graph.capture_begin()
            outputs.append(torch.ones(4))
            graph.capture_end()
            give_back(outputs[-1])
        for graph in graphs:
            graph.replay()
        outputs[0] + 1

    assert not on_one_device(program).overwritten
