"""Caches are bounded in bytes: the cache itself, and the three that use it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_pp.common.bounded_cache import BoundedCache
from megatron_pp.faults.consistency import RECEIVES, SENDS, Agreements
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.plan import builder
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.runtime.alone import SoloTransport
from megatron_pp.testing.toy import toy_config


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(0, 60)), max_size=40), st.integers(1, 3))
def test_the_last_used_entries_that_fit_are_kept(calls: list[tuple[int, bool, int]], least: int) -> None:
    cache: BoundedCache[int, str] = BoundedCache(100, least)
    kept: list[tuple[int, int]] = []  # (key, size), oldest first
    for key, reads, size in calls:
        known = next((entry for entry in kept if entry[0] == key), None)
        if reads:
            assert cache.get(key) == (None if known is None else str(key))
            kept = [entry for entry in kept if entry != known] + ([] if known is None else [known])
        elif known is None:
            cache.put(key, str(key), size)
            kept.append((key, size))
            while sum(size for _, size in kept) > 100 and len(kept) > least:
                kept.pop(0)
        assert list(cache.entries.values()) == [str(key) for key, _ in kept]


def test_the_value_that_another_thread_put_first_is_kept() -> None:
    cache: BoundedCache[str, list[int]] = BoundedCache(10)
    first = cache.put("a", [1], 1)
    assert cache.put("a", [1], 1) is first
    cache.clear()
    assert cache.get("a") is None


def test_templates_of_many_shapes_do_not_pile_up() -> None:
    """With variable sequence lengths every length has one."""
    communicator = P2PCommunicator(None, toy_config(), SoloTransport(torch.device("cpu")))
    for length in range(1, 3000):
        assert communicator.allocate((length, 1), False).shape == (length, 1)
    assert len(communicator._templates.entries) == 1024


@pytest.mark.slow
def test_plans_are_kept_by_their_size() -> None:
    builder.forget_plans()
    plans = [build_plan(PlanSpec("1f1b", 2, 1, m)) for m in range(1, 101)]
    assert all(build_plan(plan.spec) is plan for plan in plans)  # small ones: more than a count would keep
    assert 136 * 2 * 50 * 4 < builder._size(plans[49].programs) < 136 * 2 * 50 * 12
    builder.forget_plans()
    assert build_plan(plans[0].spec) is not plans[0]


def described(rank: int, text: str) -> dict[str, str]:
    return {"measured": text, SENDS: f"[{rank}]", RECEIVES: f"[{rank - 1}]"}


def test_ranks_that_know_more_or_less_of_each_other_forget_the_same_agreements() -> None:
    """A rank that came late to an agreement lacks those that had gone on; texts of different lengths must not part
    them."""
    everyone, alone = Agreements(4), Agreements(4)
    for number in range(200):
        text = "x" * (number % 7) * 100_000
        everyone.add(number, {rank: described(rank, text) for rank in range(4)})
        alone.add(number, {3: described(3, text)})
    known = [number for number in range(200) if everyone.use(number)]
    assert known == [number for number in range(200) if alone.use(number)]
    assert 5 < len(known) < 30  # of 4 MiB
    assert everyone.description(200, 2) == described(2, "x" * (199 % 7) * 100_000)
    assert alone.description(200, 2) is None
