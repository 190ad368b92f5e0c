"""Steps in slices of sequences: the GPT's losses and gradients are those of whole sequences, for every schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from examples.gpt.gpt import GPTStage, build_gpt_chunks
from examples.gpt.trainer import forward_step
from megatron_pp import get_forward_backward_func, sequence_slice, split_weight_grad
from megatron_pp.config.model_config import TransformerConfig
from megatron_pp.errors import ScheduleInputError
from megatron_pp.plan.placement import LOOP, Placement
from tests.harness.step_runs import on_ranks

VOCAB, SEQ, BATCH, LAYERS, MICROBATCHES = 29, 12, 2, 4, 3
Outcome = tuple[list[float], dict[str, torch.Tensor]]


def gpt_config(size: int, chunks: int = 1, **fields: Any) -> TransformerConfig:
    return TransformerConfig(
        **{
            "pipeline_model_parallel_size": size,
            "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
            "num_layers": LAYERS,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "pipeline_dtype": torch.float64,
            "overlap_p2p_comm": True,
            **fields,
        }
    )


def batches() -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    for mb in range(MICROBATCHES):
        text = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(mb))
        yield mb, text[:, :-1], text[:, 1:]


def train(
    size: int, chunks: int = 1, *, forward_only: bool = False, step: Any = forward_step, **fields: Any
) -> Outcome:
    """Reports of a step, and the gradients of the whole model."""
    config = gpt_config(size, chunks, **fields)
    schedule = get_forward_backward_func(size, chunks if chunks > 1 else None)

    def rank_main(rank: int, _: Any, communicator: Any) -> tuple[list[Any], list[GPTStage]]:
        model = build_gpt_chunks(
            config,
            stages=Placement(LOOP, size, chunks).stages[rank],
            layers_of_stage=config.layers_of_stages(),
            vocab_size=VOCAB,
            max_sequence_length=SEQ,
            seed=7,
        )
        for chunk in model:
            chunk.double().stream_dtype = torch.float64
        if "zb" in config.schedule_name:
            split_weight_grad(model)
        reports = schedule(
            forward_step_func=step,
            data_iterator=[batches() for _ in model] if chunks > 1 else batches(),
            model=model if chunks > 1 else model[0],
            num_microbatches=MICROBATCHES,
            seq_length=SEQ,
            micro_batch_size=BATCH,
            forward_only=forward_only,
            p2p_communicator=communicator if size > 1 else None,
        )
        return reports, model

    fields_of_wire = {"pipeline_dtype": torch.float64, "hidden_size": 16, "overlap_p2p_comm": True}
    results = on_ranks(size, rank_main, **fields_of_wire)
    named = (pair for _, model in results for stage in model for pair in stage.named_parameters())
    return [float(report["loss"]) for reports, _ in results for report in reports], {
        name: p.grad for name, p in named if p.grad is not None
    }


def assert_equal_runs(found: Outcome, expected: Outcome) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(grad, expected[1][name]) for name, grad in found[1].items())


def assert_close_runs(found: Outcome, expected: Outcome, slices: int) -> None:
    means = [sum(found[0][k * slices : (k + 1) * slices]) / slices for k in range(MICROBATCHES)]
    assert means == pytest.approx(expected[0], rel=1e-12)
    assert found[1].keys() == expected[1].keys()
    for name, grad in found[1].items():
        assert (grad - expected[1][name]).norm() <= 1e-12 * expected[1][name].norm(), name


@pytest.fixture(scope="module")
def whole() -> Outcome:
    return train(1)


@pytest.mark.parametrize(
    ("size", "chunks", "fields"),
    [
        (1, 1, {}),
        (2, 1, {}),
        (2, 1, {"overlap_p2p_comm": False}),
        (2, 2, {}),
        (4, 1, {"overlap_p2p_comm": False, "batch_p2p_comm": False}),
        (2, 1, {"pipeline_schedule": "seq_zb"}),
        (2, 2, {"pipeline_schedule": "interleaved_seq_zb"}),
        (2, 1, {"p2p_debug": True}),
    ],
)
def test_every_schedule_gives_the_numbers_of_whole_sequences(size, chunks, fields, whole):
    slices = 3
    found = train(size, chunks, sequence_slices=slices, **fields)
    assert_close_runs(found, whole, slices)
    assert_equal_runs(found, train(1, sequence_slices=slices))  # to the bit, whatever the schedule
