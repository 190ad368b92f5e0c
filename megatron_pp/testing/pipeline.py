"""Run the toy model through a real schedule with ranks as threads; compare its result with ``toy.reference_run``."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from megatron_pp.comm.p2p_communicator import P2PCommunicator
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.orders import placement_kind
from megatron_pp.runtime.stage import PipelineStage
from megatron_pp.schedules import get_forward_backward_func
from megatron_pp.testing import toy
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.threads import ThreadGroup, run_ranks


def placement_of(config: Any, pipeline_size: int, num_chunks: int) -> Placement:
    return Placement(placement_kind(getattr(config, "pipeline_schedule", None)), pipeline_size, num_chunks)


def toy_step(
    chunks: Sequence[Any],
    data: toy.ToyData,
    communicator: P2PCommunicator,
    *,
    forward_step_func: Callable[..., Any] = toy.toy_forward_step,
    iterators: Sequence[Any] | None = None,
    **more: Any,
) -> list[Any]:
    """Call the schedule function with ``chunks``, this rank's model chunks, wrapped or not. Returns its result.
    ``iterators``: one per chunk, in place of those of ``data``. ``more``: further arguments of the schedule."""
    chunked = len(chunks) > 1
    iterators = [data.iterator() for _ in chunks] if iterators is None else iterators
    return get_forward_backward_func(communicator.size, len(chunks) if chunked else None)(
        forward_step_func=forward_step_func,
        data_iterator=iterators if chunked else iterators[0],
        model=chunks if chunked else chunks[0],
        num_microbatches=data.num_microbatches,
        seq_length=data.seq_length,
        micro_batch_size=data.micro_batch_size,
        **{"p2p_communicator": communicator, "pg_collection": SimpleNamespace(pp=communicator.pp_group), **more},
    )


def run_rank(
    rank: int,
    pipeline_size: int,
    num_chunks: int,
    data: toy.ToyData,
    config: Any,
    communicator: P2PCommunicator,
    *,
    forward_only: bool = False,
    block: Callable[[int], torch.nn.Module] = toy.ToyBlock,
    prepare: Callable[[list[PipelineStage]], Any] | None = None,
) -> toy.ToyResult:
    """Run one step of the toy model on ``rank``. Returns the losses (on the last stage) and the gradients of this
    rank's stages. ``prepare`` is called with the rank's model chunks before the step."""
    placement = placement_of(config, pipeline_size, num_chunks)
    chunks = toy.toy_chunks(placement, rank, config, block)
    if prepare is not None:
        prepare(chunks)
    reports = toy_step(chunks, data, communicator, forward_only=forward_only)
    stages = dict(zip(placement.stages[rank], chunks, strict=True))
    return toy.ToyResult([float(r["loss"]) for r in reports], toy.gradients_of(stages))


def run_in_threads(
    pipeline_size: int,
    num_chunks: int,
    data: toy.ToyData,
    *,
    forward_only: bool = False,
    network: MemoryNetwork | None = None,
    block: Callable[[int], torch.nn.Module] = toy.ToyBlock,
    prepare: Callable[[list[PipelineStage]], Any] | None = None,
    timeout: float = 60.0,
    **fields: Any,
) -> toy.ToyResult:
    """Run one step with a thread per rank, and merge the results. ``fields`` are config fields. Raises the first
    exception of any rank."""
    chunks = num_chunks if num_chunks > 1 else None
    fields = {"virtual_pipeline_model_parallel_size": chunks, "variable_seq_lengths": data.variable, **fields}
    network = network or MemoryNetwork(pipeline_size, fields.get("p2p_channels", "one_way") == "one_way")

    def rank_main(rank: int) -> toy.ToyResult:
        config = toy.toy_config(**fields)
        communicator = P2PCommunicator(ThreadGroup(rank, pipeline_size), config, network.transport(rank))
        with network.running(rank):
            sizes = rank, pipeline_size, num_chunks
            return run_rank(*sizes, data, config, communicator, forward_only=forward_only, block=block, prepare=prepare)

    return toy.merged(run_ranks(pipeline_size, rank_main, network.abort, timeout))
