"""Counts memory that PyTorch's allocator does not reuse immediately after a transfer over NCCL.

torch calls ``record_stream`` for every tensor that is sent or received (``ProcessGroupNCCL::pointToPoint``). Freed
memory can be used again only when the communicator's stream has finished all that was posted to it before, including
receives that wait for their peers. So a received input keeps its memory after its backward, until the receives that
were posted ahead on its channel are done.
"""

from collections import Counter
from collections.abc import Hashable, Iterator

from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.feature import feature_of, hooks_of
from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.ir.spec import ONE_WAY, Plan
from megatron_pp.plan.ir.tasks import MessageKey

_FINISHES = ins.WAIT_OPS | ins.FREE_OPS


def recorded_timeline(plan: Plan, rank: int, deallocate: bool = True) -> Iterator[int]:
    """The number of freed pipeline tensors of ``rank`` whose memory cannot be used again yet, after each instruction of
    ``plan.timed``. ``deallocate``: an output is freed once it was sent, and not by its backward.
    """
    walk = _StreamWalk(plan, deallocate or plan.spec.forward_only)
    for at in plan.timed(rank):
        for one in at.members or (at,):
            walk.advance(one)
        yield len(walk.waiting)


class _StreamWalk:
    def __init__(self, plan: Plan, gives_back: bool) -> None:
        self.plan = plan
        self.gives_back = gives_back
        self.added = hooks_of(plan.spec.added)
        self.posted: Counter[Hashable] = Counter()
        self.finished: Counter[Hashable] = Counter()
        self.stream_of: dict[MessageKey, Hashable] = {}  # posted message -> its stream
        self.waiting: list[tuple[Hashable, int]] = []  # for each freed tensor: the stream, and how far it must get
        self.uses = (ins.FORWARD,) if plan.spec.forward_only else ins.BACKWARD_OPS

    def advance(self, at: Instruction) -> None:
        if at.op in ins.POST_OPS:
            stream = self.stream_of[(at.op, at.stage, at.mb, at.part, at.tensor)] = self._stream(at)
            self.posted[stream] += 1
        elif at.op in _FINISHES:
            stream = self.stream_of[(ins.POST_OF[at.op], at.stage, at.mb, at.part, at.tensor)]
            self.finished[stream] += 1
            self.waiting = [(s, count) for s, count in self.waiting if self.finished[s] < count]
            if at.op == ins.FREE_B or (at.op == ins.FREE_F and self.gives_back and not at.tensor):
                self._free(ins.POST_OF[at.op], at)
        elif at.op in self.uses:
            for hooks in self.added:
                for name in hooks.names(self.plan.spec, self.plan.placement, ins.FORWARD, at.stage):
                    self._free(ins.RECV_B, at._replace(tensor=name))  # its gradient is in the sum
            self._free(ins.RECV_F, at)
            self._free(ins.RECV_B, at)
            self._free(ins.SEND_F, at)  # of an output that was kept
        elif (feature := feature_of(at.op)) is not None:
            for post in feature.ends_use.get(at.op, ()):
                self._free(post, at)

    def _free(self, post: str, at: Instruction) -> None:
        """Called when the tensor that ``post`` moved, if there is one, is not used any more."""
        stream = self.stream_of.pop((post, at.stage, at.mb, at.part, at.tensor), None)
        if stream is not None and self.finished[stream] < self.posted[stream]:
            self.waiting.append((stream, self.posted[stream]))

    def _stream(self, at: Instruction) -> Hashable:
        """The stream of the communicator: of the group for batches, of a pair, or of a channel."""
        if self.plan.spec.grouped:
            return None
        return (at.peer, at.op) if self.plan.spec.channels == ONE_WAY else at.peer
