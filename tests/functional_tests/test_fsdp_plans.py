"""Plans with FSDP2's collectives on stages that ``fully_shard`` shards, P = 2 and DP = 2 over gloo: losses and
gradients of torch's own pipeline runtime, to the bit; and memory as the plan counts it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import share_comm_ctx
from torch.distributed.tensor import DTensor

from megatron_pp.errors import ScheduleInputError
from megatron_pp.features.fsdp.fsdp_instructions import REDUCES_EACH, WAIT_UNSHARD
from megatron_pp.features.fsdp.fsdp_runner import FsdpRunner
from megatron_pp.features.fsdp.shard_memory import whole_stages
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.runtime.executor import Handler, PlanExecutor
from megatron_pp.runtime.stage import PipelineStage
from megatron_pp.schedules import get_forward_backward_func
from megatron_pp.testing.toy import HIDDEN, ToyBlock, ToyData, reference_run, toy_config, toy_loss
from testkit.process_ranks import rank_of
from testkit.processes import run_processes
from testkit.sweeps import drawn

PIPELINE, REPLICAS, MICROBATCHES = 2, 2, 6

# Schedule, chunks a rank, collectives, limit on whole stages.
CASES = [
    *(("1f1b", 1, kind, None) for kind in ("per_step", "per_run", "zero2", "zero3", "by_cost")),
    *(("interleaved_1f1b", 2, kind, None) for kind in ("per_step", "per_run", "zero2", "zero3", "by_cost")),
    *(("interleaved_1f1b", 3, "by_cost", most) for most in (1, 2)),
    ("gpipe", 1, "per_step", None),
    ("breadth_first", 2, "per_run", 2),
    ("zb_h1", 1, "zero3", None),
    ("interleaved_zb", 2, "by_cost", 1),
    ("zb_v", 2, "by_cost", 1),
    ("dualpipe_v", 2, "per_run", None),
]
# Schedule of torch's, and ours.
TORCHS = {
    "Schedule1F1B": ("1f1b", 1),
    "ScheduleGPipe": ("gpipe", 1),
    "ScheduleInterleaved1F1B": ("interleaved_1f1b", 2),
    "ScheduleLoopedBFS": ("breadth_first", 2),
    "ScheduleInterleavedZeroBubble": ("interleaved_zb", 2),
    "ScheduleZBVZeroBubble": ("zb_v", 2),
}


# As ``CASES``; on longer pipelines two of them, which are drawn.
WATCHED = [
    ("1f1b", 1, "zero3", None),
    ("interleaved_1f1b", 2, "per_step", None),
    ("interleaved_1f1b", 3, "per_run", 2),
    ("interleaved_1f1b", 3, "by_cost", 2),
    ("zb_v", 2, "by_cost", 1),
    ("interleaved_1f1b", 2, "zero2", None),
]


class _Nested(torch.nn.Module):
    """A stage of two sharded blocks, and a parameter of the outer module."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([ToyBlock(2 * stage), ToyBlock(2 * stage + 1)])
        self.scale = torch.nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def _stages_of(schedule: str, chunks: int, group: dist.ProcessGroup) -> tuple[int, ...]:
    return Placement(SCHEDULES[schedule].placement, group.size(), chunks).stages[group.rank()]


def _full_gradients(modules: dict[int, torch.nn.Module]) -> dict[str, torch.Tensor]:
    return {
        f"{stage}.{name}": parameter.grad.full_tensor()
        for stage, module in modules.items()
        for name, parameter in module.named_parameters()
    }


def _ours(
    mesh: DeviceMesh,
    schedule: str,
    chunks: int,
    block: Callable[[int], torch.nn.Module] = ToyBlock,
    shared: bool = False,
    **fields: Any,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and gradients of the second of two steps."""
    data = ToyData(MICROBATCHES, first=100 * mesh["dp"].get_local_rank())
    group = mesh["pp"].get_group()
    one = rank_of(chunks, MICROBATCHES, group=group, data=data, pipeline_schedule=schedule, **fields)
    placed = _stages_of(schedule, chunks, group)
    stages = [PipelineStage(block(stage), one.config, chunk, stage=stage) for chunk, stage in enumerate(placed)]
    for stage in stages:
        for inner in getattr(stage.inner, "blocks", ()):
            fully_shard(inner, mesh=mesh["dp"])
        fully_shard(stage.inner, mesh=mesh["dp"])
    if shared:
        share_comm_ctx([stage.inner for stage in stages])
    for _ in range(2):
        for stage in stages:
            stage.zero_grad()
        reports = one.step(stages)
    losses = [float(report["loss"]) for report in reports]
    return losses, _full_gradients({number: stage.inner for number, stage in zip(placed, stages, strict=True)})


def _torchs(mesh: DeviceMesh, name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    schedule, chunks = TORCHS[name]
    group, cpu = mesh["pp"].get_group(), torch.device("cpu")
    placed = _stages_of(schedule, chunks, group)
    modules = {stage: fully_shard(ToyBlock(stage), mesh=mesh["dp"]) for stage in placed}
    stages = [
        pipelining.PipelineStage(module, stage, PIPELINE * chunks, cpu, group=group)
        for stage, module in modules.items()
    ]
    losses: list[torch.Tensor] = []
    data = [ToyData(MICROBATCHES, first=100 * mesh["dp"].get_local_rank()).microbatch(mb) for mb in range(MICROBATCHES)]
    given, target = (torch.cat(tensors) for tensors in zip(*data, strict=True))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found = toy_loss(target, output)[0]
        losses.append(found.detach().clone())
        return found / MICROBATCHES

    made = stages[0] if chunks == 1 else stages
    runs = getattr(pipelining.schedules, name)(made, MICROBATCHES, loss_fn=loss, scale_grads=False)
    for _ in range(2):
        losses.clear()
        for module in modules.values():
            module.zero_grad()
        first = (given,) if 0 in placed else ()
        runs.step(*first, target=target if PIPELINE * chunks - 1 in placed else None)
    return [float(one) for one in losses][-MICROBATCHES:], _full_gradients(modules)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (REPLICAS, dist.get_world_size() // REPLICAS), mesh_dim_names=("dp", "pp"))


def _all_cases(rank: int, size: int) -> dict[str, Any]:
    mesh = _mesh()
    found: dict[str, Any] = {"replica": mesh["dp"].get_local_rank()}
    for number, (schedule, chunks, kind, most) in enumerate(CASES):
        overlap = {"overlap_p2p_comm": bool(number % 2)}
        settings = {"fsdp_collectives": kind, "fsdp_max_active_stages": most}
        found[f"case {number}"] = _ours(mesh, schedule, chunks, **settings, **overlap)
    nested = partial(_ours, mesh, "interleaved_1f1b", 2, block=_Nested)
    found["nested"] = nested(fsdp_collectives="per_run"), nested(fsdp_collectives="zero3", shared=True)
    found["hooks"] = _ours(mesh, "1f1b", 1)
    for name in TORCHS:
        found[name] = _torchs(mesh, name)
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_processes(_all_cases, PIPELINE * REPLICAS, timeout=300, start_method="forkserver")


def _reference(stages: int, block: Callable[[int], torch.nn.Module] = ToyBlock) -> dict[str, torch.Tensor]:
    """The mean over the replicas."""
    runs = [reference_run(stages, ToyData(MICROBATCHES, first=100 * r), block=block).grads for r in range(REPLICAS)]
    return {name: (runs[0][name] + runs[1][name]) / 2 for name in runs[0]}


@pytest.mark.parametrize("number", range(len(CASES)), ids=str)
def test_gradients_are_the_mean_over_the_replicas(results: list[dict[str, Any]], number: int) -> None:
    """To the bit where sums are reduced; else as exactly as the order of additions allows."""
    _, chunks, kind, _ = CASES[number]
    expected, seen = _reference(PIPELINE * chunks), set()
    for of_rank in results:
        losses, grads = of_rank[f"case {number}"]
        wanted = {name: expected[name] for name in grads}
        tolerance = {"rtol": 1e-6, "atol": 1e-6} if kind in REDUCES_EACH else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(grads, wanted, **tolerance)
        seen |= set(grads)
        reference = reference_run(PIPELINE * chunks, ToyData(MICROBATCHES, first=100 * of_rank["replica"]))
        assert not losses or losses == reference.losses
    assert seen == set(expected)


@pytest.mark.parametrize("name", TORCHS)
def test_losses_and_gradients_are_those_of_torchs_runtime_to_the_bit(results: list[dict[str, Any]], name: str) -> None:
    number = next(k for k, case in enumerate(CASES) if case[:2] == TORCHS[name] and case[2] not in REDUCES_EACH)
    for of_rank in results:
        (losses, grads), (torchs_losses, torchs_grads) = of_rank[f"case {number}"], of_rank[name]
        assert not losses or losses == torchs_losses
        near = 1e-6 if name == "ScheduleLoopedBFS" else 0  # whose backwards run from the last microbatch to the first
        torch.testing.assert_close(grads, torchs_grads, rtol=near, atol=near)


def test_modules_sharded_within_a_stage_and_chunks_that_share_their_streams(results: list[dict[str, Any]]) -> None:
    expected = _reference(PIPELINE * 2, _Nested)
    for of_rank in results:
        for (_, grads), exact in zip(of_rank["nested"], (True, False), strict=True):
            wanted = {name: expected[name] for name in grads}
            torch.testing.assert_close(grads, wanted, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-5)


def test_without_the_setting_the_hooks_of_fsdp2_do_it(results: list[dict[str, Any]]) -> None:
    expected = _reference(PIPELINE)
    for of_rank in results:
        grads = of_rank["hooks"][1]
        torch.testing.assert_close(grads, {name: expected[name] for name in grads}, rtol=1e-6, atol=1e-6)


# -- memory -----------------------------------------------------------------------------------------------------------


class _Watch:
    """Bytes of whole parameters and gradients of a rank's stages after each instruction."""

    def __init__(self) -> None:
        self.parameters: dict[int, list[torch.Tensor]] = {}  # by stage, as FSDP2 keeps them from then on
        self.after: list[tuple[int, int]] = []

    def attach(self, original: Any, runner: FsdpRunner, engine: PlanExecutor, handlers: dict[str, Handler]) -> None:
        original(runner, engine, handlers)
        self.parameters.clear()
        self.after.clear()
        for op, handler in list(handlers.items()):
            handlers[op] = partial(self._run, runner, handler)

    def _run(self, runner: FsdpRunner, handler: Handler, at: Any) -> None:
        handler(at)
        if at.op == WAIT_UNSHARD and at.stage not in self.parameters:
            modules = runner.stages[at.chunk].modules
            self.parameters[at.stage] = [p for module in modules for p in module.parameters(recurse=False)]
            for child in (child for module in modules for child in module.children()):
                if not isinstance(child, FSDPModule):
                    self.parameters[at.stage] += child.parameters()
        whole = [parameter for found in self.parameters.values() for parameter in found]
        self.after.append(
            (
                sum(parameter.untyped_storage().nbytes() for parameter in whole),
                sum(parameter.grad.nbytes for parameter in whole if parameter.grad is not None),
            )
        )


def _watched(rank: int, size: int, cases: list[tuple[str, int, str, int | None]]) -> list[str]:
    mesh, off = _mesh(), []
    stage_bytes = 4 * (HIDDEN * HIDDEN + 2 * HIDDEN)
    for schedule, chunks, kind, most in cases:
        watch, original, plans = _Watch(), FsdpRunner.attach, []
        FsdpRunner.attach = lambda runner, engine, handlers, watch=watch, original=original, plans=plans: (
            plans.append(engine.plan),
            watch.attach(original, runner, engine, handlers),
        )[1]
        try:
            _ours(mesh, schedule, chunks, fsdp_collectives=kind, fsdp_max_active_stages=most, overlap_p2p_comm=True)
        finally:
            FsdpRunner.attach = original
        plan, group_rank = plans[-1], mesh["pp"].get_group().rank()
        predicted = [list(map(len, part)) for part in whole_stages(plan, group_rank)]
        arriving = reducing = 0
        for k, at in enumerate(plan.programs[group_rank]):
            arriving += {"UNSHARD": 1, "WAIT_UNSHARD": -1}.get(at.op, 0)  # whole with the wait
            reducing += {"REDUCE_GRAD": 1, "WAIT_REDUCE_GRAD": -1}.get(at.op, 0)  # in buffers of the reduction
            expected = stage_bytes * (predicted[0][k] - arriving), stage_bytes * (predicted[1][k] - reducing)
            if watch.after[k] != expected:
                off.append(f"{schedule} {kind} rank {group_rank}, {at} at {k}: {watch.after[k]}, not {expected}")
        if most and max(predicted[0]) > most:
            off.append(f"{schedule} {kind}: {max(predicted[0])} stages whole")
    return off


@pytest.mark.parametrize("size", [PIPELINE, pytest.param(4, marks=pytest.mark.slow)])
def test_memory_of_whole_stages_is_what_the_plan_counts_after_every_instruction(size: int) -> None:
    cases = WATCHED if size == PIPELINE else drawn(WATCHED, 2)
    for off in run_processes(_watched, size * REPLICAS, (cases,), timeout=200, start_method="forkserver"):
        assert not off, "\n".join(off[:10])


# -- errors -----------------------------------------------------------------------------------------------------------


def _step(mesh: DeviceMesh, sharded: bool, fields: dict[str, Any]) -> None:
    one = rank_of(1, MICROBATCHES, group=mesh["pp"].get_group(), pipeline_schedule="1f1b", **fields)
    stages = one.model()
    if sharded:
        fully_shard(stages[0].inner, mesh=mesh["dp"])
    one.step(stages)


def _wrong(rank: int, size: int) -> list[str]:
    mesh, words = _mesh(), []
    for sharded, fields in (
        (False, {"fsdp_collectives": "per_step"}),
        (True, {"fsdp_collectives": "zero3", "offload_chunks": 1}),
        (True, {"fsdp_max_active_stages": 1}),
        (True, {"fsdp_collectives": "zero_3"}),
        (True, {"fsdp_collectives": "by_cost", "microbatch_costs": lambda: [1.0, 2.0]}),
        (True, {"fsdp_collectives": "zero3" if mesh["dp"].get_local_rank() else "per_step"}),
    ):
        with pytest.raises(ScheduleInputError) as caught:
            _step(mesh, sharded, fields)
        words.append(str(caught.value))
        dist.barrier()
    return words


def test_wrong_settings_and_models_are_errors_on_every_rank() -> None:
    expected = (
        "has no module that torch.distributed.fsdp.fully_shard (FSDP2) shards",
        "does not go with offloading",
        "fsdp_max_active_stages is 1 without fsdp_collectives",
        "fsdp_collectives",
        "does not go with microbatch_costs",
        "data-parallel replicas run different plans",
    )
    for words in run_processes(_wrong, PIPELINE * REPLICAS, timeout=120, start_method="forkserver"):
        for found, wanted in zip(words, expected, strict=True):
            assert wanted in found


def _after_a_failure(rank: int, size: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Without a pipeline: the gradients of a step, and those of one after a step that a microbatch has ended."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    data, found = ToyData(4, first=100 * rank), []
    for fails in (False, True):
        stage = PipelineStage(ToyBlock(0), toy_config(pipeline_schedule="1f1b", fsdp_collectives="per_step"))
        fully_shard(stage.inner, mesh=mesh["dp"])
        broken = [fails]

        def forward_step(batches: Any, model: Any, broken: list[bool] = broken) -> Any:
            x, target = next(batches)
            if broken[0] and torch.equal(x, data.microbatch(2)[0]):
                raise ZeroDivisionError
            return model(x), lambda output: toy_loss(target, output)

        step = {"forward_step_func": forward_step, "model": stage, "num_microbatches": 4}
        if fails:
            with pytest.raises(ZeroDivisionError):
                get_forward_backward_func(1)(data_iterator=data.iterator(), **step)
            broken[0] = False
            stage.state_dict()  # as a checkpoint does, which reshards
            stage.zero_grad()
        get_forward_backward_func(1)(data_iterator=data.iterator(), **step)
        found.append(_full_gradients({0: stage.inner}))
    return found[0], found[1]


def test_a_step_after_one_that_failed_has_gradients_of_its_own_alone() -> None:
    for whole, after in run_processes(_after_a_failure, REPLICAS, timeout=100, start_method="forkserver"):
        torch.testing.assert_close(after, whole, rtol=0, atol=0)


# -- FSDP2's own settings ---------------------------------------------------------------------------------------------

# What a program sets of a stage, and whether the outer module and the inner ones are whole after a forward then.
KEPT: dict[str, tuple[Callable[[FSDPModule], None], bool, bool]] = {
    "nothing": (lambda root: None, True, False),
    "stays whole": (lambda root: root.set_reshard_after_forward(False), True, True),
    "resharded": (lambda root: root.set_reshard_after_forward(True), False, False),
}


def _settings_after_steps(rank: int, size: int) -> dict[str, Any]:
    """Without a pipeline: after a step, and after one that failed and another."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    x, found = torch.ones(2, HIDDEN), {}
    alone = [dist.new_group([k]) for k in range(size)][rank]
    for name, (set_it, _, _) in KEPT.items():
        one = rank_of(1, MICROBATCHES, group=alone, pipeline_schedule="1f1b", fsdp_collectives="zero3")
        stage = PipelineStage(_Nested(0), one.config)
        for module in (*stage.inner.blocks, stage.inner):
            fully_shard(module, mesh=mesh)
        set_it(stage.inner)
        for fails in (False, True):
            if fails:
                handle = stage.inner.blocks[1].register_forward_hook(_fail)
                with pytest.raises(ZeroDivisionError):
                    one.step([stage])
                handle.remove()
            one.step([stage])
            stage.inner(x)
            whole = [not isinstance(p, DTensor) for p in (stage.inner.scale, *stage.inner.blocks[0].parameters())]
            found[f"{name}, {fails}"] = whole[0], whole[1]
    stage.inner.set_requires_gradient_sync(False)
    one.step([stage])
    stage.zero_grad()
    stage.inner(x).sum().backward()
    found["not reduced"] = all(p.grad is None for p in stage.inner.parameters() if isinstance(p, DTensor))
    return found


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


def test_what_a_program_has_set_of_fsdp2_is_so_after_a_step() -> None:
    for found in run_processes(_settings_after_steps, REPLICAS, timeout=100, start_method="forkserver"):
        assert found.pop("not reduced")
        assert found == {f"{name}, {fails}": kept[1:] for name, kept in KEPT.items() for fails in (False, True)}
