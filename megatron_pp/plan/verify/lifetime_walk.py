"""One rank's program, instruction by instruction: the rules of ``rules.py``, and memory. ``lifetime.py`` walks where it
has to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_pp.errors import PlanError
from megatron_pp.on_demand import load
from megatron_pp.plan.costs.activations import key_values_change
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.dataflow import CAUSAL, neighbour_of, slice_before
from megatron_pp.plan.ir.instruction import NONE, Instruction
from megatron_pp.plan.ir.rules import (
    B_RAN,
    F_FREED,
    F_RAN,
    MAY_BE,
    RULES,
    W_LEFT,
    W_RAN,
    facts_at_end,
    needs_at,
    obliged,
    words_of,
)
from megatron_pp.plan.ir.spec import Plan

if TYPE_CHECKING:
    from megatron_pp.features.skip_tensors.skip_lifetime import NamedWalk


class Memory(NamedTuple):
    """Live pipeline tensors of one rank, in tensors (one per message, whatever its size).

    outputs        stage outputs that still hold their data
    inputs         received (or handed) activations kept for the backward
    act_buffers    posted receives of activations that were not waited yet
    output_grads   received (or handed) gradients kept for the backward
    input_grads    input gradients that still hold their data
    grad_buffers   posted receives of gradients that were not waited yet
    held           named tensors that the rank made or received, and has not dropped
    held_grads     sums of their gradients, which are not sent or used up yet

    Views on them, not more of them:

    pending_sends  sends posted and not released (their tensors are among outputs and input_grads)
    in_flight      (chunk, microbatch) pairs, or slices of them, between their forward and their backward: what autograd
                   keeps on the device
    on_host        those with a buffer in host memory: from OFFLOAD to WAIT_LOAD
    weight_backlog pairs between an input-gradient backward and its W
    logits         microbatches between S and T of a split output layer: their softmax is kept, of the rank's rows
    key_values     pairs whose keys and values attention keeps for later slices: from the forward of the first slice,
                   each forward adding its own, until the backward of the first one (in evaluation, the last forward)
    """

    outputs: int = 0
    inputs: int = 0
    act_buffers: int = 0
    output_grads: int = 0
    input_grads: int = 0
    grad_buffers: int = 0
    held: int = 0
    held_grads: int = 0
    pending_sends: int = 0
    in_flight: int = 0
    weight_backlog: int = 0
    key_values: int = 0
    logits: int = 0
    on_host: int = 0

    @property
    def tensors(self) -> int:
        """Pipeline tensors alive together."""
        return sum(self[:_VIEWS])


_KINDS = {name: kind for kind, name in enumerate(Memory._fields)}
_KEY_VALUES = _KINDS["key_values"]
_VIEWS = _KINDS["pending_sends"]  # the first that counts no more tensors
_CHANGES = {
    ins.RECV_F: Memory(act_buffers=1),
    ins.WAIT_F: Memory(act_buffers=-1, inputs=1),
    ins.RECV_B: Memory(grad_buffers=1),
    ins.WAIT_B: Memory(grad_buffers=-1, output_grads=1),
    ins.HAND_B: Memory(input_grads=-1, output_grads=1),
    ins.SEND_F: Memory(pending_sends=1),
    ins.SEND_B: Memory(pending_sends=1),
    ins.FREE_B: Memory(pending_sends=-1, input_grads=-1),
    ins.WEIGHT_GRAD: Memory(weight_backlog=-1),
    ins.OFFLOAD: Memory(on_host=1),
    ins.WAIT_LOAD: Memory(on_host=-1),
}
"""What the operations add to the memory that do so whatever the stage; ``Walk._change`` knows the others."""


_IN_ORDER = {
    ins.FORWARD: ("forward", "the data iterator gives them in order"),
    ins.WAIT_ALL_REDUCE: ("loss", "losses are reported in order"),
}
"""What each chunk runs in the order of microbatches, the loss of a split output layer on the last stage's rank."""


_CHECKED = ins.HAND_OPS | _IN_ORDER.keys()


class RankPeaks(NamedTuple):
    """Peaks over one rank's program: of each kind for itself (``each``), and of all tensors together (``tensors``)."""

    each: Memory
    tensors: int


class _Move(NamedTuple):
    """What a step makes of a cell's facts, and of the memory: ``changes`` are (index in Memory, difference)."""

    facts: int
    changes: tuple[tuple[int, int], ...]
    tensors: int


class Step(NamedTuple):
    """What an op of one chunk needs and does; ``moves``: what it was found to do, by the facts before it."""

    needs: int
    adds: int
    bars: int
    change: Memory
    moves: dict[int, _Move]


def made_before(at: Instruction) -> tuple[int, int]:
    """The stage that makes what the hand-off ``at`` hands on, and the fact that it has."""
    return neighbour_of(at.op, at.stage), F_RAN if at.op == ins.HAND_F else B_RAN


class Walk:
    """What is true of every cell of a rank, and alive on it, as its program runs. Raises PlanError naming the rank,
    the instruction and what is missing.
    """

    def __init__(self, plan: Plan, rank: int, deallocate: bool) -> None:
        spec = plan.spec
        self.plan = plan
        self.rank = rank
        self.forward_only = spec.forward_only
        self.optional = 0 if spec.forward_only else MAY_BE if spec.split_backward else MAY_BE & ~(W_LEFT | W_RAN)
        self.microbatches = spec.num_microbatches
        self.every = list(range(spec.num_microbatches))
        self.slices = spec.slices
        self.placement = plan.placement
        self.last_stage = plan.placement.num_stages - 1
        self.stages = plan.placement.stages[rank]
        self.facts = dict.fromkeys(product(self.stages, range(self.microbatches), spec.shape.parts), 0)
        reports = plan.placement.barriers > 0 and rank == plan.placement.output_root
        self.in_order = frozenset(_IN_ORDER if reports else {ins.FORWARD})
        self.next = dict.fromkeys(product(self.in_order, range(spec.num_chunks)), (0, spec.shape.parts[0]))
        self.required = {s: facts_at_end(plan.placement, s, self.forward_only) for s in self.stages}
        self.known: dict[tuple[str, int, int, int, bool], Step] = {}  # by op, stage, peer, chunk, and whether named
        self.gives_back = deallocate or spec.forward_only  # whether an output's data goes when it was sent or handed on
        self.peaks = [0] * len(Memory._fields)
        self.now = [0] * len(Memory._fields)
        self.named: NamedWalk | None = None
        if spec.skip_tensors:
            self.named = load("skip_lifetime").NamedWalk(plan, rank, self.facts, self._error)

    def tensors(self) -> Iterator[int]:
        """Run the program; after each instruction, the tensors alive together."""
        now, peaks, facts, known, named, alive = self.now, self.peaks, self.facts, self.known, self.named, 0
        for at in self.plan.timed(self.rank):
            for one in at.members or (at,):
                op, stage, mb, peer, chunk, part, tensor, _ = one
                step = known.get((op, stage, peer, chunk, not tensor)) or self.step(one)
                if tensor:
                    alive += self._count(self._moved(one))
                    continue
                cell = stage, mb, part
                before = facts.get(cell)
                if before is None:
                    if op in ins.SYNC_OPS:
                        continue
                    raise self._no_such_cell(one)
                facts[cell], changes, more = step.moves.get(before) or self._move(one, step, before)
                if op in _CHECKED:
                    self._check_turn(one)
                if part >= 0:
                    self._follow_slice(one)
                for kind, difference in changes:
                    now[kind] += difference
                    if now[kind] > peaks[kind]:
                        peaks[kind] = now[kind]
                alive += more
                if named is not None and op in ins.SINGLE_COMPUTE_OPS:
                    alive += self._count(named.computed(one))
            yield alive
        self._check_end()

    def _moved(self, at: Instruction) -> Iterable[tuple[str, int]]:
        """What a transfer or DROP of a named tensor changes. Raises PlanError."""
        if self.named is None or (at.stage, at.mb, at.slice) not in self.facts:
            raise self._no_such_cell(at) if self.named else self._error(at, "the plan has no named tensors")
        return self.named.moved(at)

    def _count(self, changes: Iterable[tuple[str, int]]) -> int:
        """Add what named tensors change to the memory; returns by how many tensors."""
        together = 0
        for name, difference in changes:
            kind = _KINDS[name]
            self.now[kind] += difference
            self.peaks[kind] = max(self.peaks[kind], self.now[kind])
            together += difference if kind < _VIEWS else 0
        return together

    def _move(self, at: Instruction, step: Step, before: int) -> _Move:
        """What ``at`` does, for all instructions of its step that find the same facts. Raises PlanError."""
        missing, twice = (step.needs | obliged(at.op, before)) & ~before, step.adds & before
        if missing:
            raise self._error(at, "it comes before " + " and before ".join(words_of(missing)))
        if step.bars & before:
            raise self._error(at, "it comes after " + " and after ".join(words_of(step.bars & before)))
        if twice:
            raise self._error(at, " and ".join(words_of(twice)) + " already: it stands twice")
        after, both, change = before | step.adds, F_FREED | B_RAN, step.change
        if not self.gives_back and after & both == both and before & both != both:  # the data that FREE_F left goes
            change = change._replace(outputs=change.outputs - 1)
        changes = tuple((kind, difference) for kind, difference in enumerate(change) if difference)
        move = step.moves[before] = _Move(after, changes, change.tensors)
        return move

    def step(self, at: Instruction) -> Step:
        """What all instructions of this op and chunk have in common. Raises PlanError where ``at`` is none of them."""
        stage, peer = self.placement.site(self.rank, at.op, at.chunk)
        if (at.stage, at.peer) != (stage, peer):
            raise self._error(
                at,
                f"it has stage {at.stage} and peer {at.peer}; on this rank and chunk they are {stage} and {peer} "
                f"({NONE}: none)",
            )
        if at.op in ins.SYNC_OPS or at.tensor:
            needs, adds, bars = 0, 0, 0
        elif at.op not in RULES or (at.stage, at.mb, at.slice) not in self.facts:
            raise self._no_such_cell(at)
        else:
            _, adds, bars = RULES[at.op]
            needs = needs_at(at.op, stage, self.placement)
            if adds & ~(self.required[stage] | self.optional):
                raise self._error(at, f"stage {stage} has no such step in this plan")
            needs &= self.required[stage] | B_RAN | MAY_BE
        step = self.known[(at.op, stage, peer, at.chunk, not at.tensor)] = Step(
            needs, adds, bars, self._change(at.op, stage), {}
        )
        return step

    def _change(self, op: str, stage: int) -> Memory:
        """What an operation of ``stage`` adds to the memory."""
        first, last = stage == 0, stage == self.last_stage and not self.placement.barriers  # without an output
        if op in ins.OUTPUT_LAYER_OPS:
            return self._change_of_output_layer(op, stage == self.last_stage)
        if op == ins.FORWARD:
            used = self.forward_only and not first
            return Memory(outputs=not last, inputs=-used, in_flight=not self.forward_only)
        if op == ins.HAND_F:
            # Given back, the output's storage becomes the input's; else it stays the output's until its backward.
            return Memory(outputs=-1, inputs=1) if self.gives_back else Memory()
        if op == ins.FREE_F:
            return Memory(pending_sends=-1, outputs=-self.gives_back)
        handed_in, handed_on = stage - 1 in self.required, stage + 1 in self.required
        own_input = not first and (self.gives_back or not handed_in)
        if op == ins.FREE_OFFLOAD:
            return Memory(in_flight=-1, inputs=-own_input)
        if op == ins.LOAD:
            return Memory(in_flight=1, inputs=own_input)
        if op in ins.BACKWARD_OPS:
            return Memory(
                in_flight=-1,
                inputs=-own_input,
                outputs=-((handed_on or (stage == self.last_stage and not last)) and not self.gives_back),
                output_grads=-(not last),
                input_grads=not first,
                weight_backlog=op == ins.INPUT_GRAD,
            )
        return _CHANGES.get(op, Memory())

    def _change_of_output_layer(self, op: str, is_root: bool) -> Memory:
        """On the last stage's rank its own output is what others get as a copy, and is given back, or used up, by T."""
        uses = ins.OUTPUT_S if self.forward_only else ins.OUTPUT_T
        summed = ins.WAIT_ALL_REDUCE if self.placement.barriers == 1 else ins.WAIT_REDUCE
        trains = not self.forward_only
        part = trains and op == (ins.OUTPUT_S if self.placement.barriers == 1 else ins.OUTPUT_T)
        over = trains and op == summed
        posted = (op == ins.BROADCAST) - (op == ins.WAIT_BROADCAST)
        there = (op == ins.WAIT_BROADCAST) - (op == uses)
        return Memory(
            outputs=-(is_root and op == uses and self.gives_back),
            inputs=0 if is_root else there,
            act_buffers=0 if is_root else posted,
            output_grads=is_root and over,
            input_grads=part - over,
            logits=trains * ((op == ins.OUTPUT_S) - (op == ins.OUTPUT_T)),
        )

    def _no_such_cell(self, at: Instruction) -> PlanError:
        slices = f", slices 0..{self.slices - 1}" if self.slices > 1 else ", sequences whole" if at.slice >= 0 else ""
        return self._error(
            at,
            f"there is no such stage and microbatch on this rank: stages are {', '.join(map(str, self.stages))}, "
            f"microbatches 0..{self.microbatches - 1}{slices}",
        )

    def _check_turn(self, at: Instruction) -> None:
        """Check what depends on other cells."""
        if at.op in ins.HAND_OPS:
            self._check_hand(at)
        elif at.op in self.in_order:
            self._check_order(at)

    def _check_order(self, at: Instruction) -> None:
        """Every chunk draws its data from an iterator, and its losses are reported in the order of its forwards."""
        mb, part = expected = self.next[at.op, at.chunk]
        if (at.mb, at.slice) != expected:
            of, (what, why) = f", slice {part}" if part >= 0 else "", _IN_ORDER[at.op]
            raise self._error(at, f"the next {what} of chunk {at.chunk} is that of microbatch {mb}{of}: {why}")
        self.next[at.op, at.chunk] = (mb, part + 1) if 0 <= part < self.slices - 1 else (mb + 1, min(part, 0))

    def _follow_slice(self, at: Instruction) -> None:
        """Check that backwards are in causal order, as forwards are (``_check_order``); count keys and values."""
        if at.op in ins.BACKWARD_OPS:
            before = slice_before(at.op, at.slice, self.slices)
            if before is not None and not self.facts[(at.stage, at.mb, before)] & B_RAN:
                raise self._error(at, f"it comes before {at._replace(slice=before)}: {CAUSAL[ins.BACKWARD]}")
        self.now[_KEY_VALUES] += key_values_change(at.op, at.slice, self.slices, self.forward_only)
        self.peaks[_KEY_VALUES] = max(self.peaks[_KEY_VALUES], self.now[_KEY_VALUES])

    def _check_hand(self, at: Instruction) -> None:
        """A hand-off needs the neighbour stage of this rank to have produced."""
        source, fact = made_before(at)
        if not self.facts.get((source, at.mb, at.slice), 0) & fact:
            raise self._error(at, f"stage {source} has not produced it yet on this rank")

    def state(self, since: int) -> Any:
        """All that the rest of the walk depends on, microbatches counted from ``since``. Cells that are not listed are
        complete before their chunk's next forward, which all before it need, and untouched from there on.
        """
        begun = {
            (stage, mb - since, part): facts
            for (stage, mb, part), facts in self.facts.items()
            if facts and self.missing(stage, facts)
        }
        named = None if self.named is None else self.named.state(since)
        return begun, [(mb - since, part) for mb, part in self.next.values()], list(self.now), named

    def missing(self, stage: int, facts: int) -> int:
        """What a finished program must have made true of a cell besides."""
        return (self.required[stage] | (W_RAN if facts & W_LEFT else 0)) & ~facts

    def _check_end(self) -> None:
        for (stage, mb, part), facts in self.facts.items():
            missing = self.missing(stage, facts)
            if missing:
                words = " nor that ".join(words_of(missing))
                raise PlanError(f"{self._at_end((stage, mb, part))} it is not true that {words}")
        if self.named is not None:
            self.named.check_end(self._at_end)

    def _at_end(self, cell: tuple[int, int, int]) -> str:
        stage, mb, part = cell
        where = f"chunk {self.stages.index(stage)}, microbatch {mb}" + (f", slice {part}" if part >= 0 else "")
        return f"rank {self.rank}: at the end of the plan, of {where}"

    def _error(self, at: Instruction, why: str) -> PlanError:
        return PlanError(f"rank {self.rank}: {at} ({at.name}): {why}")
