"""Which step it is, as the program counts (``config.step_number``).

The nth call of one rank always meets the nth call of the others: messages have no other order. So a rank that calls a
step once too often is found by the program's own number alone, and by how it moves: it stays on that rank and goes on
elsewhere. The move is the same in almost every call; so it is part of what the ranks agree on, which costs nothing
while it stays the same.
"""

from __future__ import annotations

MOVE = "step_number"
"""In a description: how the number moved; compared."""
NUMBER = "the number itself"
"""In a description: not compared, as the moves say all; shown."""


class StepNumber:
    """The number in the last call of one rank."""

    def __init__(self) -> None:
        self._last: int | None = None

    def move(self, number: int | None) -> str:
        """How ``number`` follows on that of the last call, in words; "" for a program that gives none."""
        if number is None:
            return ""
        before, self._last = self._last, number
        if before is None:
            return f"begins with {number}"
        return f"{number - before:+d} since its last step" if number != before else "as in its last step"


def shown(move: str, number: str | None) -> str:
    """What an error says of one rank."""
    if not move:
        return "none"
    return f"{number} ({move})" if number else move
