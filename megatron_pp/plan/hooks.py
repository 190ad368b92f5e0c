"""The hooks of features where plans are made and verified. Features derive from them; the core calls those of the
features that a plan has (``plan/ir/feature.py``: ``hooks_of``), and loads none for a plan that has no feature.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from megatron_pp.errors import PlanError
from megatron_pp.plan.ir.dataflow import Result
from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.ir.tasks import Cell
from megatron_pp.plan.lower.lowering import RankLowering
from megatron_pp.plan.orders.family import Family

Change = tuple[str, int]  # a field of Memory, and by how much it changes
Joins = Callable[[Instruction, Instruction], Instruction | None]  # two operations in a row as one; None: as they are


class Follower(Protocol):
    """What a feature follows along one rank's program, beside the facts of cells."""

    takes: frozenset[str]
    """The instructions without a microbatch that are its own."""

    def moved(self, at: Instruction) -> Iterable[Change]:
        """One of these instructions, or one with a name where names are the feature's. Raises PlanError."""

    def computed(self, at: Instruction) -> Iterable[Change]:
        """A compute operation. Raises PlanError."""

    def state(self, since: int) -> Any:
        """All that the rest of the walk depends on, microbatches counted from ``since``."""

    def check_end(self, where: Callable[[Cell], str]) -> None:
        """Raises PlanError for what is left. ``where`` names a cell."""


class PlanHooks:
    """Where a feature takes part in making and verifying plans that have it. It holds no state, and by default does
    nothing.

    Words for sentences of the core's:

    order_words     its compute that an order holds
    pass_words      where that runs
    barrier_words   how many barriers there may be
    gradient_words  the gradient that its last pass completes
    host_words      what was done to memory that is on the host
    part_word       what a part of a microbatch is
    """

    order_words = ""
    pass_words = ""
    barrier_words = ""
    gradient_words = ""
    host_words = ""
    part_word = ""

    def checked(self, spec: PlanSpec) -> Mapping[str, Any]:
        """Settings as ``spec`` is to have them, where they differ. Raises PlanError for what cannot be."""
        return {}

    def parts(self, spec: PlanSpec) -> int:
        """How many parts it divides every microbatch into. Raises PlanError for what cannot be."""
        return 1

    def check_family(self, spec: PlanSpec, family: Family) -> None:
        """Raises PlanError for a schedule that has no orders with it."""

    def schedule(self, num_chunks: int) -> str:
        """The schedule of a config that has it and names none; empty where that is as without it."""
        return ""

    def of_config(self, config: Any, placement: Placement, training: bool) -> Mapping[str, Any]:
        """Its settings of a spec by those of a config. Raises ConfigError for impossible ones."""
        return {}

    def needs_times(self, config: Any) -> bool:
        """Whether plans are made for the measured times of ``config``."""
        return False

    def described(self, spec: PlanSpec) -> str:
        """What the spec's line says of it."""
        return ""

    def to_file(self, name: str, value: Any) -> Any:
        """A setting as JSON takes it."""
        return value

    def from_file(self, name: str, value: Any) -> Any:
        """A setting that a file has as JSON. Raises FileFormatError."""
        return value

    def inputs(self, op: str, stage: int, placement: Placement) -> tuple[Result, ...]:
        """What collectives bring an operation."""
        return ()

    def needs_at_root(self, op: str, needs: int, barriers: int) -> int:
        """What an instruction of the last stage needs."""
        return needs

    def facts_at_end(self, placement: Placement, forward_only: bool) -> int:
        """What must be true of every cell after the step."""
        return 0

    def plan(self, spec: PlanSpec, lower: Callable[[PlanSpec], Plan]) -> Plan | None:
        """The plan of ``spec``, where it is made from that of another spec by ``lower``."""
        return None

    def comes_behind(self, spec: PlanSpec, at: Instruction) -> tuple[Instruction, str] | None:
        """The operation of another part of the same microbatch whose result an order has before that of ``at``, and
        why."""
        return None

    def check_lowered(self, spec: PlanSpec, settings: Mapping[str, Any]) -> None:
        """Raises PlanError for a spec that lowering cannot serve with these ``settings`` of its own."""

    def joins(self, spec: PlanSpec) -> Joins | None:
        """What joins operations of an order that run as one."""
        return None

    def has_names(self, spec: PlanSpec) -> bool:
        """Whether messages have others with names behind them."""
        return False

    def names(self, spec: PlanSpec, placement: Placement, kind: str, stage: int) -> tuple[str, ...]:
        """The names of the messages that go with those of ``kind`` on the edge behind ``stage``."""
        return ()

    def lay_out(self, rank: RankLowering) -> None:
        """Place what it adds to one rank's program."""

    def laid_out(self, rank: RankLowering, program: list[Instruction]) -> list[Instruction]:
        """The program with what depends on the places of everything else."""
        return program

    def follower(
        self, plan: Plan, rank: int, facts: Mapping[Cell, int], error: Callable[..., PlanError]
    ) -> Follower | None:
        """What follows it along the program of ``rank``; ``facts``: those of cells; ``error``: about an instruction."""
        return None

    def bytes_of_parameters(self, plan: Plan, rank: int, shape: Any) -> tuple[float, Iterable[float]] | None:
        """What parameters, gradients and optimizer states of a ``ModelShape`` take on ``rank`` all the time, and what
        else after each instruction; None where that is as without the feature."""
        return None

    def check_plan(self, plan: Plan, device: Sequence[str]) -> None:
        """Raises PlanError for a plan that its ranks cannot run together under the rules of ``device``."""
