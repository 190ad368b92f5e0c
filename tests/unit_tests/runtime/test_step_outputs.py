"""What stages may give each other: views, tensors without a gradient, lists; and inputs that a stage does not use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from megatron_pp.errors import P2PShapeError, P2PTypeError, PipelinePeerError
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.runtime import log_once
from megatron_pp.runtime.stage import PipelineStage
from megatron_pp.testing.pipeline import placement_of, run_in_threads, toy_step
from megatron_pp.testing.toy import (
    HIDDEN,
    ToyBlock,
    ToyData,
    ToyResult,
    gradients_of,
    reference_run,
    toy_config,
    toy_loss,
)
from megatron_pp.weight_grad import split_weight_grad
from tests.harness.step_runs import every_policy, in_pipeline, on_ranks, result_of

DATA = ToyData(5)
deallocating = pytest.mark.parametrize("deallocate", [True, False], ids=["deallocate", "keep"])


class Viewing(ToyBlock):
    """Outputs that are views, each stage another kind."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.stage = stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.stage % 4 == 0:
            return y.view(y.shape)
        if self.stage % 4 == 1:
            return torch.cat([y, y], dim=0)[: y.shape[0]]  # half of a larger tensor
        if self.stage % 4 == 2:
            return y.transpose(0, 1).contiguous().transpose(0, 1)  # not contiguous
        return y.unsqueeze(0)[0]


class SometimesIdentity(ToyBlock):
    """Odd stages give back the very tensor that they were given, as a stage without layers does."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.stage = stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.stage % 2 else super().forward(x)


class ViewOfInput(ToyBlock):
    """Odd stages give back a view of what they were given."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.stage = stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape) if self.stage % 2 else super().forward(x)


@pytest.mark.parametrize("forward_only", [False, True])
@deallocating
@every_policy
@pytest.mark.parametrize("block", [Viewing, SometimesIdentity, ViewOfInput])
@pytest.mark.parametrize(("size", "chunks"), [(4, 1), (2, 2), (1, 3)])
def test_outputs_that_are_views_or_the_input_itself(
    size: int, chunks: int, block: Callable[[int], Any], policy: dict[str, Any], deallocate: bool, forward_only: bool
) -> None:
    expected = reference_run(size * chunks, DATA, forward_only, block)
    result = run_in_threads(
        *(size, chunks, DATA), block=block, forward_only=forward_only, deallocate_pipeline_outputs=deallocate, **policy
    )
    assert result.difference(expected) == 0.0


class GivesItsParameter(torch.nn.Module):
    """The first stage of a model that learns its input: the output is the parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.learned = torch.nn.Parameter(DATA.microbatch(0)[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.learned


@every_policy
def test_a_parameter_that_is_an_output_keeps_its_data(policy: dict[str, Any]) -> None:
    def block(stage: int) -> Any:
        return ToyBlock(stage) if stage else GivesItsParameter()

    made: list[Any] = []

    def kept_block(stage: int) -> Any:
        made.append(block(stage))
        return made[-1]

    result = run_in_threads(2, 1, DATA, block=kept_block, **policy)
    assert result.difference(reference_run(2, DATA, block=block)) == 0.0
    learned = next(m.learned for m in made if isinstance(m, GivesItsParameter))
    assert torch.equal(learned, DATA.microbatch(0)[0])


def forward_with_mean(data_iterator: Any, model: Any) -> Any:
    x, _ = next(data_iterator)
    return model(x), lambda output: (output.mean(), {})


@every_policy
def test_the_users_data_is_not_freed_where_a_stage_hands_it_on(policy: dict[str, Any]) -> None:
    """A first stage without layers gives the very tensor that the data iterator gave."""
    dataset = [DATA.microbatch(mb) for mb in range(DATA.num_microbatches)]

    class GivenData(ToyData):
        def iterator(self) -> Any:
            return iter(dataset)

    in_pipeline(
        *(2, forward_with_mean),
        block=lambda stage: ToyBlock(stage) if stage else torch.nn.Identity(),
        data=GivenData(DATA.num_microbatches),
        **policy,
    )
    for mb, (x, _) in enumerate(dataset):
        assert torch.equal(x, DATA.microbatch(mb)[0])


class Frozen(ToyBlock):
    """The first two stages train nothing: the outputs of the first need no gradient."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.requires_grad_(stage >= 2)


@deallocating
@every_policy
@pytest.mark.parametrize(("size", "chunks"), [(4, 1), (2, 2), (3, 1)])
def test_stages_that_train_nothing(size: int, chunks: int, policy: dict[str, Any], deallocate: bool) -> None:
    expected = reference_run(size * chunks, DATA, block=Frozen)
    assert not [name for name in expected.grads if name.startswith(("0.", "1."))]
    result = run_in_threads(size, chunks, DATA, block=Frozen, deallocate_pipeline_outputs=deallocate, **policy)
    assert result.difference(expected) == 0.0


class Detaching(ToyBlock):
    """Stage 2 cuts the graph: what it was given has no part in the gradient."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.stage = stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.detach() if self.stage == 2 else x)


class Ignoring(ToyBlock):
    """Stage 2 does not look at what it is given, but for its shape."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.stage = stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.ones_like(x) if self.stage == 2 else x)


class Constant(ToyBlock):
    """Stage 2 gives a constant: its output needs no gradient although its input does."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.stage = stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, 0.5) if self.stage == 2 else super().forward(x)


class DetachedLast(ToyBlock):
    """The last of four stages trains alone."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.stage = stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.detach() if self.stage == 3 else x)


CUT_AT = {Detaching: 2, Ignoring: 2, Constant: 2, DetachedLast: 3}


@pytest.mark.parametrize("policy", [{"overlap_p2p_comm": True}, {}], ids=["overlap", "plain"])
@pytest.mark.parametrize("block", CUT_AT)
@pytest.mark.parametrize(("size", "chunks", "schedule"), [(4, 1, None), (2, 2, None), (1, 4, None), (2, 2, "zb_v")])
def test_stages_before_one_that_uses_no_input(
    size: int, chunks: int, schedule: str | None, block: Callable[[int], Any], policy: dict[str, Any]
) -> None:
    """Their gradients are None, as in one process, where the stage is on the same rank, or all between are. Another
    rank waits for a message, and cannot know: it gets zeros.
    """
    expected = reference_run(size * chunks, DATA, block=block)
    result = run_in_threads(
        *(size, chunks, DATA),
        block=block,
        prepare=split_weight_grad if schedule else None,
        pipeline_schedule=schedule,
        **policy,
    )
    assert result.losses == expected.losses
    stages = {int(name[0]) for name in expected.grads}
    assert stages == set(range(CUT_AT[block], 4)) - ({2} if block is Constant else set())
    placement = placement_of(toy_config(pipeline_schedule=schedule), size, chunks)
    zeros = set()
    for stage in range(CUT_AT[block] - 1, -1, -1):
        if stage + 1 in zeros or placement.homes[stage][0] != placement.homes[stage + 1][0]:
            zeros.add(stage)
    assert {int(name[0]) for name in result.grads} == stages | zeros
    for name, grad in result.grads.items():
        assert torch.equal(grad, expected.grads.get(name, torch.zeros_like(grad))), name


def test_it_is_said_once_that_zeros_are_sent(caplog: pytest.LogCaptureFixture) -> None:
    log_once._log.cache_clear()
    with caplog.at_level(logging.WARNING, "megatron_pp"):
        for _ in range(2):
            run_in_threads(4, 1, DATA, block=DetachedLast)
    assert [record.message.partition(":")[0] for record in caplog.records] == ["stage 3 makes no use of its input"]


class UsesOneOfTwo(torch.nn.Module):
    """Stages on one rank that give each other lists; the last uses the first of the two, or the second."""

    def __init__(self, stage: int, used: int) -> None:
        super().__init__()
        self.one, self.two = ToyBlock(2 * stage), ToyBlock(2 * stage + 1)
        self.stage, self.used = stage, used

    def forward(self, given: Any) -> Any:
        a, b = (given, given) if isinstance(given, torch.Tensor) else given
        if self.stage == 2:
            return self.one(a) if self.used == 0 else self.two(b)
        return [self.one(a), self.two(b)]


@pytest.mark.parametrize("used", [0, 1])
def test_of_two_tensors_for_another_chunk_of_the_rank_one_is_not_used(used: int) -> None:
    def block(stage: int) -> UsesOneOfTwo:
        return UsesOneOfTwo(stage, used)

    assert run_in_threads(1, 3, DATA, block=block).difference(reference_run(3, DATA, block=block)) == 0.0


# -- what cannot be given ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ({"x": torch.ones(3, 2, HIDDEN)}, "a dict cannot be sent between stages"),
        (None, "a NoneType cannot be sent between stages"),
        ([torch.ones(3, 2, HIDDEN), None], "a NoneType cannot be sent between stages"),
        (torch.ones(3, 2, HIDDEN, dtype=torch.float64), "a tensor of torch.float64 cannot be sent between stages"),
        (torch.ones(3, 2, HIDDEN).to_sparse(), "a Tensor of layout torch.sparse_coo cannot be sent between stages"),
        (TwoTensor(*2 * [torch.ones(3, 2, HIDDEN)]), "a TwoTensor of layout torch.strided cannot be sent"),
        ([], "the output of chunk 0 for microbatch 0 has 0 tensors, but the next stage expects 1"),
        (2 * [torch.ones(3, 2, HIDDEN)], "has 2 tensors, but the next stage expects 1"),
    ],
)
@pytest.mark.parametrize("vary", [False, True])
def test_outputs_that_cannot_be_sent_are_refused(output: Any, words: str, vary: bool) -> None:
    class Bad(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return output

    raised: dict[int, BaseException] = {}

    def rank_main(rank: int, config: Any, communicator: P2PCommunicator) -> None:
        stage = PipelineStage(ToyBlock(1) if rank else Bad(), config)
        try:
            toy_step([stage], DATA, communicator, forward_step_func=forward_with_mean)
        except BaseException as error:
            raised[rank] = error
            raise

    with pytest.raises(RuntimeError):
        on_ranks(2, rank_main, timeout=20.0, guarded=True, variable_seq_lengths=vary)
    assert isinstance(raised[0], P2PTypeError | P2PShapeError)
    assert words in str(raised[0])
    assert isinstance(raised[1], PipelinePeerError)


def test_dict_outputs_of_the_last_stage_go_to_the_loss_function() -> None:
    class Named(ToyBlock):
        def forward(self, x: torch.Tensor) -> Any:
            return {"logits": super().forward(x), "extra": 7}

    def step(data_iterator: Any, model: Any) -> Any:
        x, target = next(data_iterator)

        def loss_func(output: Any) -> Any:
            assert output["extra"] == 7
            return toy_loss(target, output["logits"])

        return model(x), loss_func

    result = result_of(*in_pipeline(2, step, block=lambda stage: Named(1) if stage else ToyBlock(0), data=DATA))
    assert result.difference(reference_run(2, DATA)) == 0.0


# -- evaluation in the middle of training ------------------------------------------------------------------------------


@every_policy
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("chunks", [1, 2])
def test_training_after_an_evaluation(chunks: int, mode: Any, policy: dict[str, Any]) -> None:
    """Whatever mode the user evaluates in, nothing of it stays on the communicator (views are the hard case)."""
    size = 2
    blocks = [Viewing(stage) for stage in range(size * chunks)]

    def rank_main(rank: int, config: Any, communicator: P2PCommunicator) -> list[list[float]]:
        model = [PipelineStage(blocks[c * size + rank], config, c) for c in range(chunks)]

        def step(forward_only: bool) -> list[float]:
            reports = toy_step(model, DATA, communicator, forward_only=forward_only)
            return [float(report["loss"]) for report in reports]

        with mode():
            before = step(True)
        assert all(p.grad is None for chunk in model for p in chunk.parameters())
        trained = step(False)
        with mode():
            return [before, trained, step(True)]

    virtual = chunks if chunks > 1 else None
    losses = on_ranks(size, rank_main, virtual_pipeline_model_parallel_size=virtual, **policy)[1]
    expected = reference_run(size * chunks, DATA, block=Viewing)
    assert losses == [expected.losses] * 3
    assert ToyResult(expected.losses, gradients_of(dict(enumerate(blocks)))).difference(expected) == 0.0
