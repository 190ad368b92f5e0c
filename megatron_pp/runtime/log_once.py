"""What a process logs once."""

import logging
import threading
from functools import lru_cache

from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.planner.bound import bound_of

logger = logging.getLogger("megatron_pp")
_LOCK = threading.Lock()


def warn_once(message: str) -> None:
    """Log ``message`` as a warning of ``megatron_pp``, once per process."""
    with _LOCK:  # ranks may be threads of one process
        _log(logging.WARNING, message)


def certify_once(plan: Plan) -> None:
    """Log, for information and once per process, what is proven of ``plan``, and what is predicted of one that was
    searched for measured times."""
    if logger.isEnabledFor(logging.INFO):
        with _LOCK:
            _log(logging.INFO, f"{plan.spec.describe()}: {plan.certificate}")
            if plan.spec.measured is not None:
                _predict(plan.spec)


@lru_cache(maxsize=128)
def _predict(spec: PlanSpec) -> None:
    plan, measured = build_plan(spec), spec.measured or Measured()
    conditions = measured.costs(plan.placement.num_stages), measured.network()
    step = simulate(plan, *conditions)
    text = f"{spec.describe()}: predicted step {step.makespan:.4g}, bubble {step.bubble_share:.1%}"
    if not measured.microbatches:  # a bound is for microbatches that cost the same
        text += f", {bound_of(plan, *conditions, measured.memory(plan.placement)).beside(step.makespan)}"
    logger.info(text)


@lru_cache(maxsize=256)
def _log(level: int, message: str) -> None:
    logger.log(level, message)
