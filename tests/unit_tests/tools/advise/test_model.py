"""Models as layers, from sizes and from Megatron's arguments, and their division into stages."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megatron_pp.config.layout_text import layers_per_stage
from megatron_pp.errors import PlanError
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.activations import kept_timeline
from megatron_pp.plan.costs.stage_costs import Link, Network, StageCosts
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.simulate.memory import ModelShape
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.planner.timing import kept_states, order_time
from megatron_pp.tools.advise.fit import Room, balanced, best_counts, fitted, is_buildable, layout_text, stages_of
from megatron_pp.tools.advise.layers.gpus import GPUS, Gpu, gpu_named
from megatron_pp.tools.advise.megatron_args import read_megatron_args, transformer_of
from megatron_pp.tools.advise.model import DECODER, EMBEDDING, LOSS, MTP, PART, Layer, Model, layer
from megatron_pp.tools.advise.transformer import Transformer

ENDS = Layer(EMBEDDING, 0.0, 0.0, 0.0), Layer(LOSS, 2.0, 2.0, 2.0)


def gpt(count=10, loss=2.0, mtp=0, activation=1.0):
    decoder = layer(DECODER, 1.0, 1.0, 1.0, activation)
    last = (Layer(MTP, 1.5, 1.5, 1.5),) * mtp + (Layer(LOSS, loss, loss, loss),)
    return Model((ENDS[0], *[decoder] * count, *last))


def room(placement, microbatches=4, limit=1e9, slices=1):
    name = "1f1b" if placement.num_chunks == 1 else "interleaved_1f1b"
    spec = PlanSpec(name, placement.pipeline_size, placement.num_chunks, microbatches)
    states = [kept_states(order, placement.num_chunks) for order in build_plan(spec).orders]
    return Room(placement, states, slices, limit, (0.0,) * placement.pipeline_size)


# --- layers per stage


@pytest.mark.parametrize(("ranks", "chunks", "most"), [(4, 1, 3), (2, 2, 6), (3, 1, 4)])
def test_the_busiest_rank_has_as_little_as_can_be(ranks, chunks, most):
    """The model has 10 layers, and a loss that costs as much as 2 layers."""
    placement = Placement("loop", ranks, chunks)
    units = gpt().units(placement.num_stages)
    stages = stages_of(units, best_counts(units, room(placement), True))
    assert max(sum(one.forward for s in row for one in stages[s]) for row in placement.stages) == most
    assert [one.kind for layers in stages for one in layers] == [EMBEDDING, *[DECODER] * 10, LOSS]


@pytest.mark.parametrize("loss", [0.5, 2.0, 6.0])
def test_stages_are_cut_so_that_the_dearest_is_cheapest(loss):
    units = gpt(10, loss=loss).units(4)
    work = [sum(one.work for one in unit) for unit in units]
    cuts = itertools.combinations(range(1, len(work)), 3)
    least = min(max(sum(work[a:b]) for a, b in itertools.pairwise((0, *cut, len(work)))) for cut in cuts)
    found = stages_of(units, balanced(units, 4))
    assert max(sum(one.work for one in layers) for layers in found) == least


def test_memory_moves_layers_away_from_ranks_that_keep_more():
    placement = Placement("loop", 4, 1)
    model = gpt(16, loss=0.0)
    units = model.units(4)
    counts = best_counts(units, room(placement, 8, limit=14.0), recompute=False)
    cut = fitted(stages_of(units, counts), room(placement, 8, limit=14.0), model, False)
    assert max(cut.peaks) <= 14.0
    assert max(fitted(stages_of(units, balanced(units, 4)), room(placement, 8), model, False).peaks) > 14.0


def test_no_more_is_recomputed_than_the_memory_needs():
    placement = Placement("loop", 4, 1)
    model = gpt(16, loss=0.0)
    units = model.units(4)
    stages = stages_of(units, (5, 4, 4, 5))
    cut = fitted(stages, room(placement, 8, limit=14.0), model, True)
    # Rank 0 keeps 4 microbatches of 4 layers; a recomputed layer keeps 1/17, and 1 layer is the workspace.
    assert cut.recomputed == (1, 0, 0, 0)
    assert cut.peaks[0] == pytest.approx(16 - 4 * 16 / 17 + 16 / 17)
    assert cut.costs.backward_input == (5.0, 4.0, 4.0, 4.0)
    assert cut.costs.backward == (9.0, 8.0, 8.0, 8.0)
    tight = fitted(stages, room(placement, 8, limit=1.0), model, True)
    assert max(tight.peaks) > 1.0
    assert tight.recomputed == (4, 4, 4, 4)


@pytest.mark.parametrize("kind", ["loop", "v"])
def test_mtp_layers_stay_together_where_megatron_builds_them(kind):
    model = gpt(6, mtp=2)
    placement = Placement(kind, 2, 2)
    assert [len(unit) for unit in model.units(4)] == [1] * 7 + [2, 1]
    assert [len(unit) for unit in model.units(4, mtp_with_loss=True)] == [1] * 7 + [3]
    stages = stages_of(model.units(4, mtp_with_loss=True), (2, 2, 3, 1))
    assert is_buildable(stages, placement)
    # On the loop stage 2 is on rank 0; on the V it is not the last stage.
    assert not is_buildable(stages_of(model.units(4), (2, 4, 2, 1)), placement)
    assert layout_text(stages) == "Et|t*2|t*3|m*2L"


def test_the_layout_reads_back():
    units = gpt(10).units(4)
    counts = (4, 3, 3, 2)
    text = layout_text(stages_of(units, counts))
    assert text == "Et*3|(t*3|)*2tL"
    assert layers_per_stage(text) == [3, 3, 3, 1]


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(PlanError, match="4 layers, embedding and loss included, cannot fill 8 stages"):
        gpt(2).units(8)
    with pytest.raises(PlanError, match="cannot be joined to 4 stages"):
        Model((layer(PART, 1, 1, 1),) * 6).units(4)
    with pytest.raises(PlanError, match="no layers"):
        Model(())


# --- a first look at orders


NAMED = [n for n, f in SCHEDULES.items() if f.search is None and not f.sliced and not f.barriers]


@pytest.mark.parametrize("name", NAMED)
def test_the_first_look_agrees_with_the_simulator(name):
    """Both agree if no message waits for another, as with free transfers."""
    family = SCHEDULES[name]
    plan = build_plan(PlanSpec(name, 4, family.chunks or 2, 8))
    stages = plan.placement.num_stages
    costs = StageCosts.per_stage([1 + 0.1 * s for s in range(stages)], [1.0] * stages, [0.5] * stages)
    found = order_time(family.orders(plan.spec.shape), plan.placement, costs, 0.0)
    assert found == pytest.approx(simulate(plan, costs).makespan)


def test_messages_take_their_time():
    plan = build_plan(PlanSpec("1f1b", 4, 1, 8))
    costs = StageCosts.uniform(4)
    orders = SCHEDULES["1f1b"].orders(plan.spec.shape)
    assert order_time(orders, plan.placement, costs, 0.25) == simulate(plan, costs, Network(link=Link(0.25))).makespan


@pytest.mark.parametrize("name", ["1f1b", "zb_h2", "interleaved_zb", "v_half"])
def test_the_estimate_of_kept_memory_equals_the_plans_peak(name):
    plan = build_plan(PlanSpec(name, 4, SCHEDULES[name].chunks or 2, 8))
    stages = plan.placement.num_stages
    forward, late = [1.0 + s for s in range(stages)], [0.9 * (1 + s) for s in range(stages)]
    for rank, order in enumerate(plan.orders):
        place = Room(plan.placement, [kept_states(o, plan.spec.num_chunks) for o in plan.orders], 1, 1.0, ())
        most = max(kept_timeline(order, plan.placement.stages[rank], forward, late))
        assert place.kept(rank, forward, late) == pytest.approx(most)


# --- sizes and rates

SHAPE = ModelShape(32, 4096, 4096, num_attention_heads=32, vocab_size=32000)


def test_operations_are_those_of_the_papers():
    """arXiv 2104.04473, section 5.1: 96 b s l h^2 (1 + s / 6h + v / 16 l h), with recomputation and without a causal
    mask; so 72 b s l h^2 (1 + s / 12 h + v / 12 l h) here.
    """
    b, s, n, h, v = 1, 4096, 32, 4096, 32000
    paper = 72 * b * s * n * h**2 * (1 + s / (12 * h) + v / (12 * n * h))
    assert Transformer(SHAPE).flops() == pytest.approx(paper)


def test_times_follow_from_operations_and_rates():
    model = Transformer(SHAPE).model(Gpu(1e15, 80, 1e30, 1e30), 0.5)
    decoder = next(one for one in model.layers if one.kind == DECODER)
    linear, attention = 24 * 4096 * 4096**2, 2 * 4096 * 4096 * 4096
    assert decoder.forward == pytest.approx((linear + attention) / 0.5e15 * 1e3)
    assert decoder.backward_input == pytest.approx((linear + 2.5 * attention) / 0.5e15 * 1e3)
    assert decoder.weight == pytest.approx(linear / 0.5e15 * 1e3)
    assert decoder.activation == pytest.approx(34 * 4096 * 4096 / 1e9)
    assert decoder.recomputed == pytest.approx(2 * 4096 * 4096 / 1e9)
    total = sum(one.work for one in model.layers) / 1e3 * 0.5e15
    assert total == pytest.approx(model.flops + 32 * attention / 2)


def test_experts_make_a_layer_dearer_and_larger():
    kinds = Transformer(SHAPE, experts=8, top_k=2, moe_layers=(0, 1) * 16).model(GPUS["h100"]).layers
    dense, moe = kinds[1], kinds[2]
    assert moe.forward > 1.5 * dense.forward
    assert moe.static > 5 * dense.static
    shared = Transformer(SHAPE, experts=8, top_k=2, expert_parallel=8).model(GPUS["h100"]).layers[1]
    assert shared.static < 0.2 * moe.static


def test_the_loss_counts_once_more_for_each_mtp_layer():
    one, three = (Transformer(SHAPE, mtp_layers=n).model(GPUS["h100"]).layers for n in (0, 2))
    assert three[-1].forward == pytest.approx(3 * one[-1].forward)
    assert [layer.kind for layer in three[-3:]] == [MTP, MTP, LOSS]


def test_an_unknown_gpu_is_refused():
    with pytest.raises(PlanError, match=r"GPU 'h10O' is not known \(did you mean h100\?\)"):
        gpu_named("h10O")
    with pytest.raises(PlanError, match="efficiency is 50"):
        Transformer(SHAPE).model(GPUS["h100"], 50)


# --- Megatron's arguments

ARGUMENTS = """torchrun pretrain_gpt.py --num-layers 30 --hidden-size=2048 --seq-length 4096 --num-attention-heads 16 \\
  --swiglu --bf16 --num-experts 8 --moe-router-topk 2 --moe-layer-freq ([0]*2+[1]*28) --vocab-size 32000
  --mtp-num-layers 1 --tensor-model-parallel-size 2 --sequence-parallel  # more
"""


def test_megatrons_arguments_are_read_as_a_transformer():
    found = transformer_of(read_megatron_args(ARGUMENTS))
    assert found.shape == replace(
        ModelShape(30, 2048, 4096, num_attention_heads=16, vocab_size=32000), tensor_parallel=2, sequence_parallel=True
    )
    assert (found.gated, found.experts, found.top_k, found.mtp_layers) == (True, 8, 2, 1)
    assert found.moe_layers == (0,) * 2 + (1,) * 28


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing of use", "has no argument"),
        ("--num-layers 'x", "cannot be read"),
        ("--num-layers 3", "lack --hidden-size, --seq-length"),
        ("--num-layers x --hidden-size 8 --seq-length 8", "--num-layers is 'x'"),
        ("--num-layers 3 --hidden-size 8 --seq-length 8 --num-experts 2 --moe-layer-freq [0]*2", "is for 2 layers"),
        ("--num-layers 3 --hidden-size 8 --seq-length 8 --num-experts 2 --moe-layer-freq x", "write it as"),
    ],
)
def test_arguments_that_cannot_be_read(text, words):
    with pytest.raises(PlanError) as error:
        transformer_of(read_megatron_args(text))
    assert words in str(error.value)
