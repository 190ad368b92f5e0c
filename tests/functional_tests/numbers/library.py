"""Rows of the library's own training loop: the toy model, under every schedule and policy, with backwards in two
halves, and with torch's data parallelism around its stages.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import share_comm_ctx
from torch.nn.parallel import DistributedDataParallel

from megatron_pp.features.fsdp.fsdp_instructions import REDUCES_EACH
from megatron_pp.testing.toy import HIDDEN, TOY_SCHEDULES, ToyBlock, ToyData, ToyResult, gradients_of, reference_run
from megatron_pp.weight_grad import split_weight_grad
from testkit.process_ranks import rank_of
from testkit.sweeps import EXHAUSTIVE, drawn
from tests.functional_tests.numbers.rows import Numbers, Place, Row, whole
from tests.functional_tests.numbers.whole_stages import watched

POLICIES: dict[str, dict[str, Any]] = {
    "overlap": {"overlap_p2p_comm": True},
    "flush": {"overlap_p2p_comm": True, "overlap_p2p_comm_warmup_flush": True},
    "batched": {"batch_p2p_comm": True},
    "plain": {},
}


class Nested(torch.nn.Module):
    """A stage of two blocks, which are sharded one by one, and of a parameter of the outer module."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([ToyBlock(2 * stage), ToyBlock(2 * stage + 1)])
        self.scale = torch.nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


@dataclass(frozen=True)
class Steps:
    """Steps of the toy model. Each replica has its own microbatches. The numbers of the last step are compared."""

    size: int
    chunks: int
    count: int
    policy: str = "overlap"
    variable: bool = False
    forward_only: bool = False
    split: bool = False
    fields: tuple[tuple[str, Any], ...] = field(default=())
    replicas: int = 1
    wrapped: str = ""
    """DDP or FSDP, around each stage."""
    block: Callable[[int], torch.nn.Module] = ToyBlock
    steps: int = 1

    def __str__(self) -> str:
        words = [f"P={self.size}", f"V={self.chunks}", f"M={self.count}", self.policy]
        words += ["variable"] * self.variable + ["forward-only"] * self.forward_only
        words += ["split"] * self.split + [self.wrapped] * bool(self.wrapped)
        words += [f"DP={self.replicas}"] * (self.replicas > 1) + ["nested"] * (self.block is Nested)
        return " ".join(words + [f"{name}={value}" for name, value in self.fields])

    def data(self, replica: int) -> ToyData:
        return ToyData(self.count, variable=self.variable, first=100 * replica)

    def run(self, place: Place) -> Numbers:
        fields = {"variable_seq_lengths": self.variable, **POLICIES[self.policy], **dict(self.fields)}
        one = rank_of(self.chunks, self.count, group=place.group, data=self.data(place.replica), **fields)
        stages = one.model(self.block)
        if self.split:
            split_weight_grad(stages)
        fired = _count_hooks(stages)
        model = WRAPPERS[self.wrapped](stages, place)
        counts = "fsdp_collectives" in fields and self.block is ToyBlock
        with watched(place.rank, fields.get("fsdp_max_active_stages")) if counts else nullcontext():
            for _ in range(self.steps):
                fired.clear()
                for stage in stages:
                    stage.zero_grad()
                reports = one.step(model, forward_only=self.forward_only)
        if self.wrapped == DDP and self.split:
            assert set(fired.values()) == {1}, f"hooks of parameters fired {sorted(fired.values())} times"
        numbers = dict(zip(one.placement.stages[one.rank], stages, strict=True))
        grads = {name: whole(grad) for name, grad in gradients_of(numbers).items()}
        return numbers_of(ToyResult([float(report["loss"]) for report in reports], grads))

    def expected(self, place: Place) -> Numbers:
        """Return the numbers of one process: the mean gradients over the replicas, and the losses of this replica."""
        runs = [
            one_process(self.size * self.chunks, self.data(replica), self.forward_only, self.block)
            for replica in range(self.replicas)
        ]
        grads = runs[0].grads
        if self.replicas > 1:
            grads = {name: torch.stack([run.grads[name] for run in runs]).mean(0) for name in grads}
        return numbers_of(ToyResult(runs[place.replica].losses, grads))

    def row(self, near: float = 0.0) -> Row:
        return Row(self.run, self.expected, self.size, self.replicas, near)


one_process = functools.lru_cache(maxsize=128)(reference_run)


def numbers_of(result: ToyResult) -> Numbers:
    losses = {f"loss of microbatch {mb}": loss for mb, loss in enumerate(result.losses)}
    return losses | {f"gradient of {name}": grad for name, grad in result.grads.items()}


def _count_hooks(stages: Sequence[torch.nn.Module]) -> Counter[torch.Tensor]:
    """Count how often the hook of each parameter fires."""
    fired: Counter[torch.Tensor] = Counter()

    def count(parameter: torch.Tensor) -> None:
        fired[parameter] += 1

    for parameter in (parameter for stage in stages for parameter in stage.parameters()):
        parameter.register_post_accumulate_grad_hook(count)
    return fired


# -- what is around stages ---------------------------------------------------------------------------------------------

DDP, FSDP, SHARED = "DistributedDataParallel", "fully_shard", "fully_shard, one stream for all"


def in_ddp(stages: Sequence[Any], place: Place) -> list[Any]:
    return [DistributedDataParallel(stage, process_group=place.across) for stage in stages]


def sharded(stages: Sequence[Any], place: Place) -> list[Any]:
    """Shard the stages by FSDP2; blocks within a stage first."""
    mesh = DeviceMesh.from_group(place.across, "cpu")
    for stage in stages:
        for inner in getattr(stage.inner, "blocks", ()):
            fully_shard(inner, mesh=mesh)
        fully_shard(stage.inner, mesh=mesh)
    return list(stages)


def sharded_with_one_stream(stages: Sequence[Any], place: Place) -> list[Any]:
    model = sharded(stages, place)
    share_comm_ctx([stage.inner for stage in stages])
    return model


WRAPPERS: dict[str, Callable[[Sequence[Any], Place], list[Any]]] = {
    "": lambda stages, place: list(stages),
    DDP: in_ddp,
    FSDP: sharded,
    SHARED: sharded_with_one_stream,
}


# -- rows --------------------------------------------------------------------------------------------------------------


def faults_elsewhere() -> list[Steps]:
    """Return rows in which a well-known stack returns wrong gradients or hangs: two ranks with two chunks each under
    the batched policy, evaluation under overlap with warm-up flush, and shapes that are sent ahead on four ranks or
    more."""
    cases = [Steps(2, 2, m, "batched") for m in (1, 2, 5)]
    cases += [Steps(2, 2, 5, "flush", forward_only=True), Steps(4, 2, 9, "flush", forward_only=True)]
    return [*cases, Steps(4, 1, 5, "overlap", True), Steps(4, 2, 9, "batched", True)]


def grid(policy: str) -> list[Steps]:
    """Return rows of 1F1B and interleaved 1F1B under ``policy``."""
    both = (False, True)
    # Each of two ranks is the other's next and previous one: here messages cross if they can.
    cases = [Steps(2, 2, m, policy, forward_only=only) for m, only in itertools.product((1, 2, 5), both)]
    cases += [Steps(2, 2, 4, policy, variable, fields=(("p2p_channels", "shared"),)) for variable in both]
    cases += [Steps(2, 1, 5, policy, variable) for variable in both]
    cases += [Steps(2, 1, 5, policy, True, fields=(("p2p_channels", "shared"),))]
    # Groups larger than the pipeline, and a smaller last group.
    cases += [Steps(2, 3, 6, policy, fields=(("microbatch_group_size_per_vp_stage", 3),))]
    cases += [Steps(3, 2, 7, policy, fields=(("microbatch_group_size_per_vp_stage", 6),))]
    cases += [Steps(3, 2, 7, policy), Steps(3, 1, 4, policy, True, True)]
    cases += [Steps(4, 1, 5, policy, True), Steps(4, 2, 9, policy, True), Steps(4, 2, 9, policy, forward_only=True)]
    return [*cases, Steps(4, 3, 5, policy), Steps(1, 3, 4, policy)]


def of_schedule(name: str) -> list[Steps]:
    """Return rows of a schedule on four ranks, in training and in evaluation. A schedule that each rank searches for
    seconds has one row."""
    family, fields = TOY_SCHEDULES[name], (("pipeline_schedule", name),)
    chunks = family.chunks or 2
    if family.search is not None:
        return [Steps(4, chunks, 4, fields=fields)]
    ways = (("overlap", False), ("batched", False), ("plain", True))
    return [Steps(4, chunks, 8, policy, forward_only=only, fields=fields) for policy, only in ways]


def with_split_backwards(name: str) -> list[Steps]:
    """Return rows with backwards in two halves and converted layers, for ragged numbers of microbatches and for fewer
    microbatches than ranks."""
    family, fields = TOY_SCHEDULES[name], (("pipeline_schedule", name),)
    ways = ((2, 5, "overlap"), (4, 9, "overlap"), (4, 3, "batched"))
    return [
        Steps(size, family.chunks or 2, count, policy, split=True, fields=fields)
        for size, count, policy in (ways if family.search is None else ways[:1])
    ]


def in_data_parallelism() -> list[Steps]:
    """Return rows in which DistributedDataParallel reduces each gradient once, when it is complete. PyTorch's own
    zero-bubble schedules silently give wrong gradients here, because they compute weight gradients after the reduction.
    Before the second step DistributedDataParallel rebuilds its buckets."""
    split_of = {"zb_h1": 1, "zb_h2": 1, "interleaved_zb": 2, "zb_v": 2, "v_half": 2, "dualpipe_v": 2, "1f1b_v": 2}
    whole_of = {"1f1b": 1, "interleaved_1f1b": 2, "zb_h1": 1}  # zb_h1 here has whole backwards
    cases = [
        Steps(2, chunks, 5, split=split, fields=(("pipeline_schedule", name),), replicas=2, wrapped=DDP, steps=2)
        for schedules, split in ((whole_of, False), (split_of, True))
        for name, chunks in schedules.items()
    ]
    # No pipeline: every rank is a replica of the whole model, and its last two operations are backwards.
    return [*cases, Steps(1, 1, 3, fields=(("pipeline_schedule", "gpipe"),), replicas=4, wrapped=DDP)]


Collectives = tuple[str, int, str, int | None]
"""Schedule, chunks a rank, ``fsdp_collectives`` and ``fsdp_max_active_stages``."""
OF_EACH_KIND: list[list[Collectives]] = [
    [("1f1b", 1, kind, None), ("interleaved_1f1b", 2, kind, None)]
    for kind in ("per_step", "per_run", "zero2", "zero3", "by_cost")
]
COLLECTIVES: list[Collectives] = [
    *(("interleaved_1f1b", 3, "by_cost", most) for most in (1, 2)),
    ("interleaved_1f1b", 3, "per_run", 2),
    ("gpipe", 1, "per_step", None),
    ("breadth_first", 2, "per_run", 2),
    ("zb_h1", 1, "zero3", None),
    ("interleaved_zb", 2, "by_cost", 1),
    ("zb_v", 2, "by_cost", 1),
    ("dualpipe_v", 2, "per_run", None),
]
ON_LONGER_PIPELINES: list[Collectives] = [
    ("1f1b", 1, "zero3", None),
    ("interleaved_1f1b", 2, "per_step", None),
    ("interleaved_1f1b", 3, "per_run", 2),
    ("interleaved_1f1b", 3, "by_cost", 2),
    ("zb_v", 2, "by_cost", 1),
    ("interleaved_1f1b", 2, "zero2", None),
]


IN_TURN = ("plain", "overlap")


def with_collectives(size: int, schedule: str, chunks: int, kind: str, most: int | None, policy: str) -> Steps:
    fields = (("pipeline_schedule", schedule), ("fsdp_collectives", kind), ("fsdp_max_active_stages", most))
    return Steps(size, chunks, 6, policy, fields=fields, replicas=2, wrapped=FSDP, steps=2)


def nearness(steps: Steps) -> float:
    """Return 0 if sums are reduced or there are two replicas, whose mean is exact; else the error that the order of
    additions allows."""
    fields = dict(steps.fields)
    if steps.wrapped in (FSDP, SHARED) and steps.replicas > 1 and "fsdp_collectives" not in fields:
        return 1e-6  # FSDP2's own hooks reduce each microbatch
    if fields.get("fsdp_collectives") in REDUCES_EACH:
        return 1e-5
    return 1e-6 if steps.wrapped == DDP else 0.0


def sharded_stages() -> list[Steps]:
    """Return rows of stages that ``fully_shard`` shards, with and without FSDP2's collectives in the plan, nested, and
    with one replica."""
    cases = [with_collectives(2, *some, IN_TURN[k % 2]) for k, some in enumerate(COLLECTIVES)]
    chunks = (("pipeline_schedule", "interleaved_1f1b"),)
    per_run, zero3 = (("fsdp_collectives", "per_run"),), (("fsdp_collectives", "zero3"),)
    more = {"replicas": 2, "block": Nested, "steps": 2}
    cases += [Steps(2, 2, 6, "plain", fields=(*chunks, *per_run), wrapped=FSDP, **more)]
    cases += [Steps(2, 2, 6, "plain", fields=(*chunks, *zero3), wrapped=SHARED, **more)]
    cases += [Steps(2, 1, 6, "plain", fields=(("pipeline_schedule", "1f1b"),), replicas=2, wrapped=FSDP, steps=2)]
    return cases + [
        Steps(2, 1, 4, "plain", fields=(("pipeline_schedule", name),), wrapped=FSDP, steps=2)
        for name in ("1f1b", "zb_h1")
    ]


def rows_of(cases: Sequence[Steps]) -> dict[str, Row]:
    return {str(steps): steps.row(nearness(steps)) for steps in cases}


ALWAYS = rows_of(faults_elsewhere())
GRID = [rows_of(steps) for steps in zip(*map(grid, POLICIES), strict=True)]
"""Steps, under each policy."""
SCHEDULES = {name: rows_of(of_schedule(name)) for name in TOY_SCHEDULES}
SPLIT = {
    name: rows_of(with_split_backwards(name))
    for name, family in TOY_SCHEDULES.items()
    if family.splits_weight or name in ("eager_1f1b", "1f1b_v")
}
REPLICAS = rows_of([*in_data_parallelism(), *sharded_stages()])
KINDS = [
    rows_of([with_collectives(2, *one, IN_TURN[(number + k) % 2]) for k, one in enumerate(some)])
    for number, some in enumerate(OF_EACH_KIND)
]
LONGER = rows_of([with_collectives(4, *some, "overlap") for some in ON_LONGER_PIPELINES])
DRAWN = [*SCHEDULES.values(), *SPLIT.values(), *KINDS]
"""Groups of rows; a run draws one row of each."""
ROWS: dict[str, Row] = functools.reduce(operator.or_, [*GRID, *DRAWN], ALWAYS | REPLICAS | LONGER)


def of_this_run() -> list[str]:
    """Return the rows of four processes that this run draws. Neighbours in the grid run under different pairs of the
    four policies."""
    (first,) = [0] if EXHAUSTIVE else drawn(range(2), 1)
    turns = [
        name
        for k, rows in enumerate(GRID)
        for policy, name in enumerate(rows)
        if EXHAUSTIVE or (k + policy) % 2 == first
    ]
    found = [*ALWAYS, *turns, *REPLICAS, *(name for rows in DRAWN for name in drawn(rows, 1))]
    return list(dict.fromkeys(found))
