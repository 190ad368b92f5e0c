"""Searches of ``pipeline_replan`` whose answer is known: another schedule's plan, whatever is predicted of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_pp.features.replanning.proposing import Answer, Recorded
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.ir.instruction import format_program
from megatron_pp.planner.replan import Proposal
from megatron_pp.tracing.files import parse_rank_trace

Search = Callable[[Recorded, Any], Answer]


def proposal(recorded: Recorded, schedule: str, shares: tuple[float, ...] = ()) -> Proposal:
    """Of what was recorded last."""
    spec = parse_rank_trace(recorded.traces[0], "rank 0").plans[-1].spec
    plan = build_plan(replace(spec, schedule=schedule, split_backward=recorded.splits, measured=None))
    assert plan.certificate is not None
    proof = plan.certificate.rules, plan.certificate.device, plan.certificate.digest
    named = replace(plan.spec, measured=Measured(microbatches=shares) if shares else None)
    return Proposal(named, plan.placement.kind, tuple(map(format_program, plan.programs)), *proof, f"to {schedule}")


def to(schedule: str) -> Search:
    return lambda recorded, started: Answer([proposal(recorded, schedule)], [])
