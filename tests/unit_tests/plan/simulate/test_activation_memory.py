"""What a waiting weight gradient weighs: by the plan's count, by the transformer formula, and in bytes that live."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from examples.gpt.gpt import GPTStage, build_gpt_chunks
from megatron_pp.config.model_config import TransformerConfig
from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import PlanError
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.activations import WEIGHT_SHARE, activations_timeline, kept_timeline, peak_activations
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.costs.stage_costs import MemoryModel
from megatron_pp.plan.io.serialize import parse_plan
from megatron_pp.plan.ir.instruction import SINGLE_COMPUTE_OPS
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.simulate.memory import FULL, ModelShape
from megatron_pp.planner.plan_search import peak_memory
from megatron_pp.runtime.alone import lone_communicator
from megatron_pp.runtime.engine.executor import PlanExecutor, Shapes
from megatron_pp.runtime.engine.gradient_hooks import SyncHooks
from megatron_pp.runtime.engine.model_steps import ModelSteps, StepOptions
from megatron_pp.runtime.engine.split_backwards import SplitBackwards
from megatron_pp.runtime.footprint import Footprint, LiveStorages, measure_footprint
from megatron_pp.testing.toy import HIDDEN, ToyBlock
from megatron_pp.weight_grad import split_weight_grad

FLOAT = 4
SEQUENCE, BATCH, WIDTH, VOCAB, LAYERS = 24, 2, 16, 64, 2


# -- the plan's count --------------------------------------------------------------------------------------------------


def test_every_stage_has_a_share_of_its_own_and_it_may_be_more_than_all() -> None:
    plan = parse_plan("0F0,0F1,0I0,0F2,0I1,0W0,0I2,0W1,0W2\n")

    def after_compute(share: float | list[float]) -> list[float]:
        values = activations_timeline(plan, 0, share)
        return [value for at, value in zip(plan.programs[0], values, strict=True) if at.op in SINGLE_COMPUTE_OPS]

    assert after_compute(0.5) == [1, 2, 1.5, 2.5, 2, 1.5, 1, 0.5, 0]
    assert after_compute([16.0]) == [1, 2, 17, 18, 33, 17, 32, 16, 0]  # recomputed layers keep their input alone
    assert peak_activations(plan, 0.5) == (2.5,)
    two = build_plan(PlanSpec("zb_h1", 2, 1, 3))
    assert peak_activations(two, [0.0, 1.0]) == (peak_activations(two, 0.0)[0], peak_activations(two, 1.0)[1])
    assert peak_activations(build_plan(PlanSpec("zb_h1", 2, 1, 3, forward_only=True))) == (0.0, 0.0)


@pytest.mark.parametrize(("share", "sentence"), [([1.0], "given for 1 stages; the plan has 2"), (-0.5, "is -0.5")])
def test_impossible_shares_are_refused(share: Any, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        peak_activations(build_plan(PlanSpec("zb_h1", 2, 1, 3)), share)


def test_the_search_counts_what_a_backward_adds() -> None:
    """Where layers are recomputed, W needs more than the forward kept."""
    order = parse_plan("0F0,0I0,0W0\n").orders[0]
    assert peak_memory(list(order), [0], MemoryModel((99.0,), (2.0,), (32.0,))) == 32.0
    assert list(kept_timeline(order, [0], [2.0], [32.0])) == [2.0, 32.0, 0.0]
    spec = PlanSpec("auto", 2, 1, 6, measured=Measured(memory_limit=40.0, activation=2.0, weight_activation=32.0))
    plan = build_plan(spec)
    for rank, order in enumerate(plan.orders):
        assert max(kept_timeline(order, [rank], [2.0] * 2, [32.0] * 2)) <= 40.0


def test_measurements_without_a_weight_share_take_the_transformers() -> None:
    placement = Placement("loop", 2, 1)
    assert Measured(activation=(2.0, 4.0)).memory(placement).weight == (2 * WEIGHT_SHARE, 4 * WEIGHT_SHARE)
    assert Measured(activation=2.0, weight_activation=1.5).memory(placement).weight == (1.5, 1.5)


def test_the_formula_gives_the_share() -> None:
    shape = ModelShape(num_layers=4, hidden_size=64, seq_length=32)
    assert shape.layer_weight_grad_bytes / shape.layer_bytes == pytest.approx(WEIGHT_SHARE)
    assert shape.weight_share(1, 4) == pytest.approx(WEIGHT_SHARE)
    recomputed = ModelShape(num_layers=4, hidden_size=64, seq_length=32, recompute=FULL)
    assert recomputed.weight_share(1, 4) == pytest.approx(16.0)
    split = ModelShape(num_layers=4, hidden_size=64, seq_length=32, tensor_parallel=2)
    assert split.layer_weight_grad_bytes == 32 * 64 * (8 + 24 / 2)  # two inputs and two output gradients are whole


# -- bytes that live ---------------------------------------------------------------------------------------------------


def gpt(stages: int = 3) -> list[GPTStage]:
    config = TransformerConfig(
        num_layers=LAYERS * stages, hidden_size=WIDTH, num_attention_heads=2, hidden_dropout=0.0, attention_dropout=0.0
    )
    layers = [list(range(LAYERS * s, LAYERS * (s + 1))) for s in range(stages)]
    return build_gpt_chunks(
        config, stages=range(stages), layers_of_stage=layers, vocab_size=VOCAB, max_sequence_length=SEQUENCE
    )


def footprint_of(chunks: list[GPTStage], store: Any, chunk: int) -> Footprint:
    tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)

    def forward() -> tuple[Any, torch.Tensor]:
        given = None if chunk == 0 else torch.ones(SEQUENCE, BATCH, WIDTH, requires_grad=True)
        chunks[chunk].set_input_tensor(given)
        return given, chunks[chunk](tokens, tokens)

    return measure_footprint(store, chunks, chunk, forward)


def test_after_its_backward_a_gpt_stage_keeps_what_the_formula_says() -> None:
    """Neither the stage's input nor anything of its graph, whose nodes would hold both."""
    chunks = gpt()
    store = split_weight_grad(chunks)
    shape = ModelShape(
        num_layers=3 * LAYERS,
        hidden_size=WIDTH,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        vocab_size=VOCAB,
        element_bytes=FLOAT,
    )
    for chunk in range(3):
        measured = footprint_of(chunks, store, chunk)
        assert measured.weight == shape.kept_for_weights(chunk, 3)
        assert 0.7 < measured.share < WEIGHT_SHARE  # this forward keeps more than a fused one: rotated queries and keys
    assert all(p.grad is None or not p.grad.any() for chunk in chunks for p in chunk.parameters())


def test_after_its_backward_the_toy_stage_keeps_its_linear_layers_input_and_output_gradient() -> None:
    block = ToyBlock(0)
    store = split_weight_grad(block)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        given = torch.ones(3, 2, HIDDEN, requires_grad=True)
        return given, block(given)

    assert measure_footprint(store, [block], 0, forward).weight == 2 * (3 * 2 * HIDDEN) * FLOAT


@pytest.mark.parametrize(("ends_in", "comes_back"), [(lambda y: y * 2.0, True), (torch.tanh, False)])
def test_an_output_is_freed_after_its_send_unless_the_graph_has_saved_it(ends_in: Any, comes_back: bool) -> None:
    block = ToyBlock(0)
    store = split_weight_grad(block)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        given = torch.ones(3, 2, HIDDEN, requires_grad=True)
        return given, ends_in(block(given))

    footprint = measure_footprint(store, [block], 0, forward)
    assert footprint.forward - footprint.sent == comes_back * (3 * 2 * HIDDEN) * FLOAT


class _Weigher:
    """Bytes that live after each operation of a run."""

    def __init__(self, storages: LiveStorages, model: GPTStage) -> None:
        self.storages, self.model = storages, model
        self.weighed: list[int] = []

    def begin(self, at: Any) -> None:
        pass

    def end(self, at: Any) -> None:
        if at.op in SINGLE_COMPUTE_OPS:
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            self.weighed.append(self.storages.bytes_without([*self.model.parameters(), *self.model.buffers(), *grads]))


def test_a_run_keeps_after_each_operation_what_the_plan_predicts() -> None:
    """A whole GPT in one process: forwards and waiting weight gradients, by their measured weights."""
    plan = parse_plan("0F0,0F1,0I0,0F2,0I1,0W0,0F3,0I2,0W1,0I3,0W2,0W3\n")
    (model,) = gpt(stages=1)
    store = split_weight_grad(model)
    footprint = footprint_of([model], store, 0)
    tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)

    def forward_step(iterator: Any, model: Any) -> Any:
        return model(tokens, tokens), lambda losses: (losses.mean(), {})

    steps = ModelSteps(forward_step, [None], [model], StepSettings.from_config(model.config), StepOptions(4, [True]))
    with LiveStorages() as storages:
        weigher = _Weigher(storages, model)
        PlanExecutor(
            plan,
            lone_communicator(model.config, model),
            steps,
            SyncHooks(StepSettings.from_config(model.config), [model]),
            [Shapes(None, None)],
            features=[SplitBackwards(store)],
            observer=weigher,
        ).run()
    kept = kept_timeline(plan.programs[0], [0], [float(footprint.forward)], [float(footprint.weight)])
    predicted = [value for at, value in zip(plan.programs[0], kept, strict=True) if at.op in SINGLE_COMPUTE_OPS]
    # A loss of a few bytes each, and the last microbatch's norm gradients, which wait for the hooks' sake.
    assert weigher.weighed == pytest.approx(predicted, rel=0.01, abs=64)
    assert max(weigher.weighed) < 0.97 * footprint.forward * 3  # three were in flight or waiting at the peak
