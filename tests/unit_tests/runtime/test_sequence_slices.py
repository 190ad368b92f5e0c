"""Steps in slices of sequences: the GPT's losses and gradients are those of whole sequences, for every schedule."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from examples.gpt.gpt import EMBEDDING, OUTPUT, GPTStage, build_gpt_chunks
from examples.gpt.optimizer import sum_tied_gradients
from examples.gpt.trainer import forward_step
from megatron_pp import get_forward_backward_func, sequence_slice, split_weight_grad
from megatron_pp.config.model_config import TransformerConfig
from megatron_pp.errors import ConfigError, ScheduleError, ScheduleInputError
from megatron_pp.features.slices import lengths as slice_lengths
from megatron_pp.features.slices import sequence_slice as slices_of_sequences
from megatron_pp.plan.ir.placement import LOOP, Placement
from megatron_pp.testing.toy import ToyBlock, ToyResult, toy_forward_step
from testkit.autograd_thread import autograd_thread
from testkit.thread_runs.step_runs import Rank, in_pipeline, pipeline, result_of
from tests.unit_tests.examples.test_gpt import BATCH, SEQ, VOCAB, make_batch, make_config

MICROBATCHES = 3
Outcome = tuple[list[float], dict[str, torch.Tensor]]


def gpt_config(size: int, chunks: int = 1, **fields: Any) -> TransformerConfig:
    virtual = chunks if chunks > 1 else None
    sizes = {"pipeline_model_parallel_size": size, "virtual_pipeline_model_parallel_size": virtual, "num_layers": 4}
    return make_config(**{**sizes, "pipeline_dtype": torch.float64, "overlap_p2p_comm": True, **fields})


def batches() -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    return ((mb, *make_batch(mb)) for mb in range(MICROBATCHES))


def train(
    size: int,
    chunks: int = 1,
    *,
    forward_only: bool = False,
    step: Any = forward_step,
    tied: bool = False,
    **fields: Any,
) -> Outcome:
    """Losses of a step, and the gradients of the whole model. ``tied``: those of tied weights are added up."""
    config = gpt_config(size, chunks, **fields)
    schedule = get_forward_backward_func(size, chunks if chunks > 1 else None)

    def gpt_step(rank: Rank) -> tuple[list[Any], list[GPTStage]]:
        model = build_gpt_chunks(
            config,
            stages=Placement(LOOP, size, chunks).stages[rank.rank],
            layers_of_stage=config.layers_of_stages(),
            vocab_size=VOCAB,
            max_sequence_length=SEQ,
            seed=7,
        )
        for chunk in model:
            chunk.double().stream_dtype = torch.float64
        if "zb" in config.schedule_name:
            split_weight_grad(model)
        reports = schedule(
            forward_step_func=step,
            data_iterator=[batches() for _ in model] if chunks > 1 else batches(),
            model=model if chunks > 1 else model[0],
            num_microbatches=MICROBATCHES,
            seq_length=SEQ,
            micro_batch_size=BATCH,
            forward_only=forward_only,
            p2p_communicator=rank.communicator if size > 1 else None,
        )
        return reports, model

    fields_of_wire = {"pipeline_dtype": torch.float64, "hidden_size": 16, "overlap_p2p_comm": True}
    results = pipeline(size, chunks, MICROBATCHES, gpt_step, **fields_of_wire)
    stages = [stage for _, model in results for stage in model]
    if tied:
        sum_tied_gradients(stages, None)
    named = (pair for stage in stages for pair in stage.named_parameters())
    return [float(report["loss"]) for reports, _ in results for report in reports], {
        name: p.grad for name, p in named if p.grad is not None
    }


def assert_equal_runs(found: Outcome, expected: Outcome) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(grad, expected[1][name]) for name, grad in found[1].items())


def assert_close_runs(found: Outcome, expected: Outcome, slices: int) -> None:
    means = [sum(found[0][k * slices : (k + 1) * slices]) / slices for k in range(MICROBATCHES)]
    assert means == pytest.approx(expected[0], rel=1e-12)
    assert found[1].keys() == expected[1].keys()
    for name, grad in found[1].items():
        assert (grad - expected[1][name]).norm() <= 1e-12 * expected[1][name].norm(), name


@pytest.fixture(scope="module")
def whole() -> Outcome:
    return train(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "chunks", "fields"),
    [(1, 1, {}), (2, 2, {}), (4, 1, {"overlap_p2p_comm": False}), (2, 2, {"pipeline_schedule": "interleaved_seq_zb"})],
)
def test_a_gpt_gives_the_numbers_of_whole_sequences(size, chunks, fields, whole):
    """``test_differential.py`` has all schedules, with a causal sum in place of attention."""
    slices = 3
    found = train(size, chunks, sequence_slices=slices, **fields)
    assert_close_runs(found, whole, slices)
    assert_equal_runs(found, train(1, sequence_slices=slices))  # to the bit, whatever the schedule


def test_uneven_layouts_and_tied_embeddings_equal_one_process():
    """The tied copies lie on both ranks, with gradients of their own, which are added once a step."""
    layout = {"num_layers": 5, "pipeline_model_parallel_layout": "Et|tt|t|tL"}
    found = train(2, 2, tied=True, **layout)
    assert_equal_runs(found, train(1, num_layers=5, tied=True))
    assert torch.equal(found[1][EMBEDDING], found[1][OUTPUT])


def test_slices_of_equal_cost_are_of_unequal_length(whole, monkeypatch):
    monkeypatch.setattr(slice_lengths, "attention_share", lambda *sizes: 0.6)  # of so short a sequence it is 0.06
    lengths: list[int] = []

    def step(data_iterator: Any, model: Any) -> Any:
        part = sequence_slice()
        lengths.append(part.stop - part.start)
        return forward_step(data_iterator, model)

    found = train(2, step=step, sequence_slices=3, balance_sequence_slices=True)
    assert sorted(lengths) == sorted([6, 3, 3] * 2 * MICROBATCHES)
    assert_close_runs(found, whole, 3)


@pytest.mark.parametrize("per_token", [True, False])
def test_sums_are_divided_by_the_tokens_of_the_whole_microbatch(per_token):
    """Tokens count unequally: some slices have none."""

    def masked(data_iterator: Any, model: Any) -> Any:
        mb, tokens, labels = next(data_iterator)
        mask = (labels > 9 + mb).double()
        part = sequence_slice()
        mask = mask if part is None else part.of(mask, 1)

        def loss(losses: torch.Tensor) -> Any:
            kept = (losses * mask).sum()
            return kept, mask.sum().int(), {"loss": kept.detach()}

        return model(tokens, labels, mb), loss

    options: dict[str, Any] = {"step": masked, "calculate_per_token_loss": per_token}
    losses, grads = train(1, **options)
    assert_close_runs(train(2, sequence_slices=6, **options), ([loss / 6 for loss in losses], grads), 6)


def test_slices_support_evaluation_and_recomputation(whole):
    slices = 3
    assert_close_runs(train(2, forward_only=True, sequence_slices=slices), (whole[0], {}), slices)

    def recomputing(data_iterator: Any, model: Any) -> Any:
        return forward_step(data_iterator, model, checkpoint=True)

    assert_equal_runs(train(2, step=recomputing, sequence_slices=slices), train(2, sequence_slices=slices))


def test_first_microbatch_marks_come_once(monkeypatch):
    marks: list[int] = []

    def step(data_iterator: Any, model: Any) -> Any:
        part = sequence_slice()
        assert (part.share, part.count) == (1 / 3, 3)
        return forward_step(data_iterator, model)

    monkeypatch.setattr(GPTStage, "set_is_first_microbatch", lambda self: marks.append(1))
    train(1, step=step, sequence_slices=3)
    assert marks == [1]
    assert sequence_slice() is None


PARTIAL = "num_microbatches_with_partial_activation_checkpoints"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sequence_slices": 5}, "12 tokens cannot be cut into 5 slices"),
        ({"sequence_slices": 3, "variable_seq_lengths": True}, "does not go with variable_seq_lengths"),
        ({"sequence_slices": 3, "context_parallel_size": 2}, "does not go with context parallelism"),
        ({"sequence_slices": 3, PARTIAL: 1}, "does not go with num_microbatches_with_partial"),
    ],
)
def test_settings_that_slices_exclude_are_refused_before_any_communication(fields, words):
    with pytest.raises(ScheduleInputError, match=words):
        train(1, **fields)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (lambda part: torch.zeros(5, 2), r"shape \[5, 2\] has 5 tokens in dimension 0; slice 0 has 4"),
        (lambda part: torch.zeros(4, 1 + (part.index == 0)), r"shape \[4, 1\] .* the whole has shape \[12, 2\]"),
    ],
    ids=["other tokens", "another shape"],
)
def test_a_tensor_that_does_not_fit_is_refused(tensor, words):
    def step(data_iterator: Any, model: Any) -> Any:
        sequence_slice().extend("layer", tensor(sequence_slice()), dim=0)
        return forward_step(data_iterator, model)

    with pytest.raises(ScheduleInputError, match=words):
        train(1, step=step, sequence_slices=3)


class Summing(torch.nn.Module):
    """A causal layer, applied ``uses`` times: each token gets the sum of those up to it. ``owner(layer, use)`` asks."""

    def __init__(self, stage: int = 0, uses: int = 1, reentrant: bool | None = None, owner: Any = None) -> None:
        super().__init__()
        self.block = ToyBlock(stage)
        self.stage, self.uses, self.reentrant = stage, uses, reentrant
        self.owner = owner or (lambda layer, use: (layer, use))

    def layer(self, x: torch.Tensor, use: int) -> torch.Tensor:
        key, part = self.block(x), sequence_slice()
        owner = None if part is None else self.owner(self, use)
        if owner is not None:
            (key,) = part.extend(owner, key, dim=0)
        return x + torch.tanh(key.cumsum(0)[-len(x) :])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for use in range(self.uses):
            recompute = self.reentrant is not None
            x = checkpoint(self.layer, x, use, use_reentrant=self.reentrant) if recompute else self.layer(x, use)
        return x


def summed(slices: int = 3, size: int = 1, block: Any = Summing, **options: Any) -> ToyResult:
    """Losses of whole microbatches, and gradients."""
    fields = {"sequence_slices": slices, "overlap_p2p_comm": True} if slices > 1 else {}
    found = result_of(*in_pipeline(size, toy_forward_step, block=partial(block, **options), **fields))
    losses = [sum(found.losses[k : k + slices]) / slices for k in range(0, len(found.losses), slices)]
    return ToyResult(losses, found.grads)


@pytest.fixture
def device_thread() -> Iterator[None]:
    with autograd_thread():
        yield


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_are_recomputed_in_a_thread_of_autograd_see_the_slice(reentrant, device_thread):
    found = summed(uses=2, reentrant=reentrant)
    assert found.difference(summed(uses=2)) < 1e-6
    assert found.difference(summed(1, uses=2)) < 1e-5


class Forgetful(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        """Nothing is kept: what remains is the caller's thread-local."""

    def __delitem__(self, key: Any) -> None:
        """Do nothing: there is no such entry."""


@pytest.mark.callers_thread
@pytest.mark.parametrize("where", [nullcontext, autograd_thread])
def test_a_slice_that_the_callers_thread_alone_knows_is_lost_in_a_thread_of_autograd(where, monkeypatch):
    monkeypatch.setattr(slices_of_sequences, "_RUNNING", Forgetful())
    with where():
        found = summed(uses=2, reentrant=False)
    assert (found.difference(summed(uses=2)) < 1e-6) == (where is nullcontext)


def test_ranks_that_share_a_thread_of_autograd_are_refused(device_thread):
    computing, asked = threading.Event(), threading.Event()

    class Meeting(Summing):  # rank 1 recomputes while rank 0 computes
        def layer(self, x: torch.Tensor, use: int) -> torch.Tensor:
            backward = torch._C._current_graph_task_id() != -1
            if self.stage == 1 and backward:
                computing.wait(20)
            elif self.stage == 0 and not backward and sequence_slice().microbatch == 1:
                computing.set()
                asked.wait(20)
            try:
                return super().layer(x, use)
            finally:
                if self.stage == 1 and backward:
                    asked.set()

    with pytest.raises(ScheduleInputError, match="which of 2 ranks of this process calls it"):
        summed(size=2, block=Meeting, reentrant=False)


def test_compiled_layers_ask_without_a_break_of_the_graph():
    compiled = torch.compile(lambda x: x + sequence_slice().start, backend="eager", fullgraph=True)
    starts: list[int] = []

    def step(data_iterator: Any, model: Any) -> Any:
        starts.append(int(compiled(torch.zeros(()))))
        return forward_step(data_iterator, model)

    train(1, step=step, sequence_slices=3)
    assert starts == [0, 4, 8] * MICROBATCHES


@pytest.mark.parametrize("size", [1, 2])
def test_a_layer_that_is_used_twice_has_an_owner_for_each_use(size):
    assert summed(size=size, uses=2).difference(summed(1, size=size, uses=2)) < 1e-5


@pytest.mark.parametrize(
    ("owner", "words"),
    [
        (lambda layer, use: layer, "of type Summing has given 1 tokens of tensor 0, and gives slice 0, tokens 0 to 1"),
        (lambda layer, use: layer if sequence_slice().index else None, "has given 0 tokens .* gives slice 1"),
    ],
    ids=["twice", "not the first"],
)
@pytest.mark.parametrize("reentrant", [None, True])
def test_an_owner_that_does_not_give_every_slice_once_is_refused(owner, words, reentrant):
    with pytest.raises(ScheduleInputError, match=words):
        summed(uses=2, owner=owner, reentrant=reentrant)


def test_the_config_refuses_a_schedule_without_slices():
    with pytest.raises(ScheduleError, match="1f1b runs sequences whole"):
        gpt_config(2, pipeline_schedule="1f1b", sequence_slices=2)
    with pytest.raises(ConfigError, match="sequence_slices is 0"):
        gpt_config(2, sequence_slices=0)
    assert gpt_config(2, 2, sequence_slices=2).schedule_name == "interleaved_seq_1f1b"
