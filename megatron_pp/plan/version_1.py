"""Programs as release 0.1 wrote them, in plans (version 1) and traces: short names, a split backward without a name of
its own, pairs by adjacency.
"""

from __future__ import annotations

import re

from megatron_pp.plan import instruction as ins
from megatron_pp.plan.instruction import Instruction, pair_up, parse_program

_NEW_NAMES = {
    "RA": ins.RECV_F,
    "WA": ins.WAIT_F,
    "SA": ins.SEND_F,
    "DA": ins.FREE_F,
    "HA": ins.HAND_F,
    "RG": ins.RECV_B,
    "WG": ins.WAIT_B,
    "SG": ins.SEND_B,
    "DG": ins.FREE_B,
    "HG": ins.HAND_B,
    "PS": ins.PARAM_SYNC,
    "GE": ins.ENABLE_GRAD_SYNC,
    "GS": ins.GRAD_SYNC,
}
_OLD_NAME = re.compile(rf"\b({'|'.join(_NEW_NAMES)})(?=\d)", re.ASCII)


def parse_version_1(line: str, overlap_pairs: bool) -> list[Instruction]:
    """One rank's program, not placed, in today's instructions. Raises InstructionError."""
    program = parse_program(_OLD_NAME.sub(lambda found: _NEW_NAMES[found.group(1)], line))
    split = {(at.chunk, at.mb) for at in program if at.op == ins.WEIGHT_GRAD}
    renamed = [
        ins.instruction(ins.INPUT_GRAD, at.chunk, at.mb) if at.op == ins.BACKWARD and (at.chunk, at.mb) in split else at
        for at in program
    ]
    return pair_up(renamed) if overlap_pairs else renamed
