"""Writing an order down phase by phase, as the papers describe it: each operation is that of the next microbatch of its
kind and chunk.
"""

from __future__ import annotations

from collections import Counter, deque

from megatron_pp.plan.family import Order, b, f, i, w


class PhaseWriter:
    """One rank's order in the making. ``order`` holds what was written so far."""

    def __init__(self) -> None:
        self.order: Order = []
        self.done: Counter[str] = Counter()  # "F0": forwards of chunk 0 written so far
        self._weights: deque[tuple[int, int]] = deque()

    def forward(self, chunk: int) -> None:
        self.order.append(f(chunk, self._next("F", chunk)))

    def backward(self, chunk: int, split: bool = False) -> None:
        """A full backward, or one that leaves its weight gradient for ``weight``."""
        mb = self._next("B", chunk)
        self.order.append(i(chunk, mb) if split else b(chunk, mb))
        if split:
            self._weights.append((chunk, mb))

    def weight(self) -> None:
        """The oldest weight gradient that was left."""
        self.order.append(w(*self._weights.popleft()))

    def all_weights(self) -> None:
        while self._weights:
            self.weight()

    def _next(self, kind: str, chunk: int) -> int:
        mb = self.done[f"{kind}{chunk}"]
        self.done[f"{kind}{chunk}"] += 1
        return mb
