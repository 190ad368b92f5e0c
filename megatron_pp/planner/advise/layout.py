"""Layers per stage, and Megatron's text for them."""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, groupby, pairwise

from megatron_pp.plan.ir.placement import LOOP, Placement
from megatron_pp.planner.advise.model import LETTERS, MTP, Layer, spreads_mtp

Units = Sequence[tuple[Layer, ...]]
Counts = tuple[int, ...]  # units of each stage, in model order
_MOST_MOVES = 60


def balanced(units: Units, num_stages: int) -> Counts:
    """Contiguous stages whose most expensive one is as cheap as can be, each with at least one unit."""
    work = [sum(one.work for one in unit) for unit in units]
    low, high = max(work), sum(work)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if _greedy(work, num_stages, middle) else (middle, high)
    return _greedy(work, num_stages, high) or _greedy(work, num_stages, sum(work)) or ()


def _greedy(work: Sequence[float], num_stages: int, most: float) -> Counts | None:
    """Stages of at most ``most`` work, filled from the front; None where there would be more of them."""
    counts, filled = [0], 0.0
    for k, one in enumerate(work):
        left, stages_left = len(work) - k, num_stages - len(counts)
        if counts[-1] and (filled + one > most * (1 + 1e-12) or left <= stages_left):
            counts.append(0)
            filled = 0.0
        counts[-1] += 1
        filled += one
    return tuple(counts) if len(counts) == num_stages else None


def improved(
    counts: Counts,
    price: Callable[[Counts], tuple[float, ...]],
    givers: Callable[[Counts], Iterable[int]],
    is_allowed: Callable[[Counts], bool],
) -> Counts:
    """``counts`` after moves of one unit from one of the stages ``givers`` to another, each the best there is, for as
    long as ``price`` falls.
    """
    best = price(counts)
    for _ in range(_MOST_MOVES):
        pairs = ((a, b) for a in givers(counts) if counts[a] > 1 for b in range(len(counts)) if a != b)
        moves = [move for move in (_moved(counts, a, b) for a, b in pairs) if is_allowed(move)]
        least = min(((price(move), move) for move in moves), default=(best, counts))
        if least[0] >= best:
            break
        best, counts = least
    return counts


def _moved(counts: Counts, source: int, target: int) -> Counts:
    return tuple(n - (k == source) + (k == target) for k, n in enumerate(counts))


def stages_of(units: Units, counts: Counts) -> list[tuple[Layer, ...]]:
    """The layers of each stage, in model order."""
    ends = list(accumulate(counts, initial=0))
    return [tuple(one for unit in units[a:b] for one in unit) for a, b in pairwise(ends)]


def is_buildable(stages: Sequence[Sequence[Layer]], placement: Placement) -> bool:
    """Whether Megatron builds these: MTP layers in the last chunk of a rank but the first, and on a V with the loss."""
    if spreads_mtp(one for layers in stages for one in layers):
        return True
    allowed = {row[-1] for row in placement.stages[1:]} if placement.kind == LOOP else set()
    allowed.add(placement.num_stages - 1)
    return all(stage in allowed or all(one.kind != MTP for one in layers) for stage, layers in enumerate(stages))


def layout_text(stages: Sequence[Sequence[Layer]]) -> str:
    """Megatron's ``pipeline_model_parallel_layout``: ``Et*3|(t*4|)*6t*3L``."""
    texts = [_letters("".join(LETTERS[one.kind] for one in layers)) for layers in stages]
    parts = []
    for text, run in groupby(texts[:-1]):
        times = len(list(run))
        parts.append(f"({text}|)*{times}" if times > 1 else f"{text}|")
    return "".join(parts) + texts[-1]


def _letters(text: str) -> str:
    return re.sub(r"(.)\1+", lambda found: f"{found[1]}*{len(found[0])}", text)
