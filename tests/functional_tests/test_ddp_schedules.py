"""torch's DistributedDataParallel around the stages of a pipeline: every schedule reduces each gradient, once, when it
is complete.

PyTorch's own zero-bubble schedules give wrong gradients here without a word: their weight gradients come after the
reduction.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megatron_pp.errors import WeightGradSplitError
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.schedules import get_forward_backward_func
from megatron_pp.testing.pipeline import toy_step
from megatron_pp.testing.toy import (
    ToyData,
    gradients_of,
    reference_run,
    toy_chunks,
    toy_config,
    toy_forward_step,
)
from megatron_pp.weight_grad import split_weight_grad
from tests.harness.processes import run_processes

PIPELINE, REPLICAS = 2, 2

CASES = [
    ("1f1b", 1, False),
    ("interleaved_1f1b", 2, False),
    ("zb_h1", 1, True),
    ("zb_h1", 1, False),  # not converted: each B is a full one
    ("zb_h2", 1, True),
    ("interleaved_zb", 2, True),
    ("zb_v", 2, True),
    ("v_half", 2, True),
    ("dualpipe_v", 2, True),
    ("1f1b_v", 2, True),
]


class _ReplicaData(ToyData):
    """Each replica sees microbatches of its own."""

    replica = 0

    def microbatch(self, mb: int) -> tuple[torch.Tensor, torch.Tensor]:
        return super().microbatch(mb + 100 * self.replica)


def _data(replica: int, microbatches: int) -> ToyData:
    data = _ReplicaData(microbatches)
    object.__setattr__(data, "replica", replica)
    return data


def _groups(rank: int) -> tuple[Any, Any]:
    """(pipeline, data-parallel) group of ``rank``: replicas are neighbours."""
    pipelines = [dist.new_group([r + REPLICAS * s for s in range(PIPELINE)]) for r in range(REPLICAS)]
    replicas = [dist.new_group([REPLICAS * s + r for r in range(REPLICAS)]) for s in range(PIPELINE)]
    return pipelines[rank % REPLICAS], replicas[rank // REPLICAS]


class _HookCount:
    def __init__(self) -> None:
        self.fired: dict[str, int] = {}

    def watch(self, name: str, parameter: torch.nn.Parameter) -> None:
        parameter.register_post_accumulate_grad_hook(_Counted(self.fired, name))


class _Counted:
    def __init__(self, fired: dict[str, int], name: str) -> None:
        self.fired = fired
        self.name = name

    def __call__(self, parameter: torch.Tensor) -> None:
        self.fired[self.name] = self.fired.get(self.name, 0) + 1


def _rank_main(rank: int, size: int, cases: list[tuple[str, int, bool]]) -> list[Any]:
    pipeline_group, replica_group = _groups(rank)
    return [*(_run_case(rank, pipeline_group, replica_group, *case) for case in cases), _run_alone(rank)]


def _run_alone(rank: int) -> dict[str, torch.Tensor]:
    """No pipeline: every rank is a replica of the whole model, and its last two operations are backwards."""
    config = toy_config(pipeline_schedule="gpipe")
    [stage] = toy_chunks(Placement("loop", 1, 1), 0, config)
    data = _data(rank, 3)
    get_forward_backward_func(1)(
        forward_step_func=toy_forward_step,
        data_iterator=data.iterator(),
        model=DistributedDataParallel(stage),
        num_microbatches=3,
    )
    return {name: grad.clone() for name, grad in gradients_of({0: stage}).items()}


def _run_case(rank: int, pipeline_group: Any, replica_group: Any, name: str, chunks: int, convert: bool) -> Any:
    stage_rank, replica = rank // REPLICAS, rank % REPLICAS
    config = toy_config(
        pipeline_schedule=name,
        overlap_p2p_comm=True,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
    )
    placement = Placement(SCHEDULES[name].placement, PIPELINE, chunks)
    data = _data(replica, 5)
    stages = toy_chunks(placement, stage_rank, config)
    if convert:
        split_weight_grad(stages)
    counts = _HookCount()
    for chunk, stage in enumerate(stages):
        for parameter_name, parameter in stage.named_parameters():
            counts.watch(f"{chunk}.{parameter_name}", parameter)
    wrapped = [DistributedDataParallel(stage, process_group=replica_group) for stage in stages]
    for _ in range(2):  # the second step finds buckets rebuilt
        for stage in stages:
            stage.zero_grad()
        counts.fired.clear()
        toy_step(wrapped, data, P2PCommunicator(pipeline_group, config))
    numbers = placement.stages[stage_rank]
    grads = gradients_of(dict(zip(numbers, stages, strict=True)))
    return {n: g.clone() for n, g in grads.items()}, dict(counts.fired)


@pytest.fixture(scope="module")
def results() -> list[Any]:
    return run_processes(_rank_main, PIPELINE * REPLICAS, (CASES,), timeout=300, start_method="forkserver")


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{n}-{v}-{c}" for n, v, c in CASES])
def test_gradients_are_the_mean_over_the_replicas(results: list[Any], case: int) -> None:
    _, chunks, _ = CASES[case]
    each = [reference_run(PIPELINE * chunks, _data(replica, 5)).grads for replica in range(REPLICAS)]
    expected = {key: (each[0][key] + each[1][key]) / 2 for key in each[0]}
    seen = set()
    for of_rank in results:
        grads, _ = of_rank[case]
        for key, grad in grads.items():
            torch.testing.assert_close(grad, expected[key], rtol=1e-6, atol=1e-7)
            seen.add(key)
    assert seen == set(expected)


def test_without_a_pipeline_too(results: list[Any]) -> None:
    each = [reference_run(1, _data(replica, 3)).grads for replica in range(PIPELINE * REPLICAS)]
    for of_rank in results:
        for key, grad in of_rank[-1].items():
            expected = torch.stack([grads[key] for grads in each]).mean(0)
            torch.testing.assert_close(grad, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", [i for i, c in enumerate(CASES) if c[2]], ids=[c[0] for c in CASES if c[2]])
def test_hooks_fire_once_per_parameter_and_step(results: list[Any], case: int) -> None:
    for of_rank in results:
        _, fired = of_rank[case]
        assert set(fired.values()) == {1}
        assert len(fired) == 3 * CASES[case][1]


def _sharded_main(rank: int, size: int) -> list[str]:
    """Stages under fully_shard: two steps each, with whole backwards; converted, an error before communication."""
    mesh, data, found = init_device_mesh("cpu", (size, 1), mesh_dim_names=("pp", "dp")), ToyData(4), []
    cases = [("1f1b", ""), ("1f1b", "before"), ("zb_h1", ""), ("zb_h1", "before"), ("zb_h1", "after")]
    for schedule, convert in cases:
        config = toy_config(pipeline_schedule=schedule)
        communicator = P2PCommunicator(mesh["pp"].get_group(), config)
        stages = toy_chunks(Placement("loop", size, 1), rank, config)
        if convert == "before":
            split_weight_grad(stages)
        fully_shard(stages[0].inner, mesh=mesh["dp"])
        if convert == "after":
            split_weight_grad(stages)
        if convert:
            with pytest.raises(WeightGradSplitError, match=r"fully_shard shards the parameters of \w*ToyBlock"):
                toy_step(stages, data, communicator)
            continue
        for _ in range(2):
            stages[0].zero_grad()
            toy_step(stages, data, communicator)
        wanted = reference_run(size, data).grads
        for name, parameter in stages[0].inner.named_parameters():
            assert torch.equal(parameter.grad.full_tensor(), wanted[f"{rank}.{name}"])
        found.append(schedule)
    return found


def test_sharded_stages_run_whole_backwards() -> None:
    assert run_processes(_sharded_main, 2, timeout=120.0) == [["1f1b", "zb_h1"]] * 2
