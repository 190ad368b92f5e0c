"""Instructions in the form that the engine executes: the values that a handler reads, made once per plan."""

from __future__ import annotations

from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import Instruction, later

Cell = tuple[int, int, int]  # (stage, microbatch, part)
MbPart = int | tuple[int, int]  # a microbatch, or (microbatch, part) where microbatches are in parts
MessageKey = tuple[str, int, int, int, str]  # (SEND or RECV, stage, microbatch, part, tensor)


class Task:
    """A placed instruction, moved on by some microbatches, with the keys of the tables that it uses. It has plain
    attributes, because reading them takes a third of the time of a tuple's named fields.

    message  for a transfer: the op that posts it, its stage, microbatch, part and tensor; equal for a SEND and its FREE
    """

    __slots__ = (
        *("_at", "_instruction", "_later", "chunk", "key", "mb", "mb_part", "members", "message", "op", "part"),
        *("peer", "stage", "tensor"),
    )

    def __init__(self, at: Instruction, microbatches: int = 0) -> None:
        op, stage, mb, peer, chunk, part, tensor, members = at
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
        self.part = part
        self.tensor = tensor
        self.mb_part: MbPart = mb if part == ins.NONE else (mb, part)
        self.key: Cell = (stage, mb, part)
        self.message: MessageKey = (ins.POST_OF.get(op, op), stage, mb, part, tensor)
        self.members = tuple([Task(one, microbatches) for one in members]) if members else ()

    @property
    def instruction(self) -> Instruction:
        """The instruction, made on first use: only observers and error messages need it."""
        if self._instruction is None:
            self._instruction = later(self._at, self._later)
        return self._instruction
