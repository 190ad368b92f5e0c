"""Checks that gradient and parameter syncs are at places where no gradient is lost or reduced too early."""

from bisect import bisect_right

from megatron_pp.errors import PlanError
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.feature import words_of_features
from megatron_pp.plan.ir.instruction import NONE, Instruction, refusal
from megatron_pp.plan.ir.spec import EXPLICIT, Plan

_NOTED = ins.COMPUTE_OPS | ins.SYNC_OPS
_BACKWARDS = ins.BACKWARD_OPS | ins.LAST_PASS | {ins.WEIGHT_GRAD}


class SyncCheck:
    """Checks that each chunk has its syncs once: gradient syncs behind gradients, parameter syncs before forwards."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.rank = rank
        self.spec = plan.spec
        self.program = plan.programs[rank]
        noted = [(k, entry) for k, entry in enumerate(self.program) if entry.op in _NOTED]
        self.syncs = [(k, entry) for k, entry in noted if entry.op in ins.SYNC_OPS]
        ran = [(k, at) for k, entry in noted for at in entry.members or (entry,)]
        backwards = [(k, at) for k, at in ran if at.op in _BACKWARDS]
        self.backwards = [k for k, _ in backwards]
        # Chunk -> index of the operation that completes its gradients, then the same for layers that do not split
        # their backward, then for passes. Last, chunk -> index of its first forward.
        self.last = {at.chunk: k for k, at in backwards if at.op not in ins.LAST_PASS}
        self.last_backward = {at.chunk: k for k, at in backwards if at.op in ins.BACKWARD_OPS}
        self.last_pass = {at.chunk: k for k, at in backwards if at.op in ins.LAST_PASS}
        self.first = {at.chunk: k for k, at in reversed(ran) if at.op == ins.FORWARD}

    def run(self) -> None:
        """Raises PlanError."""
        seen: dict[str, set[int]] = {op: set() for op in ins.SYNC_OPS}
        early: set[int] = set()  # chunks whose sync is enabled also for their last backward, before their last WEIGHT
        passes: set[int] = set()  # chunks whose sync is enabled for the last pass
        for k, at in self.syncs:
            done = passes if self._is_for_pass(k, at) else early if self._is_early(k, at) else seen[at.op]
            if at.chunk in done or not 0 <= at.chunk < self.spec.num_chunks:
                raise refusal(self.rank, at, "it occurs twice, or names no chunk of this rank")
            done.add(at.chunk)
            self._check_place(k, at)
        self._check_kinds(seen[ins.ENABLE_GRAD_SYNC] | passes, seen[ins.GRAD_SYNC], early)
        for chunk in sorted(set() if seen[ins.GRAD_SYNC] else self.last_pass.keys() - passes):
            last = self.program[self.last_pass[chunk]]
            why = f"no ENABLE_GRAD_SYNC{chunk} stands before it: it completes {words_of_features('gradient_words')}"
            raise refusal(self.rank, last, why)
        wanted = []
        if not self.spec.forward_only:
            wanted.append(("gradients", seen[ins.ENABLE_GRAD_SYNC] | seen[ins.GRAD_SYNC]))
        if self.spec.param_sync and self.spec.num_chunks > 1:
            wanted.append(("parameters", seen[ins.PARAM_SYNC]))
        for what, synced in wanted:
            lost = sorted(set(range(self.spec.num_chunks)) - synced)
            if lost:
                raise PlanError(f"rank {self.rank}: the {what} of chunk(s) {lost} are never synchronised")

    def _check_kinds(self, enabled: set[int], explicit: set[int], early: set[int]) -> None:
        """Raises PlanError if a rank has both kinds of gradient sync, or hooks at only one of the places where
        gradients become complete."""
        if explicit and (enabled or early):
            raise PlanError(
                f"rank {self.rank}: ENABLE_GRAD_SYNC{min(enabled | early)} and GRAD_SYNC{min(explicit)}: a rank "
                "synchronises its gradients by hooks (ENABLE_GRAD_SYNC) or explicitly (GRAD_SYNC), not both"
            )
        for chunk in sorted(enabled - early):
            if self.last_backward.get(chunk) != self.last.get(chunk):
                last = self.program[self.last_backward[chunk]]
                why = f"no ENABLE_GRAD_SYNC{chunk} stands before it: it is the chunk's last backward, which completes"
                raise refusal(self.rank, last, f"{why} the gradients of layers that do not split theirs")

    def _following(self, k: int) -> int | None:
        """The index of the backward or W that comes next after instruction ``k``."""
        following = bisect_right(self.backwards, k)
        return self.backwards[following] if following < len(self.backwards) else None

    def _is_early(self, k: int, at: Instruction) -> bool:
        """Whether ``at`` enables the sync for a last backward that leaves weight gradients for later."""
        backward = self.last_backward.get(at.chunk)
        return at.op == ins.ENABLE_GRAD_SYNC and backward != self.last.get(at.chunk) and self._following(k) == backward

    def _is_for_pass(self, k: int, at: Instruction) -> bool:
        """Whether ``at`` enables the sync for the last pass."""
        return at.op == ins.ENABLE_GRAD_SYNC and self._following(k) == self.last_pass.get(at.chunk, NONE)

    def _check_place(self, k: int, at: Instruction) -> None:
        if at.op == ins.PARAM_SYNC:
            if k > self.first.get(at.chunk, k):
                raise refusal(self.rank, at, "it comes after the chunk's first forward")
            return
        if self.spec.forward_only:
            raise refusal(self.rank, at, "a forward-only plan has no gradients")
        done = self.last.get(at.chunk, len(self.program))
        if at.op == ins.GRAD_SYNC:
            if self.spec.grad_sync != EXPLICIT or k < max(done, self.last_pass.get(at.chunk, done)):
                raise refusal(
                    self.rank,
                    at,
                    "it comes before the chunk's last gradient, or this plan has no explicit gradient sync",
                )
            return
        if self._following(k) != done and not self._is_early(k, at) and not self._is_for_pass(k, at):
            why = "the backward that follows is not the one that completes the chunk's gradients"
            raise refusal(self.rank, at, why)
