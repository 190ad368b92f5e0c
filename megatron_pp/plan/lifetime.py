"""The half of ``verify`` that looks at one rank at a time: completeness, order, buffer lifetime, memory.

Every (chunk, microbatch) is a *cell* with a set of facts about it (its input is posted, is here, the forward ran,
...). An instruction needs facts, must not find its own fact already there, and adds it; a cell must end with all the
facts that its stage requires, which is what "every handle is waited exactly once" and "nothing stays alive" come to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from megatron_pp.plan import instruction as ins
from megatron_pp.plan.instruction import Instruction
from megatron_pp.plan.spec import EXPLICIT, Plan, PlanError

_ACT_POSTED, _ACT_HERE, _RAN, _ACT_SENT, _ACT_FREED = 1, 2, 4, 8, 16
_GRAD_POSTED, _GRAD_HERE, _BACK, _GRAD_SENT, _GRAD_FREED, _WEIGHTS = 32, 64, 128, 256, 512, 1024

_WORDS = {
    _ACT_POSTED: "the receive of its input was posted",
    _ACT_HERE: "its input is there",
    _RAN: "its forward ran",
    _ACT_SENT: "its output was sent",
    _ACT_FREED: "its output was released",
    _GRAD_POSTED: "the receive of its output gradient was posted",
    _GRAD_HERE: "its output gradient is there",
    _BACK: "its backward ran",
    _GRAD_SENT: "its input gradient was sent",
    _GRAD_FREED: "its input gradient was released",
    _WEIGHTS: "its weight gradients ran",
}

# op -> (facts it needs, the fact it adds)
_RULES = {
    ins.RECV_ACT: (0, _ACT_POSTED),
    ins.WAIT_ACT: (_ACT_POSTED, _ACT_HERE),
    ins.HAND_ACT: (0, _ACT_HERE),
    ins.FORWARD: (_ACT_HERE, _RAN),
    ins.SEND_ACT: (_RAN, _ACT_SENT),
    ins.RELEASE_ACT: (_ACT_SENT, _ACT_FREED),
    ins.RECV_GRAD: (0, _GRAD_POSTED),
    ins.WAIT_GRAD: (_GRAD_POSTED, _GRAD_HERE),
    ins.HAND_GRAD: (0, _GRAD_HERE),
    ins.BACKWARD: (_RAN | _GRAD_HERE, _BACK),
    ins.WEIGHT: (_BACK, _WEIGHTS),
    ins.SEND_GRAD: (_BACK, _GRAD_SENT),
    ins.RELEASE_GRAD: (_GRAD_SENT, _GRAD_FREED),
}


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
        for name in _MEMORY_FIELDS:
            if getattr(other, name) > getattr(self, name):
                setattr(self, name, getattr(other, name))


_MEMORY_FIELDS = tuple(f.name for f in fields(Memory))


@dataclass
class RankPeaks:
    """Peaks over one rank's program: of each kind for itself (``each``), and of all tensors together (``tensors``)."""

    each: Memory
    tensors: int


def check_rank(plan: Plan, rank: int, deallocate: bool = True) -> RankPeaks:
    """Walk ``rank``'s program. Raises PlanError naming the rank, the instruction and what is missing; returns the
    peaks of its memory.

    ``deallocate`` says whether RELEASE_ACT gives the output's data back (config.deallocate_pipeline_outputs) or it
    stays until the backward.
    """
    peaks, together = Memory(), 0
    for _, now in _Walk(plan, rank, deallocate).steps():
        together = max(together, now.tensors)
        peaks.grow_to(now)
    return RankPeaks(peaks, together)


def memory_timeline(plan: Plan, rank: int, deallocate: bool = True) -> Iterator[tuple[Instruction, Memory]]:
    """(instruction, memory right after it) along ``rank``'s program. Raises PlanError as check_rank does."""
    for at, now in _Walk(plan, rank, deallocate).steps():
        yield at, replace(now)


def tensors_timeline(plan: Plan, rank: int, deallocate: bool = True) -> Iterator[int]:
    """Pipeline tensors alive together right after each instruction of ``rank``'s program. Raises PlanError as
    check_rank does.
    """
    for _, now in _Walk(plan, rank, deallocate).steps():
        yield now.tensors


class _Walk:
    def __init__(self, plan: Plan, rank: int, deallocate: bool) -> None:
        spec = plan.spec
        self.rank = rank
        self.program = plan.programs[rank]
        self.forward_only = spec.forward_only
        self.optional = _WEIGHTS if spec.split_backward and not spec.forward_only else 0
        self.microbatches = spec.num_microbatches
        self.chunks = spec.num_chunks
        self.placement = plan.placement
        self.stages = plan.placement.stages[rank]
        self.facts = [0] * (self.chunks * self.microbatches)
        self.next_forward = [0] * self.chunks
        self.required = [self._facts_at_end(s) for s in self.stages]
        self.local_before = [self._chunk_of(s - 1) for s in self.stages]
        self.local_after = [self._chunk_of(s + 1) for s in self.stages]
        self.gives_back = deallocate or spec.forward_only  # whether an output's data goes when it was sent or handed on
        self.split = {(i.chunk, i.mb) for i in self.program if i.op == ins.WEIGHT}
        self.memory = Memory()
        self.marks = _Marks(plan, rank)

    def steps(self) -> Iterator[tuple[Instruction, Memory]]:
        """Run the program; after each instruction, the memory (one object, updated in place)."""
        for at in self.program:
            for one in at.members or (at,):
                if one.op in ins.MARK_OPS:
                    continue
                self._check(one)
                self._account(one)
            yield at, self.memory
        self._check_end()
        self.marks.check()

    def _facts_at_end(self, stage: int) -> int:
        """The facts that a cell of this stage must end with; WEIGHT is extra, since a backward without it is a full
        one.
        """
        facts = _RAN
        if stage > 0:
            remote = self.placement.crosses_ranks(stage - 1)
            facts |= _ACT_HERE | (_ACT_POSTED if remote else 0)
            if not self.forward_only and remote:
                facts |= _GRAD_SENT | _GRAD_FREED
        if stage < self.placement.num_stages - 1:
            remote = self.placement.crosses_ranks(stage)
            facts |= (_ACT_SENT | _ACT_FREED) if remote else 0
            if not self.forward_only:
                facts |= _GRAD_HERE | (_GRAD_POSTED if remote else 0)
        return facts if self.forward_only else facts | _BACK

    def _chunk_of(self, stage: int) -> int | None:
        """The chunk of this rank that holds ``stage``; None where another rank does or there is no such stage."""
        return self.stages.index(stage) if stage in self.stages else None

    def _check(self, at: Instruction) -> None:
        rule = _RULES.get(at.op)
        if rule is None or not (0 <= at.chunk < self.chunks and 0 <= at.mb < self.microbatches):
            raise self._error(
                at,
                f"there is no such (chunk, microbatch): chunks are 0..{self.chunks - 1}, microbatches "
                f"0..{self.microbatches - 1}",
            )
        needs, adds = rule
        cell = at.chunk * self.microbatches + at.mb
        facts, required = self.facts[cell], self.required[at.chunk]
        if adds & ~(required | self.optional):
            raise self._error(at, f"stage {self.stages[at.chunk]} has no such step in this plan")
        missing = needs & (required | _BACK) & ~facts
        if missing:
            raise self._error(at, "it comes before " + " and before ".join(w for f, w in _WORDS.items() if missing & f))
        if facts & adds:
            raise self._error(at, f"{_WORDS[adds]} already: it stands twice")
        if at.op in ins.HAND_OPS:
            self._check_hand(at)
        elif at.op == ins.FORWARD:
            self._check_forward(at)
        self.facts[cell] = facts | adds

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
        stage = self.stages[at.chunk]
        source, fact = (stage - 1, _RAN) if at.op == ins.HAND_ACT else (stage + 1, _BACK)
        chunk = self._chunk_of(source)
        if chunk is None or not self.facts[chunk * self.microbatches + at.mb] & fact:
            raise self._error(at, f"stage {source} has not produced it yet on this rank")

    def _account(self, at: Instruction) -> None:
        now, op, stage = self.memory, at.op, self.stages[at.chunk]
        first, last = stage == 0, stage == self.placement.num_stages - 1
        if op == ins.RECV_ACT:
            now.act_buffers += 1
        elif op == ins.WAIT_ACT:
            now.act_buffers -= 1
            now.inputs += 1
        elif op == ins.HAND_ACT:
            # Given back, the output's storage becomes the input's; else it stays the output's until its backward.
            if self.gives_back:
                now.outputs -= 1
                now.inputs += 1
        elif op == ins.FORWARD:
            now.outputs += not last
            now.inputs -= self.forward_only and not first
            now.in_flight += not self.forward_only
        elif op == ins.SEND_ACT or op == ins.SEND_GRAD:
            now.pending_sends += 1
        elif op == ins.RELEASE_ACT:
            now.pending_sends -= 1
            kept = not (self.gives_back or self.facts[at.chunk * self.microbatches + at.mb] & _BACK)
            now.outputs -= not kept
        elif op == ins.RECV_GRAD:
            now.grad_buffers += 1
        elif op == ins.WAIT_GRAD:
            now.grad_buffers -= 1
            now.output_grads += 1
        elif op == ins.HAND_GRAD:
            now.input_grads -= 1
            now.output_grads += 1
        elif op == ins.BACKWARD:
            self._account_backward(at, first, last)
        elif op == ins.RELEASE_GRAD:
            now.pending_sends -= 1
            now.input_grads -= 1
        elif op == ins.WEIGHT:
            now.weight_backlog -= 1

    def _account_backward(self, at: Instruction, first: bool, last: bool) -> None:
        now = self.memory
        now.in_flight -= 1
        handed_in = self.local_before[at.chunk] is not None
        handed_on = self.local_after[at.chunk] is not None
        now.inputs -= not first and (self.gives_back or not handed_in)
        now.outputs -= handed_on and not self.gives_back
        now.output_grads -= not last
        now.input_grads += not first
        released = self.facts[at.chunk * self.microbatches + at.mb] & _ACT_FREED
        now.outputs -= bool(released and not self.gives_back)
        now.weight_backlog += (at.chunk, at.mb) in self.split

    def _check_end(self) -> None:
        for cell, facts in enumerate(self.facts):
            chunk, mb = divmod(cell, self.microbatches)
            missing = self.required[chunk] & ~facts
            if missing:
                words = [w for f, w in _WORDS.items() if missing & f]
                raise PlanError(
                    f"rank {self.rank}: at the end of the plan, of chunk {chunk}, microbatch {mb} it is not true that "
                    + " nor that ".join(words)
                )

    def _error(self, at: Instruction, why: str) -> PlanError:
        return PlanError(f"rank {self.rank}: {at} ({at.name}): {why}")


class _Marks:
    """Gradient and parameter syncs: once per chunk, where nothing that they cover comes after (gradients) or before
    (parameters).
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self.rank = rank
        self.spec = plan.spec
        self.program = plan.programs[rank]
        self.last: dict[int, int] = {}  # chunk -> index of the compute operation after which its gradients are complete
        self.last_backward: dict[int, int] = {}  # chunk -> the same for layers that do all of their backward in B
        self.first: dict[int, int] = {}  # chunk -> index of its first forward
        self.backwards: list[int] = []
        for k, at in enumerate(self.program):
            if at.op == ins.FORWARD:
                self.first.setdefault(at.chunk, k)
            elif at.op in (ins.BACKWARD, ins.WEIGHT):
                self.last[at.chunk] = k
                self.backwards.append(k)
                if at.op == ins.BACKWARD:
                    self.last_backward[at.chunk] = k

    def check(self) -> None:
        seen: dict[str, set[int]] = {op: set() for op in ins.MARK_OPS}
        early: set[int] = set()  # chunks whose sync is enabled for their last backward too, before their last WEIGHT
        for k, at in enumerate(self.program):
            if at.op not in ins.MARK_OPS:
                continue
            done = early if self._is_early(k, at) else seen[at.op]
            if at.chunk in done or not 0 <= at.chunk < self.spec.num_chunks:
                raise self._error(at, "it stands twice, or names no chunk of this rank")
            done.add(at.chunk)
            self._check_place(k, at)
        self._check_kinds(seen[ins.GRAD_ENABLE], seen[ins.GRAD_SYNC], early)
        synced = seen[ins.GRAD_ENABLE] | seen[ins.GRAD_SYNC]
        if not self.spec.forward_only and synced != set(range(self.spec.num_chunks)):
            lost = sorted(set(range(self.spec.num_chunks)) - synced)
            raise PlanError(f"rank {self.rank}: the gradients of chunk(s) {lost} are never synchronised")
        if (
            self.spec.param_sync
            and self.spec.num_chunks > 1
            and seen[ins.PARAM_SYNC] != set(range(self.spec.num_chunks))
        ):
            lost = sorted(set(range(self.spec.num_chunks)) - seen[ins.PARAM_SYNC])
            raise PlanError(f"rank {self.rank}: the parameters of chunk(s) {lost} are never synchronised")

    def _check_kinds(self, enabled: set[int], explicit: set[int], early: set[int]) -> None:
        """One kind of gradient sync a rank, and hooks in both places where gradients become complete."""
        if explicit and (enabled or early):
            raise PlanError(
                f"rank {self.rank}: GE{min(enabled | early)} and GS{min(explicit)}: a rank synchronises its gradients "
                "by hooks (GE) or explicitly (GS), not both"
            )
        for chunk in sorted(enabled - early):
            if self.last_backward.get(chunk) != self.last.get(chunk):
                last = self.program[self.last_backward[chunk]]
                raise PlanError(
                    f"rank {self.rank}: {last} ({last.name}): no GE{chunk} stands before it: it is the chunk's last "
                    "backward, which completes the gradients of layers that do not split theirs"
                )

    def _following(self, k: int) -> int | None:
        """The backward or WEIGHT that comes next after instruction ``k``."""
        return next((c for c in self.backwards if c > k), None)

    def _is_early(self, k: int, at: Instruction) -> bool:
        """Whether ``at`` enables the sync for a last backward that leaves weight gradients for later."""
        backward = self.last_backward.get(at.chunk)
        return at.op == ins.GRAD_ENABLE and backward != self.last.get(at.chunk) and self._following(k) == backward

    def _check_place(self, k: int, at: Instruction) -> None:
        if at.op == ins.PARAM_SYNC:
            if k > self.first.get(at.chunk, k):
                raise self._error(at, "it comes after the chunk's first forward")
            return
        if self.spec.forward_only:
            raise self._error(at, "a forward-only plan has no gradients")
        done = self.last.get(at.chunk, len(self.program))
        if at.op == ins.GRAD_SYNC:
            if self.spec.grad_sync != EXPLICIT or k < done:
                raise self._error(
                    at, "it comes before the chunk's last gradient, or this plan has no explicit gradient sync"
                )
            return
        if self._following(k) != done and not self._is_early(k, at):
            raise self._error(at, "the backward that follows is not the one that completes the chunk's gradients")

    def _error(self, at: Instruction, why: str) -> PlanError:
        return PlanError(f"rank {self.rank}: {at} ({at.name}): {why}")
