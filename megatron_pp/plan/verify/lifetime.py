"""The half of ``verify`` that looks at one rank at a time: the rules of ``rules.py``, syncs, and memory.

Where every site of a program (``sites.py``) runs all microbatches, and each fact is added at one site, the rules
compare the positions of whole sites. Any other program, and one that is refused, is walked instruction by instruction
(``lifetime_walk.py``).
"""

from collections.abc import Iterator, Sequence
from itertools import islice, starmap
from typing import NamedTuple

from megatron_pp.errors import InstructionError, PlanError
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import NONE, Instruction
from megatron_pp.plan.ir.repeated import Block, RepetitionError
from megatron_pp.plan.ir.rules import facts_in
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.lower.syncs import check_syncs
from megatron_pp.plan.verify.lifetime_walk import Memory, RankPeaks, Step, Walk, made_before
from megatron_pp.plan.verify.sites import RankSites, Site, are_before, peak


def check_rank(
    plan: Plan, rank: int, deallocate: bool = True, block: Block | None = None, sites: RankSites | None = None
) -> RankPeaks:
    """Check ``rank``'s program, whose ``sites`` are found where they are not given. Raises PlanError naming the rank,
    the instruction and what is missing; returns the peaks of its memory.

    ``deallocate`` says whether FREE_F gives the output's data back (config.deallocate_pipeline_outputs) or it
    stays until the backward. With ``block``, raises RepetitionError unless the block leaves the rank as it found it.
    """
    walk = Walk(plan, rank, deallocate)
    sites = RankSites(plan.programs[rank]) if sites is None else sites
    steps = _by_site(walk, sites, block)
    peaks = _walked(walk, plan, block) if steps is None else _peaks(steps)
    if sites.grouped:
        _check_groups(plan, rank)
    check_syncs(plan, rank, sites)
    return peaks


def tensors_timeline(plan: Plan, rank: int, deallocate: bool = True) -> Iterator[int]:
    """Pipeline tensors alive together right after each instruction of ``plan.timed(rank)``. Raises PlanError as
    check_rank does.
    """
    return Walk(plan, rank, deallocate).tensors()


class _SiteStep(NamedTuple):
    """What a site does, and where, by microbatch."""

    at: Instruction
    step: Step
    positions: list[int]


def _by_site(walk: Walk, sites: RankSites, block: Block | None) -> list[_SiteStep] | None:
    """What the sites do, where the program is accepted, also with ``block``, as every site runs each microbatch once
    and each fact is added at one site; else None. The facts of a cell are then those of the sites that have run it.
    """
    if walk.named is not None or walk.slices > 1 or not walk.gives_back or not sites.batches_post:
        return None
    found: list[_SiteStep] = []
    for site in sites.sites:
        try:
            step = walk.step(site.at)
        except PlanError:
            return None
        if step.bars or site.at.tensor or not _repeats(site, sites, walk.rank, block):
            return None
        if site.at.op in ins.SYNC_OPS and set(site.microbatches) == {NONE}:
            continue
        if (site.microbatches if site.at.op in walk.in_order else sorted(site.microbatches)) != walk.every:
            return None
        positions = site.positions if site.microbatches == walk.every else site.in_order()
        found.append(_SiteStep(site.at, step, positions))
    return found if _is_complete(walk, found, block) else None


def _repeats(site: Site, sites: RankSites, rank: int, block: Block | None) -> bool:
    """Whether at the end of ``block`` the site has run what it had at its start, of later microbatches, besides the
    first; a sync does not stand in it.
    """
    if block is None:
        return True
    more, (before, after) = block.microbatches, (site.before(sites.index[end]) for end in block.of(rank))
    return after == (before if site.at.op in ins.SYNC_OPS else [*range(more), *(mb + more for mb in before)])


def _is_complete(walk: Walk, steps: Sequence[_SiteStep], block: Block | None) -> bool:
    """Whether each fact is added at one site, after those that it needs, and all are there at the end."""
    facts = [(at.stage, fact, positions) for at, step, positions in steps for fact in facts_in(step.adds)]
    added = {(stage, fact): positions for stage, fact, positions in facts}
    at_end = dict.fromkeys(walk.stages, 0)
    for stage, fact in added:
        at_end[stage] |= fact
    if len(added) < len(facts) or any(starmap(walk.missing, at_end.items())):
        return False
    if block is not None and any(map(sum, zip(*(step.change for _, step, _ in steps), strict=True))):
        return False
    return all(are_before(added.get(need, ()), positions) for at, step, positions in steps for need in _needs(at, step))


def _needs(at: Instruction, step: Step) -> Iterator[tuple[int, int]]:
    """The facts that ``at`` needs, each with its stage."""
    yield from ((at.stage, fact) for fact in facts_in(step.needs))
    if at.op in ins.HAND_OPS:
        yield made_before(at)


def _peaks(steps: Sequence[_SiteStep]) -> RankPeaks:
    each = (peak((at.positions, at.step.change[kind]) for at in steps) for kind in range(len(Memory._fields)))
    return RankPeaks(Memory(*each), peak((at.positions, at.step.change.tensors) for at in steps))


def _walked(walk: Walk, plan: Plan, block: Block | None) -> RankPeaks:
    """What ``check_rank`` returns, found instruction by instruction."""
    rank, timeline, together = walk.rank, walk.tensors(), 0
    if block is not None:
        program, (start, end) = plan.programs[rank], block.of(rank)
        if any(at.op in ins.SYNC_OPS for at in program[start:end]):
            raise RepetitionError(f"rank {rank}: a sync stands in the block")
        together = max(islice(timeline, _timed_length(program[:start])), default=0)
        before = walk.state(0)
        together = max(together, max(islice(timeline, _timed_length(program[start:end])), default=0))
        if walk.state(block.microbatches) != before:
            raise RepetitionError(f"rank {rank}: tensors or microbatches differ between both ends of the block")
    together = max(together, max(timeline, default=0))
    return RankPeaks(Memory(*walk.peaks), together)


def _check_groups(plan: Plan, rank: int) -> None:
    """Members of a pair that are in their order one by one may still not belong there."""
    for at in plan.programs[rank]:
        if at.members and at.op not in ins.GROUP_OPS:
            raise PlanError(f"rank {rank}: {at.op} has members, {list(at.members)}: only batches and pairs do")
        if at.op == ins.PAIR:
            try:
                ins.pair(*at.members)
            except InstructionError as error:
                raise PlanError(
                    f"rank {rank}: {error}: what needs the pair's last weight gradient, or a tensor of another "
                    "operation, stands after or before it"
                ) from error


def _timed_length(program: Sequence[Instruction]) -> int:
    """Its length as ``Plan.timed`` counts, with the members of a pair by themselves."""
    return len(program) + sum(len(at.members) - 1 for at in program if at.op == ins.PAIR)
