"""The hooks by which features take part in making and verifying plans. Each feature derives a class from ``PlanHooks``.
The core calls those of a plan's features (``plan/ir/feature.py``: ``hooks_of``). A plan without features loads none.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from megatron_pp.errors import PlanError
from megatron_pp.plan.ir.dataflow import Result
from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.ir.tasks import Cell
from megatron_pp.plan.lower.lowering import RankLowering
from megatron_pp.plan.orders.family import Family

Change = tuple[str, int]  # a field of Memory, and by how much it changes
Joins = Callable[[Instruction, Instruction], Instruction | None]  # joins two operations in a row; None: does not


class Follower(Protocol):
    """Follows state of a feature along one rank's program, in addition to the facts of cells."""

    takes: frozenset[str]
    """The feature's own instructions without a microbatch."""

    def moved(self, at: Instruction) -> Iterable[Change]:
        """Called for each of these instructions, and for messages with a name if names are the feature's. Raises
        PlanError."""

    def computed(self, at: Instruction) -> Iterable[Change]:
        """Called for each compute operation. Raises PlanError."""

    def state(self, since: int) -> Any:
        """The state on which the rest of the program depends; microbatches are counted from ``since``."""

    def check_end(self, where: Callable[[Cell], str]) -> None:
        """Raises PlanError if something is left at the end. ``where`` names a cell."""


class FeatureBytes(NamedTuple):
    """Changes of a feature to the memory that a transformer (``ModelShape``) takes on one rank. None: no change.

    static     parameters, gradients and optimizer states
    shape      the model, of which the stages' activations are
    apart      of a microbatch's activations of one stage: what the feature counts by itself
    each       bytes of each tensor that the feature adds to the counts of live tensors, by its kind
    kept       further activations after each instruction of ``plan.timed(rank)``
    whole      further parameters and gradients after each
    """

    static: float | None = None
    shape: Any = None
    apart: float = 0.0
    each: Mapping[str, float] = {}
    kept: Iterable[float] | None = None
    whole: Iterable[float] | None = None


class PlanHooks:
    """The hooks of one feature, called for plans that have it. A hook holds no state, and by default does nothing.

    Attributes with words for error messages of the core:

    order_words     the feature's compute operations in an order
    pass_words      where these operations run
    barrier_words   how many barriers there may be
    gradient_words  the gradient that the feature's last pass completes
    host_words      what was done to memory that is on the host
    part_word       what a part of a microbatch is
    ring_words      what has a communicator of all ranks for its collectives
    """

    order_words = ""
    pass_words = ""
    barrier_words = ""
    gradient_words = ""
    host_words = ""
    part_word = ""
    ring_words = ""

    def checked(self, spec: PlanSpec) -> Mapping[str, Any]:
        """Settings that ``spec`` must have in another form than given. Raises PlanError for impossible ones."""
        return {}

    def parts(self, spec: PlanSpec) -> int:
        """The number of parts into which the feature divides every microbatch. Raises PlanError if it cannot."""
        return 1

    def check_family(self, spec: PlanSpec, family: Family) -> None:
        """Raises PlanError for a schedule that has no orders with this feature."""

    def schedule(self, num_chunks: int) -> str:
        """The default schedule of a config with this feature; empty if the feature does not change the default."""
        return ""

    def of_config(self, config: Any, placement: Placement, training: bool) -> Mapping[str, Any]:
        """The feature's settings of a spec, from the fields of a config. Raises ConfigError for impossible ones."""
        return {}

    def needs_times(self, config: Any) -> bool:
        """Whether plans are made for the measured times of ``config``."""
        return False

    def described(self, spec: PlanSpec) -> str:
        """The feature's words in the spec's one-line description."""
        return ""

    def to_file(self, name: str, value: Any) -> Any:
        """A setting as a value for JSON."""
        return value

    def from_file(self, name: str, value: Any) -> Any:
        """A setting from the value in a JSON file. Raises FileFormatError."""
        return value

    def inputs(self, op: str, stage: int, placement: Placement) -> tuple[Result, ...]:
        """The results that collectives bring to an operation."""
        return ()

    def needs_at_root(self, op: str, needs: int, barriers: int) -> int:
        """The facts that an instruction of the last stage needs."""
        return needs

    def facts_at_end(self, placement: Placement, forward_only: bool) -> int:
        """The facts that must hold for every cell after the step."""
        return 0

    def plan(self, spec: PlanSpec, lower: Callable[[PlanSpec], Plan]) -> Plan | None:
        """The plan of ``spec`` if it is made from the plan of another spec, by ``lower``; else None."""
        return None

    def comes_behind(self, spec: PlanSpec, at: Instruction) -> tuple[Instruction, str] | None:
        """The operation of another part of the same microbatch that must come before ``at`` in an order, and why."""
        return None

    def check_lowered(self, spec: PlanSpec, settings: Mapping[str, Any]) -> None:
        """Raises PlanError if lowering cannot serve ``spec`` with these ``settings`` of the feature."""

    def joins(self, spec: PlanSpec) -> Joins | None:
        """The function that joins operations of an order which run as one."""
        return None

    def has_names(self, spec: PlanSpec) -> bool:
        """Whether messages with names follow the plan's other messages."""
        return False

    def names(self, spec: PlanSpec, placement: Placement, kind: str, stage: int) -> tuple[str, ...]:
        """The names of the messages that follow those of ``kind`` on the edge behind ``stage``."""
        return ()

    def lay_out(self, rank: RankLowering) -> None:
        """Place the feature's instructions in one rank's program."""

    def laid_out(self, rank: RankLowering, program: list[Instruction]) -> list[Instruction]:
        """The program with the feature's instructions whose places depend on those of all others."""
        return program

    def follower(
        self, plan: Plan, rank: int, facts: Mapping[Cell, int], error: Callable[..., PlanError]
    ) -> Follower | None:
        """The feature's Follower for the program of ``rank``. ``facts``: the facts of cells; ``error`` makes the error
        about an instruction."""
        return None

    def bytes_of(self, plan: Plan, rank: int, shape: Any) -> FeatureBytes:
        """Memory of ``rank`` that the feature changes. ``shape``: the ``ModelShape``."""
        return FeatureBytes()

    def check_plan(self, plan: Plan, device: Sequence[str]) -> None:
        """Raises PlanError for a plan that the ranks cannot run together under the rules of ``device``."""
