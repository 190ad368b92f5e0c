"""A failed step leaves no tensor, handle, traceback or thread, with Python's cyclic collector off.

Else a program on a GPU that catches the error and tries again would have no memory for a second step.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_pp.comm.wait_handle import WaitHandle
from megatron_pp.features.pairs.pair_runner import in_turn
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.runtime.communicators import close_communicators, communicator_for
from megatron_pp.runtime.engine.executor import PlanExecutor
from megatron_pp.runtime.step import Step
from megatron_pp.testing.toy import HIDDEN
from testkit.faults.fault_injection import BACKWARD, DELAY, EXCEPTION, SHAPE, Fault
from testkit.models.module_grids import module_on
from testkit.processes import run_processes
from testkit.sweeps import drawn
from tests.functional_tests.failed_steps import (
    MICROBATCHES,
    SIZE,
    TOKENS,
    Trial,
    of_a_split_output_layer,
    of_several_modules,
    of_the_library,
    of_torchs_stages,
)

# Fields of the config, and arguments of ``of_the_library``.
LIBRARY: dict[str, dict[str, Any]] = {
    "plain": {},
    "batched": {"batch_p2p_comm": True},
    "overlapped, large messages": {"overlap_p2p_comm": True, "tokens": TOKENS},
    "debug": {"p2p_debug": True},
    "debug, batched": {"p2p_debug": True, "batch_p2p_comm": True},
    "variable shapes": {"variable_seq_lengths": True},
    "split backwards": {"pipeline_schedule": "zb_h1", "splits": True},
    "two chunks": {"pipeline_schedule": "interleaved_1f1b"},
    "V": {"pipeline_schedule": "zb_v", "splits": True},
    "slices": {"pipeline_schedule": "seq_1f1b", "sequence_slices": 2},
    "pairs": {"pipeline_schedule": "dualpipe_v", "overlapped_forward_backward": in_turn},
    "offload": {"pipeline_schedule": "pipe_offload"},
    "named tensors": {"pipeline_schedule": "interleaved_1f1b", "skip_tensors": "a=0>3", "makes": True},
    "measured": {"measure": 3},
    "traced": {"trace_dir": "a folder", "trace_steps": "1-3"},
    "unequal microbatches": {"microbatch_costs": [1.0, 4.0, 1.0, 1.0]},
}
MODULES = {
    "an encoder": (module_on("vision"), module_on("llm", 1)),
    "an encoder in the bubbles": (module_on("vision", dp=2), module_on("llm", pp=2)._replace(chunk=1)),
}
TORCHS = {name: partial(of_torchs_stages, schedule=name) for name in ("1f1b", "interleaved_1f1b", "zb_v")}
# Name of a case -> the function that runs the step. Cases of SHARDED have two pipelines, whose stages FSDP2 shards.
SHARDED: dict[str, Callable[[Trial], str]] = {
    "sharded, 1f1b": partial(of_the_library, fsdp_collectives="zero3"),
    "sharded, zb_v": partial(of_the_library, pipeline_schedule="zb_v", fsdp_collectives="by_cost"),
    "torch's stages, sharded, zb_v": TORCHS["zb_v"],
}
# How many drawn cases of each kind run.
KINDS: list[tuple[int, dict[str, Callable[[Trial], str]]]] = [
    (4, {name: partial(of_the_library, **fields) for name, fields in LIBRARY.items()}),
    (
        1,
        {
            f"split output layer, {name}": partial(of_a_split_output_layer, schedule=name)
            for name in ("vocab_1f1b", "vocab_1f1b_alg1")
        },
    ),
    (1, {f"modules, {name}": partial(of_several_modules, modules=modules) for name, modules in MODULES.items()}),
    (1, {f"torch's stages, {name}": case for name, case in TORCHS.items()}),
    (1, SHARDED),
]
CASES = {name: case for _, cases in KINDS for name, case in cases.items()}
STEP = (Step, PlanExecutor, WaitHandle, TracebackType)


Left = tuple[str, dict[str, int], list[str]]
"""A rank's error, what is left of its step by kind, and the threads that did not end."""


def left_of_each(rank: int, size: int, name: str, trials: list[tuple[Fault, bool]], folder: str) -> list[Left]:
    """Return what each fault leaves; each one has its own process groups."""
    found = []
    for number, (fault, closed) in enumerate(trials):
        store = dist.FileStore(f"{folder}/{number}", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
        found.append(what_is_left(rank, size, name, fault, closed))
    return found


def what_is_left(rank: int, size: int, name: str, fault: Fault, closed: bool) -> Left:
    gc.collect()
    gc.freeze()
    gc.disable()
    seen: list[StorageWeakRef] = []
    error = _error_of(rank, size, name, fault, closed, seen)
    if closed:
        close_communicators()
        dist.destroy_process_group()
    deadline = time.monotonic() + 8.0
    while (threads := _threads()) and time.monotonic() < deadline and (closed or not _keeps_communicators(name)):
        time.sleep(0.05)
    left = Counter(type(one).__name__ for one in gc.get_objects() if issubclass(type(one), STEP))
    left["memory of activations"] = sum(not one.expired() for one in seen)
    if not closed:
        close_communicators()
        dist.destroy_process_group()
    assert len(seen) > 2 * MICROBATCHES, "activations were watched"
    return error, dict(+left), [] if not closed and _keeps_communicators(name) else threads


def _error_of(rank: int, size: int, name: str, fault: Fault, closed: bool, seen: list[StorageWeakRef]) -> str:
    """Return this rank's error. The groups are freed on return; so is the communicator, unless it is ``closed``."""
    groups = [dist.new_group(list(range(first, first + SIZE))) for first in range(0, size, SIZE)]
    group, shards = groups[rank // SIZE], None
    if name in SHARDED:
        across = [dist.new_group(list(range(k, size, SIZE))) for k in range(SIZE)]
        shards = DeviceMesh.from_group(across[rank % SIZE], "cpu")
    make = (lambda config: communicator_for(group, config)) if closed else partial(P2PCommunicator, group)
    return CASES[name](Trial(rank % SIZE, fault, group, make, shards, seen))


def _keeps_communicators(name: str) -> bool:
    """Return whether communicators are kept for the program's process groups, and end with them."""
    return name.startswith(("modules", "torch's stages"))


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("megatron_pp")]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for most, cases in KINDS for name in drawn(cases, most)])
def test_nothing_of_a_step_that_failed_is_kept(name: str, tmp_path: Path) -> None:
    """The faults are an exception in forward or backward, a wrong shape, and an operation that takes too long. The rank
    with the fault and its peer, which is aborted, are checked, with a communicator that is closed and with one that is
    dropped. Each rank has each fault, except for the wrong shape on the last rank, which sends no output.
    """
    turn = list(CASES).index(name)
    kinds = [EXCEPTION, BACKWARD] if turn % 2 else [EXCEPTION, DELAY if turn % 4 else SHAPE]
    trials = []
    for kind, closed in product(kinds, (True, False)):
        rank = 0 if kind == SHAPE else (turn // 2 + closed) % 2
        trials.append((Fault(kind, rank=rank, step=3, chunk=0, mb=2, seconds=6.0), closed))
    size, given = 2 * SIZE if name in SHARDED else SIZE, (name, trials, str(tmp_path))
    ranks = run_processes(left_of_each, size, given, timeout=150.0, backend=None, start_method="forkserver")
    for rank, found in enumerate(ranks):
        for (fault, closed), (error, left, threads) in zip(trials, found, strict=True):
            what = f"{fault.kind}, {'closed' if closed else 'dropped'}: rank {rank}"
            assert error != "no error", what
            assert (left, threads) == ({}, []), f"{what} raised {error}"


def test_the_memory_of_messages_is_watched() -> None:
    assert HIDDEN * TOKENS * 4 > 64 * 1024, "larger than a socket's buffer"
