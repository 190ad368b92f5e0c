"""The part of ``verify`` that checks each rank by itself: the rules of ``rules.py``, syncs, and memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, product
from typing import Any, NamedTuple

from megatron_pp.errors import InstructionError, PlanError
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.dataflow import neighbour_of
from megatron_pp.plan.ir.feature import feature_of, hooks_of, part_word, rows_of_barriers, rows_of_names, words_of_parts
from megatron_pp.plan.ir.instruction import NONE, Instruction
from megatron_pp.plan.ir.ledger import KINDS, VIEWS, Memory, Site, change_of
from megatron_pp.plan.ir.repeated import Block, RepetitionError
from megatron_pp.plan.ir.rules import B_RAN, F_FREED, F_RAN, W_LEFT, W_RAN, facts_at_end, needs_at, rule_of, words_of
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.verify.sync_check import SyncCheck


def check_rank(plan: Plan, rank: int, deallocate: bool = True, block: Block | None = None) -> RankPeaks:
    """The peaks of memory of ``rank``'s program. Raises PlanError naming the rank, the instruction and what is missing.

    ``deallocate``: whether FREE_F frees the output's data (config.deallocate_pipeline_outputs), or else the backward
    does. With ``block``, raises RepetitionError unless the rank's state is the same before and after the block.
    """
    walk = LifetimeWalk(plan, rank, deallocate)
    timeline, together = walk.tensors(), 0
    if block is not None:
        program, (start, end) = plan.programs[rank], block.of(rank)
        if any(at.op in ins.SYNC_OPS for at in program[start:end]):
            raise RepetitionError(f"rank {rank}: the block has a sync")
        together = max(islice(timeline, _timed_length(program[:start])), default=0)
        before = walk.state(0)
        together = max(together, max(islice(timeline, _timed_length(program[start:end])), default=0))
        if walk.state(block.microbatches) != before:
            raise RepetitionError(f"rank {rank}: tensors or microbatches differ between both ends of the block")
    together = max(together, max(timeline, default=0))
    _check_groups(plan, rank)
    SyncCheck(plan, rank).run()
    return RankPeaks(Memory(*walk.peaks), together)


def _check_groups(plan: Plan, rank: int) -> None:
    """Raises PlanError if a group has members that may not be joined. Their order alone does not show it."""
    for at in plan.programs[rank]:
        if at.members and at.op not in ins.GROUP_OPS:
            raise PlanError(f"rank {rank}: {at.op} has members, {list(at.members)}: only groups do")
        if at.op in ins.JOINED_OPS:
            try:
                ins.joined(at.op, at.members)
            except InstructionError as error:
                rows = feature_of(at.op)
                raise PlanError(f"rank {rank}: {error}: {rows.outside if rows else ''}") from error


def _timed_length(program: Sequence[Instruction]) -> int:
    """The length of ``program`` with joined operations taken apart, as in ``Plan.timed``."""
    return len(program) + sum(len(at.members) - 1 for at in program if at.op in ins.JOINED_OPS)


class RankPeaks(NamedTuple):
    """Peaks over one rank's program: of each kind by itself (``each``), and of all tensors together (``tensors``)."""

    each: Memory
    tensors: int


class _Move(NamedTuple):
    """How a step changes a cell's facts and the memory. ``changes`` are tuples (index in Memory, difference)."""

    facts: int
    changes: tuple[tuple[int, int], ...]
    tensors: int


class Step(NamedTuple):
    """The needs and effects of an op of one chunk. ``moves``: facts before it -> what it does then."""

    needs: int
    adds: int
    bars: int
    change: Memory
    moves: dict[int, _Move]


class LifetimeWalk:
    """Follows a rank's program: the facts of every cell, and the tensors that are alive."""

    def __init__(self, plan: Plan, rank: int, deallocate: bool = True) -> None:
        spec = plan.spec
        self.plan = plan
        self.rank = rank
        self.forward_only = spec.forward_only
        self.barred = W_LEFT | W_RAN if not spec.split_backward else 0
        self.microbatches = spec.num_microbatches
        self.parts = spec.shape.parts
        self.placement = plan.placement
        self.last_stage = plan.placement.num_stages - 1
        self.stages = plan.placement.stages[rank]
        self.facts = dict.fromkeys(product(self.stages, range(self.microbatches), self.parts), 0)
        # Ops that each chunk runs in the order of microbatches -> the op in words, and the reason.
        self.in_order = {ins.FORWARD: ("forward", "the data iterator gives them in order")}
        if plan.placement.barriers and self.last_stage in self.stages:
            for rows in rows_of_barriers():
                self.in_order |= rows.in_order
        self.checked = ins.HAND_OPS | self.in_order.keys()
        self.then: dict[int, tuple[frozenset[str], int]] = {}  # fact -> ops that need other facts once it holds, these
        self.next = dict.fromkeys(product(self.in_order, range(spec.num_chunks)), (0, self.parts[0]))
        self.required = {s: facts_at_end(plan.placement, s, self.forward_only) for s in self.stages}
        self.known: dict[tuple[str, int, int, int, bool], Step] = {}  # keys: op, stage, peer, chunk, is it named
        self.gives_back = deallocate or spec.forward_only  # whether outputs are freed after their send or hand-off
        self.peaks = [0] * len(Memory._fields)
        self.now = [0] * len(Memory._fields)
        followed = {
            hooks: hooks.follower(plan, rank, self.facts, self._error)
            for hooks in hooks_of(spec.added, plan.placement.barriers)
        }
        self.followers = [one for one in followed.values() if one is not None]
        self.of_names = next((one for hooks, one in followed.items() if one and hooks.has_names(spec)), None)
        self.of_stages = {op: one for one in self.followers for op in one.takes}

    def tensors(self) -> Iterator[int]:
        """Run the program; yields the tensors alive after each instruction."""
        now, peaks, facts, known, followers, alive = self.now, self.peaks, self.facts, self.known, self.followers, 0
        checked = self.checked
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
                    if op in self.of_stages:
                        self._count(self.of_stages[op].moved(one))
                    elif op not in ins.SYNC_OPS:
                        raise self._no_such_cell(one)
                    continue
                facts[cell], changes, more = step.moves.get(before) or self._move(one, step, before)
                if op in checked:
                    self._check_turn(one)
                for kind, difference in changes:
                    now[kind] += difference
                    if now[kind] > peaks[kind]:
                        peaks[kind] = now[kind]
                alive += more
                if followers and op in ins.SINGLE_COMPUTE_OPS:
                    alive += sum(self._count(follower.computed(one)) for follower in followers)
            yield alive
        self._check_end()

    def _moved(self, at: Instruction) -> Iterable[tuple[str, int]]:
        """The changes of memory by a message with a name, or by its release. Raises PlanError."""
        if self.of_names is None:
            raise self._error(at, rows_of_names().lacking)
        if (at.stage, at.mb, at.part) not in self.facts:
            raise self._no_such_cell(at)
        return self.of_names.moved(at)

    def _count(self, changes: Iterable[tuple[str, int]]) -> int:
        """Add the changes of features to the memory. Returns the number of tensors that they add."""
        together = 0
        for name, difference in changes:
            kind = KINDS[name]
            self.now[kind] += difference
            self.peaks[kind] = max(self.peaks[kind], self.now[kind])
            together += difference if kind < VIEWS else 0
        return together

    def _move(self, at: Instruction, step: Step, before: int) -> _Move:
        """The effect of ``at``, also of all instructions of its step that find the same facts. Raises PlanError."""
        needs, twice = step.needs, step.adds & before
        for fact, (ops, others) in self.then.items():
            if before & fact and at.op in ops:
                needs |= others
        missing = needs & ~before
        if missing:
            raise self._error(at, "it comes before " + " and before ".join(words_of(missing)))
        if step.bars & before:
            raise self._error(at, "it comes after " + " and after ".join(words_of(step.bars & before)))
        if twice:
            raise self._error(at, " and ".join(words_of(twice)) + " already: it occurs twice")
        after, both, change = before | step.adds, F_FREED | B_RAN, step.change
        if not self.gives_back and after & both == both and before & both != both:  # frees the data that FREE_F kept
            change = change._replace(outputs=change.outputs - 1)
        changes = tuple((kind, difference) for kind, difference in enumerate(change) if difference)
        move = step.moves[before] = _Move(after, changes, change.tensors)
        return move

    def step(self, at: Instruction) -> Step:
        """The step shared by all instructions of this op and chunk. Raises PlanError if ``at`` is not one of them."""
        stage, peer = self.placement.site(self.rank, at.op, at.chunk)
        if (at.stage, at.peer) != (stage, peer):
            raise self._error(
                at,
                f"it has stage {at.stage} and peer {at.peer}; on this rank and chunk they are {stage} and {peer} "
                f"({NONE}: none)",
            )
        rule, needs, adds, bars = rule_of(at.op), 0, 0, 0
        if at.op not in ins.CHUNK_OPS and not at.tensor:
            if rule is None or (at.stage, at.mb, at.part) not in self.facts:
                raise self._no_such_cell(at)
            adds, bars = rule.adds, rule.bars
            may = 0 if self.forward_only else rule.may & ~self.barred
            if adds & ~(self.required[stage] | may):
                raise self._error(at, f"stage {stage} has no such step in this plan")
            needs = needs_at(at.op, rule.needs, stage, self.placement)
            if rule.then[0]:
                self.then[adds] = rule.then
        change = change_of(at.op, self._site(stage))
        step = self.known[(at.op, stage, peer, at.chunk, not at.tensor)] = Step(needs, adds, bars, change, {})
        return step

    def _site(self, stage: int) -> Site:
        is_last, barriers = stage == self.last_stage, self.placement.barriers
        return Site(
            has_input=stage > 0,
            has_output=not is_last or barriers > 0,
            is_root=is_last and barriers > 0,
            handed_in=stage - 1 in self.required,
            handed_on=stage + 1 in self.required,
            gives_back=self.gives_back,
            trains=not self.forward_only,
            barriers=barriers,
        )

    def _no_such_cell(self, at: Instruction) -> PlanError:
        rows = feature_of(at.op)
        if at.op in ins.STAGE_OPS and rows is not None:
            return self._error(at, rows.lacking)
        return self._error(
            at,
            f"there is no such stage and microbatch on this rank: stages are {', '.join(map(str, self.stages))}, "
            f"microbatches 0..{self.microbatches - 1}{words_of_parts(self.parts, at.part)}",
        )

    def _check_turn(self, at: Instruction) -> None:
        """Raises PlanError if a hand-off comes before its neighbour stage, or forwards are out of order."""
        if at.op in ins.HAND_OPS:
            source, fact = neighbour_of(at.op, at.stage), F_RAN if at.op == ins.HAND_F else B_RAN
            if not self.facts.get((source, at.mb, at.part), 0) & fact:
                raise self._error(at, f"stage {source} has not produced it yet on this rank")
            return
        mb, part = expected = self.next[at.op, at.chunk]
        if (at.mb, at.part) != expected:
            of, (what, why) = f", {part_word()} {part}" if part >= 0 else "", self.in_order[at.op]
            raise self._error(at, f"the next {what} of chunk {at.chunk} is that of microbatch {mb}{of}: {why}")
        self.next[at.op, at.chunk] = (mb, part + 1) if part < self.parts[-1] else (mb + 1, self.parts[0])

    def state(self, since: int) -> Any:
        """The state on which the rest of the program depends; microbatches are counted from ``since``. It has the cells
        that are begun and not complete, because nothing touches other cells before their chunk's next forward.
        """
        begun = {
            (stage, mb - since, part): facts
            for (stage, mb, part), facts in self.facts.items()
            if facts and self.missing(stage, facts)
        }
        followed = [follower.state(since) for follower in self.followers]
        return begun, [(mb - since, part) for mb, part in self.next.values()], list(self.now), followed

    def missing(self, stage: int, facts: int) -> int:
        """The facts that a finished program must still add to a cell."""
        return (self.required[stage] | (W_RAN if facts & W_LEFT else 0)) & ~facts

    def _check_end(self) -> None:
        for (stage, mb, part), facts in self.facts.items():
            missing = self.missing(stage, facts)
            if missing:
                words = " nor that ".join(words_of(missing))
                raise PlanError(f"{self._at_end((stage, mb, part))} it is not true that {words}")
        for follower in self.followers:
            follower.check_end(self._at_end)

    def _at_end(self, cell: tuple[int, int, int]) -> str:
        stage, mb, part = cell
        where = f"chunk {self.stages.index(stage)}, microbatch {mb}" + (f", {part_word()} {part}" if part >= 0 else "")
        return f"rank {self.rank}: at the end of the plan, of {where}"

    def _error(self, at: Instruction, why: str) -> PlanError:
        return ins.refusal(self.rank, at, why)
