"""Checks on one rank of a pipeline of several modules, for ``test_modules.py``."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_pp.errors import MegatronPPError, ScheduleInputError
from megatron_pp.features.modules.modules_step import ModulesPipeline, forward_backward_modules
from megatron_pp.runtime.communicators import close_communicators
from megatron_pp.testing.toy import toy_config
from testkit.models.module_models import RankModel, Setup, config_of, forward_step, sink_of


def a_rank_gives_no_dict(rank: int, size: int, setup: Setup) -> str:
    """Return the error of a step in which the first rank's model returns its output under a wrong name."""
    pipeline = ModulesPipeline(setup.modules, setup.topology)
    model = RankModel(setup, rank)
    model.config = config_of(setup)
    step = forward_step(sink_of(setup))

    def forgetful(batches: Any, model: RankModel) -> Any:
        output, loss = step(batches, model)
        return ({"other": output["vision"]} if rank == 0 else output), loss

    arguments = {"data_iterator": model.batches(0), "model": model, "num_microbatches": setup.microbatches}
    try:
        forward_backward_modules(pipeline, forward_step_func=forgetful, **arguments)
    except MegatronPPError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        close_communicators()
    return "none"


def refused_arguments(rank: int, size: int, setup: Setup) -> list[str]:
    """Return the errors that are raised before any communication."""
    pipeline = ModulesPipeline(setup.modules, setup.topology)
    model = RankModel(setup, rank)
    found = []
    for fields in (
        {"variable_seq_lengths": False},
        {"variable_seq_lengths": True, "pipeline_schedule": "zb_h1"},
        {"variable_seq_lengths": True, "p2p_channels": "shared"},
        {"variable_seq_lengths": True, "pipeline_dtype": None},
    ):
        model.config = toy_config(**fields)
        with pytest.raises(ScheduleInputError) as raised:
            forward_backward_modules(
                pipeline,
                forward_step_func=forward_step(None),
                data_iterator=model.batches(0),
                model=model,
                num_microbatches=setup.microbatches,
            )
        found.append(str(raised.value))
    return found
