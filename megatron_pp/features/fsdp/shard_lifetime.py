"""The sharded stages of one rank along its program: whole where they are used, and reduced when their gradients are
complete (``lifetime.py`` asks).
"""

from collections.abc import Callable
from typing import Any

from megatron_pp.errors import PlanError
from megatron_pp.features.fsdp import fsdp_instructions as fsdp
from megatron_pp.plan.hooks import Change, Follower
from megatron_pp.plan.ir.instruction import GRADIENT_OPS, Instruction
from megatron_pp.plan.ir.ledger import Site, change_of
from megatron_pp.plan.ir.rules import words_of
from megatron_pp.plan.ir.spec import Plan

_CHANGES = {op: [(kind, by) for kind, by in change_of(op, Site())._asdict().items() if by] for op in fsdp.ROWS.rules}


class ShardWalk(Follower):
    """Follows the sharded stages of ``rank``. ``error`` makes an error about an instruction."""

    takes = frozenset(fsdp.ROWS.rules)

    def __init__(self, plan: Plan, rank: int, error: Callable[..., PlanError]) -> None:
        spec = plan.spec
        self.rank = rank
        self.error = error
        self.stages = plan.placement.stages[rank]
        self.facts = dict.fromkeys(self.stages, 0)
        self.to_come = dict.fromkeys(self.stages, spec.num_microbatches * spec.num_parts)  # gradients
        self.trains = not spec.forward_only
        self.reduces_each = spec.fsdp_collectives in fsdp.REDUCES_EACH
        self.most = spec.fsdp_max_active_stages or len(self.stages)

    def moved(self, at: Instruction) -> list[Change]:
        """One of this feature's instructions. Raises PlanError."""
        facts = self.facts.get(at.stage)
        if facts is None:
            raise self.error(at, f"stages of this rank are {', '.join(map(str, self.stages))}")
        rule = fsdp.ROWS.rules[at.op]
        if rule.adds & facts:
            raise self.error(at, " and ".join(words_of(rule.adds & facts)) + " already: it occurs twice")
        if missing := rule.needs & ~facts:
            raise self.error(at, "it comes before " + " and before ".join(words_of(missing)))
        if at.op == fsdp.REDUCE_GRAD and not self.reduces_each and self.to_come[at.stage]:
            left = self.to_come[at.stage]
            raise self.error(at, f"it comes before the stage's last gradient: {left} are still to come")
        if at.op == fsdp.WAIT_REDUCE_GRAD and facts & fsdp.POSTED and not facts & fsdp.WHOLE:
            raise self.error(at, "an unshard of the stage is under way, which FSDP2 would drop there")
        self.facts[at.stage] = (facts | rule.adds) & ~fsdp.ENDS[at.op]
        whole = sum(bool(each & fsdp.POSTED) for each in self.facts.values())
        if at.op == fsdp.UNSHARD and whole > self.most:
            raise self.error(at, f"{whole} stages of this rank are whole then, and at most {self.most} may be")
        return _CHANGES[at.op]

    def computed(self, at: Instruction) -> list[Change]:
        """A compute operation. Raises PlanError where the parameters that it uses are not whole."""
        facts = self.facts[at.stage]
        if not facts & fsdp.WHOLE:
            raise self.error(at, "it comes before " + " and before ".join(words_of(fsdp.WHOLE)))
        first = at.op in GRADIENT_OPS and not facts & fsdp.GRADIENTS
        self.to_come[at.stage] -= at.op in GRADIENT_OPS
        self.facts[at.stage] = facts | fsdp.USED | (fsdp.GRADIENTS if first else 0)
        return [("unreduced", 1)] if first else []

    def state(self, since: int) -> Any:
        """All that the rest of the walk depends on."""
        return dict(self.facts)

    def check_end(self, where: Any) -> None:
        """Raises PlanError where a stage is left whole, or its gradients are not reduced."""
        required = fsdp.RESHARDED | (fsdp.REDUCED if self.trains else 0)
        for chunk, (stage, facts) in enumerate(self.facts.items()):
            at_end = f"rank {self.rank}: at the end of the plan, of chunk {chunk} (stage {stage})"
            if missing := required & ~facts:
                raise PlanError(f"{at_end} it is not true that {' nor that '.join(words_of(missing))}")
            if left := (fsdp.GRADIENTS | fsdp.REDUCING) & facts:
                raise PlanError(f"{at_end} it is still true that {' and that '.join(words_of(left))}")
