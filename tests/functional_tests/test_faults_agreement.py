"""Real processes that come back to different plans, each agreed on before: an error, and no wrong numbers before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from megatron_pp.errors import PipelineMismatchError
from megatron_pp.runtime.communicators import close_communicators, communicator_for
from megatron_pp.testing.pipeline import run_rank
from megatron_pp.testing.toy import ToyData, reference_run, toy_config
from tests.harness.processes import run_processes

SIZE = 3
ODD_STEP = 5


def rank_main(rank: int, size: int, odd_one: int, usual: dict[str, Any], other: dict[str, Any]) -> tuple[Any, ...]:
    """Steps alternate between the two ways; in ODD_STEP one rank takes the other one. Its error, and the steps whose
    losses were wrong."""
    config = toy_config(p2p_timeout=600.0)  # the test's deadline comes before it
    communicator = communicator_for(dist.group.WORLD, config)
    wrong = []
    try:
        for step in range(1, 100):
            way = dict(other if step % 2 == 0 or (rank, step) == (odd_one, ODD_STEP) else usual)
            forward_only = way.pop("forward_only", False)
            data = ToyData(**way)
            result = run_rank(rank, size, 1, data, config, communicator, forward_only=forward_only)
            if result.losses and result.losses != reference_run(size, data).losses:
                wrong.append(step)
    except PipelineMismatchError as error:
        return step, error.field, error.values, str(error), wrong
    finally:
        close_communicators()
        dist.destroy_process_group()
    return ("no error",)


@pytest.mark.parametrize(
    ("odd_one", "usual", "other", "field"),
    [
        (0, {"num_microbatches": 6}, {"num_microbatches": 4}, "num_microbatches (M)"),
        (2, {"num_microbatches": 6}, {"num_microbatches": 4}, "num_microbatches (M)"),
        # More than is expected ends the process in gloo, less goes unnoticed: both must not be sent.
        (1, {"num_microbatches": 4, "seq_length": 3}, {"num_microbatches": 4, "seq_length": 6}, "the shape of"),
        (1, {"num_microbatches": 4, "seq_length": 6}, {"num_microbatches": 4, "seq_length": 3}, "the shape of"),
        (2, {"num_microbatches": 4}, {"num_microbatches": 4, "forward_only": True}, "forward_only"),
    ],
)
def test_an_error_names_what_differs(odd_one: int, usual: dict[str, Any], other: dict[str, Any], field: str) -> None:
    outcomes = run_processes(rank_main, SIZE, (odd_one, usual, other), timeout=60.0, start_method="forkserver")
    for rank, outcome in enumerate(outcomes):
        assert len(outcome) == 5, (rank, outcome)
        step, named, values, text, wrong = outcome
        assert step == ODD_STEP, (rank, outcome)
        assert named.startswith(field)
        assert len(set(values.values())) == 2
        assert odd_one in values
        assert "do not agree on" in text
        assert wrong == []
