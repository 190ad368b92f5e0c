"""Follows the named tensors of one rank along its program, for ``lifetime.py``. It checks that they exist when they are
used or sent, that gradients are summed before they go back, and that each is dropped once, when nothing needs it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import product
from typing import Any

from megatron_pp.errors import PlanError
from megatron_pp.features.skip_tensors.routes import Held, routes_in
from megatron_pp.features.skip_tensors.skip_instructions import DROP, DROPPED
from megatron_pp.plan.hooks import Change as _Change
from megatron_pp.plan.hooks import Follower
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import BACKWARD_OPS, FORWARD, Instruction
from megatron_pp.plan.ir.ledger import Site, change_of
from megatron_pp.plan.ir.rules import (
    B_FREED,
    B_HERE,
    B_POSTED,
    B_RAN,
    B_SENT,
    F_FREED,
    F_HERE,
    F_POSTED,
    F_RAN,
    F_SENT,
    rule_of,
    words_of,
)
from megatron_pp.plan.ir.spec import Plan

_COMPUTE = F_RAN | B_RAN
_Cell = tuple[int, int, int]  # stage, microbatch, slice

_HELD_AS = {"inputs": "held", "outputs": "", "input_grads": "held_grads", "output_grads": ""}
"""What a message without a name is kept as -> what one with a name is; empty: in a copy or sum that is there."""


@lru_cache
def _changes_of(op: str) -> list[_Change]:
    """The changes by a transfer or DROP with a name, the same in all stages."""
    changes = ((_HELD_AS.get(kind, kind), by) for kind, by in change_of(op, Site())._asdict().items() if by)
    return [(kind, by) for kind, by in changes if kind]


class NamedWalk(Follower):
    """``facts`` are those of the rank's stages; ``error`` makes one about an instruction."""

    takes = frozenset[str]()

    def __init__(self, plan: Plan, rank: int, facts: Mapping[_Cell, int], error: Callable[..., PlanError]) -> None:
        routes = routes_in(plan)
        assert routes is not None
        self.spec = plan.spec
        self.routes = routes
        self.stages = plan.placement.stages[rank]
        self.ran = facts
        self.error = error
        self.facts: defaultdict[tuple[_Cell, str], int] = defaultdict(int)
        self.summed: set[tuple[_Cell, str]] = set()  # tensors, where they are held, whose gradient has begun
        self.required = {stage: self._facts_at_end(stage) for stage in self.stages}

    def _facts_at_end(self, stage: int) -> dict[str, int]:
        """Name -> the facts that a tensor at ``stage`` must have after the step."""
        routes = self.routes
        facts = defaultdict[str, int](int)
        for name, held in routes.came[stage].items():
            facts[name] |= F_POSTED | F_HERE | DROPPED | (B_SENT | B_FREED if self._flows_back(held) else 0)
        for name, held in routes.sent[stage].items():
            facts[name] |= F_SENT | F_FREED | (B_POSTED | B_HERE if self._flows_back(held) else 0)
        for name in routes.made[stage]:
            facts[name] |= DROPPED
        return facts

    def _flows_back(self, held: Held) -> bool:
        return held.tensor.gradient and not self.spec.forward_only

    def moved(self, at: Instruction) -> list[_Change]:
        """Called for a transfer or DROP with a name. Raises PlanError."""
        held = self.routes.of(at)
        rule = rule_of(at.op)
        needs, adds = (0, 0) if rule is None else rule[:2]
        if held is None or not self.required[at.stage].get(at.tensor, 0) & adds:
            raise self.error(at, f"the plan has no such step: stage {at.stage} does not do this with {at.tensor}")
        cell = at.stage, at.mb, at.part
        before = self.facts[cell, at.tensor]
        if adds & before:
            raise self.error(at, " and ".join(words_of(adds & before)) + " already: it occurs twice")
        self.facts[cell, at.tensor] = before | adds
        if at.op == DROP:
            self._check_drop(at, held)
            return _changes_of(DROP)
        missing = (needs & ~_COMPUTE & ~before) | (needs & _COMPUTE & ~self.ran[cell])
        if missing:
            raise self.error(at, "it comes before " + " and before ".join(words_of(missing)))
        if at.op == ins.FREE_B:
            self.summed.discard((cell, at.tensor))
        return _changes_of(at.op) + (self._sum(held, at) if at.op == ins.WAIT_B else [])

    def _check_drop(self, at: Instruction, held: Held) -> None:
        """Raises PlanError if something on the rank still uses or sends the tensor."""
        last = F_RAN if self.spec.forward_only else B_RAN
        waits_for = [(stage, last, self.ran[stage, at.mb, at.part]) for stage in held.users]
        waits_for += [(s, F_FREED, self.facts[(s, at.mb, at.part), held.name]) for s in held.sends]
        for stage, fact, found in waits_for:
            if not fact & found:
                why = f"of stage {stage} it is not true yet that {next(words_of(fact))}"
                raise self.error(at, f"it comes before the last use of {held.name}: {why}")

    def computed(self, at: Instruction) -> list[_Change]:
        """Called for a forward, a backward or a weight gradient. Raises PlanError if a tensor that it needs is
        missing."""
        routes = self.routes
        stage = at.stage
        if at.op == FORWARD:
            for name in routes.came[stage]:
                self._check_here(at, stage, name, F_HERE)
            for name, held in routes.used[stage].items():
                if held.is_made_here and not self.ran[held.stage, at.mb, at.part] & F_RAN:
                    raise self.error(at, f"stage {held.stage} of this rank has not made {name} yet")
                if not held.is_made_here:
                    self._check_here(at, held.stage, name, F_HERE)
            return [("held", len(routes.made[stage]))]
        if at.op not in BACKWARD_OPS:
            return []
        changes = []
        for name, held in routes.sent[stage].items():
            if held.tensor.gradient:
                self._check_here(at, stage, name, B_HERE)
        for held in routes.used[stage].values():
            changes += self._sum(held, at) if held.tensor.gradient else []
        for held in routes.made[stage].values():
            key = (held.stage, at.mb, at.part), held.name
            if key in self.summed:
                self.summed.remove(key)
                changes.append(("held_grads", -1))
        return changes

    def _check_here(self, at: Instruction, stage: int, name: str, fact: int) -> None:
        if not self.facts[(stage, at.mb, at.part), name] & fact:
            what = "tensor" if fact == F_HERE else "gradient"
            raise self.error(at, f"it comes before the {what} {name} is there, which stage {stage} waits for")

    def _sum(self, held: Held, at: Instruction) -> list[_Change]:
        """The changes by a gradient that is added to the rank's sum, or begins it."""
        key = (held.stage, at.mb, at.part), held.name
        if key in self.summed:
            return []
        self.summed.add(key)
        return [("held_grads", 1)]

    def state(self, since: int) -> Any:
        """All that the rest of the walk depends on, microbatches counted from ``since``: of those that are under way,
        every fact."""
        live = {mb for (_, mb, _), missing in self._missing() if missing}
        facts = {
            ((s, mb - since, part), name): f for ((s, mb, part), name), f in self.facts.items() if mb in live and f
        }
        return facts, {((s, mb - since, part), name) for (s, mb, part), name in self.summed}

    def _missing(self) -> Iterator[tuple[_Cell, int]]:
        """The facts that a finished program must still make true, of microbatches that it has begun."""
        for (cell, name), facts in self.facts.items():
            if facts:
                yield cell, self.required[cell[0]][name] & ~facts

    def check_end(self, where: Callable[[_Cell], str]) -> None:
        """Raises PlanError for a tensor that was not moved or not dropped. ``where`` names a cell."""
        parts = self.spec.shape.parts
        for stage, names in self.required.items():
            for (name, required), mb, part in product(names.items(), range(self.spec.num_microbatches), parts):
                cell = stage, mb, part
                missing = required & ~self.facts[cell, name]
                if missing:
                    words = " nor that ".join(words_of(missing))
                    raise PlanError(f"{where(cell)}, tensor {name} it is not true that {words}")
