"""What a schedule family is: a name, a placement, and a function from a pipeline's shape to every rank's compute
order.
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
    """The steady state of an order repeats after ``period`` microbatches, in orders of at least ``least``."""

    period: int
    least: int = 1


def every_microbatch(shape: Shape) -> Repeats:
    return Repeats(1)


def every_group(shape: Shape) -> Repeats:
    return Repeats(shape.group_size)


@dataclass(frozen=True)
class Family:
    """A schedule family.

    name           what ``config.pipeline_schedule`` says
    orders         Shape -> one compute order per rank
    source         where the rule comes from
    summary        one line for people who choose
    placement      which rank and chunk holds which stage
    chunks         the number of chunks that a rank must have; None for any
    splits_weight  whether the orders have I and W (backward split into input and weight gradients)
    search         of families that search: (PlanSpec, announce) -> its plan for its measured times and memory,
                   announced where that takes long
    remark         Shape -> a sentence where other orders are used in place of the family's; empty otherwise
    programs       of files: PlanSpec -> the file's whole programs, None where they are lowered otherwise
    digest         of the file that the orders come from; empty where they come from a rule
    shape          of files: the one shape that they have
    grouped        whether the orders depend on the group size
    small_groups   whether groups of fewer microbatches than ranks are of use
    repeats        of families whose orders have a steady state: Shape -> Repeats
    sliced         whether the orders may be of slices of sequences, for that feature
    added          Shape -> settings of features that a plan has unless its spec has others
    joint          Shape -> whether a forward and the backward behind it have one exchange where exchanges block
    barriers       of ``Placement``
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
        """Whether ranks wait where a group has fewer microbatches than there are ranks, which full groups do not."""
        return self.grouped and not self.small_groups and self.search is None


f, b, i, w = (partial(instruction, op) for op in (FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD))
"""An operation of (chunk, microbatch), or of a part: (chunk, microbatch, part)."""
