"""What stays of a step that failed, with Python's cyclic collector off: no tensor, handle, traceback or thread of it.

A program that catches the error and tries again on a GPU has no memory for a second step otherwise.
"""

from __future__ import annotations

import gc
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_pp.comm.wait_handle import WaitHandle
from megatron_pp.features.pairs.pair_runner import in_turn
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.plan.orders import find_family
from megatron_pp.runtime.communicators import close_communicators, communicator_for
from megatron_pp.runtime.executor import PlanExecutor
from megatron_pp.runtime.step import StepCall
from megatron_pp.testing.toy import HIDDEN, ToyData, toy_config
from megatron_pp.weight_grad import split_weight_grad
from tests.harness.fault_injection import BACKWARD, DELAY, EXCEPTION, SHAPE, Fault, FaultyBlock, Trigger
from tests.harness.processes import run_processes
from tests.harness.step_runs import Rank

SIZE, MICROBATCHES = 2, 4
TOKENS = 20_000  # of a microbatch, where messages have connections of their own
# Fields of the config; "tokens": of a microbatch, "makes": a stage's tensors besides its output, "split": backwards.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "batched": {"batch_p2p_comm": True},
    "overlapped, large messages": {"overlap_p2p_comm": True, "tokens": TOKENS},
    "debug": {"p2p_debug": True},
    "debug, batched": {"p2p_debug": True, "batch_p2p_comm": True},
    "variable shapes": {"variable_seq_lengths": True},
    "split backwards": {"pipeline_schedule": "zb_h1", "split": True},
    "two chunks": {"pipeline_schedule": "interleaved_1f1b"},
    "V": {"pipeline_schedule": "zb_v", "split": True},
    "slices": {"pipeline_schedule": "seq_1f1b", "sequence_slices": 2},
    "pairs": {"pipeline_schedule": "dualpipe_v", "overlapped_forward_backward": in_turn},
    "offload": {"pipeline_schedule": "pipe_offload"},
    "named tensors": {"pipeline_schedule": "interleaved_1f1b", "skip_tensors": "a=0>3", "makes": "a"},
    "measured": {"measure": 3},
    "traced": {"trace_dir": "a folder", "trace_steps": "1-3"},
    "unequal microbatches": {"microbatch_costs": [1.0, 4.0, 1.0, 1.0]},
}
STEP = (StepCall, PlanExecutor, WaitHandle, TracebackType)


class WatchedBlock(FaultyBlock):
    """A stage that notes the memory of its inputs and outputs in ``seen``, and takes and makes named tensors."""

    def __init__(self, stage: int, chunk: int, trigger: Trigger, seen: list[StorageWeakRef], last: int) -> None:
        super().__init__(stage, chunk, trigger)
        self.seen, self.stage, self.last = seen, stage, last

    def forward(self, x: torch.Tensor, **named: torch.Tensor) -> Any:
        y = super().forward(x + sum(named.values()) if named else x)
        self.seen += [StorageWeakRef(one.untyped_storage()) for one in (x, y)]
        return y


class MakingBlock(WatchedBlock):
    """The first stage gives one tensor more, ``a``, to the last one."""

    def forward(self, x: torch.Tensor, **named: torch.Tensor) -> Any:
        y = super().forward(x, **named)
        return (y, {"a": y * 2}) if self.stage == 0 else y


def step_that_fails(
    rank: int, name: str, fault: Fault, communicator_of: Callable[[Any], Any], seen: list[StorageWeakRef], folder: str
) -> str:
    """The error of this rank, in words; everything that was made for it goes when this returns."""
    fields = dict(CASES[name])
    tokens, splits, makes = fields.pop("tokens", 4), fields.pop("split", False), fields.pop("makes", None)
    if "trace_dir" in fields:
        fields["trace_dir"] = folder
    family = find_family(fields.get("pipeline_schedule", "1f1b"))
    chunks = 1 if family.name in ONE_CHUNK else family.chunks or 2
    config = toy_config(
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        p2p_timeout=1.0 if fault.kind == DELAY else 20.0,
        compute_timeout=1.5 if fault.kind == DELAY else None,
        **fields,
    )
    data = ToyData(MICROBATCHES, seq_length=tokens, variable=fields.get("variable_seq_lengths", False))
    one = Rank(rank, config, communicator_of(config), chunks, data)
    trigger, made = Trigger(fault if fault.rank == rank else None, lambda: None), iter(range(chunks))
    kind = WatchedBlock if makes is None else MakingBlock
    model = one.model(lambda stage: kind(stage, next(made), trigger, seen, SIZE * chunks - 1))
    if splits:
        split_weight_grad(model)
    try:
        for step in (1, 2, 3):
            trigger.step = step
            for chunk in model:
                chunk.inner.begin_step()
            one.step(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


ONE_CHUNK = ("1f1b", "zb_h1", "seq_1f1b", "gpipe")


def what_is_left(rank: int, size: int, name: str, fault: Fault, closed: bool) -> tuple[str, dict[str, int], list[str]]:
    """This rank's error, what is left of its step by kind, and the threads that did not end."""
    gc.collect()
    gc.freeze()
    gc.disable()
    seen: list[StorageWeakRef] = []
    group = dist.new_group(list(range(size)))
    own = None if closed else group
    make = (lambda config: communicator_for(group, config)) if closed else (lambda config: P2PCommunicator(own, config))
    with tempfile.TemporaryDirectory() as folder:
        error = step_that_fails(rank, name, fault, make, seen, folder)
    if closed:
        close_communicators()
        dist.destroy_process_group()
    deadline = time.monotonic() + 8.0
    while (threads := _threads()) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = Counter(type(one).__name__ for one in gc.get_objects() if issubclass(type(one), STEP))
    left["memory of activations"] = sum(not one.expired() for one in seen)
    if not closed:
        dist.destroy_process_group()
    assert len(seen) > 2 * MICROBATCHES, "activations were watched"
    return error, dict(+left), threads


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("megatron_pp")]


@pytest.mark.slow
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "dropped"])
@pytest.mark.parametrize("name", CASES)
def test_nothing_of_a_step_that_failed_is_kept(name: str, closed: bool) -> None:
    """By an exception in forward or backward, a wrong shape, or an operation that takes too long, on the rank itself
    and on its peer, which is aborted."""
    turn = list(CASES).index(name)
    kinds = [EXCEPTION, BACKWARD] if turn % 2 else [EXCEPTION, DELAY if turn % 4 else SHAPE]
    for kind in kinds:
        fault = Fault(kind, rank=turn % 2, step=3, chunk=0, mb=2, seconds=4.0)
        ranks = run_processes(what_is_left, SIZE, (name, fault, closed), timeout=60.0, start_method="forkserver")
        for rank, (error, left, threads) in enumerate(ranks):
            assert error != "no error", f"{kind}: rank {rank}"
            assert (left, threads) == ({}, []), f"{kind}: rank {rank} raised {error}"


def test_the_memory_of_messages_is_watched() -> None:
    assert HIDDEN * TOKENS * 4 > 64 * 1024, "larger than a socket's buffer"
