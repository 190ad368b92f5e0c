"""The half of ``verify`` that runs all ranks against each other, under the rules of the device.

``rendezvous``   A send completes only when the matching receive is posted, and the other way round. Operations on one
                 queue run strictly in the order in which they were posted; a batch is one entry of its queue and leaves
                 it as a whole (``queues.py``). A wait holds back all that follows on its rank, while what was posted
                 goes on. A collective is over when every rank has posted it, in one order. NCCL is so with large
                 messages, gloo always.
``one_queue``    Besides, what is posted behind an unfinished operation of its own queue holds back all that follows on
                 its rank, compute included: with CUDA_DEVICE_MAX_CONNECTIONS=1 everything goes through one hardware
                 queue, whose head waits for the stream that it belongs to.
The sends of a pair are posted in it, once their half has made its result: forward first, then backward, both before
the pair is over. So under ``one_queue`` they may hold back the rest of it.

``device_sync``  Besides, compute holds back all that follows on its rank until everything that the rank has posted is
                 over, as ``torch.cuda.synchronize()`` within it does.

The outcome does not depend on the order in which ranks are advanced (each step only ever enables more), so one run
decides. A rule only adds to what is waited for: a plan that passes under several rules together passes under each.
"""

from collections.abc import Collection, Sequence
from typing import Any

from megatron_pp.errors import PlanError
from megatron_pp.on_demand import load
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import POST_OF, Instruction, later
from megatron_pp.plan.ir.repeated import Block, RepetitionError
from megatron_pp.plan.ir.spec import DEVICE_SYNC, ONE_QUEUE, Plan
from megatron_pp.plan.verify.queues import DATA, SHAPE, Entry, QueueMachine


def check_rendezvous(plan: Plan, device: Collection[str] = (), block: Block | None = None) -> None:
    """Raises PlanError where the plan can hang or a receive would get another message than it is meant for, with the
    cycle in words. ``device``: rules that hold besides rendezvous; others than ONE_QUEUE and DEVICE_SYNC say nothing
    here. With ``block``, raises RepetitionError unless ranks that run to its ends come to a standstill as ranks that
    run to its starts do.
    """
    run = _Run(plan, [rule for rule in (ONE_QUEUE, DEVICE_SYNC) if rule in device])
    if block is not None:
        run.upto(block.starts)
        before = run.state(block.starts, 0)
        run.upto(block.ends)
        if run.state(block.ends, block.microbatches) != before:
            raise RepetitionError("sends and receives differ between both ends of the block")
    run.upto([len(program) for program in plan.programs])
    run.check_end()


class _Run:
    def __init__(self, plan: Plan, rules: list[str]) -> None:
        self.plan = plan
        self.machine = QueueMachine(plan)
        self.shapes_first = plan.spec.variable_shapes
        self.rules = rules
        self.one_queue = ONE_QUEUE in rules
        self.device_sync = DEVICE_SYNC in rules
        self.at = [0] * len(plan.programs)
        self.posted: list[dict[tuple[str, tuple[Any, ...], str], Entry]] = [{} for _ in plan.programs]
        self.open: list[list[Entry]] = [[] for _ in plan.programs]  # posted, and unfinished when last looked at
        self.blocked: dict[int, Entry] = {}  # rank -> the entry that its current instruction waits for
        self.limits: Sequence[int] = self.at
        self.ready: list[int] = []

    def upto(self, limits: Sequence[int]) -> None:
        """Run every rank to its limit, or until nothing moves."""
        self.limits = limits
        self.ready = [rank for rank in range(len(limits)) if rank not in self.blocked]
        while self.ready:
            self._advance(self.ready.pop())

    def state(self, limits: Sequence[int], since: int) -> Any:
        """All that the rest of the run depends on; positions counted from ``limits``, microbatches from ``since``. Of a
        rank that has not come to its limit, what it has still to run.
        """
        programs = [
            [later(one, -since) for one in program[at:limit]]
            for program, at, limit in zip(self.plan.programs, self.at, limits, strict=True)
        ]
        blocked = {rank: entry.state(since) for rank, entry in self.blocked.items()}
        posted = [
            {
                (op, of[0], of[1] - since, *of[2:], content): entry.state(since)
                for (op, of, content), entry in known.items()
            }
            for known in self.posted
        ]
        unfinished = [[entry.state(since) for entry in entries if not entry.is_done] for entries in self.open]
        return programs, blocked, posted, unfinished, self.machine.state(since)

    def check_end(self) -> None:
        """Raises PlanError where a rank has not come to its end, or an operation has no partner."""
        stuck = [r for r in range(len(self.at)) if self.at[r] < len(self.plan.programs[r])]
        if stuck:
            raise PlanError(load("deadlock_report").cycle_in_words(self, stuck[0]))
        unfinished = next((queue[0] for queue in self.machine.queues.values() if queue), None)
        if unfinished is not None:
            end = next(e for e in unfinished.ends if not e.done)
            raise PlanError(
                f"rank {unfinished.rank}: {end.at} ({end.at.name}) has no partner: rank "
                f"{self.machine.missing_peer(end)} never posts the other end"
            )

    def _advance(self, rank: int) -> None:
        program = self.plan.programs[rank]
        for position in range(self.at[rank], self.limits[rank]):
            unfinished = self._execute(rank, program[position])
            if unfinished is not None:
                self.at[rank] = position
                self.blocked[rank] = unfinished
                return
        self.at[rank] = self.limits[rank]

    def _execute(self, rank: int, at: Instruction) -> Entry | None:
        """Post what ``at`` posts. Returns the entry that ``at`` has to wait for before the next one can start."""
        if at.op in POST_OF:
            return self._await(rank, at)
        if at.op in ins.COMPUTE_OPS:
            return self._compute(rank, at)
        if at.op in ins.COLLECTIVE_POSTS:
            return self._in_front_of(self._once(rank, at, DATA))
        if at.op not in ins.POST_OPS and at.op != ins.BATCH:
            return None
        if self.shapes_first:
            # The shape of a single receive is waited where the receive is; that of a batch or a send, here.
            shape = self._once(rank, at, SHAPE)
            if at.op in ins.RECV_OPS:
                return self._in_front_of(shape)
            if at.op == ins.BATCH and not shape.is_done:
                return shape
        return self._in_front_of(self._once(rank, at, DATA))

    def _compute(self, rank: int, at: Instruction) -> Entry | None:
        """A pair's sends are posted in it, and may hold back its rest as they would what follows it."""
        for one in at.members:
            if one.op in ins.SEND_OPS and (held := self._execute(rank, one)) is not None:
                return held
        return self._unfinished(rank) if self.device_sync else None

    def _await(self, rank: int, at: Instruction) -> Entry | None:
        """What a WAIT or FREE still waits for."""
        post, of = POST_OF[at.op], at[1:]
        data = self.posted[rank].get((post, of, DATA))
        if data is None:
            shape = self.posted[rank].get((post, of, SHAPE))
            if shape is None:
                raise PlanError(f"rank {rank}: {at} ({at.name}) waits for what was never posted")
            if not shape.is_done:
                return shape
            data = self._once(rank, shape.at, DATA)
        if not data.is_done:
            return data
        del self.posted[rank][(post, of, DATA)]  # nothing asks for it again
        if self.shapes_first and at.op not in ins.COLLECTIVE_WAITS:
            del self.posted[rank][(post, of, SHAPE)]
        return None

    def _in_front_of(self, entry: Entry) -> Entry | None:
        """What holds back all that follows ``entry`` on its rank, where everything goes through one hardware queue."""
        held = self.one_queue and not entry.is_done and entry.queue[0] is not entry
        return entry.queue[0] if held else None

    def _unfinished(self, rank: int) -> Entry | None:
        """What a synchronisation of the device waits for."""
        self.open[rank] = [entry for entry in self.open[rank] if not entry.is_done]
        return next(iter(self.open[rank]), None)

    def _once(self, rank: int, at: Instruction, content: str) -> Entry:
        """The entry of ``at``, posted now unless it was before the rank had to wait."""
        posted, first = self.posted[rank], at.members[0] if at.members else at
        entry = posted.get((first.op, first[1:], content))
        if entry is None or entry.at is not at:
            entry = self.machine.post(rank, at, content)
            for one in at.members or (at,):
                posted[(one.op, one[1:], content)] = entry
            if self.machine.met:
                self._settle()
            if self.device_sync:
                self.open[rank].append(entry)
        return entry

    def _settle(self) -> None:
        """Without time, what has met is over."""
        met = self.machine.met
        while met:
            for end in met.pop():
                if self.machine.finish(end) and self.blocked.get(end.entry.rank) is end.entry:
                    del self.blocked[end.entry.rank]
                    self.ready.append(end.entry.rank)
