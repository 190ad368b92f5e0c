"""Where Megatron's data-parallel hooks are called: parameter and gradient syncs, staggered so that all ranks start them
together.

Collectives slow compute down, so Megatron starts them in the same slot on every pipeline rank: rank r is r slots
behind rank 0 in the forward direction and ahead in the backward one (Megatron's interleaved schedule; apex#1611).
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

from megatron_pp.errors import PlanError
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import NONE, Instruction, numbered
from megatron_pp.plan.ir.spec import EXPLICIT, HOOKS, Plan, PlanSpec
from megatron_pp.plan.verify.sites import RankSites

_NOTED = ins.COMPUTE_OPS | ins.SYNC_OPS
_BACKWARDS = ins.BACKWARD_OPS | {ins.WEIGHT_GRAD, ins.OUTPUT_T}

Syncs = dict[int, list[Instruction]]  # index of an entry of a compute order -> syncs next to it


def syncs_of(spec: PlanSpec, rank: int, order: Sequence[Instruction]) -> tuple[Syncs, Syncs]:
    """(before, after): syncs to run right before and right after the entry of that index of ``rank``'s placed order."""
    before: Syncs = defaultdict(list)
    after: Syncs = defaultdict(list)
    if spec.param_sync:
        _param_syncs(spec, rank, order, before)
    if not spec.forward_only:
        _grad_syncs(spec, rank, order, before, after)
    return before, after


def _param_syncs(spec: PlanSpec, rank: int, order: Sequence[Instruction], before: Syncs) -> None:
    """Chunks 0 and 1 up front; chunk c + 1 when the first microbatch of chunk c is due on rank 0. One chunk alone is
    left to the wrapper's own pre-forward hooks, as in Megatron.
    """
    if spec.num_chunks == 1:
        return
    forwards = [(i, at) for i, at in numbered(order) if at.op == ins.FORWARD]
    first = {at.chunk: k for k, (_, at) in reversed(list(enumerate(forwards))) if at.mb == 0}
    stages = {at.chunk: at.stage for _, at in forwards}
    for chunk in range(spec.num_chunks):
        entry = 0 if chunk < 2 else forwards[max(0, first[chunk - 1] - rank)][0]
        before[entry].append(_sync(ins.PARAM_SYNC, chunk, stages))


def _grad_syncs(spec: PlanSpec, rank: int, order: Sequence[Instruction], before: Syncs, after: Syncs) -> None:
    singles = list(numbered(order))
    stages = {at.chunk: at.stage for _, at in singles}
    completing = [(i, at) for i, at in singles if at.op in ins.GRADIENT_OPS]
    last = {at.chunk: k for k, (_, at) in enumerate(completing)}  # chunk -> ordinal of the one that completes it
    # Megatron: the first rank of a pipeline without chunks has no bubble after its last backward to hide an explicit
    # sync in.
    if spec.grad_sync == HOOKS or (spec.num_chunks == 1 and rank == 0):
        # Layers that do not split their backward complete their gradients in the last I or B, the others in the last W.
        # A split output layer's are complete in the last T.
        last_backward = {at.chunk: i for i, at in singles if at.op in ins.BACKWARD_OPS}
        last_pass = {at.chunk: i for i, at in singles if at.op == ins.OUTPUT_T}
        for chunk, k in last.items():
            for entry in sorted({completing[k][0], last_backward[chunk], last_pass.get(chunk, completing[k][0])}):
                before[_enable_at(spec, order, entry)].append(_sync(ins.ENABLE_GRAD_SYNC, chunk, stages))
        return
    for chunk, k in sorted(last.items()):
        late = k + rank >= len(completing) or (spec.num_chunks == 1 and rank > 0)
        entry = len(order) - 1 if late else completing[k + rank][0]
        after[entry].append(_sync(ins.GRAD_SYNC, chunk, stages))


def _sync(op: str, chunk: int, stages: dict[int, int]) -> Instruction:
    return Instruction(op, stages.get(chunk, NONE), chunk=chunk)


def _enable_at(spec: PlanSpec, order: Sequence[Instruction], completing: int) -> int:
    """Right before the completing entry; without a pipeline before the forward of the last backward, where it stands
    right before that, so that wrappers which prepare in forward see it (``prepares_in_forward``).
    """
    alone = spec.pipeline_size == 1 and spec.num_chunks == 1
    if alone and completing > 0 and order[completing - 1].op == ins.FORWARD:
        return completing - 1
    return completing


def prepares_in_forward(plan: Plan, rank: int) -> bool:
    """Whether wrappers that prepare for a reduction in forward do so in the right one: without a pipeline, where the
    sync is enabled before the last forward.
    """
    if plan.spec.pipeline_size > 1 or plan.spec.num_chunks > 1:
        return False
    following = None
    for at in reversed(plan.programs[rank]):
        if at.op in ins.COMPUTE_OPS:
            following = at.op
        elif at.op == ins.ENABLE_GRAD_SYNC and following != ins.WEIGHT_GRAD:
            return following in (ins.FORWARD, ins.PAIR)
    return True


def last_reentry(plan: Plan, rank: int) -> int:
    """The position of ``rank``'s program from which on no_sync, once left, is not entered again: that of the last
    gradients. Megatron's interleaved schedule enters it after every backward, the last one among them.
    """
    program, spec = plan.programs[rank], plan.spec
    if spec.num_chunks > 1 and (spec.grad_sync == HOOKS or rank == 0):
        return len(program)
    entries = () if spec.forward_only else range(len(program) - 1, -1, -1)
    return next((k for k in entries if any(at.op in _BACKWARDS for at in ins.each([program[k]]))), 0)


def check_syncs(plan: Plan, rank: int, sites: RankSites) -> None:
    """Gradient and parameter syncs stand once per chunk, where nothing that they cover comes after (gradients) or
    before (parameters), in the program with these sites. Raises PlanError.
    """
    _Check(plan, rank, sites).run()


class _Check:
    def __init__(self, plan: Plan, rank: int, sites: RankSites) -> None:
        self.rank = rank
        self.spec = plan.spec
        self.program = plan.programs[rank]
        noted = [(k, self.program[k]) for k in sites.entries(_NOTED)]
        self.syncs = [(k, entry) for k, entry in noted if entry.op in ins.SYNC_OPS]
        ran = [(k, at) for k, entry in noted for at in ins.each([entry])]
        backwards = [(k, at) for k, at in ran if at.op in _BACKWARDS]
        self.backwards = [k for k, _ in backwards]
        # Chunk -> index of the compute operation after which its gradients are complete; the same for layers that do
        # all of their backward in B; the same for a split output layer; index of its first forward.
        self.last = {at.chunk: k for k, at in backwards if at.op != ins.OUTPUT_T}
        self.last_backward = {at.chunk: k for k, at in backwards if at.op in ins.BACKWARD_OPS}
        self.last_pass = {at.chunk: k for k, at in backwards if at.op == ins.OUTPUT_T}
        self.first = {at.chunk: k for k, at in reversed(ran) if at.op == ins.FORWARD}

    def run(self) -> None:
        seen: dict[str, set[int]] = {op: set() for op in ins.SYNC_OPS}
        early: set[int] = set()  # chunks whose sync is enabled for their last backward too, before their last WEIGHT
        passes: set[int] = set()  # chunks whose sync is enabled for the last T
        for k, at in self.syncs:
            done = passes if self._is_for_pass(k, at) else early if self._is_early(k, at) else seen[at.op]
            if at.chunk in done or not 0 <= at.chunk < self.spec.num_chunks:
                raise self._error(at, "it stands twice, or names no chunk of this rank")
            done.add(at.chunk)
            self._check_place(k, at)
        self._check_kinds(seen[ins.ENABLE_GRAD_SYNC] | passes, seen[ins.GRAD_SYNC], early)
        for chunk in sorted(set() if seen[ins.GRAD_SYNC] else self.last_pass.keys() - passes):
            last = self.program[self.last_pass[chunk]]
            why = f"no ENABLE_GRAD_SYNC{chunk} stands before it: it completes the output layer's gradient"
            raise self._error(last, why)
        if not self.spec.forward_only:
            self._check_all("gradients", seen[ins.ENABLE_GRAD_SYNC] | seen[ins.GRAD_SYNC])
        if self.spec.param_sync and self.spec.num_chunks > 1:
            self._check_all("parameters", seen[ins.PARAM_SYNC])

    def _check_all(self, what: str, synced: set[int]) -> None:
        lost = sorted(set(range(self.spec.num_chunks)) - synced)
        if lost:
            raise PlanError(f"rank {self.rank}: the {what} of chunk(s) {lost} are never synchronised")

    def _check_kinds(self, enabled: set[int], explicit: set[int], early: set[int]) -> None:
        """One kind of gradient sync a rank, and hooks in both places where gradients become complete."""
        if explicit and (enabled or early):
            raise PlanError(
                f"rank {self.rank}: ENABLE_GRAD_SYNC{min(enabled | early)} and GRAD_SYNC{min(explicit)}: a rank "
                "synchronises its gradients by hooks (ENABLE_GRAD_SYNC) or explicitly (GRAD_SYNC), not both"
            )
        for chunk in sorted(enabled - early):
            if self.last_backward.get(chunk) != self.last.get(chunk):
                last = self.program[self.last_backward[chunk]]
                raise PlanError(
                    f"rank {self.rank}: {last} ({last.name}): no ENABLE_GRAD_SYNC{chunk} stands before it: it is the "
                    "chunk's last backward, which completes the gradients of layers that do not split theirs"
                )

    def _following(self, k: int) -> int | None:
        """The backward or WEIGHT that comes next after instruction ``k``."""
        following = bisect_right(self.backwards, k)
        return self.backwards[following] if following < len(self.backwards) else None

    def _is_early(self, k: int, at: Instruction) -> bool:
        """Whether ``at`` enables the sync for a last backward that leaves weight gradients for later."""
        backward = self.last_backward.get(at.chunk)
        return at.op == ins.ENABLE_GRAD_SYNC and backward != self.last.get(at.chunk) and self._following(k) == backward

    def _is_for_pass(self, k: int, at: Instruction) -> bool:
        """Whether ``at`` enables the sync for the last T."""
        return at.op == ins.ENABLE_GRAD_SYNC and self._following(k) == self.last_pass.get(at.chunk, NONE)

    def _check_place(self, k: int, at: Instruction) -> None:
        if at.op == ins.PARAM_SYNC:
            if k > self.first.get(at.chunk, k):
                raise self._error(at, "it comes after the chunk's first forward")
            return
        if self.spec.forward_only:
            raise self._error(at, "a forward-only plan has no gradients")
        done = self.last.get(at.chunk, len(self.program))
        if at.op == ins.GRAD_SYNC:
            if self.spec.grad_sync != EXPLICIT or k < max(done, self.last_pass.get(at.chunk, done)):
                raise self._error(
                    at, "it comes before the chunk's last gradient, or this plan has no explicit gradient sync"
                )
            return
        if self._following(k) != done and not self._is_early(k, at) and not self._is_for_pass(k, at):
            raise self._error(at, "the backward that follows is not the one that completes the chunk's gradients")

    def _error(self, at: Instruction, why: str) -> PlanError:
        return PlanError(f"rank {self.rank}: {at} ({at.name}): {why}")
