"""How many named tensors a plan sends to later stages, with each cache, counted in the plans themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_pp.plan.lower import lowered
from megatron_pp.plan.skip_tensors import CACHES, Traffic, traffic_of
from megatron_pp.plan.spec import Plan

_WORDS = {
    "none": "without a cache",
    "received": "where ranks keep what they receive",
    "all": "where they keep what they make too",
}


def skip_facts(plan: Plan) -> dict[str, Any]:
    """For JSON; empty without such tensors."""
    if not plan.spec.skip_tensors:
        return {}
    counts = {cache: traffic._asdict() for cache, traffic in _by_cache(plan).items()}
    return {"skip_tensors": {"cache": plan.spec.skip_cache, **counts[plan.spec.skip_cache], "by_cache": counts}}


def skip_sentences(plan: Plan) -> list[str]:
    """One line; none without such tensors."""
    if not plan.spec.skip_tensors:
        return []
    counts = _by_cache(plan)
    mine = counts.pop(plan.spec.skip_cache)
    others = (f"{_WORDS[cache]} {of.messages} ({of.peak})" for cache, of in counts.items())
    words = f"{_WORDS[plan.spec.skip_cache]}: {mine.messages} sent per microbatch, at most {mine.peak} on a hop"
    return [f"tensors to later stages, {words}; {', '.join(others)}"]


def _by_cache(plan: Plan) -> dict[str, Traffic]:
    plans = {cache: replace(plan.spec, skip_cache=cache) for cache in CACHES if cache != plan.spec.skip_cache}
    programs = {cache: lowered(spec, plan.placement, plan.orders).programs for cache, spec in plans.items()}
    programs[plan.spec.skip_cache] = plan.programs
    return {cache: traffic_of(programs[cache]) for cache in CACHES}
