"""The spec, which identifies a plan, and the plan itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megatron_pp import feature_table
from megatron_pp.common.gc_pause import collector_paused
from megatron_pp.common.names import unknown
from megatron_pp.errors import PlanError
from megatron_pp.plan.ir.certificate import Certificate
from megatron_pp.plan.ir.feature import all_values, hooks_of, part_word, takes_settings, with_settings
from megatron_pp.plan.ir.instruction import COPIES_TO_HOST, JOINED_OPS, NONE, Instruction, format_program, unjoined
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.repeated import Line, Repeated
from megatron_pp.plan.ir.tasks import Cell, Task

if TYPE_CHECKING:
    from megatron_pp.plan.costs.measured import Measured
    from megatron_pp.plan.ir.added_settings import SpecSettings
else:
    from megatron_pp.plan.ir.feature import SpecSettings

OVERLAP = "overlap"  # posts early, waits late
BATCHED = "batched"  # one grouped call per compute boundary, waited there
PLAIN = "plain"  # the same exchange as single operations, waited together at that boundary
POLICIES = (OVERLAP, BATCHED, PLAIN)

ONE_WAY = "one_way"  # every (source, destination, activation or gradient) is a FIFO of its own
SHARED = "shared"  # everything between two ranks is one FIFO, in the order each of them posted
CHANNELS = (ONE_WAY, SHARED)

RENDEZVOUS = "rendezvous"  # always holds: a send completes when its receive is posted; channels run in posting order
ONE_QUEUE = "one_queue"  # all that a rank issues goes through one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1)
ANY_WAIT = "any_wait"  # any instruction may wait for an idle device, and so for all that its rank has posted
DEVICE_SYNC = "device_sync"  # every compute operation waits so, as under Megatron's timers at log level 2
STATIC_BUFFERS = "static_buffers"  # graphed layers reuse an input gradient's buffer after the next backward
DEVICE_RULES = (RENDEZVOUS, ONE_QUEUE, ANY_WAIT, DEVICE_SYNC, STATIC_BUFFERS)
ON_NCCL = (ONE_QUEUE, ANY_WAIT)  # the rules for which plans on NCCL are made by default

MOST_TASKS = 10**8  # stages times microbatches times parts: larger plans fit into no host's memory

HOOKS = "hooks"  # data-parallel hooks fire in the last backward of a chunk, outside no_sync
EXPLICIT = "explicit"  # config.grad_sync_func is called, staggered by rank as Megatron does


@dataclass(frozen=True)
class Shape:
    """P ranks with V chunks each, M microbatches in groups of G (1 <= G <= M), and the parts of each microbatch."""

    pipeline_size: int
    num_chunks: int
    num_microbatches: int
    group_size: int
    num_parts: int = 1

    @property
    def parts(self) -> range:
        """The values of ``Instruction.part`` in one microbatch; only NONE if microbatches are whole."""
        return range(self.num_parts) if self.num_parts > 1 else range(NONE, NONE + 1)


@takes_settings
@dataclass(frozen=True)
class PlanSpec(SpecSettings):
    """Everything a plan depends on. It is hashable, and is the key of the cache.

    schedule          family name, a key of ``megatron_pp.plan.orders.SCHEDULES``, or the path of a schedule file
    pipeline_size     P, ranks in the pipeline
    num_chunks        V, model chunks per rank
    num_microbatches  M >= 1
    group_size        microbatches per group of an interleaved order (Megatron's microbatch_group_size_per_vp_stage);
                      families without groups ignore it
    policy            overlap, batched or plain
    channels          one_way or shared
    forward_only      evaluation: only forwards
    variable_shapes   shapes are sent before the tensors
    release_after     compute slots between posting a send and its release under ``overlap`` (>= 1)
    lookahead         slots by which a receive is posted ahead of its use, under ``overlap`` on one_way channels (>= 0);
                      under ANY_WAIT 0 posts none ahead, and any other number as early as no wait can hang
    grad_sync         hooks or explicit
    param_sync        whether PARAM_SYNC marks are wanted
    measured          times and memory that "auto" and "auto_v" plan for (``measured.py``)
    digest            of the schedule file's content; empty for a named family
    split_backward    whether the model can defer weight gradients; if not, the plan has no W
    device            the DEVICE_RULES that hold on the device: the plan is lowered and verified for them
    added             settings of features that are not their defaults, by name in the order of ``SPEC_DEFAULTS``.
                      Each is an argument and an attribute by its own name
    """

    schedule: str
    pipeline_size: int
    num_chunks: int
    num_microbatches: int
    group_size: int = 0
    policy: str = OVERLAP
    channels: str = ONE_WAY
    forward_only: bool = False
    variable_shapes: bool = False
    release_after: int = 1
    lookahead: int = 1
    grad_sync: str = HOOKS
    param_sync: bool = False
    measured: Measured | None = None
    digest: str = ""
    split_backward: bool = True
    device: tuple[str, ...] = ()
    added: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        one_of("lowering policy", self.policy, POLICIES)
        one_of("channels", self.channels, CHANNELS)
        one_of("grad_sync", self.grad_sync, (HOOKS, EXPLICIT))
        object.__setattr__(self, "device", checked_device(self.device))
        for name, value, least in (
            ("pipeline size", self.pipeline_size, 1),
            ("number of model chunks", self.num_chunks, 1),
            ("number of microbatches", self.num_microbatches, 1),
            ("group size", self.group_size, 0),
            ("release_after", self.release_after, 1),
            ("lookahead", self.lookahead, 0),
        ):
            check_whole(name, value, least)
        tasks = self.pipeline_size * self.num_chunks * self.num_microbatches * self.num_parts
        if tasks > MOST_TASKS:
            raise PlanError(
                f"pipeline size {self.pipeline_size}, {self.num_chunks} model chunks and {self.num_microbatches} "
                f"microbatches make {tasks:,} forwards; a plan has at most {MOST_TASKS:,}"
            )
        for hooks in hooks_of(self.added) if self.added else ():
            object.__setattr__(self, "added", with_settings(self.added, hooks.checked(self)))

    def values(self) -> dict[str, Any]:
        """Every setting by name, settings of features included."""
        return all_values(self)

    @property
    def effective_group_size(self) -> int:
        """Microbatches per group, at most M; by default the fewest that have P parts together."""
        return min(self.group_size or -(-self.pipeline_size // self.num_parts), self.num_microbatches)

    @property
    def num_parts(self) -> int:
        """The number of parts of every microbatch; 1 if microbatches are whole."""
        return max(hooks.parts(self) for hooks in hooks_of(self.added)) if self.added else 1

    @property
    def joins(self) -> bool:
        """Whether operations of its orders that are side by side run as one."""
        return bool(self.added) and any(hooks.joins(self) is not None for hooks in hooks_of(self.added))

    @property
    def may_wait(self) -> bool:
        """Whether instructions may wait for all that their rank has posted."""
        return ANY_WAIT in self.device or DEVICE_SYNC in self.device

    @property
    def grouped(self) -> bool:
        """Whether messages go out as grouped calls. If shapes vary and any instruction may wait, they do so under every
        policy: then all shapes of a call are known before its buffers are allocated and its tensors go out.
        """
        return self.policy == BATCHED or (self.variable_shapes and self.may_wait)

    @property
    def shape(self) -> Shape:
        sizes = self.pipeline_size, self.num_chunks, self.num_microbatches, self.effective_group_size
        return Shape(*sizes, self.num_parts)

    def describe(self) -> str:
        """The spec in one line, for error messages and titles of drawings."""
        kind = "forward only" if self.forward_only else "training"
        parts = f"{part_word()}s={self.num_parts} " if self.num_parts > 1 else ""
        added = "".join(hooks.described(self) for hooks in hooks_of(self.added))
        return (
            f"{self.schedule} P={self.pipeline_size} V={self.num_chunks} M={self.num_microbatches} "
            f"{parts}group={self.effective_group_size} {self.policy}/{self.channels} {kind}{added}"
        )


@dataclass(frozen=True)
class Plan:
    """A lowered plan: one program per rank.

    orders  the compute orders from which it was lowered
    remark  a sentence for the log if another order is used in place of the schedule's own; else empty
    proof   what ``verify`` has proven of these programs
    """

    spec: PlanSpec
    placement: Placement
    programs: Sequence[Line]
    orders: Sequence[Line] = field(repr=False, default=())
    remark: str = ""
    proof: Certificate | None = field(default=None, repr=False, compare=False)
    _tasks: dict[int, tuple[Task, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _copied: dict[int, frozenset[Cell]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def certificate(self) -> Certificate | None:
        """This plan's certificate from ``verify``; None for an unverified plan, and for a copy with other programs."""
        return self.proof if self.proof is not None and self.proof.programs is self.programs else None

    @collector_paused()
    def tasks(self, rank: int) -> tuple[Task, ...]:
        """``rank``'s program for the engine, made once."""
        if rank not in self._tasks:
            programs = self.programs
            made = programs.tasks(rank) if isinstance(programs, Repeated) else tuple(map(Task, programs[rank]))
            self._tasks[rank] = made
        return self._tasks[rank]

    @property
    def has_names(self) -> bool:
        """Whether messages with names follow the plan's other messages."""
        added = self.spec.added
        return bool(added) and any(hooks.has_names(self.spec) for hooks in hooks_of(added))

    @cached_property
    def copies_to_host(self) -> bool:
        """Whether any rank copies activations to the host."""
        return any(at.op in COPIES_TO_HOST for program in self.programs for at in program)

    def copied(self, rank: int) -> frozenset[Cell]:
        """The forwards whose activations ``rank`` copies to the host; made once."""
        if rank not in self._copied:
            self._copied[rank] = frozenset(task.key for task in self.tasks(rank) if task.op in COPIES_TO_HOST)
        return self._copied[rank]

    def timed(self, rank: int) -> tuple[Instruction, ...]:
        """``rank``'s program with joined operations taken apart, because times are recorded and simulated for each."""
        program = self.programs[rank]
        return tuple(unjoined(program)) if not JOINED_OPS.isdisjoint([at.op for at in program]) else program

    def __str__(self) -> str:
        return "\n".join(f"rank {r}: {format_program(p)}" for r, p in enumerate(self.programs))


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Values that settings of features may have, for programs that import them from here."""
        return getattr(feature_table, name)


def checked_device(rules: Collection[str]) -> tuple[str, ...]:
    """``rules`` in the order of DEVICE_RULES, without RENDEZVOUS, which always holds. Raises PlanError for
    other names.
    """
    if isinstance(rules, str):
        rules = rules.split(",")
    for rule in rules:
        one_of("device rule", rule, DEVICE_RULES)
    return tuple(rule for rule in DEVICE_RULES[1:] if rule in rules)


def check_whole(what: str, value: Any, least: int) -> None:
    """Raises PlanError unless ``value`` is a whole number that is not below ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise PlanError(f"{what} is {value!r}; it must be a whole number of at least {least}")


def one_of(what: str, value: str, known: tuple[str, ...]) -> None:
    """Raises PlanError unless ``value`` is one of those ``known``."""
    if value not in known:
        raise PlanError(unknown(what, value, known))
