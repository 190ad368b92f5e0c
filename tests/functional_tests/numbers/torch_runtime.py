"""Rows of torch's pipeline stages that compare the bits of PlanSchedule with those of torch's own runtime, or of other
ways to run them. ``torch_stages.py`` has the rows that are compared with one process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, pipeline
from torch.distributed.tensor import DTensor

from megatron_pp.integrations.torch_pipelining import PlanSchedule, get_schedule_class
from megatron_pp.plan.builder import stage_numbers
from megatron_pp.weight_grad import split_weight_grad
from tests.functional_tests.numbers import torch_stages
from tests.functional_tests.numbers.rows import Numbers, Place, Row
from tests.functional_tests.numbers.torch_models import (
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
from tests.functional_tests.numbers.torch_stages import CHUNKS, V_SHAPED, loss_fn, shape_of, table_of, torchs

CPU = torch.device("cpu")
Maker = Callable[[int, int], nn.Module]


def modules_of(place: Place, numbers: tuple[int, ...], count: int, make: Maker) -> list[nn.Module]:
    made = []
    for number in numbers:
        torch.default_generator.manual_seed(number)
        made.append(make(number, count))
    return made


def block(number: int, count: int) -> nn.Module:
    return Block()


def mixed(number: int, count: int) -> nn.Module:
    return Mixed(number == 0, number == count - 1)


def tied(number: int, count: int) -> nn.Module:
    return Tied()


def stages_of(
    place: Place, numbers: tuple[int, ...], modules: list[nn.Module], static: bool = False
) -> list[PipelineStage]:
    """Return the rank's stages. ``static``: shapes are given; else torch's runtime finds them by a forward and a
    backward, which DistributedDataParallel mistakes for a step."""
    count, like = place.size * len(numbers), torch.zeros(SAMPLES, HIDDEN)
    stages = []
    for number, module in zip(numbers, modules, strict=True):
        shapes = {"input_args": like.clone().requires_grad_(number > 0), "output_args": like.clone().requires_grad_()}
        stages.append(PipelineStage(module, number, count, CPU, group=place.group, **shapes if static else {}))
    return stages


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
    """Take two steps, and return losses, outputs and gradients, the last after ``whole``."""
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


def train_ours(place: Place, name: str = "zb_v", make: Maker = block, store: bool = False) -> list[Tensor]:
    """Call ``train`` for a V under our plan. ``store``: the caller converts the modules, not PlanSchedule."""
    count, numbers = 6, stage_numbers(name, place.size, 2)[place.rank]
    modules = modules_of(place, numbers, place.size * 2, make)
    if store:
        split_weight_grad(modules)
    stages = stages_of(place, numbers, modules)
    return train(PlanSchedule(stages, count, loss_fn, schedule=name), stages, modules, count)


def evaluate(schedule: Any, stages: list[Any], count: int) -> list[Tensor]:
    x, target = batch(9, count)
    losses: list[Tensor] = []
    given = (x,) if any(stage.is_first for stage in stages) else ()
    more = {"target": target, "losses": losses} if any(stage.is_last for stage in stages) else {}
    output = schedule.eval(*given, **more)
    return [] if output is None else [output, *losses]


def microbatches(place: Place) -> int:
    """Return three rounds on two ranks, and two rounds on more, where all schedules still reach their steady state."""
    return (3 if place.size == 2 else 2) * place.size


def largest_difference(found: list[Tensor], expected: list[Tensor]) -> float:
    assert len(found) == len(expected), f"{len(found)} tensors, not {len(expected)}"
    assert found
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    return max((a.float() - b.float()).abs().max().item() for a, b in zip(found, expected, strict=True))


def compare(place: Place, name: str, make: Maker = block, table: bool = False) -> float:
    """Return the largest difference between torch's runtime and ours in two training steps, and in an evaluation if
    torch's schedule can evaluate. ``table``: ours runs torch's own table. It does so for LoopedBFS too, whose backwards
    run from the last microbatch to the first."""
    count, chunks = microbatches(place), CHUNKS[name]
    numbers = stage_numbers(shape_of(name), place.size, chunks)[place.rank]
    evaluates = name not in V_SHAPED  # torch's V schedules raise
    both: list[list[Tensor]] = []
    schedule: Any = None
    for ours in (False, True):
        modules = modules_of(place, numbers, place.size * chunks, make)
        stages = stages_of(place, numbers, modules)
        with table_of(schedule, place) if ours and (table or name == "LoopedBFS") else nullcontext(name) as named:
            if ours:
                schedule = PlanSchedule(stages if chunks > 1 else stages[0], count, loss_fn, schedule=named)
            else:
                schedule = torchs(name, stages, count)
            found = train(schedule, stages, modules, count)
        both.append(found + (evaluate(schedule, stages, count) if evaluates else []))
    return largest_difference(both[1], both[0])


def compare_sharded(place: Place, name: str, **more: Any) -> float:
    """Compare with stages that FSDP2 shards. ``more``: arguments of ``fully_shard``."""
    count, chunks = microbatches(place), CHUNKS[name]
    numbers = stage_numbers(shape_of(name), place.size, chunks)[place.rank]
    mesh = DeviceMesh.from_group(place.across, "cpu")
    both: list[list[Tensor]] = []
    schedule: Any = None
    for ours in (False, True):
        modules = modules_of(place, numbers, place.size * chunks, block)
        stages = stages_of(place, numbers, [fully_shard(module, mesh=mesh, **more) for module in modules])
        with table_of(schedule, place) if ours and name == "LoopedBFS" else nullcontext(name) as named:
            schedule = PlanSchedule(stages, count, loss_fn, schedule=named) if ours else torchs(name, stages, count)
            both.append(train(schedule, stages, modules, count, place.replica, DTensor.full_tensor))
    return largest_difference(both[1], both[0])


def compare_traced(place: Place, name: str = "GPipe") -> float:
    """Compare stages that ``pipeline()`` makes, with an output that skips two stages. torch runs them under its
    schedules of one stage a rank."""
    torch.default_generator.manual_seed(0)
    pipe = pipeline(Skipping(), (torch.zeros(SAMPLES, HIDDEN),))
    assert pipe.num_stages == place.size
    count, both = 6, []
    for ours in (False, True):
        stage = pipe.build_stage(place.rank, CPU, place.group)
        stage.submod.zero_grad()
        schedule = PlanSchedule(stage, count, loss_fn, schedule=name) if ours else torchs(name, [stage], count)
        both.append(train(schedule, [stage], [stage.submod], count) + evaluate(schedule, [stage], count))
    return largest_difference(*both)


def compare_builders(place: Place, name: str) -> float:
    """Compare stages with torch's ``dw_builder``."""
    count, chunks, both = 6, CHUNKS[name], []
    numbers = stage_numbers(shape_of(name), place.size, chunks)[place.rank]
    for ours in (False, True):
        modules = modules_of(place, numbers, place.size * chunks, lambda number, count: WithBuilder())
        stages = stages_of(place, numbers, modules, static=True)  # else torch's runtime queues its own backward
        for stage in stages:
            stage.dw_builder = stage.submod.dw_builder
        QUEUE.clear()
        schedule = PlanSchedule(stages, count, loss_fn, schedule=name) if ours else torchs(name, stages, count)
        both.append(train(schedule, stages, modules, count))
    return largest_difference(*both)


def compare_builder_beside(place: Place) -> float:
    """Compare split with whole backwards, where one of a rank's two stages has a ``dw_builder``."""
    count, both = 6, []
    numbers = stage_numbers("zb_v", place.size, 2)[place.rank]
    for name in ("1f1b_v", "zb_v"):
        QUEUE.clear()
        modules = modules_of(
            place, numbers, place.size * 2, lambda number, count: Block() if number % 2 else WithBuilder()
        )
        stages = stages_of(place, numbers, modules)
        for stage in stages:
            stage.dw_builder = getattr(stage.submod, "dw_builder", None)
        both.append(train(PlanSchedule(stages, count, loss_fn, schedule=name), stages, modules, count))
    return largest_difference(*both)


def compare_split(place: Place) -> float:
    """Compare split backwards with whole ones."""
    return largest_difference(*(train_ours(place, name, _shifted) for name in ("zb_v", "1f1b_v")))


def _shifted(number: int, count: int) -> nn.Module:
    return Shifted(number == count - 1)


def compare_store(place: Place) -> float:
    """Compare modules that the caller has converted with modules that PlanSchedule converts."""
    return largest_difference(*(train_ours(place, store=store) for store in (False, True)))


def compare_given(place: Place) -> float:
    """Compare with the whole model in one process: microbatches that the caller has cut, keyword arguments, and a
    second step that adds to the gradients of the first."""
    count, size = 4, place.size
    numbers, every = stage_numbers("1f1b", size, 1)[place.rank], tuple(range(size))
    modules, whole = modules_of(place, numbers, size, block), modules_of(place, every, size, block)
    stages = stages_of(place, numbers, modules)
    schedule = get_schedule_class("1F1B")(stages[0], n_microbatches=count, loss_fn=loss_fn)
    losses: list[Tensor] = []
    first, last = place.rank == 0, place.rank == size - 1
    expected = []
    for step in range(2):
        xs, targets = (tensor.chunk(count) for tensor in batch(step, count))
        more: dict[str, Any] = {"arg_mbs": [(x,) for x in xs]} if first else {}
        more |= {"target_mbs": list(targets), "losses": losses, "return_outputs": False} if last else {}
        assert schedule.step(**more) is None
        earlier = [p.grad for p in whole[place.rank].parameters()]
        whole[place.rank].zero_grad()
        for x, target in zip(xs, targets, strict=True):
            output = x
            for module in whole:
                output = module(output)
            expected.append(loss_fn(output, target))
            expected[-1].backward()
        for p, grad in zip(whole[place.rank].parameters(), earlier, strict=True):
            assert p.grad is not None
            p.grad = p.grad / count if grad is None else grad + p.grad / count
    found = [*losses] if last else []
    found += [p.grad for module in modules for p in module.parameters() if p.grad is not None]
    mine = [p.grad for p in whole[place.rank].parameters() if p.grad is not None]
    return largest_difference(found, [*[loss.detach() for loss in expected[count:] if last], *mine])


def refusals(rank: int, size: int) -> dict[str, str]:
    """Return the error of each misuse on this rank, which is raised before anything is sent."""

    def made(numbers: tuple[int, ...], schedule: str, microbatches: int = 4, count: int = 0) -> PlanSchedule:
        given = [PipelineStage(Block(), n, count or size * len(numbers), CPU) for n in numbers]
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


# -- rows --------------------------------------------------------------------------------------------------------------


def row_of(check: Callable[[Place], float], size: int = 2, replicas: int = 1) -> Row:
    """Return the row of a check that returns the largest difference on its rank."""

    def run(place: Place) -> Numbers:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {"largest difference": check(place)}

    return Row(run, lambda place: {"largest difference": 0.0}, size, replicas)


LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)

ALWAYS = {
    **{name: row_of(partial(compare, name=name)) for name in ("1F1B", *V_SHAPED)},
    "table of InterleavedZeroBubble": row_of(partial(compare, name="InterleavedZeroBubble", table=True)),
    "mixed dtypes": row_of(partial(compare, name="ZBVZeroBubble", make=mixed)),
    "mixed dtypes, 1F1B": row_of(partial(compare, name="1F1B", make=mixed)),
    "one weight twice": row_of(partial(compare, name="ZBVZeroBubble", make=tied)),
    "dw_builder": row_of(partial(compare_builders, name="ZBVZeroBubble")),
    "dw_builder, whole backwards": row_of(partial(compare_builders, name="Interleaved1F1B")),
    "split_weight_grad": row_of(compare_store),
    "one gradient for two, and none": row_of(compare_split),
    "a builder beside a layer that splits": row_of(compare_builder_beside),
    "microbatches given, two steps": row_of(compare_given),
}
# torch's runtime with these on two ranks, whose numbers under our plans are also compared with one process.
OTHERS = {
    name: row_of(partial(compare, name=name))
    for name in ("GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
}
TRACED = {"stages of pipeline()": row_of(compare_traced, 4)}
SHARDED = {f"{name} beside torch's runtime": row_of(partial(compare_sharded, name=name), 2, 2) for name in CHUNKS}
PRECISION = {"mixed precision": row_of(partial(compare_sharded, name="ZBVZeroBubble", mp_policy=LOW), 2, 2)}
ROWS = torch_stages.ROWS | ALWAYS | OTHERS | TRACED | SHARDED | PRECISION
"""All rows of torch's stages."""
