"""torch's DistributedDataParallel around the stages of a pipeline: every schedule reduces each gradient, once, when it
is complete.

PyTorch's own zero-bubble schedules give wrong gradients here without a word: their weight gradients come after the
reduction.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megatron_pp.errors import WeightGradSplitError
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.schedules import get_forward_backward_func
from megatron_pp.testing.toy import ToyData, gradients_of, reference_run, toy_chunks, toy_config, toy_forward_step
from megatron_pp.weight_grad import split_weight_grad
from testkit.process_ranks import rank_of
from testkit.processes import run_processes

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


def _data(replica: int, microbatches: int) -> ToyData:
    """Each replica sees microbatches of its own."""
    return ToyData(microbatches, first=100 * replica)


def _groups(rank: int) -> tuple[Any, Any]:
    """(pipeline, data-parallel) group of ``rank``: replicas are neighbours."""
    pipelines = [dist.new_group([r + REPLICAS * s for s in range(PIPELINE)]) for r in range(REPLICAS)]
    replicas = [dist.new_group([REPLICAS * s + r for r in range(REPLICAS)]) for s in range(PIPELINE)]
    return pipelines[rank % REPLICAS], replicas[rank // REPLICAS]


def _rank_main(rank: int, size: int, cases: list[tuple[str, int, bool]]) -> list[Any]:
    pipeline_group, replica_group = _groups(rank)
    return [*(_run_case(rank, pipeline_group, replica_group, *case) for case in cases), _run_alone(rank)]


def _run_alone(rank: int) -> dict[str, torch.Tensor]:
    """No pipeline: every rank is a replica of the whole model, and its last two operations are backwards."""
    [stage] = toy_chunks(Placement("loop", 1, 1), 0, toy_config(pipeline_schedule="gpipe"))
    get_forward_backward_func(1)(
        forward_step_func=toy_forward_step,
        data_iterator=_data(rank, 3).iterator(),
        model=DistributedDataParallel(stage),
        num_microbatches=3,
    )
    return gradients_of({0: stage})


def _run_case(rank: int, pipeline_group: Any, replica_group: Any, name: str, chunks: int, convert: bool) -> Any:
    """Gradients, and how often the hook of each parameter fired."""
    data = _data(rank % REPLICAS, 5)
    one = rank_of(chunks, 5, group=pipeline_group, data=data, pipeline_schedule=name, overlap_p2p_comm=True)
    stages = one.model()
    if convert:
        split_weight_grad(stages)
    fired: Counter[torch.Tensor] = Counter()
    for parameter in (parameter for stage in stages for parameter in stage.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda fired_for: fired.update([fired_for]))
    wrapped = [DistributedDataParallel(stage, process_group=replica_group) for stage in stages]
    for _ in range(2):  # the second step finds buckets rebuilt
        for stage in stages:
            stage.zero_grad()
        fired.clear()
        one.step(wrapped)
    return one.result(stages, []).grads, list(fired.values())


@pytest.fixture(scope="module")
def results() -> list[Any]:
    return run_processes(_rank_main, PIPELINE * REPLICAS, (CASES,), timeout=300, start_method="forkserver")


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{n}-{v}-{c}" for n, v, c in CASES])
def test_gradients_are_the_mean_over_the_replicas_and_hooks_fire_once(results: list[Any], case: int) -> None:
    """Once per parameter and step."""
    _, chunks, convert = CASES[case]
    each = [reference_run(PIPELINE * chunks, _data(replica, 5)).grads for replica in range(REPLICAS)]
    seen = set()
    for grads, fired in (of_rank[case] for of_rank in results):
        expected = {key: (each[0][key] + each[1][key]) / 2 for key in grads}
        torch.testing.assert_close(grads, expected, rtol=1e-6, atol=1e-7)
        seen |= set(grads)
        assert fired == [1] * 3 * chunks or not convert
    assert seen == set(each[0])


def test_without_a_pipeline_too(results: list[Any]) -> None:
    each = [reference_run(1, _data(replica, 3)).grads for replica in range(PIPELINE * REPLICAS)]
    for of_rank in results:
        for key, grad in of_rank[-1].items():
            expected = torch.stack([grads[key] for grads in each]).mean(0)
            torch.testing.assert_close(grad, expected, rtol=1e-6, atol=1e-7)


def _sharded_main(rank: int, size: int) -> list[str]:
    """Stages under fully_shard: two steps each, with whole backwards; converted, an error before communication."""
    mesh, found = init_device_mesh("cpu", (size, 1), mesh_dim_names=("pp", "dp")), []
    cases = [("1f1b", ""), ("1f1b", "before"), ("zb_h1", ""), ("zb_h1", "before"), ("zb_h1", "after")]
    for schedule, convert in cases:
        one = rank_of(1, 4, group=mesh["pp"].get_group(), pipeline_schedule=schedule)
        stages = one.model()
        if convert == "before":
            split_weight_grad(stages)
        fully_shard(stages[0].inner, mesh=mesh["dp"])
        if convert == "after":
            split_weight_grad(stages)
        if convert:
            with pytest.raises(WeightGradSplitError, match=r"fully_shard shards the parameters of \w*ToyBlock"):
                one.step(stages)
            continue
        for _ in range(2):
            stages[0].zero_grad()
            one.step(stages)
        wanted = reference_run(size, one.data).grads
        for name, parameter in stages[0].inner.named_parameters():
            assert torch.equal(parameter.grad.full_tensor(), wanted[f"{rank}.{name}"])
        found.append(schedule)
    return found


def test_sharded_stages_run_whole_backwards() -> None:
    assert run_processes(_sharded_main, 2, timeout=120.0, start_method="forkserver") == [["1f1b", "zb_h1"]] * 2
