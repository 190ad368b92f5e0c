"""Instructions as the engine executes them: what a handler reads, made once per plan instead of in every step."""

from __future__ import annotations

from megatron_pp.plan import instruction as ins
from megatron_pp.plan.instruction import Instruction, later

Key = tuple[int, int]  # (stage, microbatch)
MessageKey = tuple[str, int, int]  # (SEND or RECV, stage, microbatch)


class Task:
    """A placed instruction, that many microbatches later, with the keys of what it works on. Plain attributes are read
    in a third of the time that a tuple's named fields take.

    message  of a transfer: the operation that posts it, its stage and microbatch; the same for a SEND and its FREE
    """

    __slots__ = ("_at", "_instruction", "_later", "chunk", "key", "mb", "members", "message", "op", "peer", "stage")

    def __init__(self, at: Instruction, microbatches: int = 0) -> None:
        op, stage, mb, peer, chunk, _, _, members = at
        if mb != ins.NONE:
            mb += microbatches
        self._at = at
        self._later = microbatches
        self._instruction = None if microbatches else at
        self.op = op
        self.stage = stage
        self.mb = mb
        self.peer = peer
        self.chunk = chunk
        self.key: Key = (stage, mb)
        self.message: MessageKey = (ins.POST_OF.get(op, op), stage, mb)
        self.members = tuple([Task(one, microbatches) for one in members]) if members else ()

    @property
    def instruction(self) -> Instruction:
        """Made when it is first asked for: by who observes the run, or names an error."""
        if self._instruction is None:
            self._instruction = later(self._at, self._later)
        return self._instruction
