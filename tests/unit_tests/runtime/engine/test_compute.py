"""One microbatch through one chunk: autocast, flags, wrappers, and Megatron's own functions for it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_pp.common.module_attributes import wrapped_attribute, wrapped_attributes
from megatron_pp.errors import ScheduleInputError
from megatron_pp.runtime.stage import PipelineStage
from megatron_pp.schedules import backward_step, forward_step
from megatron_pp.testing.toy import HIDDEN, ToyBlock, ToyData, reference_run, toy_config
from testkit.models.blocks import of_stage
from testkit.thread_runs.step_runs import (
    DATA,
    alone,
    assert_same_gradients,
    forward_with,
    in_pipeline,
    loss_of,
    reference,
)

# -- autocast ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("enabled", [False, True])
def test_autocast_covers_the_forward_step_and_not_the_loss_function(enabled: bool) -> None:
    seen: list[bool] = []

    def step(data_iterator: Any, model: Any) -> Any:
        seen.append(torch.is_autocast_enabled("cpu"))
        output = model(next(data_iterator)[0])
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16 or not enabled

        def loss_func(output: torch.Tensor) -> Any:
            seen.append(torch.is_autocast_enabled("cpu"))
            return output.float().mean(), {}

        return output, loss_func

    alone(step, toy_config(enable_autocast=enabled, autocast_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16))
    assert seen == [enabled, False] * DATA.num_microbatches
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_takes_the_pipelines_dtype_where_it_has_none_of_its_own() -> None:
    dtypes = []

    def step(data_iterator: Any, model: Any) -> Any:
        dtypes.append(model.inner.linear(next(data_iterator)[0]).dtype)
        return model(torch.ones(3, 2, HIDDEN)), lambda output: (output.float().mean(), {})

    alone(step, toy_config(enable_autocast=True, pipeline_dtype=torch.bfloat16))
    assert dtypes == [torch.bfloat16] * DATA.num_microbatches


# -- partial activation checkpointing ---------------------------------------------------------------------------------


def checkpoint_flags_of(size: int, chunks: int, count: int, partial: int | None, **more: Any) -> list[list[Any]]:
    """Per rank, the third argument of every forward_step_func call in their order; "none" where there was none."""
    given: list[list[Any]] = [[] for _ in range(size)]

    def step(data_iterator: Any, model: Any, *flag: Any) -> Any:
        x, target = next(data_iterator)
        given[model.inner.stage % size].append(flag[0] if flag else "none")
        return model(x), lambda output: (loss_of(target, output), {})

    block = of_stage(lambda stage, x, block: block(x))
    fields = {"num_microbatches_with_partial_activation_checkpoints": partial}
    in_pipeline(size, step, chunks=chunks, block=block, data=ToyData(count), more=more, **fields)
    return given


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("partial", [0, 1, 2, 3])
@pytest.mark.parametrize(("size", "chunks"), [(2, 1), (4, 1), (2, 2)])
def test_checkpoint_flags_are_megatrons(size: int, chunks: int, partial: int, forward_only: bool) -> None:
    """k % (warm-up + 1) >= partial, of the k-th forward. In evaluation the warm-up of 1F1B is that of training, that of
    the interleaved schedule everything.
    """
    for count in (1, size, 2 * size + 1) if chunks == 1 else (6,):
        expected = []
        for rank in range(size):
            warmup = min(size - rank - 1, count) if chunks == 1 else 2 * (size - rank - 1) + (chunks - 1) * size
            window = (chunks * count if forward_only and chunks > 1 else warmup) + 1
            expected.append([k % window >= partial for k in range(chunks * count)])
        assert checkpoint_flags_of(size, chunks, count, partial, forward_only=forward_only) == expected


def test_without_the_option_or_a_pipeline_forward_step_functions_take_two_arguments() -> None:
    assert checkpoint_flags_of(2, 1, 3, None) == [["none"] * 3] * 2
    assert checkpoint_flags_of(1, 1, 4, 1) == [["none"] * 4]


# -- the first microbatch ---------------------------------------------------------------------------------------------


class Marked(PipelineStage):
    """Counts its forwards, and notes after how many of them the first microbatch was announced."""

    def __init__(self, stage: PipelineStage) -> None:
        super().__init__(stage.inner, stage.config, stage.vp_stage)
        self.forwards = 0
        self.marks: list[int] = []
        self.microbatches: list[int] = []

    def set_is_first_microbatch(self) -> None:
        self.marks.append(self.forwards)

    def set_current_microbatch(self, mb: int) -> None:
        self.microbatches.append(mb)

    def forward(self, batch: Any = None) -> Any:
        self.forwards += 1
        return super().forward(batch)


@pytest.mark.parametrize(
    ("more", "marked"),
    [
        ({}, True),
        ({"first_val_step": False}, True),  # of no effect in training
        ({"forward_only": True}, True),
        ({"forward_only": True, "first_val_step": True}, True),
        ({"forward_only": True, "first_val_step": False}, False),
    ],
)
@pytest.mark.parametrize("chunks", [1, 2])
def test_the_first_microbatch_of_each_chunk_is_marked(chunks: int, more: dict[str, Any], marked: bool) -> None:
    stages: list[Marked] = []

    def wrap(stage: PipelineStage) -> Marked:
        stages.append(Marked(stage))
        return stages[-1]

    in_pipeline(2, forward_with(lambda loss: (loss, {})), chunks=chunks, wrap=wrap, more=more)
    assert len(stages) == 2 * chunks
    for stage in stages:
        assert stage.marks == ([0] if marked else [])
        assert stage.microbatches == list(range(DATA.num_microbatches))


# -- wrappers ---------------------------------------------------------------------------------------------------------


class Wrapper(torch.nn.Module):
    """Such as DistributedDataParallel or Float16Module: holds the model as ``module`` and hides its attributes."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


class Forwarding(Wrapper):
    """A wrapper that gives its model's attributes as its own."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def test_an_attribute_is_found_wherever_a_module_keeps_it() -> None:
    """Where ``getattr`` finds it, in the outermost module that has it."""
    inner = torch.nn.Linear(2, 2)
    inner.register_buffer("table", torch.zeros(1))
    inner.config = "inner"
    outer = Wrapper(inner)
    for name in ("weight", "table", "config", "in_features", "forward", "no_such_thing"):
        expected = getattr(outer, name, getattr(inner, name, None))
        found = wrapped_attribute(outer, name)
        assert found is expected or found == expected, name
    assert wrapped_attribute(outer, "module") is inner
    outer.config = "outer"
    assert wrapped_attribute(outer, "config") == "outer"
    assert wrapped_attribute(Forwarding(inner), "config") == "inner"
    assert wrapped_attribute(None, "config", 3) == 3
    stage = PipelineStage(ToyBlock(0), toy_config())
    twice = Wrapper(Wrapper(stage))
    assert wrapped_attribute(twice, "set_input_tensor") == stage.set_input_tensor
    assert wrapped_attribute(twice, "no_such_thing", 7) == 7
    assert wrapped_attributes(twice, ("config", "no_such_thing", "block")) == [stage.config, None, None]


@pytest.mark.parametrize("chunks", [1, 2])
def test_wrapped_models_train(chunks: int) -> None:
    reports, blocks = in_pipeline(
        *(2, forward_with(lambda loss: (loss, float(loss.detach())))),
        chunks=chunks,
        wrap=lambda stage: Wrapper(Wrapper(Marked(stage))),
    )
    assert reports[1] == reference_run(2 * chunks, DATA).losses
    assert_same_gradients(blocks, reference(2 * chunks, lambda losses: sum(losses) / 4))


# -- a stage that is called several times, or later -------------------------------------------------------------------


def averaged(data_iterator: Any, model: Any) -> Any:
    """Twice in a forward, and once in the loss function."""
    x, target = next(data_iterator)
    with torch.no_grad():
        model(x)
    return (model(x) + model(x)) / 2, lambda output: (loss_of(target, (output + model(x)) / 2), {})


def stages_of(schedule: str, chunks: int, step: Any, block: Any = ToyBlock) -> list[PipelineStage]:
    stages: list[PipelineStage] = []
    in_pipeline(
        *(2, step),
        chunks=chunks,
        block=block,
        wrap=lambda stage: stages.append(stage) or stage,
        pipeline_schedule=schedule,
    )
    return sorted(stages, key=lambda stage: stage.inner.stage)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2)])
def test_a_stage_called_several_times_gets_its_input_each_time(schedule: str, chunks: int) -> None:
    stages = stages_of(schedule, chunks, averaged, of_stage(lambda stage, x, block: block(x)))
    blocks = [ToyBlock(stage) for stage in range(2 * chunks)]
    for x, target in DATA.iterator():
        for block in blocks:
            before, x = x, (block(x) + block(x)) / 2
        (loss_of(target, (x + block(before)) / 2) / DATA.num_microbatches).backward()
    for mine, theirs in zip(stages, blocks, strict=True):
        for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2)])
def test_a_checkpoint_around_a_stage_is_refused(schedule: str, chunks: int) -> None:
    """The checkpoint would recompute the stage without its input. Around the first stage it is right."""

    def step(data_iterator: Any, model: Any) -> Any:
        x, target = next(data_iterator)
        kept = model(x) if first_only and model.inner.stage else checkpoint(model, x, use_reentrant=False)
        return kept, lambda output: (loss_of(target, output), {})

    block = of_stage(lambda stage, x, block: block(x))
    for first_only in (True, False):
        with nullcontext() if first_only else pytest.raises(ScheduleInputError, match="not the stage"):
            stages = stages_of(schedule, chunks, step, block)
    expected = reference(2 * chunks, lambda losses: sum(losses) / 4)
    assert_same_gradients([stage.inner for stage in stages], expected)


def test_after_a_step_a_stage_is_a_module_again() -> None:
    """The same holds after a step that failed, and in a backward of the user's. Nothing of the step is kept."""

    def fails(data_iterator: Any, model: Any) -> Any:
        if model.inner.stage:
            raise KeyError("a test")
        return model(next(data_iterator)[0]), None

    block = of_stage(lambda stage, x, block: block(x))
    stages: list[PipelineStage] = []
    with pytest.raises(KeyError):
        in_pipeline(2, fails, block=block, wrap=lambda stage: stages.append(stage) or stage)
    stages += stages_of("1f1b", 1, forward_with(lambda loss: (loss, {})), block)
    x = DATA.microbatch(0)[0]
    for stage in stages:
        assert (stage.received, stage.named) == (None, {})
        assert torch.equal(stage(x), stage.inner(x))
        checkpoint(stage, x, use_reentrant=False).sum().backward()


# -- Megatron's functions of these names ------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", [(), ("model type",)])
def test_forward_step_and_backward_step_can_be_called_alone(model_type: tuple[str, ...]) -> None:
    config = toy_config(grad_scale_func=lambda loss: loss * 2)
    x, target = DATA.microbatch(0)
    store: list[Any] = []
    given, fresh = x.clone().requires_grad_(), x.clone().requires_grad_()

    def step(data_iterator: Any, model: Any, flag: bool) -> Any:
        assert flag is True
        return model(), lambda output: (loss_of(target, output), torch.tensor(6), "report")

    stage = Marked(PipelineStage(ToyBlock(0), config))
    loss, tokens = forward_step(
        *(step, None, stage, 4, given, store, config),
        cp_group_size=1,
        checkpoint_activations_microbatch=True,
        current_microbatch=3,
        is_first_microbatch=not model_type,
    )
    assert (store, tokens) == (["report"], 6)
    assert (stage.marks, stage.microbatches) == ([] if model_type else [0], [3])
    (loss_of(target, ToyBlock(0)(fresh)) / 6 / 4 * 2).backward()
    torch.testing.assert_close(backward_step(given, loss, None, *model_type, config), fresh.grad)


def test_a_list_gives_a_list() -> None:
    config = toy_config()
    stage = PipelineStage(ToyBlock(0), config)
    x = DATA.microbatch(0)[0].requires_grad_()
    step = lambda data_iterator, model: (model(), None)  # noqa: E731
    outputs, _ = forward_step(step, None, stage, 4, [x], [], config, is_last_stage=False)
    assert isinstance(outputs, list)
    (grad,) = backward_step([x], outputs, [torch.ones_like(outputs[0])], config)
    assert grad.shape == x.shape
    first_stage, _ = forward_step(
        lambda data_iterator, model: (model(x), None), None, stage, 4, [None], [], config, is_last_stage=False
    )
    assert backward_step([None], first_stage, [torch.ones_like(x)], config) == [None]


def test_the_gradient_of_an_input_inside_a_graph_is_kept() -> None:
    config = toy_config()
    leaf = torch.ones(3, 2, HIDDEN, requires_grad=True)
    inner = leaf * 2
    output = (inner * 3).sum()
    assert torch.equal(backward_step(inner, output, None, config), torch.full_like(inner, 3.0))
    assert torch.equal(leaf.grad, torch.full_like(leaf, 6.0))


def test_chunks_in_the_wrong_order_are_noticed() -> None:
    stage = PipelineStage(ToyBlock(0), toy_config(), vp_stage=1)
    with pytest.raises(ScheduleInputError, match="chunk 0 was given the model whose vp_stage is 1; pass the chunks in"):
        forward_step(forward_with(None), DATA.iterator(), stage, 4, None, [], stage.config, vp_stage=0)
