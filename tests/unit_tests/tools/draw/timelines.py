"""Plans and timelines that the tests of drawings share."""

from __future__ import annotations

from dataclasses import replace

from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.cost_hooks import known_costs
from megatron_pp.plan.costs.stage_costs import Link, Network, StageCosts
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.simulate.memory import ModelShape
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.tools.draw.timeline import Timeline, simulated_timeline

SHAPE = ModelShape(num_layers=24, hidden_size=512, seq_length=256, vocab_size=1000)
NETWORK = Network(1.0, link=Link(bandwidth=4.0))
FREE = Network()


def plan_of(schedule: str, p: int = 4, m: int = 8, v: int | None = None) -> Plan:
    """The plan of a schedule. A searched schedule gets P microbatches: with more, its search would take seconds."""
    family = SCHEDULES[schedule]
    return build_plan(PlanSpec(schedule, p, v or family.chunks or 2, m if family.search is None else p))


def timeline_of(
    schedule: str,
    p: int = 4,
    m: int = 8,
    v: int | None = None,
    network: Network = NETWORK,
    shape: ModelShape | None = SHAPE,
) -> Timeline:
    """The simulated step. Every stage takes 1 ms for each of F, I and W, and 0.5 ms for each of S and T."""
    plan = plan_of(schedule, p, m, v)
    costs = replace(StageCosts.uniform(plan.placement.num_stages), **known_costs(passes=(0.5, 0.5)))
    return simulated_timeline(simulate(plan, costs, network), "ms", shape)


def compared(*schedules: str, p: int = 8, m: int = 16, network: Network = FREE) -> list[Timeline]:
    """Several schedules of one model. A rank's share of the model takes 1 slot for each of F, I and W."""
    costs = StageCosts.uniform(1, p, p, p)
    plans = (plan_of(name, p, m) for name in schedules)
    return [simulated_timeline(simulate(q, costs.regrouped(q.placement.num_stages), network)) for q in plans]


def num_blocks(*timelines: Timeline) -> int:
    return sum(len(lane.compute) for timeline in timelines for lane in timeline.lanes)
