"""What the last stage makes of its output: Megatron's loss functions, their scaling, and what is reported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import ScheduleInputError
from megatron_pp.runtime.engine.compute import LossRecord
from megatron_pp.runtime.engine.context_parallel_loss import WholeSequence
from megatron_pp.runtime.engine.model_steps import StepOptions, scaled_loss
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.toy import HIDDEN, ToyBlock, reference_run
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

# -- the loss ---------------------------------------------------------------------------------------------------------


def scale(
    loss_func: Any, output: Any = None, cp_size: int = 1, whole_sequence: Any = None, **fields: Any
) -> tuple[Any, LossRecord]:
    record = LossRecord()
    output = torch.tensor(12.0, requires_grad=True) if output is None else output
    settings = StepSettings.from_config(SimpleNamespace(**fields))
    options = StepOptions(4, [True], cp_size=cp_size, whole_sequence=whole_sequence)
    return scaled_loss(output, loss_func, settings, options, record), record


TOKENS = (3, torch.tensor(3), torch.tensor(3, dtype=torch.int32))
SCALED: list[tuple[Any, dict[str, Any], float, int]] = [  # of a loss of 12 in a step of four microbatches
    (lambda output: (output * 2, "report"), {}, 24 / 4, 0),
    (lambda output: (output * 2, "report"), {"calculate_per_token_loss": True}, 24 / 4, 0),
    (lambda output: (output, "report"), {"cp_size": 2}, 12 * 2 / 4, 0),
    (lambda output: (output, torch.tensor(3), "report"), {"cp_size": 2}, 12 / 3 / 4, 3),  # not by that size
    *((lambda output, n=tokens: (output, n, "report"), {}, 12 / 3 / 4, 3) for tokens in TOKENS),
    # Every token masked: a loss of 0, not a NaN.
    *((lambda output, n=tokens: (output * 0, n, "report"), {}, 0.0, 0) for tokens in (0, torch.tensor(0))),
    # Left to the finalisation of gradients.
    (lambda output: (output, torch.tensor(3), "report"), {"calculate_per_token_loss": True}, 12.0, 3),
]


@pytest.mark.parametrize(("loss_func", "fields", "expected", "tokens"), SCALED)
def test_a_pair_is_a_mean_and_a_triple_a_sum_over_tokens(
    loss_func: Any, fields: dict[str, Any], expected: float, tokens: int
) -> None:
    loss, record = scale(loss_func, **fields)
    assert (loss, record.num_tokens, record.data) == (expected, tokens, ["report"])


def test_tokens_of_shards_need_the_group_of_their_ranks() -> None:
    """A triple with a context-parallel size that the config names, and no group to count the other shards' tokens."""
    with pytest.raises(ScheduleInputError, match="context-parallel group is not known; give the schedule a pg_coll"):
        scale(lambda output: (output, 3, {}), whole_sequence=WholeSequence(None, 2))


def test_without_a_loss_function_the_output_is_reported() -> None:
    output = torch.ones((), requires_grad=True)
    got, record = scale(None, output)
    assert got is output
    assert record.data[0] is output


def test_the_loss_function_may_change_its_argument_only_by_returning() -> None:
    """The loss is scaled out of place: what the function returned, and perhaps keeps, is not touched."""
    kept = torch.tensor(8.0, requires_grad=True)
    assert scale(lambda output: (kept, {}))[0] == 2.0
    assert kept == 8.0


@pytest.mark.parametrize(
    ("returned", "kind"), [(torch.ones(3), "Tensor"), ((torch.ones(()),), "tuple"), ({}, "dict"), (None, "NoneType")]
)
def test_wrong_return_values_of_a_loss_function_are_refused(returned: Any, kind: str) -> None:
    with pytest.raises(ScheduleInputError, match=rf"loss function returned {kind}; it must return \(loss, report\)"):
        scale(lambda output: returned)


LEAF = torch.ones(2, requires_grad=True)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (0.5, "the loss function returned a float as its loss; it must be a tensor"),
        (None, "the loss function returned a NoneType as its loss; it must be a tensor"),
        (LEAF * 2, r"the loss has shape \[2\]; it must be one number"),
    ],
)
@pytest.mark.parametrize("more", [(), (3,)])
def test_a_loss_that_is_no_scalar_tensor_is_refused(loss: Any, words: str, more: tuple[int, ...]) -> None:
    """A number would train nothing."""
    with pytest.raises(ScheduleInputError, match=words):
        alone(lambda data, model: (model(next(data)[0]), lambda output: (loss, *more, {})))


def test_a_loss_of_one_element_may_have_a_dimension() -> None:
    step = forward_with(lambda loss: (loss.reshape(1), "report"))
    assert alone(step) == ["report"] * 4


DETACHED: list[Any] = [
    lambda output: (output.detach().mean(), {}),
    lambda output: (torch.tensor(0.5), 3, {}),
    lambda output: (torch.ones(2), {}),
    torch.no_grad()(lambda output: (output.mean(), {})),
]


@pytest.mark.parametrize("loss_func", DETACHED)
def test_a_loss_without_a_gradient_is_an_error_as_in_one_process(loss_func: Any) -> None:
    """Before the backward. Its backward would train nothing."""
    with pytest.raises(ScheduleInputError, match="the loss of a training step needs no gradient"):
        alone(lambda data, model: (model(next(data)[0]), loss_func))
    reports = alone(lambda data, model: (model(next(data)[0]), loss_func), forward_only=True)
    assert len(reports) == 4


@pytest.mark.parametrize("output", [{"logits": torch.ones(3)}, torch.ones(()), None])
def test_without_a_loss_function_a_loss_without_a_gradient_is_an_error_too(output: Any) -> None:
    with pytest.raises(ScheduleInputError, match="the loss of a training step needs no gradient"):
        alone(lambda data, model: (output, None))
    assert alone(lambda data, model: (output, None), forward_only=True) == [output] * 4


def test_a_loss_without_a_gradient_is_an_error_on_every_rank() -> None:
    with pytest.raises(Exception, match="the loss of a training step needs no gradient"):
        in_pipeline(2, lambda data, model: (model(next(data)[0]), lambda output: (output.detach().mean(), {})))


def test_evaluation_may_report_a_number_as_the_loss() -> None:
    step = forward_with(lambda loss: (loss.item(), "report"))
    assert alone(step, forward_only=True) == ["report"] * 4


@pytest.mark.parametrize("returned", [torch.ones(2, 3), None, (torch.ones(1),), (1, 2, 3)])
def test_wrong_return_values_of_a_forward_step_function_are_refused(returned: Any) -> None:
    """A tensor whose first dimension happens to be 2 could be unpacked."""
    with pytest.raises(ScheduleInputError, match=r"forward_step_func returned a \w+; it must return \(output, loss f"):
        alone(lambda data, model: returned)


# -- through a pipeline -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_token", [False, True])
def test_gradients_of_token_sums(per_token: bool) -> None:
    tokens = {0: 2, 1: 0, 2: 5, 3: 1}
    order = iter(range(4))

    def report(loss: torch.Tensor) -> Any:
        mb = next(order)
        return loss * tokens[mb], torch.tensor(tokens[mb]), mb

    counts: list[int] = []
    reports, blocks = in_pipeline(
        *(2, forward_with(report)),
        calculate_per_token_loss=per_token,
        finalize_model_grads_func=lambda model, count: counts.append(count),
    )
    assert reports == [[], [0, 1, 2, 3]]
    if per_token:
        assert sorted(map(int, counts)) == [0, 8]
        expected = reference(2, lambda losses: sum(loss * tokens[mb] for mb, loss in enumerate(losses)))
    else:
        assert counts == [None, None]
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
        return (loss_of(target, output) if model.inner.stage == 1 else output), None

    reports, blocks = in_pipeline(2, step, block=of_stage(lambda stage, x, block: block(x)))
    assert [loss.item() for loss in reports[1]] == reference_run(2, DATA).losses
    assert_same_gradients(blocks, reference(2, sum))


def test_grad_scale_func_scales_every_gradient_once() -> None:
    """By a power of two, so that nothing is rounded."""
    plain = run_in_threads(3, 1, DATA)
    scaled = run_in_threads(3, 1, DATA, grad_scale_func=lambda loss: loss * 1024)
    assert scaled.losses == plain.losses
    for name, grad in plain.grads.items():
        assert torch.equal(scaled.grads[name], grad * 1024), name
