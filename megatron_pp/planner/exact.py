"""The best possible step of a small pipeline, by OR-tools' CP-SAT (extra ``solver``).

Start times are the variables: operations of a rank take turns, inputs come first, messages of a channel take turns, and
memory stays under the rank's limit. Operations of a stage are alike, so they run in ascending order of microbatches.
With P <= 4, M <= 8 and V <= 2 the shortest step and the bound mostly meet within seconds.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from megatron_pp.errors import PlanError
from megatron_pp.plan.ir.dataflow import RESULT_OF, consumer_of
from megatron_pp.plan.ir.instruction import FORWARD, INPUT_GRAD, WEIGHT_GRAD, instruction
from megatron_pp.plan.orders.family import Order
from megatron_pp.plan.orders.list_scheduler import ROUNDING, Problem

_TICKS = 1 << 16  # of a step, where its times are no whole parts of a unit
_PARTS = (1, 2, 4, 5, 10, 20, 50, 100, 1000)  # of a unit
_MEMORY = 1 << 20  # parts of the largest memory
_CLOSE = 1e-9


@dataclass(frozen=True)
class Optimum:
    """What the solver found, in the unit of the costs.

    step    of the best plan with split backwards; infinity where none of at most ``most`` was found
    bound   no such plan is shorter; infinity where there is none of at most ``most``
    orders  of the plan, one per rank; empty without one
    """

    step: float
    bound: float
    orders: tuple[Order, ...]

    @property
    def is_proven(self) -> bool:
        """Whether no plan is shorter than ``step``."""
        return self.step <= self.bound * (1 + _CLOSE)


def optimum(problem: Problem, most: float, least: float = 0.0, effort: float = 10.0, workers: int = 2) -> Optimum:
    """The best plan with split backwards for ``problem``, found by ``workers`` threads within ``effort``, in CP-SAT's
    deterministic seconds, which do not depend on the machine's load.

    most, least  steps of a known plan and of a known bound: the nearer, the faster

    Times that are no whole parts of a unit are rounded down by at most 1/65536 of ``most``, memory by 1e-6 of it: the
    step is then the rounded problem's, and the bound holds. Raises PlanError where OR-tools is missing, and for links
    or microbatches that differ.
    """
    if problem.links or problem.costs.microbatches:
        raise PlanError("the exact solver takes links that are alike, and microbatches that cost the same")
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise PlanError("the exact solver needs OR-tools: pip install '.[solver]'") from error
    model = _Model(problem, most, least, cp_model.CpModel())
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time, solver.parameters.num_workers = effort, workers
    status = solver.solve(model.model)
    if status == cp_model.INFEASIBLE:
        return Optimum(math.inf, math.inf, ())
    bound = max(least, solver.best_objective_bound / model.scale)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Optimum(math.inf, bound, ())
    return Optimum(solver.objective_value / model.scale, bound, model.orders(solver))


def _scale(times: list[float], most: float) -> float:
    """Ticks per unit of time: as many as make all times whole."""
    for parts in _PARTS:
        if all(abs(time * parts - round(time * parts)) <= 1e-6 for time in times):
            return parts
    return _TICKS / most


class _Model:
    """The problem in whole ticks: variables, constraints and objective of a CP-SAT model."""

    def __init__(self, problem: Problem, most: float, least: float, model: Any) -> None:
        self.problem, self.model = problem, model
        costs = problem.costs
        times = [*costs.forward, *costs.backward_input, *costs.weight, problem.transfer, *problem.links.values()]
        self.scale = _scale(times, most)
        self.most = self._ticks(most)
        self.starts: dict[tuple[str, int, int], Any] = {}
        self.ends: dict[tuple[str, int, int], Any] = {}
        self.turns: dict[Any, list[Any]] = defaultdict(list)  # of each rank and channel: what cannot be at once
        self.kept: dict[int, list[tuple[Any, float]]] = defaultdict(list)  # of each rank: an interval and its memory
        for stage in range(problem.placement.num_stages):
            self._add_stage(stage)
        for op in (FORWARD, INPUT_GRAD):
            for stage in range(problem.placement.num_stages):
                self._add_messages(op, stage)
        for intervals in self.turns.values():
            model.add_no_overlap(intervals)
        self._limit_memory()
        end = model.new_int_var(min(self.most, math.ceil(least * self.scale * (1 - _CLOSE))), self.most, "end")
        for stage in range(problem.placement.num_stages):
            model.add(end >= self.ends[(WEIGHT_GRAD, stage, problem.num_microbatches - 1)])
        model.minimize(end)

    def _ticks(self, time: float) -> int:
        return math.floor(time * self.scale * (1 + _CLOSE) + 1e-6)

    def _add_stage(self, stage: int) -> None:
        """Its operations, in turn with those of its rank, and what they keep."""
        model, problem = self.model, self.problem
        rank, _ = problem.placement.homes[stage]
        for k in range(problem.num_microbatches):
            for op in (FORWARD, INPUT_GRAD, WEIGHT_GRAD):
                took = self._ticks(problem.costs.of(op, stage))
                start = self.starts[(op, stage, k)] = model.new_int_var(0, self.most, "")
                self.ends[(op, stage, k)] = start + took
                self.turns[rank].append(model.new_fixed_size_interval_var(start, took, ""))
                if k:
                    model.add(start >= self.ends[(op, stage, k - 1)])
            after = self.ends[(INPUT_GRAD, stage, k)]
            model.add(self.starts[(INPUT_GRAD, stage, k)] >= self.ends[(FORWARD, stage, k)])
            model.add(self.starts[(WEIGHT_GRAD, stage, k)] >= after)
            self._keep(rank, self.starts[(FORWARD, stage, k)], after, problem.memory.forward[stage])
            self._keep(rank, after, self.ends[(WEIGHT_GRAD, stage, k)], problem.memory.weight[stage])

    def _keep(self, rank: int, start: Any, end: Any, memory: float) -> None:
        """Of ``rank``, from ``start`` to ``end``."""
        length = self.model.new_int_var(0, self.most, "")
        self.model.add(length == end - start)
        self.kept[rank].append((self.model.new_interval_var(start, length, end, ""), memory))

    def _add_messages(self, op: str, stage: int) -> None:
        """From each operation of ``stage`` to the one that uses its result, in turn with those of the channel."""
        placement = self.problem.placement
        user = consumer_of(op, stage, placement.num_stages)
        if user is None:
            return
        source, target = placement.homes[stage][0], placement.homes[user][0]
        transfer = self._ticks(self.problem.transfer_time(source, target))
        for k in range(self.problem.num_microbatches):
            sent, used = self.ends[(op, stage, k)], self.starts[(op, user, k)]
            if source == target or not transfer:
                self.model.add(used >= sent)
                continue
            start = self.model.new_int_var(0, self.most, "")
            self.model.add(start >= sent)
            self.model.add(used >= start + transfer)
            message = self.model.new_fixed_size_interval_var(start, transfer, "")
            self.turns[(source, target, RESULT_OF[op])].append(message)

    def _limit_memory(self) -> None:
        for rank, kept in self.kept.items():
            limit = self.problem.memory.limits[rank]
            if math.isinf(limit):
                continue
            parts = _MEMORY / max(limit, *(memory for _, memory in kept))
            sizes = [math.floor(memory * parts) for _, memory in kept]
            self.model.add_cumulative([one for one, _ in kept], sizes, math.floor(limit * parts * (1 + ROUNDING)))

    def orders(self, solver: Any) -> tuple[Order, ...]:
        """The solution per rank. Of operations that start together, those that take no time come first."""
        found = []
        for row in self.problem.placement.stages:
            keys = [key for key in self.starts if key[1] in row]
            keys.sort(key=lambda key: (solver.value(self.starts[key]), solver.value(self.ends[key]), key[0] != FORWARD))
            found.append([instruction(op, row.index(stage), k) for op, stage, k in keys])
        return tuple(found)
