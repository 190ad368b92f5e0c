"""Stages of torch's, and the same steps by torch's own runtime and by PlanSchedule; for real processes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, pipeline, schedules
from torch.nn.parallel import DistributedDataParallel

from megatron_pp.config.model_config import ModelParallelConfig
from megatron_pp.integrations.torch_pipelining import PlanSchedule, get_schedule_class
from megatron_pp.plan.builder import build_plan, stage_numbers
from megatron_pp.plan.io.serialize import format_plan
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.orders import find_family
from megatron_pp.weight_grad import split_weight_grad
from tests.functional_tests.torch_pipelining_models import (
    HIDDEN,
    QUEUE,
    SAMPLES,
    Block,
    Mixed,
    Shifted,
    Skipping,
    Tied,
    WithBuilder,
)

CPU = torch.device("cpu")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
SPLITTING = ("InterleavedZeroBubble", *V_SHAPED)
CHUNKS = {"1F1B": 1, "GPipe": 1, "Interleaved1F1B": 2, "LoopedBFS": 2, **dict.fromkeys(SPLITTING, 2)}


class Layout(NamedTuple):
    """This process's pipeline of ``size`` ranks, and the replicas of its stages."""

    size: int
    rank: int
    group: Any
    replica: int
    replicas: Any


def layouts(world: int) -> dict[str, Layout]:
    """The pipeline over all processes, and replicas of pipelines of two; made by all processes together."""
    rank = dist.get_rank()
    whole = dist.new_group(list(range(world)))
    pairs = [dist.new_group([r, r + 1]) for r in range(0, world, 2)]
    across = [dist.new_group(list(range(r, world, 2))) for r in range(2)]
    return {
        "whole": Layout(world, rank, whole, 0, None),
        "replicas": Layout(2, rank % 2, pairs[rank // 2], rank // 2, across[rank % 2]),
    }


Maker = Callable[[int, int], nn.Module]


def modules_of(layout: Layout, numbers: tuple[int, ...], count: int, make: Maker) -> list[nn.Module]:
    made = []
    for number in numbers:
        torch.manual_seed(number)
        made.append(make(number, count))
    return made


def block(number: int, count: int) -> nn.Module:
    return Block()


def mixed(number: int, count: int) -> nn.Module:
    return Mixed(number == 0, number == count - 1)


def tied(number: int, count: int) -> nn.Module:
    return Tied()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def stages_of(
    layout: Layout, numbers: tuple[int, ...], modules: list[nn.Module], static: bool = False
) -> list[PipelineStage]:
    """``static``: shapes are given; else torch's runtime finds them by a forward and a backward, which
    DistributedDataParallel takes for a step."""
    count, like = layout.size * len(numbers), torch.zeros(SAMPLES, HIDDEN)
    stages = []
    for number, module in zip(numbers, modules, strict=True):
        shapes = {"input_args": like.clone().requires_grad_(number > 0), "output_args": like.clone().requires_grad_()}
        stages.append(PipelineStage(module, number, count, CPU, group=layout.group, **shapes if static else {}))
    return stages


def theirs(name: str, stages: list[PipelineStage], count: int, **more: Any) -> Any:
    return getattr(schedules, f"Schedule{name}")(
        stages if len(stages) > 1 else stages[0], count, loss_fn=loss_fn, **more
    )


def batch(step: int, count: int, replica: int = 0) -> list[Tensor]:
    """Input and target."""
    generator = torch.Generator().manual_seed(100 * replica + step)
    return [torch.randn(count * SAMPLES, HIDDEN, generator=generator) for _ in range(2)]


def train(
    schedule: Any,
    stages: list[Any],
    modules: list[nn.Module],
    count: int,
    replica: int = 0,
    whole: Callable[[Any], Tensor] = Tensor.clone,
) -> list[Tensor]:
    """Losses, outputs and gradients, these made ``whole``, of two steps."""
    found: list[Tensor] = []
    for step in range(2):
        for module in modules:
            module.zero_grad()
        x, target = batch(step, count, replica)
        losses: list[Tensor] = []
        given = (x,) if any(stage.is_first for stage in stages) else ()
        more = {"target": target, "losses": losses} if any(stage.is_last for stage in stages) else {}
        output = schedule.step(*given, **more)
        found += [loss.detach().clone() for loss in losses]
        found += [] if output is None else [output.detach()]
        found += [whole(p.grad) for module in modules for p in module.parameters() if p.grad is not None]
    return found


def train_ours(
    layout: Layout, name: str = "zb_v", make: Maker = block, store: bool = False, config: Any = None
) -> list[Tensor]:
    """``train`` of a V under our plan. ``store``: the caller converts the modules, not PlanSchedule."""
    count, numbers = 6, stage_numbers(name, layout.size, 2)[layout.rank]
    modules = modules_of(layout, numbers, layout.size * 2, make)
    if store:
        split_weight_grad(modules)
    stages = stages_of(layout, numbers, modules)
    return train(PlanSchedule(stages, count, loss_fn, schedule=name, config=config), stages, modules, count)


def evaluate(schedule: Any, stages: list[Any], count: int) -> list[Tensor]:
    x, target = batch(9, count)
    losses: list[Tensor] = []
    given = (x,) if any(stage.is_first for stage in stages) else ()
    more = {"target": target, "losses": losses} if any(stage.is_last for stage in stages) else {}
    output = schedule.eval(*given, **more)
    return [] if output is None else [output, *losses]


@contextmanager
def table_of(schedule: Any, layout: Layout) -> Iterator[str]:
    """The path of torch's own table of ``schedule``, with its communication."""
    paths: list[Any] = [None]
    with tempfile.TemporaryDirectory() as folder:
        if layout.rank == 0:
            paths = [str(Path(folder) / "table.csv")]
            schedule._dump_csv(paths[0])
        dist.broadcast_object_list(paths, dist.get_global_rank(layout.group, 0), layout.group)
        yield paths[0]
        dist.barrier(layout.group)


def microbatches(layout: Layout) -> int:
    """Three rounds on two ranks; two on more, where all schedules still come to their steady state."""
    return (3 if layout.size == 2 else 2) * layout.size


def largest_difference(found: list[Tensor], expected: list[Tensor]) -> float:
    assert len(found) == len(expected), f"{len(found)} tensors, not {len(expected)}"
    assert found
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    return max((a.float() - b.float()).abs().max().item() for a, b in zip(found, expected, strict=True))


def compare(layout: Layout, name: str, make: Maker = block, table: bool = False) -> float:
    """The largest difference between torch's runtime and ours in two training steps and, where torch can, an
    evaluation. ``table``: ours runs torch's own table; so it does for LoopedBFS, whose backwards are from the last
    microbatch to the first."""
    count, chunks = microbatches(layout), CHUNKS[name]
    numbers = stage_numbers(shape_of(name), layout.size, chunks)[layout.rank]
    expected, found = [], []
    modules = modules_of(layout, numbers, layout.size * chunks, make)
    stages = stages_of(layout, numbers, modules)
    schedule = theirs(name, stages, count)
    expected += train(schedule, stages, modules, count)
    evaluates = name not in V_SHAPED  # torch's V schedules raise
    expected += evaluate(schedule, stages, count) if evaluates else []
    modules = modules_of(layout, numbers, layout.size * chunks, make)
    stages = stages_of(layout, numbers, modules)
    if table or name == "LoopedBFS":
        with table_of(schedule, layout) as path:
            ours = PlanSchedule(stages, count, loss_fn, schedule=path)
            found += train(ours, stages, modules, count)
    else:
        ours = PlanSchedule(stages if chunks > 1 else stages[0], count, loss_fn, schedule=name)
        found += train(ours, stages, modules, count)
    found += evaluate(ours, stages, count) if evaluates else []
    return largest_difference(found, expected)


def shape_of(name: str) -> str:
    return "zb_v" if name in V_SHAPED else "breadth_first" if CHUNKS[name] > 1 else "1f1b"


def compare_replicas(layout: Layout, name: str) -> float:
    """With DistributedDataParallel around our stages: beside torch's runtime with it or, where that is wrong (it leaves
    out what a W computes), torch's runtime without it and gradients averaged by hand."""
    count, chunks = microbatches(layout), CHUNKS[name]
    numbers = stage_numbers(shape_of(name), layout.size, chunks)[layout.rank]
    both: list[list[Tensor]] = []
    schedule: Any = None
    for ours in (False, True):
        modules = modules_of(layout, numbers, layout.size * chunks, block)
        wraps = ours or name not in SPLITTING
        wrapped: list[Any] = modules
        if wraps:
            wrapped = [DistributedDataParallel(m, process_group=layout.replicas) for m in modules]
        stages = stages_of(layout, numbers, wrapped, static=wraps)
        with table_of(schedule, layout) if ours and name == "LoopedBFS" else nullcontext(name) as named:
            if ours:
                schedule = PlanSchedule(stages, count, loss_fn, schedule=named, scale_grads=False)
            else:
                schedule = theirs(name, stages, count, scale_grads=False)
            train(schedule, stages, modules, count, layout.replica)
        grads = [p.grad for module in modules for p in module.parameters() if p.grad is not None]
        for grad in () if wraps else grads:
            dist.all_reduce(grad.div_(2), group=layout.replicas)
        both.append(grads)
    return largest_difference(both[1], both[0])


def compare_plan(layout: Layout, name: str, order: bool = False) -> float:
    """Our plan, written for torch, run by torch's runtime and by our engine. ``order``: torch's runtime is given our
    schedule's ``pipeline_order`` instead."""
    chunks, count, both = find_family(name).chunks or 2, 6, []
    waits = hasattr(schedules, "WAIT_SEND_F")  # since torch 2.15
    plan = build_plan(PlanSpec(name, layout.size, chunks, count, channels="shared"))
    numbers = stage_numbers(name, layout.size, chunks)[layout.rank]
    for ours in (False, True):
        modules = modules_of(layout, numbers, layout.size * chunks, block)
        stages = stages_of(layout, numbers, modules)
        if ours:
            schedule: Any = PlanSchedule(stages, count, loss_fn, schedule=name, scale_grads=False)
        else:
            schedule = schedules._PipelineScheduleRuntime(stages, count, loss_fn=loss_fn, scale_grads=False)
        if order and not ours:
            schedule._prepare_schedule_with_comms(PlanSchedule(stages, count, loss_fn, schedule=name).pipeline_order)
        elif not ours:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "plan.csv")
                path.write_text(format_plan(plan, "torch-csv-waits" if waits else "torch-csv-comms"))
                schedule._load_csv(str(path), format="compute_comms")
        both.append(train(schedule, stages, modules, count))
    return largest_difference(*both)


def compare_traced(layout: Layout, name: str = "GPipe") -> float:
    """Stages that ``pipeline()`` makes, one of whose outputs skips two stages; torch runs such under its schedules of
    one stage a rank."""
    count, both = 6, []
    for ours in (False, True):
        torch.manual_seed(0)
        pipe = pipeline(Skipping(), (torch.zeros(SAMPLES, HIDDEN),))
        assert pipe.num_stages == layout.size
        stage = pipe.build_stage(layout.rank, CPU, layout.group)
        schedule = PlanSchedule(stage, count, loss_fn, schedule=name) if ours else theirs(name, [stage], count)
        both.append(train(schedule, [stage], [stage.submod], count) + evaluate(schedule, [stage], count))
    return largest_difference(*both)


def compare_builders(layout: Layout, name: str) -> float:
    """Stages with torch's ``dw_builder``."""
    count, chunks, both = 6, CHUNKS[name], []
    numbers = stage_numbers(shape_of(name), layout.size, chunks)[layout.rank]
    for ours in (False, True):
        modules = modules_of(layout, numbers, layout.size * chunks, lambda number, count: WithBuilder())
        stages = stages_of(layout, numbers, modules, static=True)  # else torch's runtime queues a backward of its own
        for stage in stages:
            stage.dw_builder = stage.submod.dw_builder
        QUEUE.clear()
        schedule = PlanSchedule(stages, count, loss_fn, schedule=name) if ours else theirs(name, stages, count)
        both.append(train(schedule, stages, modules, count))
    return largest_difference(*both)


def compare_builder_beside(layout: Layout) -> float:
    """One of a rank's two stages has a ``dw_builder``; beside whole backwards."""
    count, both = 6, []
    numbers = stage_numbers("zb_v", layout.size, 2)[layout.rank]
    for name in ("1f1b_v", "zb_v"):
        QUEUE.clear()
        modules = modules_of(
            layout, numbers, layout.size * 2, lambda number, count: Block() if number % 2 else WithBuilder()
        )
        stages = stages_of(layout, numbers, modules)
        for stage in stages:
            stage.dw_builder = getattr(stage.submod, "dw_builder", None)
        both.append(train(PlanSchedule(stages, count, loss_fn, schedule=name), stages, modules, count))
    return largest_difference(*both)


def compare_split(layout: Layout) -> float:
    """Backwards that are split beside whole ones."""
    return largest_difference(*(train_ours(layout, name, _shifted) for name in ("zb_v", "1f1b_v")))


def _shifted(number: int, count: int) -> nn.Module:
    return Shifted(number == count - 1)


def compare_store(layout: Layout) -> float:
    """Modules that the caller has converted beside those that PlanSchedule converts."""
    return largest_difference(*(train_ours(layout, store=store) for store in (False, True)))


SETTINGS: dict[str, dict[str, Any]] = {
    "batched": {"overlap_p2p_comm": False},
    "p2p_debug": {"overlap_p2p_comm": True, "p2p_debug": True},
    "offload": {"overlap_p2p_comm": True, "offload_chunks": 1},
    "variable": {"overlap_p2p_comm": True, "variable_seq_lengths": True},
}


def compare_settings(layout: Layout) -> float:
    """Further settings of ours beside none, with several tensors between stages."""
    without, *found = (
        train_ours(layout, make=mixed, config=ModelParallelConfig(**fields) if fields else None)
        for fields in ({}, *SETTINGS.values())
    )
    return max(largest_difference(one, without) for one in found)


def compare_given(layout: Layout) -> float:
    """Microbatches that the caller has cut, keyword arguments, and a second step on top of the gradients of the first,
    beside the whole model in one process."""
    count, size = 4, layout.size
    numbers, every = stage_numbers("1f1b", size, 1)[layout.rank], tuple(range(size))
    modules, whole = modules_of(layout, numbers, size, block), modules_of(layout, every, size, block)
    stages = stages_of(layout, numbers, modules)
    schedule = get_schedule_class("1F1B")(stages[0], n_microbatches=count, loss_fn=loss_fn)
    losses: list[Tensor] = []
    first, last = layout.rank == 0, layout.rank == size - 1
    expected = []
    for step in range(2):
        xs, targets = (tensor.chunk(count) for tensor in batch(step, count))
        more: dict[str, Any] = {"arg_mbs": [(x,) for x in xs]} if first else {}
        more |= {"target_mbs": list(targets), "losses": losses, "return_outputs": False} if last else {}
        assert schedule.step(**more) is None
        earlier = [p.grad for p in whole[layout.rank].parameters()]
        whole[layout.rank].zero_grad()
        for x, target in zip(xs, targets, strict=True):
            output = x
            for module in whole:
                output = module(output)
            expected.append(loss_fn(output, target))
            expected[-1].backward()
        for p, grad in zip(whole[layout.rank].parameters(), earlier, strict=True):
            assert p.grad is not None
            p.grad = p.grad / count if grad is None else grad + p.grad / count
    found = [*losses] if last else []
    found += [p.grad for module in modules for p in module.parameters() if p.grad is not None]
    mine = [p.grad for p in whole[layout.rank].parameters() if p.grad is not None]
    return largest_difference(found, [*[loss.detach() for loss in expected[count:] if last], *mine])


def refusals(layout: Layout) -> dict[str, str]:
    """What each misuse says, on this rank, before anything is sent."""
    size, rank = layout.size, layout.rank

    def made(numbers: tuple[int, ...], schedule: str, microbatches: int = 4, count: int = 0) -> PlanSchedule:
        given = [PipelineStage(Block(), n, count or size * len(numbers), CPU, group=layout.group) for n in numbers]
        return PlanSchedule(given, microbatches, loss_fn, schedule=schedule)

    one = made((rank,), "1f1b")
    x, target = batch(0, 4)
    misuses: dict[str, Callable[[], Any]] = {
        "a loop for a V": lambda: made((rank, rank + size), "zb_v"),
        "a V for a loop": lambda: made((rank, 2 * size - 1 - rank), "interleaved_1f1b"),
        "one stage twice": lambda: made((rank, rank), "interleaved_1f1b"),
        "a stage is missing": lambda: made((rank,), "1f1b", count=2 * size),
        "one chunk for a V": lambda: made((rank,), "zb_v"),
        "no stages": lambda: PlanSchedule([], 4, loss_fn),
        "no microbatches": lambda: made((rank,), "1f1b", 0),
        "unknown schedule": lambda: made((rank,), "1f2b"),
        "arg_mbs of 3": lambda: one.step(arg_mbs=[(x,)] * 3),
        "arg_mbs of tensors": lambda: one.step(arg_mbs=[x] * 4),
        "both": lambda: one.step(x, target_mbs=[target] * 4),
        "a batch of 3": lambda: one.step(x[:3], target=target),
        "a batch of 3 on one rank": lambda: one.step(x if rank else x[:3], target=target),
        "losses": lambda: one.step(x, target=target, losses=()),
        "no gradients": torch.no_grad()(lambda: one.step(x, target=target)),
        "no target": lambda: one.step(x),
    }
    said = {}
    for name, misuse in misuses.items():
        try:
            misuse()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said
