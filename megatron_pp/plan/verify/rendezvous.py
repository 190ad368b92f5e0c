"""The part of ``verify`` that runs all ranks against each other, under the rules of the device (``device_ranks.py``).

The outcome does not depend on the order in which ranks are advanced, because a step of one rank never blocks another.
So one run decides. A rule only adds waits: a plan that passes under several rules together passes under each.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from megatron_pp.errors import PlanError
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import POST_OF, Instruction, later
from megatron_pp.plan.ir.repeated import Block, RepetitionError
from megatron_pp.plan.ir.spec import ANY_WAIT, DEVICE_SYNC, ONE_QUEUE, Plan
from megatron_pp.plan.verify.device_ranks import DeviceRanks
from megatron_pp.plan.verify.queues import DATA, SHAPE, Entry, QueueMachine

_POSTS = ins.POST_OPS | ins.COLLECTIVE_POSTS | {ins.BATCH}


def check_rendezvous(plan: Plan, device: Collection[str] = (), block: Block | None = None, replicas: int = 1) -> None:
    """Raises PlanError, with the cycle in words, if the plan can hang, or if a receive would get a message that is
    meant for another. ``device``: further rules that hold; only ONE_QUEUE, ANY_WAIT and DEVICE_SYNC are checked here.
    ``replicas``: of the pipeline; their ranks follow each other in the plan's programs. With ``block``, raises
    RepetitionError unless the standstill of ranks that run to its ends is that of ranks that run to its starts.
    """
    run = RendezvousRun(plan, [rule for rule in (ONE_QUEUE, ANY_WAIT, DEVICE_SYNC) if rule in device], replicas)
    if block is not None:
        run.upto(block.starts)
        before = run.state(block.starts, 0)
        run.upto(block.ends)
        if run.state(block.ends, block.microbatches) != before:
            raise RepetitionError("sends and receives differ between both ends of the block")
    run.upto([len(program) for program in plan.programs])
    run.check_end()


class Standstill(NamedTuple):
    """The state in which nothing moves any more. ``pending``: for each rank the posted sends, receives and collectives
    that are not over. ``awaited``: rank -> those of them at which it has stopped; a rank at its end has no entry."""

    pending: dict[int, list[Instruction]]
    awaited: dict[int, list[Instruction]]


def standstill(plan: Plan) -> Standstill:
    """Run all ranks of ``plan`` as far as they get. Its programs may end early."""
    run = RendezvousRun(plan, [], 1)
    run.upto([len(program) for program in plan.programs])
    pending: dict[int, list[Instruction]] = {}
    for queue in run.queues.queues.values():
        for entry in queue:
            pending.setdefault(entry.rank, []).extend(_unfinished(entry))
    return Standstill(pending, {rank: _unfinished(entry) for rank, entry in run.blocked.items()})


def _unfinished(entry: Entry) -> list[Instruction]:
    return [end.at for end in entry.ends if not end.done]


class RendezvousRun(DeviceRanks):
    """A run without time: a transfer is over as soon as both of its ends are posted."""

    def __init__(self, plan: Plan, rules: list[str], replicas: int) -> None:
        super().__init__(plan, QueueMachine(plan, replicas=replicas), rules)
        self.at = [0] * len(plan.programs)
        self.limits: Sequence[int] = self.at
        # Keys: op, the rest of the instruction, and content.
        self.posted: list[dict[tuple[str, tuple[Any, ...], str], Entry]] = [{} for _ in plan.programs]

    def upto(self, limits: Sequence[int]) -> None:
        """Run every rank to its limit, or until nothing moves."""
        self.limits = limits
        for rank in range(len(limits)):
            if rank not in self.blocked:
                self.agenda.plan(rank, 0)
        self.agenda.run(self.resume)

    def state(self, limits: Sequence[int], since: int) -> Any:
        """The state on which the rest of the run depends. Positions are counted from ``limits``, microbatches from
        ``since``. For a rank before its limit it has the instructions that are left; how far the rank is within an
        instruction follows from its posts and from what it waits for.
        """
        programs = [
            [later(one, -since) for one in program[at:limit]]
            for program, at, limit in zip(self.plan.programs, self.at, limits, strict=True)
        ]
        blocked = {rank: entry.state(since) for rank, entry in self.blocked.items()}
        posted = [
            {
                (op, of[0], of[1] if of[1] < 0 else of[1] - since, *of[2:], content): entry.state(since)
                for (op, of, content), entry in known.items()
            }
            for known in self.posted
        ]
        unfinished = [[entry.state(since) for entry in self.unfinished(rank)] for rank in range(len(limits))]
        return programs, blocked, posted, unfinished, self.queues.state(since)

    def check_end(self) -> None:
        """Raises PlanError if a rank has not reached its end, or if an operation has no partner."""
        stuck = [r for r in range(len(self.at)) if self.at[r] < len(self.plan.programs[r])]
        if stuck:
            from megatron_pp.plan.verify import deadlock_report

            raise PlanError(deadlock_report.cycle_in_words(self, stuck[0]))
        unfinished = next((queue[0] for queue in self.queues.queues.values() if queue), None)
        if unfinished is not None:
            end = next(e for e in unfinished.ends if not e.done)
            raise PlanError(
                f"rank {unfinished.rank}: {end.at} ({end.at.name}) has no partner: rank "
                f"{self.queues.missing_peer(end)} never posts the other end"
            )

    def program(self, rank: int) -> Iterator[Entry | None]:
        program, posted = self.plan.programs[rank], self.posted[rank]
        any_wait = self.any_wait
        while True:
            limit = self.limits[rank]  # may grow while the rank waits
            for position in range(self.at[rank], limit):
                self.at[rank] = position
                at = program[position]
                while any_wait and (unfinished := self.unfinished(rank)):
                    yield unfinished[0]
                if at.op in POST_OF:
                    key = (POST_OF[at.op], at[1:], DATA)
                    entry = posted.get(key)
                    if entry is None:
                        shape = self._shape_of(rank, at)
                        if shape.left:
                            yield shape
                        while any_wait and (unfinished := self.unfinished(rank)):
                            yield unfinished[0]
                        entry = self._post(rank, shape.at, DATA)
                    if entry.left:
                        yield entry
                    del posted[key]  # it is not needed again
                    if self.late_receives and at.op not in ins.COLLECTIVE_WAITS:
                        del posted[(key[0], key[1], SHAPE)]
                elif at.op in _POSTS:
                    if at.op == ins.BATCH and self.late_receives:  # the rank waits right away for the batch's shapes
                        shape = self._post(rank, at, SHAPE)
                        if shape.left:
                            yield shape
                    held = self._send_off(rank, at)
                    if held is not None:
                        yield held
                elif at.op in ins.COMPUTE_OPS:
                    for one in at.members:
                        while any_wait and (unfinished := self.unfinished(rank)):
                            yield unfinished[0]
                        if one.op in ins.SEND_OPS and (held := self._send_off(rank, one)) is not None:
                            yield held
                    while self.device_sync and (unfinished := self.unfinished(rank)):
                        yield unfinished[0]
            self.at[rank] = limit
            if limit == self.limits[rank]:
                yield None

    def _shape_of(self, rank: int, at: Instruction) -> Entry:
        shape = self.posted[rank].get((POST_OF[at.op], at[1:], SHAPE))
        if shape is None:
            raise PlanError(f"rank {rank}: {at} ({at.name}) waits for a transfer that was never posted")
        return shape

    def _send_off(self, rank: int, at: Instruction) -> Entry | None:
        """Post ``at``, or only the shape of a single receive whose shape comes first. Returns what blocks the rest."""
        first = self.late_receives and at.op in ins.POST_OPS
        entry = self._post(rank, at, SHAPE if first else DATA)
        if first and at.op in ins.SEND_OPS:
            entry = self._post(rank, at, DATA)
        return self.in_front_of(entry)

    def _post(self, rank: int, at: Instruction, content: str) -> Entry:
        entry = self.queues.post(rank, at, content)
        for one in at.members or (at,):
            self.posted[rank][(one.op, one[1:], content)] = entry
        met = self.queues.met
        while met:
            for end in met.pop():
                if self.queues.finish(end):
                    self.complete(end.entry, 0)
        self.opened(rank, entry)
        return entry
