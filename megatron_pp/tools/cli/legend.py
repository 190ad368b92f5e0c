"""Explains names of instructions, such as ``F0.7``, below text that has them."""

from __future__ import annotations

import re

from megatron_pp.tools.draw.palette import NAMES

_NAME = re.compile(r"\b([A-Z]+(?:_[A-Z]+)*?)(\d+)\.(\d+)")
_BEGINNINGS = {
    "RECV_": "posts a receive",
    "SEND_": "posts a send",
    "WAIT_": "waits for a posted receive",
    "FREE_": "waits for a send, then frees its buffer",
    "HAND_": "hands over to another stage of the same rank",
}
_ENDS = {"_F": "of an output", "_B": "of a gradient"}


def legend(text: str) -> str:
    """A sentence that explains the names in ``text``; "" if it has none."""
    found = list(_NAME.finditer(text))
    if not found:
        return ""
    names = {match[1] for match in found}
    example = next((match for match in found if match[1] in NAMES), found[0])
    parts = [f"{example[0]} is microbatch {example[3]} of the rank's chunk {example[2]}"]
    parts += [f"{op} {meaning}" for op, meaning in NAMES.items() if op in names]
    for part, meaning in (_BEGINNINGS | _ENDS).items():
        if any(name.startswith(part) or name.endswith(part) for name in names):
            parts.append(f"{part} {meaning}")
    return "; ".join(parts)
