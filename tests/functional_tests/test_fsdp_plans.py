"""Stages that ``fully_shard`` (FSDP2) shards: refused settings, a step after a failed one, and FSDP2's own settings.

Rows of ``numbers/library.py`` compare their numbers and the memory of whole stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from megatron_pp.errors import ScheduleInputError, WeightGradSplitError
from megatron_pp.runtime.stage import PipelineStage
from megatron_pp.schedules import get_forward_backward_func
from megatron_pp.testing.toy import HIDDEN, ToyBlock, ToyData, toy_config, toy_loss
from megatron_pp.weight_grad import split_weight_grad
from testkit.process_ranks import rank_of
from testkit.processes import run_processes
from tests.functional_tests.numbers.library import Nested

PIPELINE, REPLICAS, MICROBATCHES = 2, 2, 6


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (REPLICAS, dist.get_world_size() // REPLICAS), mesh_dim_names=("dp", "pp"))


# -- errors -----------------------------------------------------------------------------------------------------------


def _step(mesh: DeviceMesh, sharded: bool, fields: dict[str, Any], convert: str = "") -> None:
    """Take a step. ``convert``: weight gradients are split "before" the stage is sharded, or "after", or not ("")."""
    one = rank_of(1, MICROBATCHES, group=mesh["pp"].get_group(), **{"pipeline_schedule": "1f1b", **fields})
    stages = one.model()
    if convert == "before":
        split_weight_grad(stages)
    if sharded:
        fully_shard(stages[0].inner, mesh=mesh["dp"])
    if convert == "after":
        split_weight_grad(stages)
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
    for schedule, convert in (("1f1b", "before"), ("zb_h1", "before"), ("zb_h1", "after")):
        with pytest.raises(WeightGradSplitError) as refused:
            _step(mesh, True, {"pipeline_schedule": schedule}, convert)
        words.append(str(refused.value))
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
        *["fully_shard shards the parameters of FSDPToyBlock"] * 3,
    )
    for words in run_processes(_wrong, PIPELINE * REPLICAS, timeout=120, start_method="forkserver"):
        for found, wanted in zip(words, expected, strict=True):
            assert wanted in found


def _after_a_failure(rank: int, size: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return, without a pipeline, the gradients of a step, and of a step after one in which a microbatch raised."""
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
        found.append({name: parameter.grad.full_tensor() for name, parameter in stage.inner.named_parameters()})
    return found[0], found[1]


def test_a_step_after_one_that_failed_has_gradients_of_its_own_alone() -> None:
    for whole, after in run_processes(_after_a_failure, REPLICAS, timeout=100, start_method="forkserver"):
        torch.testing.assert_close(after, whole, rtol=0, atol=0)


# -- FSDP2's own settings ---------------------------------------------------------------------------------------------

# Settings of a stage by the program, and whether the outer and the inner modules are then whole after a forward.
KEPT: dict[str, tuple[Callable[[FSDPModule], None], bool, bool]] = {
    "nothing": (lambda root: None, True, False),
    "stays whole": (lambda root: root.set_reshard_after_forward(False), True, True),
    "resharded": (lambda root: root.set_reshard_after_forward(True), False, False),
}


def _settings_after_steps(rank: int, size: int) -> dict[str, Any]:
    """Return which modules are whole under each setting of KEPT: after a step, and after a step that follows a failed
    one. The steps have no pipeline."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    x, found = torch.ones(2, HIDDEN), {}
    alone = [dist.new_group([k]) for k in range(size)][rank]
    for name, (set_it, _, _) in KEPT.items():
        one = rank_of(1, MICROBATCHES, group=alone, pipeline_schedule="1f1b", fsdp_collectives="zero3")
        stage = PipelineStage(Nested(0), one.config)
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


def test_a_step_restores_the_programs_fsdp2_settings() -> None:
    for found in run_processes(_settings_after_steps, REPLICAS, timeout=100, start_method="forkserver"):
        assert found.pop("not reduced")
        assert found == {f"{name}, {fails}": kept[1:] for name, kept in KEPT.items() for fails in (False, True)}
