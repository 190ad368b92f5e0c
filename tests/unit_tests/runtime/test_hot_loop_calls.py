"""What the engine does for each virtual microbatch, counted in calls: a guard without a clock.

Counted are calls of functions of this package and calls that they make into C, between two steps that differ in
their number of microbatches alone, so that what a step does once does not count. Each bound is a little above what
the engine needs today; whoever adds work to every instruction meets it here. `scripts/benchmark.py overhead` shows what
it costs in time.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_pp
from megatron_pp.comm.transport import P2PRequest, Transport
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.runtime import run_step
from megatron_pp.runtime.stage import PipelineStage
from megatron_pp.schedules import get_forward_backward_func
from megatron_pp.testing.threads import ThreadGroup

pytestmark = pytest.mark.callers_thread
PACKAGE = str(Path(megatron_pp.__file__).parent)
SHAPE = (1, 1, 8)


class StillTransport(Transport):
    """Every transfer is over when it is posted."""

    device = torch.device("cpu")

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> StillTransport:
        return self

    def irecv(self, tensor: torch.Tensor, peer: int, channel: str) -> StillTransport:
        return self

    def batch(self, requests: Sequence[P2PRequest]) -> list[StillTransport]:
        return [self] * len(requests)

    def is_gone(self) -> bool:
        return False

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class AddWeight(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(SHAPE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


def make_step(
    size: int, chunks: int, rank: int, microbatches: int, policy: str, transport: StillTransport | None = None
) -> Callable[[], Any]:
    config = SimpleNamespace(
        pipeline_dtype=torch.float32,
        hidden_size=SHAPE[2],
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        deallocate_pipeline_outputs=True,
        overlap_p2p_comm=policy == "overlap",
        batch_p2p_comm=policy == "batched",
    )
    stages = [PipelineStage(AddWeight(), config, chunk, stage=size * chunk + rank) for chunk in range(chunks)]
    communicator = P2PCommunicator(ThreadGroup(rank, size), config, transport or StillTransport(rank, size))
    x = torch.ones(SHAPE)
    function = get_forward_backward_func(size, chunks if chunks > 1 else None)
    return lambda: function(
        forward_step_func=lambda iterator, model: (model(x), None),
        data_iterator=[None] * chunks if chunks > 1 else None,
        model=stages if chunks > 1 else stages[0],
        num_microbatches=microbatches,
        seq_length=SHAPE[0],
        micro_batch_size=SHAPE[1],
        p2p_communicator=communicator,
    )


def counted_calls(step: Callable[[], Any]) -> Counter[str]:
    """Calls of one step by "file:function": of this package's own functions, and of C functions out of them."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event in ("call", "c_call") and code.co_filename.startswith(PACKAGE):
            what = code.co_name if event == "call" else f"{code.co_name} -> {argument.__name__}"
            calls[f"{Path(code.co_filename).name}:{what}"] += 1

    before = sys.getprofile()
    gc.disable()  # what dies in a collection is removed from tables of this package, in calls that would be counted
    try:
        step()  # plans are built, imports and caches are warm
        sys.setprofile(count)
        step()
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls


def calls_per_virtual_microbatch(size: int, chunks: int, rank: int, policy: str) -> tuple[float, Counter[str]]:
    few, many = 8, 24
    calls = counted_calls(make_step(size, chunks, rank, many, policy))
    calls.subtract(counted_calls(make_step(size, chunks, rank, few, policy)))
    return sum(calls.values()) / ((many - few) * chunks), calls


# (P, V, rank, policy) -> most calls for a forward and a backward with everything between them.
BOUNDS = {
    (4, 2, 1, "overlap"): 80,
    (4, 2, 1, "plain"): 80,
    (4, 2, 1, "batched"): 140,
    (4, 1, 1, "overlap"): 80,
    (2, 1, 0, "plain"): 54,
}


@pytest.mark.parametrize("case", BOUNDS, ids=lambda case: "P{}V{}rank{}-{}".format(*case))
def test_calls_per_virtual_microbatch(case: tuple[int, int, int, str]) -> None:
    calls, by_function = calls_per_virtual_microbatch(*case)
    most = "\n".join(f"{n:6d}  {name}" for name, n in by_function.most_common(12))
    assert calls <= BOUNDS[case], (
        f"{calls:.1f} calls for each virtual microbatch, {BOUNDS[case]} are allowed; where the calls are:\n{most}"
    )


class Observer:
    """Sees every instruction, as a profiler does."""

    def begin(self, at: Any) -> None: ...

    def end(self, at: Any) -> None: ...


def test_work_added_to_every_instruction_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_step, "ranges_if_profiling", Observer)
    for case, bound in BOUNDS.items():
        calls, _ = calls_per_virtual_microbatch(*case)
        assert calls > bound, case


# -- sends that are left unfinished: small ones of gloo, whose end cannot be polled, are waited for together -----------


class NumberedSend(StillTransport):
    """The work of a send, which notes when it is waited for; it is over when it has been asked ``asks`` times."""

    def __init__(self, waited: list[int], number: int, asks: float) -> None:
        self.waited = waited
        self.number = number
        self.asks = asks

    def wait(self, timeout: Any = None) -> bool:
        self.waited.append(self.number)
        return True

    def is_completed(self) -> bool:
        self.asks -= 1
        return self.asks < 0


class LikeGloo(StillTransport):
    """A transport that lets ``most`` sends stay unfinished."""

    groups_calls = False

    def __init__(self, rank: int, size: int, most: int, asks: float = float("inf")) -> None:
        super().__init__(rank, size)
        self.most, self.asks = most, asks
        self.asked: set[float] = set()
        self.waited: list[int] = []
        self.before_each_send: list[int] = []

    def unfinished_sends(self, allowed: int, message_bytes: float) -> int:
        self.asked.add(message_bytes)
        return self.most

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> StillTransport:
        self.before_each_send.append(len(self.waited))
        return NumberedSend(self.waited, len(self.before_each_send), self.asks)


@pytest.mark.parametrize("policy", ["plain", "batched", "overlap"])
def test_the_older_half_is_waited_for_last_send_first_and_none_is_left(policy: str) -> None:
    transport = LikeGloo(0, 2, most=4)
    make_step(2, 1, 0, 12, policy, transport)()
    assert transport.asked == {4 * SHAPE[2]}
    assert transport.waited == [3, 2, 1, 6, 5, 4, 9, 8, 7, 12, 11, 10]
    assert all(sent - waited <= 5 + (policy == "overlap") for sent, waited in enumerate(transport.before_each_send))


def test_others_are_waited_for_one_by_one() -> None:
    transport = LikeGloo(0, 2, most=0)
    make_step(2, 1, 0, 5, "plain", transport)()
    assert transport.waited == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("asks", [0, 1, 2])
def test_a_send_that_is_put_off_is_polled_at_each_release_behind_it(asks: int) -> None:
    """The send's memory is freed as soon as the send is over, although many more sends might stay unfinished."""
    transport = LikeGloo(0, 2, most=100, asks=asks)
    make_step(2, 1, 0, 12, "overlap", transport)()
    assert transport.waited == list(range(1, 13))
    assert all(sent - waited <= 3 + asks for sent, waited in enumerate(transport.before_each_send))
