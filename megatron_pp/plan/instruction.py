"""The instruction set of a pipeline plan: every instruction prints as it parses.

An instruction is a small immutable tuple ``(op, chunk, mb, members)``. ``chunk`` is the model chunk on its rank
(Megatron's ``vp_stage``), ``mb`` the microbatch. Printed form: ``F0.3`` is the forward of chunk 0, microbatch 3;
``GS1`` the gradient sync of chunk 1 (no microbatch); ``[SA0.3 RG0.2]`` a batch of sends and receives that go out as
one grouped call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

# Compute.
FORWARD = "F"  # run the chunk; on the last stage also the loss function
BACKWARD = "B"  # full backward, or input gradients only when a WEIGHT of the same (chunk, mb) follows
WEIGHT = "W"  # the weight gradients that BACKWARD left
# Activations, from a stage to the one after it.
RECV_ACT = "RA"  # allocate the buffer and post the receive of (chunk, mb)'s input; never blocks
WAIT_ACT = "WA"  # wait on that receive
SEND_ACT = "SA"  # post the send of (chunk, mb)'s output; never blocks
RELEASE_ACT = "DA"  # wait on the send's handle, then deallocate the output tensor
HAND_ACT = "HA"  # (chunk, mb)'s input is the output of the previous stage, which lives on this same rank
# Gradients, from a stage to the one before it.
RECV_GRAD = "RG"
WAIT_GRAD = "WG"
SEND_GRAD = "SG"
RELEASE_GRAD = "DG"  # wait on the send's handle, then drop the input gradient
HAND_GRAD = "HG"  # (chunk, mb)'s output gradient is the input gradient of the next stage, on this same rank
# Marks: the places where Megatron's hooks fire. They carry a chunk, no microbatch.
PARAM_SYNC = "PS"  # config.param_sync_func[chunk]
GRAD_ENABLE = "GE"  # leave no_sync for the next gradient-completing compute, so that data-parallel hooks fire in it
GRAD_SYNC = "GS"  # config.grad_sync_func[chunk]
# Several sends and receives as one grouped call.
BATCH = "["

COMPUTE_OPS = frozenset({FORWARD, BACKWARD, WEIGHT})
SEND_OPS = frozenset({SEND_ACT, SEND_GRAD})
RECV_OPS = frozenset({RECV_ACT, RECV_GRAD})
WAIT_OPS = frozenset({WAIT_ACT, WAIT_GRAD})
RELEASE_OPS = frozenset({RELEASE_ACT, RELEASE_GRAD})
HAND_OPS = frozenset({HAND_ACT, HAND_GRAD})
MARK_OPS = frozenset({PARAM_SYNC, GRAD_ENABLE, GRAD_SYNC})
BATCHABLE_OPS = SEND_OPS | RECV_OPS
ALL_OPS = COMPUTE_OPS | SEND_OPS | RECV_OPS | WAIT_OPS | RELEASE_OPS | HAND_OPS | MARK_OPS | {BATCH}

OP_NAMES = {
    FORWARD: "FORWARD",
    BACKWARD: "BACKWARD",
    WEIGHT: "WEIGHT",
    RECV_ACT: "RECV_ACT",
    WAIT_ACT: "WAIT_ACT",
    SEND_ACT: "SEND_ACT",
    RELEASE_ACT: "RELEASE_ACT",
    HAND_ACT: "HAND_ACT",
    RECV_GRAD: "RECV_GRAD",
    WAIT_GRAD: "WAIT_GRAD",
    SEND_GRAD: "SEND_GRAD",
    RELEASE_GRAD: "RELEASE_GRAD",
    HAND_GRAD: "HAND_GRAD",
    PARAM_SYNC: "PARAM_SYNC",
    GRAD_ENABLE: "GRAD_ENABLE",
    GRAD_SYNC: "GRAD_SYNC",
    BATCH: "BATCH",
}

NO_MICROBATCH = -1
_TOKEN = re.compile(r"([A-Z]{1,2})(\d{1,9})(?:\.(\d{1,9}))?\Z", re.ASCII)


class InstructionError(ValueError):
    """A text is not an instruction; the message quotes it and says what would be right."""


class Instruction(NamedTuple):
    """One step of one rank's plan."""

    op: str
    chunk: int
    mb: int
    members: tuple[Instruction, ...] = ()

    def __str__(self) -> str:
        if self.op == BATCH:
            return "[" + " ".join(map(str, self.members)) + "]"
        if self.mb < 0:
            return f"{self.op}{self.chunk}"
        return f"{self.op}{self.chunk}.{self.mb}"

    def __repr__(self) -> str:
        return str(self)

    @property
    def name(self) -> str:
        """In words, as error messages say it: ``FORWARD of chunk 0, microbatch 3``."""
        if self.op == BATCH:
            return "BATCH " + str(self)
        where = f"chunk {self.chunk}" if self.mb < 0 else f"chunk {self.chunk}, microbatch {self.mb}"
        return f"{OP_NAMES[self.op]} of {where}"


@lru_cache(maxsize=1 << 18)
def instruction(op: str, chunk: int, mb: int = NO_MICROBATCH) -> Instruction:
    """The instruction ``op`` of (chunk, mb); equal ones are one object, since every rank's plan repeats them."""
    return Instruction(op, chunk, mb)


def batch(members: Iterable[Instruction]) -> Instruction:
    """A batch: the sends and receives in ``members`` go out as one grouped call."""
    inside = tuple(members)
    wrong = [m for m in inside if m.op not in BATCHABLE_OPS]
    if wrong or not inside:
        raise InstructionError(f"a batch holds sends and receives only, and at least one; found {wrong or 'none'}")
    return Instruction(BATCH, -1, NO_MICROBATCH, inside)


def parse_instruction(text: str) -> Instruction:
    """Read what ``str(instruction)`` prints. Raises InstructionError."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        return batch(parse_instruction(part) for part in text[1:-1].split())
    found = _TOKEN.match(text)
    if found is None or found.group(1) not in ALL_OPS:
        raise InstructionError(
            f"{text[:40]!r} is not an instruction; it would look like F0.3, SA1.2, GS0 or [SA0.3 RG0.2]"
        )
    op, chunk, mb = found.groups()
    if (mb is None) != (op in MARK_OPS):
        need = "no microbatch (as in GS0)" if op in MARK_OPS else "a chunk and a microbatch (as in F0.3)"
        raise InstructionError(f"{text!r}: {OP_NAMES[op]} takes {need}")
    return instruction(op, int(chunk), NO_MICROBATCH if mb is None else int(mb))


def format_program(program: Iterable[Instruction]) -> str:
    """One rank's program as one line."""
    return " ".join(map(str, program))


def parse_program(line: str) -> list[Instruction]:
    """Read what ``format_program`` prints. Raises InstructionError."""
    return [parse_instruction(token) for token in re.findall(r"\[[^\]]*\]?|[^\s\[]+", line)]
