"""Instructions in words, and read from text."""

import re

from megatron_pp.errors import InstructionError
from megatron_pp.plan.ir import feature
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import BATCH, CHUNK_OPS, NONE, Instruction, batch, instruction, joined

_TOKEN = re.compile(r"([A-Z_]{1,16})(\d{1,9})(?:\.(\d{1,9}))?(?:s(\d{1,9}))?(?::([A-Za-z_]\w{0,63}))?\Z", re.ASCII)
_ENTRY = re.compile(r"\[[^\]]*\]?|\([^)]*\)?|[^\s\[(]+")


def parse_instruction(text: str) -> Instruction:
    """Read what ``str(instruction)`` prints; the result is not placed. Raises InstructionError."""
    text = text.strip()
    for op, (opening, closing) in ins.BRACKETS.items():
        if text.startswith(opening) and text.endswith(closing):
            members = [parse_instruction(part) for part in text[1:-1].split()]
            return batch(members) if op == BATCH else joined(op, members)
    found = _TOKEN.match(text)
    if found is None or found.group(1) not in ins.SINGLE_OPS:
        raise InstructionError(
            f"{text[:40]!r} is not an instruction; it would look like F0.3, SEND_F1.2, GRAD_SYNC0 or "
            "[SEND_F0.3 RECV_B0.2]"
        )
    op, chunk, mb, part, tensor = found.groups()
    if (mb is None) != (op in CHUNK_OPS):
        need = "no microbatch (as in GRAD_SYNC0)" if op in CHUNK_OPS else "a chunk and a microbatch (as in F0.3)"
        raise InstructionError(f"{text!r}: {op} takes {need}")
    if op in ins.RELEASE_OPS and tensor is None:
        raise InstructionError(f"{text!r}: {op} takes a tensor (as in DROP0.3:skip)")
    if part is None and tensor is None:
        return instruction(op, int(chunk), NONE if mb is None else int(mb))
    whole = op in CHUNK_OPS | ins.RANKWIDE_OPS
    if whole or (tensor is not None and op in ins.SINGLE_COMPUTE_OPS | ins.COPY_OPS):
        raise InstructionError(f"{text!r}: {op} takes no {'tensor' if tensor else feature.part_word()}")
    return Instruction(op, mb=int(mb), chunk=int(chunk), part=NONE if part is None else int(part), tensor=tensor or "")


def parse_program(line: str) -> list[Instruction]:
    """Read what ``format_program`` prints; the result is not placed. Raises InstructionError."""
    return [parse_instruction(token) for token in _ENTRY.findall(line)]


_VERBS = {"RECV": "receive of", "WAIT": "wait for", "SEND": "send of", "FREE": "release of", "HAND": "hand-off of"}
_NAMES = {
    ins.FORWARD: "forward",
    ins.BACKWARD: "backward",
    ins.INPUT_GRAD: "input gradient",
    ins.WEIGHT_GRAD: "weight gradient",
    **{
        f"{verb}_{kind}": f"{words} the {what}"
        for kind, what in (("F", "activation"), ("B", "gradient"))
        for verb, words in _VERBS.items()
    },
    ins.PARAM_SYNC: "parameter sync",
    ins.ENABLE_GRAD_SYNC: "start of gradient sync in the backward",
    ins.GRAD_SYNC: "gradient sync",
    BATCH: "batch",
}


def op_name(op: str) -> str:
    """``op`` in words."""
    rows = feature.feature_of(op)
    return (_NAMES if rows is None else rows.names)[op]


def name_of(at: Instruction) -> str:
    """``Instruction.name``."""
    return f"{op_name(at.op)} {at}" if at.members else f"{op_name(at.op)} of {at.where}"


def where_of(at: Instruction) -> str:
    """``Instruction.where``."""
    words = [f"chunk {at.chunk}"]
    words += [f"microbatch {at.mb}"] if at.mb >= 0 else []
    words += [f"{feature.part_word()} {at.part}"] if at.part >= 0 else []
    words += [f"tensor {at.tensor}"] if at.tensor else []
    return ", ".join(words)
