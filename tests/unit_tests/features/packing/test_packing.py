"""Sequences in packs: each once, within the memory of its ranks, with ranks that cost the same."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import pytest

from megatron_pp.errors import PlanError
from megatron_pp.features.packing.packing import PackingRules, packed, pair_cost


def test_costs_are_linear_in_tokens_and_quadratic_in_each_sequence() -> None:
    rules = PackingRules(4, 8, 0.5)
    assert rules.cost([4, 2]) == 4 + 2 + 0.5 * (16 + 4)
    assert rules.cost([16], 2) == (16 + 0.5 * 256) / 2
    hidden, ffn = 4096, 16384
    linear, pairs = 8 * hidden**2 + 4 * hidden * ffn, 2 * hidden  # per token, and per token and token before it
    assert pair_cost(hidden, ffn) == pytest.approx(pairs / linear)


@pytest.mark.parametrize(("length", "context"), [(1, 1), (8, 1), (9, 2), (16, 2), (17, 4), (32, 4)])
def test_a_long_sequence_gets_as_many_ranks_as_it_needs(length: int, context: int) -> None:
    assert PackingRules(4, 8).context(length) == context


def test_context_sizes_are_those_of_megatrons_hybrid_context_parallelism() -> None:
    """Megatron's groups are no microbatches: their ranks differ in numbers of sequences, and exceed a rank's tokens."""
    theirs = pytest.importorskip("megatron.core.pipeline_parallel.hybrid_cp_schedule")
    chance, unequal, beyond = random.Random(2), 0, 0
    for ranks, tokens in [(1, 7), (2, 12), (4, 5), (8, 4096)]:
        rules = PackingRules(ranks, tokens)
        scheduler = theirs.BalancedCPScheduler(tokens, SimpleNamespace(size=lambda ranks=ranks: ranks))
        lengths = [chance.randint(1, ranks * tokens) for _ in range(60)]
        assert [rules.context(length) for length in lengths] == [scheduler.gpus_needed(length) for length in lengths]
        _, groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)
        unequal += sum(len(set(map(len, group))) > 1 for group in groups)
        beyond += sum(sum(lengths[k] / rules.context(lengths[k]) for k in rank) > tokens for g in groups for rank in g)
        assert all(pack.tokens <= pack.context * tokens for slot in packed(lengths, rules).slots for pack in slot.packs)
    assert unequal
    assert beyond


@pytest.mark.parametrize("seed", range(40))
def test_each_sequence_is_packed_once_and_each_rank_has_a_pack_that_fits(seed: int) -> None:
    chance = random.Random(seed)
    rules = PackingRules(chance.choice([1, 2, 4, 8]), chance.randint(1, 20), chance.choice([0.0, 0.1]))
    lengths = [chance.randint(1, rules.ranks * rules.rank_tokens) for _ in range(chance.randint(1, 60))]
    step = packed(lengths, rules)
    assert step == packed(tuple(lengths), rules)
    found = [k for slot in step.slots for pack in slot.packs for k in pack.sequences]
    assert sorted(found) == list(range(len(lengths)))
    assert step.tokens == sum(lengths)
    for slot in step.slots:
        assert [rank for pack in slot.packs for rank in pack.ranks] == list(range(rules.ranks))
        for pack in slot.packs:
            assert pack.lengths == tuple(lengths[k] for k in pack.sequences)
            assert pack.tokens <= pack.context * rules.rank_tokens
            assert pack.context & (pack.context - 1) == 0
            assert pack.ranks.start % pack.context == 0, "the ranks of a group that is made once"
            assert pack.context >= max(map(rules.context, pack.lengths))
            assert pack.cost == rules.cost(pack.lengths, pack.context)
        assert slot.cost == max(pack.cost for pack in slot.packs)
    for rank in range(rules.ranks):
        assert len(step.of_rank(rank)) == len(step.slots)


def test_ranks_that_are_left_share_the_costliest_pack() -> None:
    for lengths, packs in (
        ([8], [((8,), 4)]),
        ([8, 2], [((8,), 2), ((2,), 2)]),
        ([8, 2, 3], [((8,), 2), ((2,), 1), ((3,), 1)]),
        ([8, 7, 6, 5], [((8,), 1), ((7,), 1), ((6,), 1), ((5,), 1)]),
        ([16, 8], [((16,), 2), ((8,), 2)]),
    ):
        (slot,) = packed(lengths, PackingRules(4, 8)).slots
        assert [(pack.lengths, pack.context) for pack in slot.packs] == packs


def test_pipelines_of_a_slot_cost_nearly_the_same() -> None:
    chance = random.Random(1)
    rules = PackingRules(8, 4096, pair_cost(4096, 16384))
    lengths = [min(8 * 4096, 1 + int(chance.lognormvariate(7, 1.2))) for _ in range(400)]
    step = packed(lengths, rules)
    assert sum(step.costs) < 1.1 * rules.cost(lengths, rules.ranks)


def test_an_order_keeps_what_is_in_each_slot() -> None:
    step = packed([8, 8, 8, 3], PackingRules(1, 8))
    order = [2, 0, 3, 1]
    assert step.ordered(order).slots == tuple(step.slots[k] for k in order)
    assert Counter(step.ordered(order).costs) == Counter(step.costs)


@pytest.mark.parametrize(
    ("ranks", "tokens", "pair", "why"),
    [(3, 8, 0.0, "power of two"), (0, 8, 0.0, "power of two"), (2, 0, 0.0, "rank_tokens is 0"), (2, 8, -1.0, "pair")],
)
def test_impossible_packing_rules_are_refused(ranks: int, tokens: int, pair: float, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        PackingRules(ranks, tokens, pair)


@pytest.mark.parametrize(("lengths", "why"), [([], "at least one"), ([0], "at least 1"), ([17], "needs 4 ranks")])
def test_sequences_that_do_not_fit_are_refused(lengths: list[int], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        packed(lengths, PackingRules(2, 8))
