"""What is alive during a step, counted by storage while it runs, is what ``verify`` predicted, instruction by
instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_pp.feature_table import CACHES
from megatron_pp.features.skip_tensors.skip_runner import SkipRunner
from megatron_pp.plan.builder import build_plan, verified_plan
from megatron_pp.plan.ir.instruction import SEND_OPS, Instruction
from megatron_pp.plan.ir.spec import POLICIES, PlanSpec
from megatron_pp.plan.verify.lifetime import LifetimeWalk
from megatron_pp.runtime.engine.executor import PlanExecutor
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.toy import TOY_SCHEDULES, ToyBlock, ToyData
from testkit.models.blocks import EndsInTanh
from testkit.models.skip_block import SkipBlock
from testkit.thread_runs.race_support import run_plan

STATE = ("inputs", "outputs", "output_grads", "input_grads")


class Census:
    """Counts, after every instruction, the storages of pipeline tensors that are still allocated, wherever they are
    held.
    """

    def __init__(self) -> None:
        self.executor: Any = None
        self.seen: set[StorageWeakRef] = set()
        self.counted: list[int] = []
        self.outputs_with_data: list[int] = []
        self.pending: list[int] = []

    def begin(self, at: Instruction) -> None:
        pass

    def end(self, at: Instruction) -> None:
        skips = next((one for one in self.executor.features if isinstance(one, SkipRunner)), None)
        tables = [getattr(self.executor, name) for name in STATE]
        for table in tables + ([] if skips is None else [skips.held, skips.sums]):
            for tensor in table.values():
                self._see(tensor)
        for handle in self.executor.handles.values():
            self._see(handle.tensor)
        self.counted.append(sum(not ref.expired() for ref in self.seen))
        self.outputs_with_data.append(
            sum(isinstance(t, torch.Tensor) and t.numel() > 1 for t in self.executor.outputs.values())
        )
        self.pending.append(sum(op in SEND_OPS for op, *_ in self.executor.handles))

    def _see(self, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor) and tensor.numel() > 1:  # no losses, and no mere places in a graph
            self.seen.add(StorageWeakRef(tensor.untyped_storage()))


def run_counted(
    spec: PlanSpec, deallocate: bool = True, block: Callable[[int], torch.nn.Module] = ToyBlock
) -> list[Census]:
    """Execute ``spec`` with a census on every rank."""
    counted: dict[int, Census] = {}

    def executor(*args: Any, **more: Any) -> PlanExecutor:
        census = Census()
        census.executor = made = PlanExecutor(*args, observer=census, deallocate=deallocate, **more)
        counted[made.rank] = census
        return made

    data, network = ToyData(spec.num_microbatches), MemoryNetwork(spec.pipeline_size)
    complaints = run_plan(build_plan(spec), data, network, executor=executor, block=block).complaints
    assert not any("never waited" in text for text in complaints)
    return [counted[rank] for rank in range(spec.pipeline_size)]


DEFAULT = {"1f1b": [(2, 1, 5), (4, 1, 8)], "interleaved_1f1b": [(2, 2, 4), (3, 2, 7), (4, 2, 16), (1, 2, 3)]}
# Of offloaded inputs other tensors stand in (``test_offload.py``).
PLANS = [(name, *sizes) for name in DEFAULT for sizes in DEFAULT[name]] + [
    (name, 3, family.chunks or 2, 7)
    for name, family in TOY_SCHEDULES.items()
    if name not in DEFAULT and name != "pipe_offload" and family.search is None
]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "{} P{}V{}M{}".format(*plan))
def test_live_storages_are_those_predicted(plan: tuple[str, int, int, int], policy: str) -> None:
    for deallocate, forward_only in product((True, False), (False, True)):
        made, verdict = verified_plan(spec := PlanSpec(*plan, policy=policy, forward_only=forward_only))
        for rank, census in enumerate(run_counted(spec, deallocate)):
            assert census.counted == list(LifetimeWalk(made, rank, deallocate).tensors())
            assert max(census.counted) == verdict.ranks[rank].tensors or not deallocate
            assert census.counted[-1] == 0


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("cache", CACHES)
def test_named_tensors_are_counted_as_they_live(cache: str, forward_only: bool) -> None:
    for schedule, size, chunks, text in (("1f1b", 3, 1, "a=0>2; b=1>2"), ("interleaved_1f1b", 2, 2, "blocks")):
        spec = PlanSpec(schedule, size, chunks, 4, forward_only=forward_only, skip_tensors=text, skip_cache=cache)
        plan, verdict = verified_plan(spec)
        block = partial(SkipBlock, tensors=spec.skip_tensors)
        for rank, census in enumerate(run_counted(spec, block=block)):
            assert census.counted == list(LifetimeWalk(plan, rank).tensors())
            assert max(census.counted) == verdict.ranks[rank].tensors
            assert census.counted[-1] == 0


def test_outputs_that_hold_data_stay_within_the_promise() -> None:
    """P=4, V=2, M=16 on rank 0: no more than the warm-up depth + 1 + max_pending_sends, and none after the step."""
    spec = PlanSpec("interleaved_1f1b", 4, 2, 16)
    census = run_counted(spec)[0]
    warmup = 2 * 3 + 4
    assert max(census.outputs_with_data) <= warmup + 1 + spec.release_after
    assert max(census.outputs_with_data) <= 1 + spec.release_after  # much less, in fact: only what is being sent
    assert max(census.pending) == verified_plan(spec)[1].ranks[0].each.pending_sends
    assert census.outputs_with_data[-1] == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sizes", [(3, 1, 6), (2, 2, 4)])
def test_outputs_that_the_graph_has_saved_count_as_kept(sizes: tuple[int, int, int], policy: str) -> None:
    """Until their backward, whatever ``deallocate`` says: ``verify --keep-outputs`` foretells the memory."""
    schedule = "1f1b" if sizes[1] == 1 else "interleaved_1f1b"
    spec = PlanSpec(schedule, *sizes, policy=policy)
    for rank, census in enumerate(run_counted(spec, True, EndsInTanh)):
        kept = list(LifetimeWalk(build_plan(spec), rank, deallocate=False).tensors())
        assert census.counted == kept
