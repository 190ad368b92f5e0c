"""Every schedule under every policy over every adversarial network, up to P=16, V=8: losses and gradients equal those
of one process to the last bit.

``MEGATRON_PP_EXHAUSTIVE=1`` runs the whole products, not a part of them.
"""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pp.plan.ir.spec import CHANNELS, ONE_WAY, POLICIES
from megatron_pp.testing.adversarial_transports import HOSTILE_NETWORKS, HostileNetwork
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.toy import TOY_SCHEDULES, ToyData, ToyResult, reference_run
from megatron_pp.weight_grad import split_weight_grad
from tests.harness.sweeps import EXHAUSTIVE

FLAGS: dict[str, dict[str, bool]] = {
    "overlap": {"overlap_p2p_comm": True},
    "batched": {"batch_p2p_comm": True},
    "plain": {},
}
# As at import time: "auto" schedules search for minutes at large shapes.
LARGE = [name for name in TOY_SCHEDULES if not name.startswith("auto")]
CHUNKED = "interleaved_1f1b"


@functools.lru_cache(maxsize=64)
def reference(num_stages: int, data: ToyData, forward_only: bool) -> ToyResult:
    """One process."""
    return reference_run(num_stages, data, forward_only)


def chunks_of(schedule: str, wanted: int) -> int:
    return TOY_SCHEDULES[schedule].chunks or wanted


def difference(
    schedule: str,
    pipeline_size: int,
    num_chunks: int,
    data: ToyData,
    policy: str,
    network: HostileNetwork,
    *,
    forward_only: bool = False,
    convert: bool = True,
    **fields: Any,
) -> float:
    """From one process, with layers converted where the schedule splits backwards, unless `convert` is False; 0.0 means
    equal to the last bit. Asserts that the network has nothing to report.
    """
    result = run_in_threads(
        pipeline_size,
        num_chunks,
        data,
        network=network,
        forward_only=forward_only,
        prepare=split_weight_grad if convert and TOY_SCHEDULES[schedule].splits_weight else None,
        timeout=120.0,
        pipeline_schedule=schedule,
        p2p_channels=ONE_WAY if network.one_way else "shared",
        **FLAGS[policy],
        **fields,
    )
    assert network.violations == []
    return result.difference(reference(pipeline_size * num_chunks, data, forward_only))


def small_cases() -> list[tuple[str, str, type[HostileNetwork]]]:
    """All of them, or every schedule under every policy, where each of the two meets every network."""
    return [
        (schedule, policy, kind)
        for (i, schedule), (j, policy), (k, kind) in product(
            *map(enumerate, (TOY_SCHEDULES, POLICIES, HOSTILE_NETWORKS))
        )
        if EXHAUSTIVE or k == (i + j) % len(HOSTILE_NETWORKS)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "policy", "kind"), small_cases())
def test_every_schedule_and_policy(schedule: str, policy: str, kind: type[HostileNetwork]) -> None:
    """On one of the eight combinations of size, channels and polling. They take turns, so that every policy on every
    network meets all of them but for one at most.
    """
    combinations = list(enumerate(product((2, 3), CHANNELS, (False, True))))
    turn = list(TOY_SCHEDULES).index(schedule) // len(HOSTILE_NETWORKS) + POLICIES.index(policy)
    some = combinations if EXHAUSTIVE else [combinations[turn % len(combinations)]]
    for seed, (size, channels, pollable) in some:
        num_chunks = chunks_of(schedule, 2)
        data = ToyData(2 * size + 1, variable=seed % 3 == 2)
        network = kind(size, channels == ONE_WAY, seed=seed, pollable=pollable)
        only, convert = seed % 4 == 3, seed != 1
        off = difference(schedule, size, num_chunks, data, policy, network, forward_only=only, convert=convert)
        assert off == 0.0, f"P={size} channels={channels} pollable={pollable} seed={seed}: off by {off}"


def large_cases() -> list[tuple[str, str, type[HostileNetwork]]]:
    """All of them, or a part: 1F1B of chunks under every policy and on every network, each second other one once, in
    turn.
    """
    everything = list(product(LARGE, POLICIES, HOSTILE_NETWORKS))
    if EXHAUSTIVE:
        return everything
    pairs = list(product(POLICIES, HOSTILE_NETWORKS))
    others = [name for name in LARGE if name != CHUNKED][1::2]
    kept = {(schedule, *pairs[turn % len(pairs)]) for turn, schedule in enumerate(others)}
    kept |= {(CHUNKED, policy, kind) for policy, kind in zip(POLICIES, HOSTILE_NETWORKS, strict=True)}
    return [case for case in everything if case in kept]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "policy", "kind"), large_cases())
def test_sixteen_ranks_and_up_to_eight_chunks(schedule: str, policy: str, kind: type[HostileNetwork]) -> None:
    """P=16, V=8 is the shape of the run in Megatron-LM#4047. DualPipeV has an order of its own from 2 P on."""
    num_chunks = chunks_of(schedule, 8 if EXHAUSTIVE or schedule == CHUNKED else 3)
    count = 16 if num_chunks > 2 else 32 if EXHAUSTIVE or schedule == "dualpipe_v" else 20
    assert difference(schedule, 16, num_chunks, ToyData(count), policy, kind(16, seed=405)) == 0.0


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    """A pipeline of any shape, a schedule, a policy, and a network with a seed."""
    schedule = draw(st.sampled_from(list(TOY_SCHEDULES)))
    size = draw(st.integers(1, 6))
    num_chunks = chunks_of(schedule, draw(st.integers(1, 4)))
    kind = draw(st.sampled_from(HOSTILE_NETWORKS))
    network = kind(size, draw(st.booleans()), seed=draw(st.integers(0, 2**32 - 1)), pollable=draw(st.booleans()))
    return {
        "schedule": schedule,
        "pipeline_size": size,
        "num_chunks": num_chunks,
        "data": ToyData(draw(st.integers(1, 13)), variable=draw(st.booleans())),
        "policy": draw(st.sampled_from(POLICIES)),
        "network": network,
        "forward_only": draw(st.booleans()),
        "convert": draw(st.booleans()),
        "microbatch_group_size_per_vp_stage": size + draw(st.integers(0, size)),
        "deallocate_pipeline_outputs": draw(st.booleans()),
        "max_pending_sends": draw(st.integers(0, 4)),
    }


@pytest.mark.slow
@settings(max_examples=1000 if EXHAUSTIVE else 40)
@given(runs())
def test_whatever_is_drawn(run: dict[str, Any]) -> None:
    assert difference(**run) == 0.0
