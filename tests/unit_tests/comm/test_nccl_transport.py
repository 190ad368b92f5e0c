"""What the transport for NCCL makes and asks for, on virtual devices: communicators, options, timeouts, waits."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_pp.comm import abort
from megatron_pp.comm.backends import group_transport
from megatron_pp.comm.channels import SHAPES
from megatron_pp.comm.p2p_communicator import P2PCommunicator
from megatron_pp.comm.transport import Preparation
from megatron_pp.errors import CommunicatorClosedError
from megatron_pp.features.pairs.pair_runner import HalfCall, on_two_streams
from megatron_pp.testing.pipeline import run_rank
from megatron_pp.testing.threads import ThreadGroup, run_ranks
from megatron_pp.testing.toy import ToyData, toy_config
from testkit.device_runs.nccl_runs import on_nccl
from testkit.device_runs.stream_runs import on_one_device
from testkit.streams import StreamNetwork, virtual_cuda
from testkit.streams.device import VirtualDevice
from testkit.streams.network import StreamTransport
from testkit.virtual_groups import VirtualNCCL

SIZE = 3


@pytest.fixture(autouse=True)
def nccl_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


def channels_of(communicator: P2PCommunicator) -> dict[Any, Any]:
    return communicator.transport._channels  # type: ignore[attr-defined, no-any-return]


def backend_of(channel: Any) -> VirtualNCCL:
    return channel.group._get_backend(torch.device("cuda"))  # type: ignore[no-any-return]


def step(communicator: P2PCommunicator, **data: Any) -> None:
    """One step of the toy model."""
    run_rank(communicator.rank, SIZE, 1, ToyData(4, **data), communicator.config, communicator)


@pytest.mark.parametrize("warm_up", [True, False])
def test_batched_plans_have_no_channels_and_a_warm_group(warm_up: bool) -> None:
    def look(communicator: P2PCommunicator) -> tuple[bool, int]:
        is_connected = bool(communicator.pp_group.backend._communicators)
        step(communicator)
        return is_connected, len(channels_of(communicator))

    assert (
        on_nccl(StreamNetwork(SIZE, seed=None), look, batch_p2p_comm=True, warm_up_p2p=warm_up) == [(warm_up, 0)] * SIZE
    )


def test_the_group_of_a_batched_plan_with_shapes_is_warm_in_any_case() -> None:
    """All ranks must post a group's first batch. In a step, a rank of three may wait for shapes before it posts."""

    def is_warm(communicator: P2PCommunicator) -> bool:
        return bool(communicator.pp_group.backend._communicators)

    fields = {"batch_p2p_comm": True, "variable_seq_lengths": True, "warm_up_p2p": False}
    assert on_nccl(StreamNetwork(SIZE, seed=None), is_warm, **fields) == [True] * SIZE


def test_other_plans_have_warm_channels_with_options_of_their_own() -> None:
    def look(communicator: P2PCommunicator) -> list[tuple[Any, ...]]:
        assert not communicator.pp_group.backend._communicators
        seen = []
        for (source, target, _), channel in channels_of(communicator).items():
            options = backend_of(channel).options
            assert backend_of(channel)._communicators
            assert (options.group_name, options.global_ranks_in_group) == (channel.group.group_name, [source, target])
            seen.append((options.is_high_priority_stream, options.config.max_ctas))
        return seen

    in_a_line = [2, 4, 2]
    assert on_nccl(StreamNetwork(SIZE, seed=None), look, overlap_p2p_comm=True) == [
        [(True, 8)] * count for count in in_a_line
    ]
    assert on_nccl(StreamNetwork(SIZE, seed=None), look, p2p_max_ctas=3)[0] == [(True, 3)] * 2


@pytest.mark.parametrize("batched", [False, True])
def test_a_communicator_made_during_an_abort_is_aborted(batched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL makes it in the first operation. Here rank 0's abort has looked before that, and has found none. Rank 0 then
    posts nothing more: the next communicator could wait for a rank that is gone."""
    post = VirtualNCCL._post
    transports: dict[int, Any] = {}
    ended: list[Any] = []

    def late(backend: VirtualNCCL, *args: Any) -> Any:
        transport = transports.get(backend.device.rank)
        assert transport is None or not transport.aborted, "posted after the abort"
        work = post(backend, *args)
        if transport is not None and not transport.aborted:
            transport.abort()
        return work

    def prepare(communicator: P2PCommunicator) -> None:
        transport = group_transport(communicator.pp_group)
        if communicator.rank == 0:
            transports[0] = transport
        transport.prepare(Preparation(((0, 1), (1, 2)), batched=batched), timedelta(seconds=30))

    monkeypatch.setattr(VirtualNCCL, "_post", late)
    monkeypatch.setattr(abort, "abort_groups", lambda groups: ended.append(list(groups)))
    with pytest.raises(CommunicatorClosedError, match="rank 0: closed while a communicator was being made"):
        on_nccl(StreamNetwork(SIZE, seed=None), prepare, overlap_p2p_comm=True)
    by_the_abort, late_ones = ended
    assert late_ones
    assert set(late_ones) <= set(by_the_abort), "it has looked, and their communicators were made after that"


def test_channels_follow_the_timeout_of_the_pipeline_group() -> None:
    """Megatron's ``update_pg_timeout`` changes it after the first steps."""
    later = timedelta(minutes=3)

    def look(communicator: P2PCommunicator) -> set[timedelta]:
        communicator.pp_group.backend._set_default_timeout(later)
        step(communicator)
        return {backend_of(channel).options._timeout for channel in channels_of(communicator).values()}

    assert on_nccl(StreamNetwork(SIZE, seed=None), look, overlap_p2p_comm=True) == [{later}] * SIZE


@pytest.mark.slow
@pytest.mark.parametrize("policy", [{"overlap_p2p_comm": True}, {"batch_p2p_comm": True}, {"p2p_channels": "shared"}])
def test_shapes_travel_from_host_to_host(policy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for the device nowhere in a step: fixed shapes and variable ones have the same waits."""
    waits: dict[str, list[str]] = {}

    def synchronize(device: VirtualDevice, lanes: Any, what: str, *, of: Any = VirtualDevice.synchronize) -> None:
        waits.setdefault(name, []).append(what)
        of(device, lanes, what)

    monkeypatch.setattr(VirtualDevice, "synchronize", synchronize)

    def look(communicator: P2PCommunicator) -> int:
        step(communicator, variable=communicator.shapes_vary)
        return sum(key[2] == SHAPES for key in channels_of(communicator))

    name = "fixed"
    assert on_nccl(StreamNetwork(SIZE, seed=None), look, **policy) == [0] * SIZE
    name = "variable"
    assert on_nccl(StreamNetwork(SIZE, seed=None), look, variable_seq_lengths=True, **policy) == [1, 2, 1]
    # Tensors of varying shapes go over the group's communicator, which each rank warms up beside its channels.
    warm_up = [] if "batch_p2p_comm" in policy else ["torch.cuda.synchronize"] * SIZE
    assert sorted(waits["variable"]) == sorted([*waits["fixed"], *warm_up])


class SlowSends(StreamTransport):
    """No send is done before somebody waits for it, and ``waits`` has what was still pending then."""

    def __init__(self, network: StreamNetwork, rank: int) -> None:
        super().__init__(network, rank)
        self.pending = 0
        self.waits: list[int] = []

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> Any:
        work = super().isend(tensor, peer, channel)
        self.pending += 1

        def wait(*args: Any) -> bool:
            self.waits.append(self.pending)
            self.pending -= 1
            return work.wait(*args)

        return SimpleNamespace(wait=wait, is_completed=lambda: False)


@pytest.mark.parametrize("bound", [0, 2, 100])
def test_compute_waits_for_sends_only_beyond_the_bound(bound: int) -> None:
    """``max_pending_sends`` unfinished sends are left alone while there is something to compute."""
    network, microbatches = StreamNetwork(SIZE), 12
    transports = [SlowSends(network, rank) for rank in range(SIZE)]

    def rank_main(rank: int) -> None:
        config = toy_config(overlap_p2p_comm=True, max_pending_sends=bound)
        with network.running(rank):
            communicator = P2PCommunicator(ThreadGroup(rank, SIZE), config, transports[rank])
            run_rank(rank, SIZE, 1, ToyData(microbatches), config, communicator)

    with virtual_cuda():
        run_ranks(SIZE, rank_main, network.abort)
    for transport, sends in zip(transports, (microbatches, 2 * microbatches, microbatches), strict=True):
        assert len(transport.waits) == sends
        in_the_step, at_its_end = transport.waits[: sends - bound], transport.waits[max(0, sends - bound) :]
        assert all(bound < pending <= bound + 3 for pending in in_the_step)
        assert at_its_end == sorted(range(1, len(at_its_end) + 1), reverse=True)


def test_pairs_have_one_other_stream() -> None:
    def program() -> tuple[int, bool]:
        seen: list[Any] = []
        current = torch.cuda.current_stream()
        for _ in range(5):
            on_two_streams(*(HalfCall(0, 0, None, lambda: seen.append(torch.cuda.current_stream())) for _ in "FB"))
        return len(set(seen)), seen[1] == current != seen[0]

    assert on_one_device(program).results == [(2, True)]
