"""Odd models and odd programs under Megatron's schedules, on ranks: equal bits under Megatron's and under this engine.

The stages are those of ``numbers/odd_models.py``. A program is drawn: the number of microbatches of each call, training
or evaluation, what the loss function returns and reports, and what the data iterators are.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.transformer import TransformerConfig

from megatron_pp.integrations import megatron_core
from testkit.megatron import lab
from testkit.megatron.cases import Case
from tests.functional_tests.numbers.odd_models import CASES, SAMPLES, H

CALLS = 5
Loss = Callable[[torch.Tensor, int], tuple[Any, ...]]
LOSSES: dict[str, Loss] = {
    "a pair": lambda loss, mb: (loss, {"loss": loss.detach().clone()}),
    "a list": lambda loss, mb: [loss, [loss.detach().clone(), mb]],  # type: ignore[dict-item]
    "the loss itself": lambda loss, mb: (loss, {"loss": loss}),
    "nested": lambda loss, mb: (loss, {"a": [{"loss": loss.detach().clone()}, (mb, None, "text")]}),
    "a number": lambda loss, mb: (loss, float(loss)),
    "nothing": lambda loss, mb: (loss, None),
    "double precision": lambda loss, mb: (loss.double(), loss.detach().double()),
    "one element": lambda loss, mb: (loss.reshape(1), loss.detach().clone()),
    "not a number": lambda loss, mb: (loss * (float("nan") if mb == 1 else 1.0), mb),
    "tokens": lambda loss, mb: (loss, torch.tensor(3, dtype=torch.int), loss.detach().clone()),
    "no tokens": lambda loss, mb: (loss, torch.tensor(3 * (mb % 2), dtype=torch.int64), mb),
}
ITERATORS: dict[str, Callable[[list[Any]], Any]] = {
    "list": iter,
    "generator": lambda data: (item for item in data),
    "longer": lambda data: itertools.chain(data, data),
    "rerun": lambda data: RerunDataIterator(iter(data)),
}


class Chunk(torch.nn.Module):
    """A stage of an odd model, as Megatron's schedules call it."""

    def __init__(self, config: TransformerConfig, name: str, stage: int, count: int, vp_stage: int | None) -> None:
        super().__init__()
        self.config, self.model_type, self.vp_stage = config, ModelType.encoder_or_decoder, vp_stage
        self.pre_process, self.post_process = stage == 0, stage == count - 1
        torch.manual_seed(stage)
        self.stage: Any = CASES[name].kind(stage, count)
        self.given: torch.Tensor | None = None

    def set_input_tensor(self, given: Any) -> None:
        (self.given,) = given if isinstance(given, list) else (given,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taken: Any = x if self.pre_process else self.given
        output: torch.Tensor = self.stage(taken.reshape(SAMPLES, H))
        return output.reshape(SAMPLES, 1, H).contiguous()  # Megatron's own communicator sends contiguous outputs alone


def found_of(case: Case, name: str, draw: random.Random, **fields: Any) -> list[Any]:
    """Return what a program sees that trains the odd model ``name``: reports and gradients of each call."""
    rank, chunks = parallel_state.get_pipeline_model_parallel_rank(), case.vp or 1
    config = TransformerConfig(
        num_layers=case.pp * chunks,
        hidden_size=H,
        num_attention_heads=1,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vp,
        pipeline_dtype=torch.float32,
        **fields,
    )
    count = case.pp * chunks
    model = [Chunk(config, name, n * case.pp + rank, count, n if case.vp else None) for n in range(chunks)]
    torch.manual_seed(rank)
    return [value for step in range(CALLS) for value in call(model, name, step, draw)]


def call(model: list[Chunk], name: str, step: int, draw: random.Random) -> Iterator[Any]:
    """Make a drawn call; yield its reports, and the gradients after it."""
    config, virtual = model[0].config, len(model) > 1
    trains, groups = draw.random() < 0.7, draw.randint(1, 3)
    number = groups * config.pipeline_model_parallel_size if virtual else draw.randint(1, 5)
    loss_of, iterator = LOSSES[draw.choice([*LOSSES])], ITERATORS[draw.choice([*ITERATORS])]
    scale = draw.choice([None, 1.0, 0.3])
    config.grad_scale_func = None if scale is None else lambda loss: loss * scale
    if (before := CASES[name].before) is not None:
        before(step, [chunk.stage for chunk in model])
    generator = torch.Generator().manual_seed(step)
    data = [(mb, torch.randn(SAMPLES, 1, H, generator=generator)) for mb in range(number)]

    def forward_step(data_iterator: Any, chunk: Chunk) -> tuple[torch.Tensor, Any]:
        mb, x = next(data_iterator)
        return chunk(x), lambda output: loss_of(output.pow(2).mean(), mb)

    iterators = [iterator(data) for _ in model]
    with torch.set_grad_enabled(trains):
        yield get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if virtual else iterators[0],
            model=model if virtual else model[0],
            num_microbatches=number,
            seq_length=SAMPLES,
            micro_batch_size=1,
            forward_only=not trains,
        )
    for chunk in model:
        yield [None if one.grad is None else one.grad.clone() for one in chunk.parameters()]


def same(one: Any, other: Any) -> bool:
    """Return whether reports are equal, tensors to the last bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and bool(torch.equal(one.nan_to_num(nan=7.5), other.nan_to_num(nan=7.5)))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other or one != one)


def odd_stages(case: Case) -> int:
    """Train the odd model that the case names, in a program that its seed draws, under both schedules. Return the
    number of equal values."""
    lab.set_up_parallel_state(case)
    name, seed = case.model.extra_config[0]
    draw = random.Random(f"{seed} {name} {case.vp}")
    overlap, frees, splits = draw.random() < 0.5, draw.random() < 0.5, draw.random() < 0.3
    program = draw.random()
    theirs = found_of(case, name, random.Random(program), batch_p2p_comm=False)
    with megatron_core.installed(strict=True, pipeline_schedule=schedule_of(case) if splits else None):
        fields = {"overlap_p2p_comm": overlap, "batch_p2p_comm": not overlap, "deallocate_pipeline_outputs": frees}
        ours = found_of(case, name, random.Random(program), **fields)
    for number, (one, other) in enumerate(zip(theirs, ours, strict=True)):
        assert same(one, other), f"value {number} differs: {one} under Megatron's schedule, {other} under this engine"
    return len(theirs)


def schedule_of(case: Case) -> str:
    return "interleaved_zb" if case.vp else "zb_h1"
