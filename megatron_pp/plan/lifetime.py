"""The half of ``verify`` that looks at one rank at a time: the rules of ``rules.py``, syncs, and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_pp.plan import instruction as ins
from megatron_pp.plan.dataflow import neighbour_of
from megatron_pp.plan.instruction import NONE, Instruction
from megatron_pp.plan.rules import B_RAN, F_FREED, F_RAN, RULES, W_LEFT, W_RAN, facts_at_end, words_of
from megatron_pp.plan.spec import Plan, PlanError
from megatron_pp.plan.sync_marks import check_syncs


@dataclass
class Memory:
    """Live pipeline tensors of one rank, in tensors (one per message, whatever its size).

    outputs        stage outputs that still hold their data
    inputs         received (or handed) activations kept for the backward
    act_buffers    posted receives of activations that were not waited yet
    output_grads   received (or handed) gradients kept for the backward
    input_grads    input gradients that still hold their data
    grad_buffers   posted receives of gradients that were not waited yet
    pending_sends  sends posted and not released (their tensors are among outputs and input_grads)
    in_flight      (chunk, microbatch) pairs between their forward and their backward: what autograd keeps
    weight_backlog pairs between an input-gradient backward and its WEIGHT
    """

    outputs: int = 0
    inputs: int = 0
    act_buffers: int = 0
    output_grads: int = 0
    input_grads: int = 0
    grad_buffers: int = 0
    pending_sends: int = 0
    in_flight: int = 0
    weight_backlog: int = 0

    @property
    def tensors(self) -> int:
        """Pipeline tensors alive together; ``pending_sends``, ``in_flight`` and ``weight_backlog`` are views on them,
        not more of them.
        """
        return self.outputs + self.inputs + self.act_buffers + self.output_grads + self.input_grads + self.grad_buffers

    def grow_to(self, other: Memory) -> None:
        """Field by field maximum, in place."""
        most = self.__dict__
        for name, value in other.__dict__.items():
            if value > most[name]:
                most[name] = value


@dataclass
class RankPeaks:
    """Peaks over one rank's program: of each kind for itself (``each``), and of all tensors together (``tensors``)."""

    each: Memory
    tensors: int


def check_rank(plan: Plan, rank: int, deallocate: bool = True) -> RankPeaks:
    """Walk ``rank``'s program. Raises PlanError naming the rank, the instruction and what is missing; returns the
    peaks of its memory.

    ``deallocate`` says whether FREE_F gives the output's data back (config.deallocate_pipeline_outputs) or it
    stays until the backward.
    """
    peaks, together = Memory(), 0
    for _, now in _Walk(plan, rank, deallocate).steps():
        together = max(together, now.tensors)
        peaks.grow_to(now)
    check_syncs(plan, rank)
    return RankPeaks(peaks, together)


def tensors_timeline(plan: Plan, rank: int, deallocate: bool = True) -> Iterator[int]:
    """Pipeline tensors alive together right after each instruction of ``plan.timed(rank)``. Raises PlanError as
    check_rank does.
    """
    for _, now in _Walk(plan, rank, deallocate).steps():
        yield now.tensors


class _Walk:
    def __init__(self, plan: Plan, rank: int, deallocate: bool) -> None:
        spec = plan.spec
        self.rank = rank
        self.program = plan.timed(rank)
        self.forward_only = spec.forward_only
        self.optional = W_LEFT | W_RAN if spec.split_backward and not spec.forward_only else 0
        self.microbatches = spec.num_microbatches
        self.chunks = spec.num_chunks
        self.last_stage = plan.placement.num_stages - 1
        self.stages = plan.placement.stages[rank]
        self.facts = {(stage, mb): 0 for stage in self.stages for mb in range(self.microbatches)}
        self.next_forward = [0] * self.chunks
        self.required = {s: facts_at_end(plan.placement, s, self.forward_only) for s in self.stages}
        self.placement = plan.placement
        self.sites: dict[tuple[str, int], tuple[int, int]] = {}  # (op, chunk) -> (stage, peer)
        self.gives_back = deallocate or spec.forward_only  # whether an output's data goes when it was sent or handed on
        self.memory = Memory()

    def steps(self) -> Iterator[tuple[Instruction, Memory]]:
        """Run the program; after each instruction, the memory (one object, updated in place)."""
        for at in self.program:
            for one in at.members or (at,):
                self._check_site(one)
                if one.op not in ins.SYNC_OPS:
                    self._check(one)
                    self._account(one)
            yield at, self.memory
        self._check_end()

    def _check(self, at: Instruction) -> None:
        cell = at[1:3]
        rule = RULES.get(at.op)
        facts = self.facts.get(cell)
        if rule is None or facts is None:
            raise self._error(
                at,
                f"there is no such stage and microbatch on this rank: stages are {', '.join(map(str, self.stages))}, "
                f"microbatches 0..{self.microbatches - 1}",
            )
        needs, adds, _ = rule
        required = self.required[at.stage]
        if adds & ~(required | self.optional):
            raise self._error(at, f"stage {at.stage} has no such step in this plan")
        missing = needs & (required | B_RAN | W_LEFT) & ~facts
        if missing:
            raise self._error(at, "it comes before " + " and before ".join(words_of(missing)))
        if facts & adds:
            raise self._error(at, " and ".join(words_of(facts & adds)) + " already: it stands twice")
        if at.op in ins.HAND_OPS:
            self._check_hand(at)
        elif at.op == ins.FORWARD:
            self._check_forward(at)
        self.facts[cell] = facts | adds

    def _check_site(self, at: Instruction) -> None:
        """Stage, chunk and peer must be those of the placement."""
        key = (at.op, at.chunk)
        site = self.sites.get(key)
        if site is None:
            site = self.sites[key] = self.placement.site(self.rank, *key)
        if (at.stage, at.peer) != site:
            raise self._error(
                at,
                f"it has stage {at.stage} and peer {at.peer}; on this rank and chunk they are {site[0]} and {site[1]} "
                f"({NONE}: none)",
            )

    def _check_forward(self, at: Instruction) -> None:
        """Every chunk draws its data from an iterator, and its losses are reported in the order of its forwards."""
        expected = self.next_forward[at.chunk]
        if at.mb != expected:
            raise self._error(
                at,
                f"the next forward of chunk {at.chunk} is that of microbatch {expected}: the data iterator gives "
                "them in order",
            )
        self.next_forward[at.chunk] = expected + 1

    def _check_hand(self, at: Instruction) -> None:
        """A hand-off needs the neighbour stage of this rank to have produced."""
        source = neighbour_of(at.op, at.stage)
        fact = F_RAN if at.op == ins.HAND_F else B_RAN
        if not self.facts.get((source, at.mb), 0) & fact:
            raise self._error(at, f"stage {source} has not produced it yet on this rank")

    def _account(self, at: Instruction) -> None:
        now, op = self.memory, at.op
        first, last = at.stage == 0, at.stage == self.last_stage
        if op == ins.RECV_F:
            now.act_buffers += 1
        elif op == ins.WAIT_F:
            now.act_buffers -= 1
            now.inputs += 1
        elif op == ins.HAND_F:
            # Given back, the output's storage becomes the input's; else it stays the output's until its backward.
            if self.gives_back:
                now.outputs -= 1
                now.inputs += 1
        elif op == ins.FORWARD:
            now.outputs += not last
            now.inputs -= self.forward_only and not first
            now.in_flight += not self.forward_only
        elif op in ins.SEND_OPS:
            now.pending_sends += 1
        elif op == ins.FREE_F:
            now.pending_sends -= 1
            kept = not (self.gives_back or self.facts[(at.stage, at.mb)] & B_RAN)
            now.outputs -= not kept
        elif op == ins.RECV_B:
            now.grad_buffers += 1
        elif op == ins.WAIT_B:
            now.grad_buffers -= 1
            now.output_grads += 1
        elif op == ins.HAND_B:
            now.input_grads -= 1
            now.output_grads += 1
        elif op in ins.BACKWARD_OPS:
            self._account_backward(at, first, last)
        elif op == ins.FREE_B:
            now.pending_sends -= 1
            now.input_grads -= 1
        elif op == ins.WEIGHT_GRAD:
            now.weight_backlog -= 1

    def _account_backward(self, at: Instruction, first: bool, last: bool) -> None:
        now = self.memory
        now.in_flight -= 1
        handed_in = at.stage - 1 in self.required
        handed_on = at.stage + 1 in self.required
        now.inputs -= not first and (self.gives_back or not handed_in)
        now.outputs -= handed_on and not self.gives_back
        now.output_grads -= not last
        now.input_grads += not first
        released = self.facts[(at.stage, at.mb)] & F_FREED
        now.outputs -= bool(released and not self.gives_back)
        now.weight_backlog += at.op == ins.INPUT_GRAD

    def _check_end(self) -> None:
        for (stage, mb), facts in self.facts.items():
            missing = (self.required[stage] | (W_RAN if facts & W_LEFT else 0)) & ~facts
            if missing:
                chunk = self.stages.index(stage)
                raise PlanError(
                    f"rank {self.rank}: at the end of the plan, of chunk {chunk}, microbatch {mb} it is not true that "
                    + " nor that ".join(words_of(missing))
                )

    def _error(self, at: Instruction, why: str) -> PlanError:
        return PlanError(f"rank {self.rank}: {at} ({at.name}): {why}")
