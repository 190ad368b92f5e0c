"""torch's stages in ``fully_shard`` (FSDP2) under our plans: the same bits as torch's own runtime with FSDP2.

Quick cases share one start of four processes, two pipelines of two ranks; slow ones one of eight, two of four.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron_pp.config.model_config import ModelParallelConfig
from megatron_pp.integrations.torch_pipelining import PlanSchedule
from megatron_pp.plan.builder import stage_numbers
from testkit.processes import run_processes
from testkit.sweeps import EXHAUSTIVE, drawn
from tests.functional_tests import torch_pipelining_checks as checks
from tests.functional_tests.torch_pipelining_checks import Layout, loss_fn
from tests.functional_tests.torch_pipelining_models import HIDDEN, Block

REPLICAS = 2
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)


def _layout(size: int) -> tuple[Layout, DeviceMesh]:
    """Of a world of ``REPLICAS`` pipelines of ``size``."""
    rank = dist.get_rank()
    pipelines = [dist.new_group(list(range(first, first + size))) for first in range(0, size * REPLICAS, size)]
    across = [dist.new_group(list(range(k, size * REPLICAS, size))) for k in range(size)]
    layout = Layout(size, rank % size, pipelines[rank // size], rank // size, across[rank % size])
    return layout, DeviceMesh.from_group(layout.replicas, "cpu")


class Nested(nn.Module):
    """Blocks that are sharded one by one, and a parameter of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def _sharded(mesh: DeviceMesh, modules: list[nn.Module], **more: Any) -> list[nn.Module]:
    for module in modules:
        for block in getattr(module, "blocks", ()):
            fully_shard(block, mesh=mesh, **more)
        fully_shard(module, mesh=mesh, **more)
    return modules


def _compare(layout: Layout, mesh: DeviceMesh, name: str, make: Any = Block, table: bool = False, **more: Any) -> float:
    """The largest difference between torch's runtime and ours. ``more``: for ``fully_shard``."""
    count, chunks = checks.microbatches(layout), checks.CHUNKS[name]
    numbers = stage_numbers(checks.shape_of(name), layout.size, chunks)[layout.rank]
    both: list[list[Tensor]] = []
    schedule: Any = None
    for ours in (False, True):
        modules = checks.modules_of(layout, numbers, layout.size * chunks, lambda number, count: make())
        stages = checks.stages_of(layout, numbers, _sharded(mesh, modules, **more))
        with checks.table_of(schedule, layout) if ours and table else nullcontext(name) as named:
            if ours:
                schedule = PlanSchedule(stages, count, loss_fn, schedule=named)
            else:
                schedule = checks.theirs(name, stages, count)
            both.append(checks.train(schedule, stages, modules, count, layout.replica, DTensor.full_tensor))
    return checks.largest_difference(both[1], both[0])


def _compare_each(layout: Layout, mesh: DeviceMesh, name: str = "zb_v") -> float:
    """The gradients of each microbatch reduced by themselves beside their sum reduced; 0 where nearly equal."""
    both: list[list[Tensor]] = []
    numbers = stage_numbers(name, layout.size, 2)[layout.rank]
    for kind in ("per_run", "zero3"):
        modules = checks.modules_of(layout, numbers, layout.size * 2, lambda number, count: Nested())
        stages = checks.stages_of(layout, numbers, _sharded(mesh, modules))
        config = ModelParallelConfig(overlap_p2p_comm=True, fsdp_collectives=kind, fsdp_max_active_stages=1)
        schedule = PlanSchedule(stages, 6, loss_fn, schedule=name, config=config)
        both.append(checks.train(schedule, stages, modules, 6, layout.replica, DTensor.full_tensor))
    difference = checks.largest_difference(*both)
    return 0.0 if difference < 1e-6 else difference


def _compare_nested(layout: Layout, mesh: DeviceMesh, name: str) -> float:
    """Beside torch's runtime without FSDP2 and gradients averaged by hand: with it, it leaves out what a W computes
    for a module that is sharded within a stage."""
    count, chunks = checks.microbatches(layout), checks.CHUNKS[name]
    numbers = stage_numbers(checks.shape_of(name), layout.size, chunks)[layout.rank]
    both: list[list[Tensor]] = []
    for ours in (False, True):
        modules = checks.modules_of(layout, numbers, layout.size * chunks, lambda number, count: Nested())
        stages = checks.stages_of(layout, numbers, _sharded(mesh, modules) if ours else modules)
        if ours:
            schedule: Any = PlanSchedule(stages, count, loss_fn, schedule=name, scale_grads=False)
        else:
            schedule = checks.theirs(name, stages, count, scale_grads=False)
        checks.train(schedule, stages, modules, count, layout.replica)
        grads = [p.grad for module in modules for p in module.parameters() if p.grad is not None]
        for grad in () if ours else grads:
            dist.all_reduce(grad.div_(REPLICAS), group=layout.replicas)
        both.append([grad.full_tensor() if ours else grad for grad in grads])  # type: ignore[attr-defined]
    return checks.largest_difference(both[1], both[0])


def _compare_alone(layout: Layout, mesh: DeviceMesh, name: str) -> float:
    """Sharded over one process: each pipeline by itself."""
    world = range(dist.get_world_size())
    group = [dist.new_group([rank]) for rank in world][dist.get_rank()]
    return _compare(layout, DeviceMesh.from_group(group, "cpu"), name)


def _compare_wrapped(layout: Layout, mesh: DeviceMesh, name: str) -> float:
    """In DistributedDataParallel instead."""
    return checks.compare_replicas(layout, name)


QUICK: dict[str, Callable[..., Any]] = {
    **{name: partial(_compare, name=name, table=name == "LoopedBFS") for name in checks.CHUNKS},
    **{f"one replica, {name}": partial(_compare_alone, name=name) for name in ("Interleaved1F1B", "ZBVZeroBubble")},
    "mixed precision, ZBVZeroBubble": partial(_compare, name="ZBVZeroBubble", mp_policy=LOW),
    "reduced one by one": _compare_each,
    "nested, Interleaved1F1B": partial(_compare, name="Interleaved1F1B", make=Nested),
    "nested, ZBVZeroBubble": partial(_compare_nested, name="ZBVZeroBubble"),
}
# Of each kind of order one; the others differ on four ranks as they do on two.
ON_FOUR = ("1F1B", "InterleavedZeroBubble", "DualPipeV", "nested, Interleaved1F1B", "nested, ZBVZeroBubble")
SLOW = {
    **{f"{name}, 4 ranks": check for name, check in QUICK.items() if EXHAUSTIVE or name in ON_FOUR},
    **{
        f"DistributedDataParallel, {name}": partial(_compare_wrapped, name=name)
        for name in (checks.CHUNKS if EXHAUSTIVE else drawn(("1F1B", "DualPipeV"), 1))
    },
    **{
        f"table of {name}": partial(_compare, name=name, table=True)
        for name in drawn(("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"), 1)
    },
}


def _rank_main(rank: int, size: int, cases: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    layout, mesh = _layout(size // REPLICAS)
    return {name: check(layout, mesh) for name, check in cases.items()}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_processes(_rank_main, 4, (QUICK,), timeout=180, start_method="mixed")


@pytest.fixture(scope="module")
def slow_results() -> list[dict[str, Any]]:
    return run_processes(_rank_main, 8, (SLOW,), timeout=400, start_method="mixed")


@pytest.mark.parametrize("case", QUICK)
def test_losses_outputs_and_gradients_are_torchs_to_the_last_bit(results: list[dict[str, Any]], case: str) -> None:
    assert [of_rank[case] for of_rank in results] == [0.0] * 4


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_so_they_are_on_four_ranks(slow_results: list[dict[str, Any]], case: str) -> None:
    assert [of_rank[case] for of_rank in slow_results] == [0.0] * 8
