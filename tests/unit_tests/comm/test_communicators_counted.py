"""The communicators that ``simulate --memory`` counts are those that the engine makes on virtual devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron_pp.comm.p2p_communicator import P2PCommunicator
from megatron_pp.plan.costs.communicators import Communicators, Outside
from megatron_pp.plan.ir.placement import LOOP, Placement
from megatron_pp.plan.ir.spec import BATCHED, OVERLAP, PLAIN
from megatron_pp.testing.pipeline import placement_of, run_rank
from megatron_pp.testing.toy import ToyData, toy_config
from testkit.device_runs.nccl_runs import on_nccl
from testkit.streams import StreamNetwork
from testkit.virtual_groups import VirtualNCCL

POLICIES: dict[str, dict[str, Any]] = {
    OVERLAP: {"overlap_p2p_comm": True},
    BATCHED: {"batch_p2p_comm": True},
    PLAIN: {"overlap_p2p_comm": False, "batch_p2p_comm": False},
}
SHAPES = [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_v", 2)]
Communicator = tuple[VirtualNCCL, tuple[int, ...]]
Ends = dict[int, dict[Communicator, set[tuple[bool, int]]]]


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Ends:
    """By rank and communicator: which peers it has sent to (True) and received from."""
    ends: Ends = defaultdict(lambda: defaultdict(set))
    post = VirtualNCCL._post

    def noted(backend: VirtualNCCL, requests: Sequence[tuple[bool, torch.Tensor, int]], ranks: tuple[int, ...]) -> Any:
        ends[backend.device.rank][backend, ranks] |= {(is_send, peer) for is_send, _, peer in requests}
        return post(backend, requests, ranks)

    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    monkeypatch.setattr(VirtualNCCL, "_post", noted)
    return ends


def _numbers(ends: dict[Communicator, set[tuple[bool, int]]]) -> tuple[int, int]:
    """Peers received from and sent to."""
    everyone = [is_send for one in ends.values() for is_send, _ in one]
    return everyone.count(False), everyone.count(True)


def _compare(used: Ends, placement: Placement, policy: str, channels: str, limit: int) -> None:
    for rank in range(placement.pipeline_size):
        counted = list(Outside().communicators(placement, rank, policy, channels))
        assert _numbers(used[rank]) == (sum(c.receiving for c in counted), sum(c.sending for c in counted))
        assert len(used[rank]) == sum(one.count for one in counted)
        if channels == "one_way" and policy != BATCHED:
            assert (
                {backend.options.config.max_ctas for backend, _ in used[rank]}
                == {limit}
                == {c.channels for c in counted}
            )


@pytest.mark.parametrize("channels", ["one_way", "shared"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("name", "chunks"), SHAPES)
def test_a_step_makes_the_counted_communicators(
    name: str, chunks: int, size: int, policy: str, channels: str, used: Ends
) -> None:
    """Evaluation, other numbers of microbatches and varying shapes follow, and make no more."""
    fields = {"pipeline_schedule": name, "p2p_channels": channels, **POLICIES[policy]}
    fields["virtual_pipeline_model_parallel_size"] = chunks if chunks > 1 else None

    def steps(communicator: P2PCommunicator) -> None:
        for count, forward_only in ((size, False), (size, True), (2 * size, False)):
            run_rank(
                communicator.rank,
                size,
                chunks,
                ToyData(count),
                communicator.config,
                communicator,
                forward_only=forward_only,
            )

    on_nccl(StreamNetwork(size, seed=None, looks_for_races=False), steps, **fields)
    placement = placement_of(toy_config(**fields), size, chunks)
    _compare(used, placement, policy, channels, 8)


@pytest.mark.parametrize("size", [2, 4])
def test_a_split_output_layer_adds_one_communicator(size: int, used: Ends) -> None:
    placement = Placement(LOOP, size, 1, barriers=1)

    def steps(communicator: P2PCommunicator) -> None:
        communicator.prepare(placement.rank_edges, 0, 0, batched=False, collectives=True)

    on_nccl(StreamNetwork(size, seed=None), steps, overlap_p2p_comm=True)
    for rank in range(size):
        counted: list[Communicators] = list(Outside().communicators(placement, rank, OVERLAP, "one_way"))
        assert len(used[rank]) == sum(one.count for one in counted) == 2 * (1 + (0 < rank < size - 1)) + 1
        assert (
            {backend.options.config.max_ctas for backend, _ in used[rank]} == {one.channels for one in counted} == {8}
        )
