"""Named tensors that skip stages: losses and gradients of a run without a pipeline, whatever the schedule and route."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron_pp.plan.skip_tensors import CACHES, skip_tensors
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.toy import SkipBlock, ToyData, ToyResult, reference_run

U_NET = "a=0>3; b=1>2,3; sign=0>1,3 no_grad"


class DoubleData(ToyData):
    def microbatch(self, mb: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, target = super().microbatch(mb)
        return x.double(), target.double()


def run(size: int, chunks: int, declared: str = "blocks", variable: bool = False, **fields: object) -> ToyResult:
    tensors = skip_tensors(declared, size * chunks)
    return run_in_threads(
        *(size, chunks, DoubleData(4, variable=variable)),
        block=partial(SkipBlock, tensors=tensors),
        skip_tensors=tensors,
        **{"pipeline_dtype": torch.float64, "overlap_p2p_comm": True, **fields},
    )


def expected(num_stages: int, declared: str = "blocks", variable: bool = False, **options: bool) -> ToyResult:
    block = partial(SkipBlock, tensors=skip_tensors(declared, num_stages))
    return reference_run(num_stages, DoubleData(4, variable=variable), block=block, **options)


def assert_close(found: ToyResult, wanted: ToyResult) -> None:
    assert found.losses == pytest.approx(wanted.losses, rel=1e-12)
    assert found.grads.keys() == wanted.grads.keys()
    for name, grad in found.grads.items():
        assert (grad - wanted.grads[name]).norm() <= 1e-12 * wanted.grads[name].norm(), name


CASES = [
    (2, 1, {}),
    (3, 1, {"overlap_p2p_comm": False}),
    (4, 1, {"overlap_p2p_comm": False, "batch_p2p_comm": False}),
    (4, 1, {"pipeline_schedule": "zb_h1"}),
    (2, 2, {}),
    (2, 2, {"pipeline_schedule": "zb_v"}),
    (3, 2, {"overlap_p2p_comm": False}),
    (4, 2, {}),
    (2, 2, {"pipeline_schedule": "interleaved_zb", "p2p_channels": "shared"}),
    (1, 2, {}),
]


@pytest.mark.parametrize(("size", "chunks", "fields"), CASES)
def test_numbers_are_those_of_one_process(size, chunks, fields):
    for cache in CACHES:
        assert_close(run(size, chunks, skip_cache=cache, **fields), expected(size * chunks))
