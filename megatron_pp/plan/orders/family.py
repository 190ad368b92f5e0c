"""A schedule family: a name, a placement, and a function that makes the compute order of every rank from a pipeline's
shape.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Instruction, instruction
from megatron_pp.plan.ir.placement import LOOP
from megatron_pp.plan.ir.repeated import Line
from megatron_pp.plan.ir.spec import Plan, PlanSpec, Shape

ONE_F_ONE_B = "1f1b"
INTERLEAVED = "interleaved_1f1b"

Order = list[Instruction]
Announce = Callable[[str], None]  # takes a sentence for the log


def nothing_added(shape: Shape) -> Mapping[str, Any]:
    return {}


class Repeats(NamedTuple):
    """The steady state of an order repeats after ``period`` microbatches, if there are at least ``least``."""

    period: int
    least: int = 1


def every_microbatch(shape: Shape) -> Repeats:
    return Repeats(1)


def every_group(shape: Shape) -> Repeats:
    return Repeats(shape.group_size)


@dataclass(frozen=True)
class Family:
    """A schedule family.

    name           the value of ``config.pipeline_schedule``
    orders         Shape -> one compute order per rank
    source         the source of the rule, such as a paper
    summary        one line for people who choose a schedule
    placement      which rank and chunk holds which stage
    chunks         the number of chunks that a rank must have; None for any
    splits_weight  whether the orders have I and W (backward split into input and weight gradients)
    search         for families that search: (PlanSpec, announce) -> the plan for its measured times and memory; a long
                   search is announced
    remark         Shape -> a sentence if other orders are used in place of the family's; else empty
    programs       for files: PlanSpec -> the file's whole programs, None if they were lowered for another run
    digest         digest of the file that the orders come from; empty if they come from a rule
    shape          for files: the one shape that they have
    grouped        whether the orders depend on the group size
    small_groups   whether groups of fewer microbatches than ranks are useful
    repeats        for families whose orders have a steady state: Shape -> Repeats
    sliced         whether the orders may be of slices of sequences, for that feature
    added          Shape -> settings of features that a plan has unless its spec has others
    joint          Shape -> whether, if exchanges block, a forward and the backward behind it have one exchange
    barriers       number of barriers; see ``Placement``
    """

    name: str
    orders: Callable[[Shape], list[Order]]
    source: str
    summary: str
    placement: str = LOOP
    chunks: int | None = None
    splits_weight: bool = False
    search: Callable[..., Plan] | None = None
    remark: Callable[[Shape], str] = lambda shape: ""
    programs: Callable[[PlanSpec], Sequence[Line] | None] | None = None
    digest: str = ""
    shape: Shape | None = None
    grouped: bool = False
    small_groups: bool = False
    repeats: Callable[[Shape], Repeats] | None = None
    sliced: bool = False
    added: Callable[[Shape], Mapping[str, Any]] = nothing_added
    joint: Callable[[Shape], bool] = lambda shape: False
    barriers: int = 0

    @property
    def idles_in_short_groups(self) -> bool:
        """Whether ranks wait in a group of fewer microbatches than ranks, and do not wait in full groups."""
        return self.grouped and not self.small_groups and self.search is None


f, b, i, w = (partial(instruction, op) for op in (FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD))
"""An operation of (chunk, microbatch), or of a part: (chunk, microbatch, part)."""
