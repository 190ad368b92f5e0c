"""A data iterator that ends early on one rank, among real processes: every rank raises, and says which and where."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_pp.runtime.communicators import close_communicators, communicator_for
from megatron_pp.testing.pipeline import run_rank
from megatron_pp.testing.toy import ToyData, toy_config
from tests.harness.processes import run_processes

MICROBATCHES = 4


class ShortData(ToyData):
    """Promises four microbatches and gives two."""

    def iterator(self):  # type: ignore[no-untyped-def]
        return (self.microbatch(mb) for mb in range(2))


def rank_main(rank: int, size: int, short: int, chunks: int) -> tuple[str, str]:
    """What the step raised on this rank: the exception's class and its text."""
    config = toy_config(virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None)
    data = (ShortData if rank == short else ToyData)(MICROBATCHES)
    communicator = communicator_for(dist.group.WORLD, config)
    try:
        run_rank(rank, size, chunks, data, config, communicator)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        close_communicators()
        dist.destroy_process_group()
    return "nothing", ""


@pytest.mark.parametrize(("short", "chunks"), [(0, 1), (2, 2)])
def test_all_ranks_raise(short: int, chunks: int) -> None:
    raised = run_processes(rank_main, 3, (short, chunks), timeout=60.0, start_method="forkserver")
    sentence = "the data iterator of chunk 0 ended at microbatch 2; a step of 4 microbatches needs that many items"
    assert raised[short] == ("ScheduleInputError", sentence)
    for rank, (kind, words) in enumerate(raised):
        if rank != short:
            assert kind == "PipelinePeerError", raised
            assert f"rank {short}" in words
            assert sentence in words
