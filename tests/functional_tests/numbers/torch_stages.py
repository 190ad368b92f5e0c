"""Rows of torch's pipeline stages under our plans: losses, outputs, all gradients, values, buffers and counts of calls.

A row has two training steps and an evaluation between them. In most models the second step adds to the gradients of the
first.
"""

from __future__ import annotations

import functools
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from megatron_pp.config.model_config import ModelParallelConfig
from megatron_pp.integrations.torch_pipelining import PlanSchedule
from megatron_pp.plan.builder import build_plan, stage_numbers
from megatron_pp.plan.io.serialize import format_plan
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.orders import SCHEDULES
from testkit.sweeps import EXHAUSTIVE, drawn
from tests.functional_tests.numbers.odd_models import CASES, COMPILED, PLAIN, SAMPLES, Case, H, compiling
from tests.functional_tests.numbers.rows import Numbers, Place, Row, whole

CPU = torch.device("cpu")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
SPLITTING = ("InterleavedZeroBubble", *V_SHAPED)
WHOLE = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS")
CHUNKS = {"1F1B": 1, "GPipe": 1, "Interleaved1F1B": 2, "LoopedBFS": 2, **dict.fromkeys(SPLITTING, 2)}
"""torch's schedules, and stages a rank."""
DDP, FSDP = "DistributedDataParallel", "fully_shard"
MODELS: dict[str, Case] = {**CASES, **COMPILED, **PLAIN}
NEAR = 1e-5
"""The tolerance of rows in which sums are added in a different order."""


def shape_of(name: str) -> str:
    """Return a schedule of ours that places stages as torch's schedule ``name`` does."""
    return "zb_v" if name in V_SHAPED else "breadth_first" if CHUNKS[name] > 1 else "1f1b"


@dataclass(frozen=True)
class Stages:
    """One row. ``schedule``: our name or torch's. ``runtime``: makes what takes the steps, from this description and
    the stages."""

    schedule: str
    model: str
    size: int = 2
    count: int = 4
    replicas: int = 1
    wrapped: str = ""
    own_batches: bool = False
    """Whether each replica has its own batches; else all have the same, and the mean of their gradients is each one's.
    With own batches ``count`` is a power of two, so that the order of the divisions does not matter."""
    runtime: str = "ours"
    fields: tuple[tuple[str, Any], ...] = field(default=())

    def __str__(self) -> str:
        words = [f"{self.schedule}, {self.model}", f"P={self.size}"] + [self.wrapped] * bool(self.wrapped)
        words += [f"DP={self.replicas}"] * (self.replicas > 1) + [self.runtime] * (self.runtime != "ours")
        return " ".join(words + [f"{name}={value}" for name, value in self.fields])

    @property
    def chunks(self) -> int:
        return CHUNKS.get(self.schedule) or SCHEDULES[self.schedule].chunks or 2

    @property
    def evaluates(self) -> bool:
        """Whether the row evaluates; torch's runtime cannot under all schedules."""
        return not self.runtime.endswith("in torch")

    @property
    def divisor(self) -> int:
        """Return the divisor of gradients. torch's runtime divides only under its own schedules."""
        return 1 if self.runtime == "our plan in torch" else self.count

    @property
    def case(self) -> Case:
        return MODELS[self.model]

    def numbers_of_stages(self, place: Place) -> tuple[int, ...]:
        shape = shape_of(self.schedule) if self.schedule in CHUNKS else self.schedule
        return stage_numbers(shape, self.size, self.chunks)[place.rank]

    def run(self, place: Place) -> Numbers:
        with quiet():
            return self._run(place)

    def _run(self, place: Place) -> Numbers:
        case, count, numbers = self.case, self.size * self.chunks, self.numbers_of_stages(place)
        every = stages_of(case, count)
        given: list[Any] = every
        if case.compiles:
            with compiling():
                given = [torch.compile(stage, backend="eager") for stage in every]
        modules = [WRAPPERS[self.wrapped](given[k], place) for k in numbers]
        stages = [self._stage(module, k, place) for module, k in zip(modules, numbers, strict=True)]
        batches = Batches(self.count, place.replica if self.own_batches else 0)
        found: dict[str, Any] = {}
        with RUNTIMES[self.runtime](self, stages, place) as schedule:
            for number, trains in enumerate(RUNS):
                if trains and case.before is not None:
                    case.before(number // 2, every)
                elif not trains and not self.evaluates:
                    continue
                x, target = batches.of(number)
                losses: list[Any] = []
                run = schedule.step if trains else schedule.eval
                more = {"target": target, "losses": losses} if count - 1 in numbers else {}
                output = run(*((x,) if 0 in numbers else ()), **more)
                if losses:
                    found |= named_losses(number, losses, output)
                if self.wrapped != FSDP or number == len(RUNS) - 1:  # called whenever all parameters are gathered
                    for k in numbers:
                        found |= named_state(number, k, every[k])
        return found

    def _stage(self, module: nn.Module, number: int, place: Place) -> PipelineStage:
        """Return a stage, with shapes under DistributedDataParallel: torch's runtime would find them by a forward and a
        backward, which DistributedDataParallel mistakes for a step."""
        shapes: dict[str, Any] = {}
        if self.wrapped == DDP:
            like = torch.zeros(SAMPLES, H)
            given = like.clone().requires_grad_(number > 0)
            shapes = {"input_args": given, "output_args": like.clone().requires_grad_()}
        return PipelineStage(module, number, self.size * self.chunks, CPU, group=place.group, **shapes)

    def expected(self, place: Place) -> Numbers:
        with quiet():
            return self._expected(place)

    def _expected(self, place: Place) -> Numbers:
        """Return the numbers of one process; each gradient is the mean over the replicas."""
        every = range(self.replicas) if self.own_batches else [0]
        given = self.model, self.size * self.chunks
        then = self.divisor, self.evaluates, self.wrapped != FSDP
        runs = [one_process(*given, Batches(self.count, replica), *then) for replica in every]
        if not self.own_batches:
            return runs[0]
        return {
            name: torch.stack([run[name] for run in runs]).mean(0) if "gradient" in name else number
            for name, number in runs[place.replica].items()
        }

    def row(self, near: float = 0.0) -> Row:
        return Row(self.run, self.expected, self.size, self.replicas, near)


RUNS = (True, False, True)
"""Whether each trains."""


@functools.lru_cache(maxsize=16)
def one_process(model: str, stages: int, batches: Batches, divisor: int, evaluates: bool, each: bool) -> Numbers:
    """Run all stages one after another. Gradients are divided, and added to those of earlier steps. ``each``: return
    the state of stages after each run, else after the last one."""
    case, made = MODELS[model], stages_of(MODELS[model], stages)
    found: dict[str, Any] = {}
    for run, trains in enumerate(RUNS):
        if trains and case.before is not None:
            case.before(run // 2, made)
        elif not trains and not evaluates:
            continue
        losses, outputs = run_in_one_process(made, batches.of(run), batches.count, divisor if trains else 0)
        found |= named_losses(run, losses, outputs)
        if each or run == len(RUNS) - 1:
            for k, stage in enumerate(made):
                found |= named_state(run, k, stage)
    return found


class Batches(NamedTuple):
    """The batches of a replica, in microbatches."""

    count: int
    replica: int

    def of(self, run: int) -> tuple[Tensor, Tensor]:
        """Return input and target."""
        generator = torch.Generator().manual_seed(run + 100 * self.replica)
        shape = self.count * SAMPLES, H
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings that the unusual models provoke."""
    logger = logging.getLogger("megatron_pp")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


def stages_of(case: Case, count: int) -> list[nn.Module]:
    made = []
    for k in range(count):
        torch.default_generator.manual_seed(k)
        made.append(case.kind(k, count))
    return made


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def run_in_one_process(
    stages: list[nn.Module], batch: tuple[Tensor, Tensor], microbatches: int, divisor: int
) -> tuple[list[Tensor], Tensor]:
    """Return losses and the outputs of all microbatches. ``divisor``: divides the gradients; 0 in evaluation."""
    x, target = batch
    trains = divisor > 0
    losses, outputs = [], []
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    earlier = {one: one.grad for one in parameters if one.grad is not None}
    for parameter in earlier:
        parameter.grad = None
    for given, wanted in zip(x.chunk(microbatches), target.chunk(microbatches), strict=True):
        with nullcontext() if trains else torch.no_grad():
            passed: Any = (given,)
            for stage in stages:
                made = stage(*passed)
                passed = made if isinstance(made, tuple) else (made,)
            loss = loss_fn(passed[0], wanted)
        losses.append(loss.detach())
        outputs.append(passed[0].detach().clone())
        if trains:
            loss.backward()
    for one in parameters:
        if one.grad is not None and trains:
            one.grad /= divisor
        if one in earlier:
            one.grad = earlier[one] if one.grad is None else one.grad + earlier[one]
    return losses, torch.cat(outputs)


def named_losses(run: int, losses: list[Any], outputs: Any) -> dict[str, Any]:
    found = {f"run {run}: loss {k}": loss.detach().clone() for k, loss in enumerate(losses)}
    return found | {f"run {run}: outputs": outputs.detach().clone()}


def named_state(run: int, number: int, stage: nn.Module) -> dict[str, Any]:
    """Return gradients, values, buffers and counts of a stage, by name."""
    found: dict[str, Tensor | None] = {}
    for name, parameter in stage.named_parameters():
        grad = parameter.grad
        found[f"gradient of {name}"] = None if grad is None else whole(grad).clone()
        main_grad = getattr(parameter, "main_grad", None)
        if main_grad is not None:
            found[f"main_grad of {name}"] = main_grad.clone()
        found[f"value of {name}"] = whole(parameter.detach()).clone()
    found |= {f"buffer {name}": buffer.clone() for name, buffer in stage.named_buffers()}
    found |= {
        name: torch.tensor(float(value if isinstance(value, int) else len(value)))
        for name, value in vars(stage).items()
        if name in ("calls", "history", "kept")
    }
    return {f"run {run}: stage {number}: {name}": tensor for name, tensor in found.items()}


# -- what is around stages, and what runs them -------------------------------------------------------------------------


def sharded(stage: Any, place: Place) -> Any:
    """Shard a part of the stage by FSDP2, then the whole stage."""
    mesh = DeviceMesh.from_group(place.across, "cpu")
    other = getattr(stage, "other", None)
    for part in getattr(stage, "blocks", [other] if isinstance(other, nn.Linear) else []):
        fully_shard(part, mesh=mesh)
    return fully_shard(stage, mesh=mesh)


def in_ddp(stage: Any, place: Place) -> Any:
    return DistributedDataParallel(stage, process_group=place.across)


WRAPPERS: dict[str, Callable[[Any, Place], Any]] = {"": lambda stage, place: stage, DDP: in_ddp, FSDP: sharded}


@contextmanager
def ours(steps: Stages, stages: Sequence[PipelineStage], place: Place) -> Iterator[Any]:
    config = ModelParallelConfig(**{"overlap_p2p_comm": True, **dict(steps.fields)}) if steps.fields else None
    given = list(stages) if steps.chunks > 1 else stages[0]
    yield PlanSchedule(given, steps.count, loss_fn, schedule=steps.schedule, config=config)


@contextmanager
def torchs_table(steps: Stages, stages: Sequence[PipelineStage], place: Place) -> Iterator[Any]:
    """Yield our runtime, which runs torch's own table of the schedule with its communication."""
    with table_of(torchs(steps.schedule, list(stages), steps.count), place) as path:
        yield PlanSchedule(list(stages), steps.count, loss_fn, schedule=path)


@contextmanager
def our_plan_in_torch(steps: Stages, stages: Sequence[PipelineStage], place: Place) -> Iterator[Any]:
    """Yield torch's runtime, which runs our plan."""
    waits = hasattr(schedules, "WAIT_SEND_F")  # since torch 2.15
    plan = build_plan(PlanSpec(steps.schedule, steps.size, steps.chunks, steps.count, channels="shared"))
    runtime = schedules._PipelineScheduleRuntime(list(stages), steps.count, loss_fn=loss_fn, scale_grads=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.csv")
        path.write_text(format_plan(plan, "torch-csv-waits" if waits else "torch-csv-comms"))
        runtime._load_csv(str(path), format="compute_comms")
    yield runtime


@contextmanager
def our_order_in_torch(steps: Stages, stages: Sequence[PipelineStage], place: Place) -> Iterator[Any]:
    """Yield torch's runtime, which runs our schedule's ``pipeline_order``."""
    runtime = schedules._PipelineScheduleRuntime(list(stages), steps.count, loss_fn=loss_fn)
    schedule = PlanSchedule(list(stages), steps.count, loss_fn, schedule=steps.schedule)
    runtime._prepare_schedule_with_comms(schedule.pipeline_order)
    yield runtime


RUNTIMES: dict[str, Callable[[Stages, Sequence[PipelineStage], Place], Any]] = {
    "ours": ours,
    "torch's table": torchs_table,
    "our plan in torch": our_plan_in_torch,
    "our order in torch": our_order_in_torch,
}


def torchs(name: str, stages: list[PipelineStage], count: int, **more: Any) -> Any:
    """Return torch's own schedule."""
    return getattr(schedules, f"Schedule{name}")(
        stages if len(stages) > 1 else stages[0], count, loss_fn=loss_fn, **more
    )


@contextmanager
def table_of(schedule: Any, place: Place) -> Iterator[str]:
    """Yield the path of torch's own table of ``schedule``, with its communication."""
    paths: list[Any] = [None]
    with tempfile.TemporaryDirectory() as folder:
        if place.rank == 0:
            paths = [str(Path(folder) / "table.csv")]
            schedule._dump_csv(paths[0])
        dist.broadcast_object_list(paths, dist.get_global_rank(place.group, 0), place.group)
        yield paths[0]
        dist.barrier(place.group)


# -- rows --------------------------------------------------------------------------------------------------------------


def rows_of(cases: Sequence[Stages]) -> dict[str, Row]:
    return {str(steps): steps.row(nearness(steps)) for steps in cases}


def nearness(steps: Stages) -> float:
    """Return 0, or a tolerance if gradients are added in a different order: in torch's LoopedBFS backwards run from the
    last microbatch to the first."""
    reversed_sums = steps.schedule == "LoopedBFS" and steps.runtime != "ours"
    reduced_each = dict(steps.fields).get("fsdp_collectives") == "zero3"
    return NEAR if steps.case.rounds or reversed_sums or reduced_each else 0.0


OUR_SPLITTING = sorted(name for name, family in SCHEDULES.items() if family.splits_weight and not family.barriers)
OUR_WHOLE = ("1f1b", "interleaved_1f1b")
ODD = [[Stages(schedule, model) for model in CASES] for schedule in (*OUR_SPLITTING, *OUR_WHOLE)]
ODD_COMPILED = rows_of([Stages(schedule, model) for schedule in ("zb_h1", "1f1b") for model in COMPILED])

# What FSDP2 itself does not do: main_grad, hooks of a parameter, sparse gradients, several dtypes in one group, layers
# without shapes, parameters that a forward writes to, and that are frozen or trained later.
NOT_SHARDED = {"MainGrad", "Hooks", "Sparse", "Half", "Lazy", "Remembers", "gradual unfreezing", "frozen later"}
ODD_SHARDED = [
    [Stages(schedule, model, replicas=2, wrapped=FSDP) for model in CASES if model not in NOT_SHARDED]
    for schedule in ("1f1b", "interleaved_1f1b", "zb_v", "dualpipe_v")
]


def in_turn(table: Sequence[Sequence[Stages]], parts: int) -> dict[str, Row]:
    """Return one of ``parts`` of each schedule's rows, in turn over the models; the first one is drawn. With as many
    parts as schedules, each model runs under one schedule."""
    parts = 1 if EXHAUSTIVE else parts
    (first,) = drawn(range(parts), 1)
    return rows_of([steps for k, of in enumerate(table) for i, steps in enumerate(of) if (k + i) % parts == first])


def odd_of_this_run() -> dict[str, Row]:
    """Return each model under one schedule that splits backwards, and some models under schedules that do not."""
    splitting, others = ODD[: len(OUR_SPLITTING)], ODD[len(OUR_SPLITTING) :]
    return in_turn(splitting, len(splitting)) | {name: ROWS[name] for of in others for name in drawn(rows_of(of), 4)}


def of_torchs(names: Sequence[str], size: int, rounds: int, model: str = "layers", **more: Any) -> dict[str, Row]:
    return rows_of([Stages(name, model, size, rounds * size, **more) for name in names])


APART: dict[str, Any] = {"replicas": 2, "own_batches": True}
IN_FSDP: dict[str, Any] = {**APART, "wrapped": FSDP}
NESTED = ("Interleaved1F1B", "ZBVZeroBubble")
KINDS = [(("fsdp_collectives", kind), ("fsdp_max_active_stages", 1)) for kind in ("per_run", "zero3")]

ON_TWO = of_torchs(("GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"), 2, 3)
ON_FOUR = [of_torchs(WHOLE, 4, 2), of_torchs(SPLITTING, 4, 2)]
IN_DDP = [of_torchs(names, 2, 2, wrapped=DDP, **APART) for names in (WHOLE, SPLITTING)]
TABLES = of_torchs(("Interleaved1F1B", "LoopedBFS", *V_SHAPED), 2, 3, runtime="torch's table")
PLANS = of_torchs(("v_half", "1f1b_v", "zb_v"), 2, 3, runtime="our plan in torch")
ORDERS = of_torchs(("interleaved_1f1b", "dualpipe_v", "zb_v"), 2, 3, runtime="our order in torch")
SETTINGS = rows_of(
    [
        Stages("zb_v", "Several", 2, 6, fields=fields)
        for fields in (
            (("overlap_p2p_comm", False),),
            (("p2p_debug", True),),
            (("offload_chunks", 1),),
            (("variable_seq_lengths", True),),
        )
    ]
)
# How many rows of each of these a run has.
SHARDED = [
    (2, of_torchs(WHOLE, 2, 2, **IN_FSDP)),
    (2, of_torchs(SPLITTING, 2, 2, **IN_FSDP)),
    (1, of_torchs(NESTED, 2, 3, wrapped=FSDP)),
    (1, of_torchs(NESTED, 2, 2, model="nested layers", **IN_FSDP)),
    (1, rows_of([Stages("zb_v", "nested layers", 2, 4, fields=fields, **IN_FSDP) for fields in KINDS])),
]
LONGER = {
    **of_torchs(tuple(CHUNKS), 4, 2, **IN_FSDP),
    **of_torchs(NESTED, 4, 2, model="nested layers", **IN_FSDP),
    **of_torchs(("1F1B", "DualPipeV"), 4, 2, wrapped=DDP, **APART),
    **of_torchs(("Interleaved1F1B", *SPLITTING[:2]), 4, 2, runtime="torch's table", **IN_FSDP),
}
ROWS: dict[str, Row] = rows_of([steps for of in (*ODD, *ODD_SHARDED) for steps in of]) | ODD_COMPILED
for _rows in (ON_TWO, *ON_FOUR, *IN_DDP, TABLES, PLANS, ORDERS, SETTINGS, *(rows for _, rows in SHARDED), LONGER):
    ROWS |= _rows
