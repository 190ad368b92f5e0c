"""One microbatch through one chunk: losses, scaling, flags, wrappers. Megatron's semantics."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_pp.errors import ScheduleInputError
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.schedules import backward_step, forward_backward_no_pipelining, forward_step, get_forward_backward_func
from megatron_pp.stage import PipelineStage
from megatron_pp.steps import LossRecord, scaled_loss, unwrap_model, wrapped_attribute
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.threads import ThreadGroup, run_ranks
from megatron_pp.testing.toy import HIDDEN, ToyBlock, ToyData, reference_run, toy_config

DATA = ToyData(4)

# -- the loss ---------------------------------------------------------------------------------------------------------


def scale(loss_func: Any, output: Any = None, cp_size: int = 1, **fields: Any) -> tuple[Any, LossRecord]:
    record = LossRecord()
    output = torch.tensor(12.0) if output is None else output
    return scaled_loss(output, loss_func, SimpleNamespace(**fields), 4, cp_size, record), record


@pytest.mark.parametrize("per_token", [False, True])
def test_a_pair_is_a_mean_over_the_microbatch(per_token: bool) -> None:
    loss, record = scale(lambda output: (output * 2, {"a": 1}), calculate_per_token_loss=per_token)
    assert loss == 24.0 / 4
    assert record.data == [{"a": 1}]
    assert record.num_tokens == 0


def test_a_pair_is_multiplied_by_the_context_parallel_size_and_a_triple_is_not() -> None:
    assert scale(lambda output: (output, {}), cp_size=2)[0] == 12.0 * 2 / 4
    assert scale(lambda output: (output, torch.tensor(3), {}), cp_size=2)[0] == 12.0 / 3 / 4


@pytest.mark.parametrize("tokens", [3, torch.tensor(3), torch.tensor(3, dtype=torch.int32)])
def test_a_triple_is_a_sum_over_tokens(tokens: Any) -> None:
    loss, record = scale(lambda output: (output, tokens, "report"))
    assert loss == 12.0 / 3 / 4
    assert record.num_tokens == 3
    assert record.data == ["report"]


@pytest.mark.parametrize("tokens", [0, torch.tensor(0)])
def test_no_tokens_at_all_divide_by_one(tokens: Any) -> None:
    """Every token masked: a loss of 0, not a NaN."""
    loss, record = scale(lambda output: (output * 0, tokens, {}))
    assert loss == 0.0
    assert record.num_tokens == 0


def test_per_token_losses_are_left_to_finalisation() -> None:
    loss, record = scale(lambda output: (output, torch.tensor(3), {}), calculate_per_token_loss=True)
    assert loss == 12.0
    assert record.num_tokens == 3


def test_tokens_add_up_over_the_step() -> None:
    record = LossRecord()
    for tokens in (3, 0, 5):
        scaled_loss(torch.ones(()), lambda o, n=tokens: (o, torch.tensor(n), {}), SimpleNamespace(), 3, 1, record)
    assert record.num_tokens == 8


def test_without_a_loss_function_the_output_is_reported() -> None:
    output = {"logits": torch.ones(3)}
    got, record = scale(None, output)
    assert got is output
    assert record.data[0] is output


def test_the_loss_function_may_change_its_argument_only_by_returning() -> None:
    """The loss is scaled out of place: what the function returned, and perhaps keeps, is not touched."""
    kept = torch.tensor(8.0)
    assert scale(lambda output: (kept, {}))[0] == 2.0
    assert kept == 8.0


@pytest.mark.parametrize(
    ("returned", "kind"), [(torch.ones(3), "Tensor"), ((torch.ones(()),), "tuple"), ({}, "dict"), (None, "NoneType")]
)
def test_what_a_loss_function_must_return(returned: Any, kind: str) -> None:
    with pytest.raises(
        ScheduleInputError, match=rf"the loss function returned {kind}; it must return \(loss, report\)"
    ):
        scale(lambda output: returned)


@pytest.mark.parametrize("returned", [torch.ones(2, 3), None, (torch.ones(1),), (1, 2, 3)])
def test_what_a_forward_step_function_must_return(returned: Any) -> None:
    """A tensor whose first dimension happens to be 2 could be unpacked."""
    with pytest.raises(
        ScheduleInputError, match=r"forward_step_func returned a \w+; it must return \(output, loss funct"
    ):
        alone(lambda data, model: returned)


# -- through a pipeline -----------------------------------------------------------------------------------------------


def loss_of(target: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    return (output - target).pow(2).mean()


def forward_with(loss_func: Callable[[torch.Tensor], Any] | None, target_needed: bool = True) -> Any:
    """A forward_step_func whose loss function is ``loss_func(loss of the microbatch)``."""

    def step(data_iterator: Any, model: Any) -> Any:
        x, target = next(data_iterator)
        if loss_func is None:
            return model(x), None
        return model(x), lambda output, **more: loss_func(loss_of(target, output), **more)

    return step


def alone(step: Any, config: Any = None, module: Any = None, **more: Any) -> list[Any]:
    config = config or toy_config()
    return forward_backward_no_pipelining(
        forward_step_func=step,
        data_iterator=DATA.iterator(),
        model=module or PipelineStage(ToyBlock(0), config),
        num_microbatches=DATA.num_microbatches,
        **more,
    )


def in_pipeline(
    size: int,
    step: Any,
    *,
    chunks: int = 1,
    wrap: Callable[[PipelineStage], Any] = lambda stage: stage,
    data: ToyData = DATA,
    more: dict[str, Any] | None = None,
    **fields: Any,
) -> tuple[list[list[Any]], list[torch.nn.Module]]:
    """Reports of every rank, and the blocks of all stages in order."""
    network = MemoryNetwork(size)
    blocks = [ToyBlock(stage) for stage in range(size * chunks)]

    def rank_main(rank: int) -> list[Any]:
        config = toy_config(virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None, **fields)
        model = [wrap(PipelineStage(blocks[c * size + rank], config, c)) for c in range(chunks)]
        return get_forward_backward_func(size, chunks if chunks > 1 else None)(
            forward_step_func=step,
            data_iterator=[data.iterator() for _ in model],
            model=model,
            num_microbatches=data.num_microbatches,
            seq_length=data.seq_length,
            micro_batch_size=data.micro_batch_size,
            p2p_communicator=P2PCommunicator(ThreadGroup(rank, size), config, network.transport(rank)),
            **(more or {}),
        )

    return run_ranks(size, rank_main, network.abort), blocks


def reference(stages: int, total: Callable[[list[torch.Tensor]], torch.Tensor]) -> list[torch.nn.Module]:
    """Blocks after the backward of ``total(losses of all microbatches)`` in one process."""
    blocks = [ToyBlock(stage) for stage in range(stages)]
    losses = []
    for x, target in DATA.iterator():
        for block in blocks:
            x = block(x)
        losses.append(loss_of(target, x))
    total(losses).backward()
    return blocks


def assert_same_gradients(blocks: list[torch.nn.Module], expected: list[torch.nn.Module]) -> None:
    for mine, theirs in zip(blocks, expected, strict=True):
        for (name, one), other in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            assert one.grad is not None, name
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("per_token", [False, True])
def test_gradients_of_token_sums(per_token: bool) -> None:
    tokens = {0: 2, 1: 0, 2: 5, 3: 1}
    order = iter(range(4))

    def report(loss: torch.Tensor) -> Any:
        mb = next(order)
        return loss * tokens[mb], torch.tensor(tokens[mb]), mb

    told: list[int] = []
    reports, blocks = in_pipeline(
        *(2, forward_with(report)),
        calculate_per_token_loss=per_token,
        finalize_model_grads_func=lambda model, count: told.append(count),
    )
    assert reports == [[], [0, 1, 2, 3]]
    if per_token:
        assert sorted(map(int, told)) == [0, 8]
        expected = reference(2, lambda losses: sum(loss * tokens[mb] for mb, loss in enumerate(losses)))
    else:
        assert told == [None, None]
        expected = reference(2, lambda losses: sum(loss * (tokens[mb] > 0) for mb, loss in enumerate(losses)) / 4)
    assert_same_gradients(blocks, expected)


def test_collect_non_loss_data_reports_what_the_function_makes_of_the_output() -> None:
    def step(data_iterator: Any, model: Any) -> Any:
        x, _ = next(data_iterator)
        return model(x), lambda output, non_loss_data=False: ("collected", non_loss_data, tuple(output.shape))

    reports, _ = in_pipeline(2, step, more={"forward_only": True, "collect_non_loss_data": True})
    assert reports == [[], [("collected", True, (3, 2, HIDDEN))] * 4]


def test_inference_without_a_loss_function_returns_the_outputs() -> None:
    reports, _ = in_pipeline(2, forward_with(None), more={"forward_only": True})
    blocks = [ToyBlock(0), ToyBlock(1)]
    for got, (x, _) in zip(reports[1], DATA.iterator(), strict=True):
        assert torch.equal(got, blocks[1](blocks[0](x)))
        assert not got.requires_grad


def test_training_without_a_loss_function_takes_the_output_for_the_loss() -> None:
    """Megatron neither scales nor divides it (Megatron-LM#3943)."""

    def step(data_iterator: Any, model: Any) -> Any:
        x, target = next(data_iterator)
        output = model(x)
        return (loss_of(target, output) if model.inner.last else output), None

    network, size = MemoryNetwork(2), 2
    blocks = [ToyBlock(0), ToyBlock(1)]
    blocks[0].last, blocks[1].last = False, True

    def rank_main(rank: int) -> Any:
        config = toy_config()
        return get_forward_backward_func(size)(
            forward_step_func=step,
            data_iterator=DATA.iterator(),
            model=PipelineStage(blocks[rank], config),
            num_microbatches=4,
            seq_length=3,
            micro_batch_size=2,
            p2p_communicator=P2PCommunicator(ThreadGroup(rank, size), config, network.transport(rank)),
        )

    reports = run_ranks(size, rank_main, network.abort)
    assert [loss.item() for loss in reports[1]] == reference_run(2, DATA).losses
    assert_same_gradients(blocks, reference(2, sum))


def test_grad_scale_func_scales_every_gradient_once() -> None:
    """By a power of two, so that nothing is rounded."""
    plain = run_in_threads(3, 1, DATA)
    scaled = run_in_threads(3, 1, DATA, grad_scale_func=lambda loss: loss * 1024)
    assert scaled.losses == plain.losses
    for name, grad in plain.grads.items():
        assert torch.equal(scaled.grads[name], grad * 1024), name


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
    data = ToyData(count)
    rank_of: dict[int, int] = {}

    def step(data_iterator: Any, model: Any, *flag: Any) -> Any:
        x, target = next(data_iterator)
        given[rank_of[id(model.inner)]].append(flag[0] if flag else "none")
        return model(x), lambda output: (loss_of(target, output), {})

    def wrap(stage: PipelineStage) -> PipelineStage:
        number = next(
            n for n in range(size * chunks) if torch.equal(stage.inner.linear.weight, ToyBlock(n).linear.weight)
        )
        rank_of[id(stage.inner)] = number % size
        return stage

    in_pipeline(
        *(size, step),
        chunks=chunks,
        wrap=wrap,
        data=data,
        more=more,
        num_microbatches_with_partial_activation_checkpoints=partial,
    )
    return given


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("partial", [0, 1, 2])
@pytest.mark.parametrize("size", [2, 4])
def test_checkpoint_flags_of_1f1b_are_megatrons(size: int, partial: int, forward_only: bool) -> None:
    """k % (warm-up + 1) >= partial, of the k-th forward; warm-up as in training also where nothing is trained."""
    for count in (1, size, 2 * size + 1):
        expected = []
        for rank in range(size):
            window = min(size - rank - 1, count) + 1
            expected.append([k % window >= partial for k in range(count)])
        assert checkpoint_flags_of(size, 1, count, partial, forward_only=forward_only) == expected


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("partial", [0, 3])
def test_checkpoint_flags_of_interleaved_are_megatrons(partial: int, forward_only: bool) -> None:
    """The same with the warm-up of the interleaved schedule, which in evaluation is everything."""
    size, chunks, count = 2, 2, 6
    expected = []
    for rank in range(size):
        warmup = 2 * (size - rank - 1) + (chunks - 1) * size if not forward_only else chunks * count
        expected.append([k % (warmup + 1) >= partial for k in range(chunks * count)])
    assert checkpoint_flags_of(size, chunks, count, partial, forward_only=forward_only) == expected


def test_without_the_option_forward_step_functions_take_two_arguments() -> None:
    assert checkpoint_flags_of(2, 1, 3, None) == [["none"] * 3] * 2


def test_without_a_pipeline_there_is_no_third_argument() -> None:
    given = []

    def step(data_iterator: Any, model: Any, *flag: Any) -> Any:
        given.append(flag)
        return model(next(data_iterator)[0]), lambda output: (output.mean(), {})

    alone(step, toy_config(num_microbatches_with_partial_activation_checkpoints=1))
    assert given == [()] * DATA.num_microbatches


# -- the first microbatch ---------------------------------------------------------------------------------------------


class Marked(PipelineStage):
    """Counts its forwards, and writes down after how many of them it was told that the first microbatch comes."""

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


def test_wrapped_models_are_looked_through() -> None:
    stage = PipelineStage(ToyBlock(0), toy_config())
    wrapped = Wrapper(Wrapper(stage))
    assert wrapped_attribute(wrapped, "config") is stage.config
    assert wrapped_attribute(wrapped, "set_input_tensor") == stage.set_input_tensor
    assert wrapped_attribute(wrapped, "no_such_thing", 7) == 7
    assert unwrap_model(wrapped) is stage


@pytest.mark.parametrize("chunks", [1, 2])
def test_wrapped_models_train(chunks: int) -> None:
    reports, blocks = in_pipeline(
        *(2, forward_with(lambda loss: (loss, float(loss.detach())))),
        chunks=chunks,
        wrap=lambda stage: Wrapper(Wrapper(Marked(stage))),
    )
    assert reports[1] == reference_run(2 * chunks, DATA).losses
    assert_same_gradients(blocks, reference(2 * chunks, lambda losses: sum(losses) / 4))


# -- Megatron's functions of these names ------------------------------------------------------------------------------


def test_forward_step_and_backward_step_stand_alone() -> None:
    config = toy_config(grad_scale_func=lambda loss: loss * 2)
    stage = PipelineStage(ToyBlock(0), config)
    x, target = DATA.microbatch(0)
    store: list[Any] = []
    given = x.clone().requires_grad_()

    def step(data_iterator: Any, model: Any, flag: bool) -> Any:
        assert flag is True
        return model(), lambda output: (loss_of(target, output), torch.tensor(6), "report")

    loss, tokens = forward_step(
        *(step, None, stage, 4, given, store, config),
        cp_group_size=1,
        checkpoint_activations_microbatch=True,
        current_microbatch=3,
        is_first_microbatch=True,
    )
    assert store == ["report"]
    assert tokens == 6
    for arguments in ((config,), ("model type", config)):
        fresh = x.clone().requires_grad_()
        block = ToyBlock(0)
        expected = loss_of(target, block(fresh)) / 6 / 4 * 2
        expected.backward()
        if len(arguments) == 2:  # a second graph for the second form
            stage = PipelineStage(ToyBlock(0), config)
            given = x.clone().requires_grad_()
            loss, _ = forward_step(
                *(step, None, stage, 4, given, store, config), checkpoint_activations_microbatch=True
            )
        grad = backward_step(given, loss, None, *arguments)
        torch.testing.assert_close(grad, fresh.grad)


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
    with pytest.raises(
        ScheduleInputError, match="chunk 0 was given the model whose vp_stage is 1; pass the chunks in o"
    ):
        forward_step(forward_with(None), DATA.iterator(), stage, 4, None, [], stage.config, vp_stage=0)


@pytest.mark.parametrize("first", [False, True])
def test_forward_step_marks_the_first_microbatch_when_it_is_told(first: bool) -> None:
    stage = Marked(PipelineStage(ToyBlock(0), toy_config()))
    for mb in (0, 2):
        forward_step(
            *(forward_with(None), DATA.iterator(), stage, 4, None, [], stage.config),
            is_first_microbatch=first,
            current_microbatch=mb,
        )
    assert stage.marks == ([0, 1] if first else [])
    assert stage.microbatches == [0, 2]
