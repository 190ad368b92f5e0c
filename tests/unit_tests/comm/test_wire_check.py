"""Wire check: a message that is not the expected one is named, with what came; right ones pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_pp.errors import P2PShapeError, WireMismatchError
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.instruction import RECV_F, SEND_F
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.runtime import step
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.toy import ToyData, reference_run
from tests.harness.blocks import of_stage
from tests.harness.plan_text import edited, index_of
from tests.harness.step_runs import Rank, every_policy, pipeline


def _swapped_on_rank_0(spec: PlanSpec, announce: object = None) -> Plan:
    """A plan whose rank 0 sends the activation of microbatch 1 first, then that of microbatch 0."""
    plan = build_plan(spec)
    plan = edited(plan, 0, "move SEND_F0.0 behind SEND_F0.1")  # each release stays behind its send
    late = index_of(plan.programs[0], "FREE_F0.0") < index_of(plan.programs[0], "SEND_F0.0")
    return edited(plan, 0, "move FREE_F0.0 behind SEND_F0.0") if late else plan


@pytest.fixture
def _sent_out_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "build_plan", _swapped_on_rank_0)


@pytest.mark.usefixtures("_sent_out_of_order")
@pytest.mark.parametrize("by_environment", [False, True])
def test_a_message_out_of_order_is_named(by_environment: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment turns it on for configs without the field, such as Megatron's own."""
    if by_environment:
        monkeypatch.setenv("MEGATRON_PP_P2P_DEBUG", "1")
    field = {} if by_environment else {"p2p_debug": True}
    with pytest.raises(WireMismatchError) as caught:
        run_in_threads(2, 1, ToyData(2), forward_only=True, overlap_p2p_comm=True, **field)
    text = str(caught.value)
    assert "rank 1 expected the activation of chunk 0 of rank 0, microbatch 0, torch.float32 [3, 2, 4]" in text
    assert "rank 0 sent the activation of chunk 0 of rank 0, microbatch 1" in text
    assert caught.value.field == "microbatch"
    assert caught.value.values == {1: "0", 0: "1"}


@pytest.mark.usefixtures("_sent_out_of_order")
def test_without_the_check_it_trains_on_the_wrong_microbatch() -> None:
    """Why the check exists: the same fault passes in silence, with wrong losses."""
    data = ToyData(2)
    result = run_in_threads(2, 1, data, forward_only=True, overlap_p2p_comm=True)
    assert result.difference(reference_run(2, data, forward_only=True)) > 0.0


@pytest.mark.parametrize("debug", [False, True])
@every_policy
def test_a_wrong_output_shape_is_refused_before_it_is_sent(debug: bool, policy: dict[str, Any]) -> None:
    """Stage 0 gives one row too many."""
    wide = of_stage(lambda stage, x, block: block(x) if stage else torch.cat([block(x), x[:1]]))
    with pytest.raises(P2PShapeError, match=r"chunk 0 for microbatch 0 has shape \[4, 2, 4\].*expects \[3, 2, 4\]"):
        run_in_threads(2, 1, ToyData(2), block=wide, p2p_debug=debug, **policy)


def exchanged(sent: torch.Tensor, fields_of: Any = lambda rank: {}, **fields: Any) -> Any:
    """What rank 1 receives, as [3, 2], of what rank 0 sends."""

    def exchange(rank: Rank) -> Any:
        if rank.rank == 0:
            return rank.communicator.send_forward(sent, False)
        return rank.communicator.recv_forward((3, 2), False)

    return pipeline(2, 1, 0, exchange, fields_of=fields_of, p2p_debug=True, **fields)[1]


@pytest.mark.parametrize("batched", [False, True])
def test_megatron_style_calls_compare_shape(batched: bool) -> None:
    assert torch.equal(exchanged(torch.ones(3, 2), batch_p2p_comm=batched), torch.ones(3, 2))
    with pytest.raises(WireMismatchError, match=r"expected a message, torch.float32 \[3, 2\].*sent .*\[2, 3\]: shape"):
        exchanged(torch.ones(2, 3), batch_p2p_comm=batched)


def test_megatron_style_calls_compare_dtype() -> None:
    with pytest.raises(WireMismatchError, match=r"expected a message, torch.float32.*sent a message, torch.int32"):
        exchanged(torch.ones(3, 2).int(), lambda rank: {"pipeline_dtype": torch.float32 if rank else torch.int32})


def test_what_is_expected_follows_the_plan() -> None:
    """A receive and the send that it belongs to carry one stamp, on every channel of a V."""
    from megatron_pp.features.p2p_debug.wire_check import WireCheck

    plan = build_plan(PlanSpec("zb_v", 2, 2, 4))
    stamps: dict[bool, list[Any]] = {True: [], False: []}
    for rank, program in enumerate(plan.programs):
        check = WireCheck(rank)
        for at in program:
            if at.op in (SEND_F, "SEND_B", RECV_F, "RECV_B"):
                check.source = SimpleNamespace(placement=plan.placement, instruction=at)
                stamps[at.op in (SEND_F, "SEND_B")].append(check.stamp(torch.float32))
    assert stamps[True]
    assert sorted(stamps[True]) == sorted(stamps[False])
    assert len(set(stamps[True])) == len(stamps[True])
