"""torch.distributed.pipelining for `engines.make_step`, with one process group, or with one for each edge. Also torch's
stages under our plans.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch

from benchmarks.work import MakeStage, Step, Unavailable, Work, first_input, loss_of


def make(engine: str, work: Work, rank: int, group: Any, make_stage: MakeStage, transport: Any) -> Step:
    from torch.distributed import pipelining

    names = {
        "1f1b": "Schedule1F1B",
        "gpipe": "ScheduleGPipe",
        "interleaved_1f1b": "ScheduleInterleaved1F1B",
        "breadth_first": "ScheduleLoopedBFS",
    }
    if work.schedule not in names:
        raise Unavailable(f"torch has no schedule {work.schedule}")
    if work.policy != "overlap":
        raise Unavailable("torch has one way to communicate; see overlap")
    if work.pipeline_size == 1:
        raise Unavailable("torch's schedules need a pipeline of several ranks")
    edges = engine == "torch per-edge"
    if edges and not hasattr(getattr(torch.distributed, "config", None), "pipeline_per_edge_p2p"):
        raise Unavailable(f"torch {torch.__version__} has no process group for each edge; 2.15 has")
    with torch.distributed.config.patch(pipeline_per_edge_p2p=True) if edges else contextlib.nullcontext():
        return _step(getattr(pipelining, names[work.schedule]), work, rank, group, make_stage)


def make_ours(work: Work, rank: int, group: Any, make_stage: MakeStage) -> Step:
    """A step of torch's stages under our plan."""
    from megatron_pp.integrations.torch_pipelining import get_schedule_class

    return _step(get_schedule_class(work.schedule), work, rank, group, make_stage)


def _step(kind: Any, work: Work, rank: int, group: Any, make_stage: MakeStage) -> Step:
    """A step of torch's stages. ``kind``: the class of the schedule."""
    numbers = [chunk * work.pipeline_size + rank for chunk in range(work.num_chunks)]
    stages = [_stage(make_stage(n), n, work, group) for n in numbers]
    chunked = work.num_chunks > 1
    # Gradients are not divided by the number of microbatches. Other engines do that in the loss, which costs nothing
    # here.
    schedule = kind(stages if chunked else stages[0], work.num_microbatches, loss_fn=_loss, scale_grads=False)
    batch = first_input(work).repeat(work.num_microbatches, 1, 1)
    given = (batch,) if rank == 0 else ()
    wanted: dict[str, Any] = {"target": batch} if numbers[-1] == work.num_stages - 1 else {}

    def step() -> None:
        schedule.step(*given, **wanted, return_outputs=False)

    return step


def _stage(module: torch.nn.Module, number: int, work: Work, group: Any) -> Any:
    from torch.distributed import pipelining

    given = torch.ones(work.shape, requires_grad=number > 0)
    made = torch.ones(work.shape, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pipelining.PipelineStage(
            module,
            number,
            work.num_stages,
            torch.get_default_device(),
            input_args=(given,),
            output_args=(made,),
            group=group,
        )


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return loss_of(output)
