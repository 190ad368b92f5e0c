"""Estimates the time and memory of compute orders, much faster than the simulator. The time is that of a step in which
every message takes its link's time and none waits for another.
"""

from collections.abc import Sequence
from operator import le

from megatron_pp.plan.costs.stage_costs import StageCosts
from megatron_pp.plan.ir.instruction import Instruction, unjoined
from megatron_pp.plan.ir.ledger import IN_FLIGHT, WEIGHT_BACKLOG
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.lower.clock import run_clock

Kept = tuple[tuple[int, ...], tuple[int, ...]]  # per chunk: forwards before their backward, waiting weight gradients


def order_time(
    orders: Sequence[Sequence[Instruction]], placement: Placement, costs: StageCosts, transfer: float, slices: int = 1
) -> float:
    """The end of the last operation if every message takes ``transfer``, in the unit of ``costs``. Raises PlanError for
    orders that cannot run.
    """
    shares = costs.of_parts(slices)
    of_mb = costs.microbatches

    def took(op: str, stage: int, mb: int, part: int) -> float:
        return costs.of(op, stage) * shares[part] * (of_mb[mb] if of_mb else 1.0)

    ends = run_clock([list(unjoined(order)) for order in orders], placement, took, transfer).ends
    return max(line[-1] for line in ends if line)


def kept_states(order: Sequence[Instruction], num_chunks: int) -> tuple[Kept, ...]:
    """The numbers of kept activations at the moments of a rank's memory peaks. A moment is left out if another one has
    at least as much of everything. ``order`` may be a program with its copies to host memory.
    """
    flight = [0] * num_chunks
    late = [0] * num_chunks
    states: set[tuple[int, ...]] = set()
    grew = False
    for at in unjoined(order):
        change = IN_FLIGHT[at.op]
        left = WEIGHT_BACKLOG[at.op]
        chunk = at.chunk
        if not change and not left:
            continue
        if change <= 0 and grew:  # only a state right before memory is freed can be a peak
            states.add((*flight, *late))
        grew = change > 0 or left > 0
        flight[chunk] += change
        late[chunk] += left
    states.add((*flight, *late))
    most: list[tuple[int, ...]] = []
    for state in sorted(states, key=sum, reverse=True):
        if not any(all(map(le, state, other)) for other in most):
            most.append(state)
    return tuple((state[:num_chunks], state[num_chunks:]) for state in most)
