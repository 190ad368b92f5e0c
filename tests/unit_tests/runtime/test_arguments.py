"""What a step reads of the arguments of a schedule function."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_pp.errors import ScheduleInputError
from megatron_pp.runtime.arguments import StepInputs


class Wrapper(torch.nn.Module):
    """The wrapper of a model, with an attribute for its own config."""

    config: Any = None

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def inputs(model: Any, **more: Any) -> StepInputs:
    return StepInputs(False, forward_step_func=print, data_iterator=None, model=model, num_microbatches=1, **more)


@pytest.mark.parametrize("length", [np.int64(8), np.int32(8), torch.tensor(8), 8])
def test_lengths_may_be_whole_numbers_of_any_kind(length: Any) -> None:
    """Data loaders give such numbers. Shapes are made of Python's integers."""
    found = inputs(SimpleNamespace(config=1), seq_length=length, micro_batch_size=length, decoder_seq_length=length)
    given = found.seq_length, found.micro_batch_size, found.decoder_seq_length
    assert given == (8, 8, 8)
    assert {type(one) for one in given} == {int}
    assert inputs(SimpleNamespace(config=1)).seq_length is None


def test_the_config_is_that_of_the_first_wrapper_that_has_one() -> None:
    """None is as no config, as for Megatron's `get_model_config`."""
    model: Any = torch.nn.Linear(1, 1)
    model.config = "the model's"
    wrapped = Wrapper(Wrapper(model))
    assert inputs(wrapped).config == "the model's"
    wrapped.module.config = "the wrapper's"
    assert inputs(wrapped).config == "the wrapper's"
    with pytest.raises(ScheduleInputError, match="model chunk Wrapper has no attribute config"):
        inputs(Wrapper(torch.nn.Linear(1, 1)))
