"""What is predicted of a plan that was searched for measured times."""

from functools import lru_cache

from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.planner.bound import bound_of


@lru_cache(maxsize=128)
def predicted(spec: PlanSpec) -> str:
    """One line: step, bubble, and how far the step is from its lower bound."""
    plan, measured = build_plan(spec), spec.measured or Measured()
    conditions = measured.costs(plan.placement.num_stages), measured.network()
    step = simulate(plan, *conditions)
    text = f"{spec.describe()}: predicted step {step.makespan:.4g}, bubble {step.bubble_share:.1%}"
    if not measured.microbatches:  # a bound is for microbatches that cost the same
        text += f", {bound_of(plan, *conditions, measured.memory(plan.placement)).beside(step.makespan)}"
    return text
