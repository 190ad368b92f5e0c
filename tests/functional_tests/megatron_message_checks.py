"""Checks of messages that are wider than the hidden size, as with Attention Residuals (Megatron-LM#6840). They run on
ranks, in the processes of testkit/megatron/runner.py, under every release."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules

from megatron_pp.errors import ScheduleInputError
from megatron_pp.integrations import megatron_core
from megatron_pp.integrations.megatron.releases import release as megatron_release
from testkit.megatron import lab as megatron_lab
from testkit.megatron.cases import Case
from tests.functional_tests.megatron_checks import call_schedule, with_fields

FIELD = "enable_attention_residuals"
WIDTH = 3
"""Slices in a message between chunks."""


def _stacked(run: megatron_lab.Run, sent: int) -> Callable[[Any, Any], Any]:
    """Return a forward step whose stages use the first slice of what they receive, and send ``sent`` copies."""

    def forward_step(data_iterator: Any, model: Any) -> Any:
        given = model.module.decoder.input_tensor
        if given is not None:
            model.module.decoder.set_input_tensor(given[: run.case.model.seq].contiguous())
        output, loss_func = megatron_lab.forward_step(False, data_iterator, model)
        return (torch.cat([output] * sent) if model.module.decoder.post_process is False else output), loss_func

    return forward_step


def messages_grow_from_stage_to_stage(case: Case) -> list[float]:
    """Run under a release that gives shapes for each side of a stage; a rank sends rank + 2 slices. Return losses."""
    run = megatron_lab.Run(case)
    theirs = schedules.get_tensor_shapes
    sides: list[bool] = []

    def get_tensor_shapes(*, config: Any, pp_group: Any, is_recv: bool = True, **arguments: Any) -> Any:
        sides.append(is_recv)
        slices = pp_group.rank() + (1 if is_recv else 2)
        return [(slices * shape[0], *shape[1:]) for shape in theirs(config=config, **arguments)]

    sent = parallel_state.get_pipeline_model_parallel_rank() + 2
    with megatron_core.installed():
        expected = [float(report["loss"]) for report in call_schedule(run, forward_only=False)]
        with mock.patch.object(schedules, "get_tensor_shapes", get_tensor_shapes):
            reports = call_schedule(run, forward_step_func=_stacked(run, sent), forward_only=False)
    assert sides[:2] == [True, False]
    losses = [float(report["loss"]) for report in reports]
    assert losses == expected
    return losses


@contextlib.contextmanager
def _release_with_sums() -> Iterator[list[str]]:
    """Install a release whose module says how wide messages between chunks are; yield the calls of the module."""
    called: list[str] = []
    module: Any = types.ModuleType("megatron.core.transformer.attention_residual")
    module.attn_res_source_cache_reset = lambda: called.append("reset")

    def attn_res_uniform_payload_slices(config: Any) -> int:
        assert getattr(config, FIELD)
        called.append("width")
        return WIDTH

    theirs = schedules.get_tensor_shapes

    def get_tensor_shapes(*, config: Any, pp_group: Any, is_recv: bool = True, **arguments: Any) -> Any:
        assert not getattr(config, FIELD, False), "it says how wide messages are without virtual stages"
        return theirs(config=config, **arguments)

    module.attn_res_uniform_payload_slices = attn_res_uniform_payload_slices
    modules = mock.patch.dict(sys.modules, {module.__name__: module})
    with modules, mock.patch.object(schedules, "get_tensor_shapes", get_tensor_shapes):
        yield called


def messages_between_chunks_have_one_width(case: Case) -> list[float]:
    """Run a model with Attention Residuals; return its losses. A step begins by clearing the sums of the one before."""
    run = megatron_lab.Run(case)
    with megatron_core.installed():
        expected = [float(report["loss"]) for report in call_schedule(run, forward_only=False)]
        with _release_with_sums() as called, with_fields(run.config, {FIELD: True}):
            reports = call_schedule(run, forward_step_func=_stacked(run, WIDTH), forward_only=False)
    assert called == ["width", "reset"]
    losses = [float(report["loss"]) for report in reports]
    assert losses == expected
    return losses


def sums_in_a_v_are_refused(case: Case) -> str | None:
    """Return the text of the error; None under 0.14, whose models cannot be built for a V."""
    if megatron_release.load_megatron().row.release < (0, 15):
        return None
    with megatron_core.installed(strict=True):
        run = megatron_lab.Run(case)
        with _release_with_sums(), with_fields(run.config, {FIELD: True}), pytest.raises(ScheduleInputError) as error:
            call_schedule(run, forward_only=False)
    return str(error.value)
