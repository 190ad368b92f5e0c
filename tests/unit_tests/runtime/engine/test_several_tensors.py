"""Stages that give each other several tensors, as a list, a tuple or a dict: the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_pp.errors import ScheduleInputError
from megatron_pp.runtime.stage import PipelineStage
from megatron_pp.schedules import get_forward_backward_func
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.toy import HIDDEN, TOY_SCHEDULES, ToyBlock, ToyData, reference_run, toy_config
from megatron_pp.testing.toy import toy_forward_step as forward_step
from megatron_pp.weight_grad import split_weight_grad
from testkit.models.blocks import SquaresInPython
from testkit.thread_runs.step_runs import every_policy, in_pipeline, result_of

SHORT, LONG = (3, 2, HIDDEN), (5, 2, HIDDEN)


def reads_in_hook(h: Tensor) -> Tensor:
    h.register_hook(lambda grad: grad * torch.cos(h.detach()))
    return h + 1.0


# What a stage makes of h, which it gives as well.
MADE_OF: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda h: h * h,
    "gelu": F.gelu,
    "silu": F.silu,
    "rms_norm": lambda h: F.rms_norm(h, (HIDDEN,)),
    "leaky_relu": F.leaky_relu,
    "log": lambda h: torch.log(h.abs() + 1.0),
    "layer_norm": lambda h: F.layer_norm(h, (HIDDEN,)),
    "custom function": SquaresInPython.apply,
    "tensor hook": reads_in_hook,
    "saves its own output": torch.tanh,
    "view": lambda h: (h * h).view(-1).view(h.shape),
    "the same": lambda h: h,
}


class TwoTensors(torch.nn.Module):
    """Takes and gives two tensors, the last stage what it makes of both. They are of different shapes, or where the
    second is made of the first, of one. ``kind`` says how; ``flip``: the second comes first.
    """

    def __init__(self, stage: int, stages: int, kind: str, flip: bool = False) -> None:
        super().__init__()
        self.one, self.two = ToyBlock(2 * stage), ToyBlock(2 * stage + 1)
        self.is_last = stage == stages - 1
        self.kind, self.flip = kind, flip

    def forward(self, given: Any) -> Any:
        pair = self.pair(*(given[name] for name in ("a", "b")) if isinstance(given, dict) else given)
        if self.is_last:
            return {"first used": pair[0], "second used": pair[1][:3]}.get(self.kind, pair[0] + pair[1].sum())
        return pair[::-1] if self.flip else pair

    def pair(self, a: Tensor, b: Tensor) -> list[Tensor]:
        if self.kind in MADE_OF or self.kind == "gate":
            h = self.one(a[:3] + 0.5 * b[:3])
            return [h, h * torch.sigmoid(self.two.linear(h)) if self.kind == "gate" else MADE_OF[self.kind](h)]
        if self.kind == "tied":
            a = a + b.mean()
        a, b = self.one(a), self.two(b)
        if self.kind == "views":
            return [a.view(a.shape), torch.cat([b, b])[:5]]
        return [a, b.detach() if self.kind == "second without gradient" else b]


class Pairs(ToyData):
    """Inputs of two tensors."""

    def microbatch(self, mb: int) -> Any:
        draw = torch.Generator().manual_seed(11 + mb)
        return (torch.randn(SHORT, generator=draw), torch.randn(LONG, generator=draw)), super().microbatch(mb)[1]


def as_dict(pair: list[Any]) -> dict[str, Any]:
    return {"b": pair[1], "a": pair[0]}  # in another order than that of the shapes


def difference(size: int, kind: str, form: Any, flip: bool = False, only: bool = False, **fields: Any) -> float:
    """From one process, of a step of ``size`` ranks. ``form`` makes of a stage's list what it gives."""
    shapes = [SHORT, LONG if kind not in MADE_OF and kind != "gate" else SHORT]

    def adjust(receive: list[Any], send: list[Any]) -> Any:
        assert receive == send == [SHORT]
        return (dict(zip("ab", shapes, strict=True)),) * 2 if form is as_dict else (shapes, shapes)

    def step(data_iterator: Any, model: Any) -> Any:
        output, loss = forward_step(data_iterator, model)
        return form(output) if isinstance(output, list) else output, loss

    def converted(stage: PipelineStage) -> PipelineStage:
        schedule = fields.get("pipeline_schedule")
        if schedule is not None and TOY_SCHEDULES[schedule].splits_weight:
            split_weight_grad([stage])
        return stage

    block, more = partial(TwoTensors, stages=size, kind=kind, flip=flip), {"adjust_tensor_shapes_fn": adjust}
    more |= {"forward_only": only}
    found = in_pipeline(size, step, block=block, wrap=converted, data=Pairs(5), more=more, **fields)
    return result_of(*found).difference(reference_run(size, Pairs(5), only, block))


@every_policy
@pytest.mark.parametrize("form", [list, tuple, as_dict])
@pytest.mark.parametrize("kind", ["apart", "tied", "views", "second without gradient"])
def test_tensors_of_different_shapes(kind: str, form: Any, policy: dict[str, Any]) -> None:
    """Where the second needs no gradient, what comes back for it has nowhere to go."""
    for size, variable, forward_only in ((2, True, False), (3, False, True), (4, False, False)):
        assert difference(size, kind, form, only=forward_only, variable_seq_lengths=variable, **policy) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*MADE_OF, "gate"])
@settings(max_examples=5, derandomize=True, deadline=None, database=None)
@given(
    size=st.sampled_from([2, 3]),
    flip=st.booleans(),
    form=st.sampled_from([list, tuple]),
    schedule=st.sampled_from([name for name, family in TOY_SCHEDULES.items() if family.chunks == 1]),
    policy=st.sampled_from([{"overlap_p2p_comm": True}, {"batch_p2p_comm": True}, {}]),
    debug=st.booleans(),
)
def test_a_stage_that_gives_what_its_graph_has_saved(
    kind: str, size: int, flip: bool, form: Any, schedule: str, policy: dict[str, Any], debug: bool
) -> None:
    assert difference(size, kind, form, flip, pipeline_schedule=schedule, p2p_debug=debug, **policy) == 0.0


@pytest.mark.parametrize("kind", ["first used", "second used"])
def test_a_chunk_on_the_same_rank_may_use_one_of_two_tensors(kind: str) -> None:
    block = partial(TwoTensors, stages=3, kind=kind)
    assert run_in_threads(1, 3, Pairs(5), block=block).difference(reference_run(3, Pairs(5), block=block)) == 0.0


def test_a_dict_with_other_names_is_refused() -> None:
    more = {"adjust_tensor_shapes_fn": lambda receive, send: ({"x": SHORT}, {"x": SHORT})}
    block = partial(TwoTensors, stages=2, kind="apart")

    def step(data_iterator: Any, model: Any) -> Any:
        output, loss = forward_step(data_iterator, model)
        return as_dict(output), loss

    with pytest.raises(ScheduleInputError, match=r"gave b, a; adjust_tensor_shapes_fn says .* a dict of x"):
        in_pipeline(2, step, block=block, data=Pairs(5), more=more)


def test_without_a_pipeline_shapes_are_not_adjusted() -> None:
    """adjust_tensor_shapes_fn is asked for pipelines without chunks, as in Megatron."""
    with pytest.raises(ValueError, match="adjust_tensor_shapes_fn is for pipelines with one model chunk a rank"):
        get_forward_backward_func(1)(
            forward_step_func=forward_step,
            data_iterator=Pairs(1).iterator(),
            model=PipelineStage(TwoTensors(0, 1, "apart"), toy_config()),
            num_microbatches=1,
            adjust_tensor_shapes_fn=lambda receive, send: (receive, send),
        )
