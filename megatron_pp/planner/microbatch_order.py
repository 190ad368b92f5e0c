"""Finds an order for microbatches that take different times."""

import random
from collections.abc import Callable, Sequence
from functools import partial

Order = tuple[int, ...]
"""``order[k]`` is the given microbatch that runs as the k-th."""


def shortest_order(
    given: Sequence[float],
    estimate: Callable[[Order], float],
    trials: int,
    is_over: Callable[[float], bool] = lambda share: False,
) -> Order:
    """The order with the least ``estimate`` that the search finds for microbatches of the ``given`` costs.

    The search starts from several orders: as given, ascending, descending, and with the short microbatches at both ends
    (they fill and drain the pipeline quickly) or in the middle. From each it tries ``trials`` swaps of two microbatches
    and moves of one. It leaves a start when ``is_over(share)`` is true; ``share`` is the number of this start over the
    number of starts. If ``is_over`` is never true, equal arguments give equal orders.
    """
    starts = sorted(_first_orders(given), key=estimate)
    found = [_improved(one, estimate, trials, partial(is_over, k / len(starts))) for k, one in enumerate(starts, 1)]
    return min(found, key=estimate)


def _first_orders(given: Sequence[float]) -> list[Order]:
    up = sorted(range(len(given)), key=lambda k: given[k])
    down = up[::-1]
    ends = up[::2] + up[1::2][::-1]
    middle = down[::2] + down[1::2][::-1]
    return [tuple(range(len(given))), tuple(up), tuple(down), tuple(ends), tuple(middle)]


def _improved(order: Order, estimate: Callable[[Order], float], trials: int, is_over: Callable[[], bool]) -> Order:
    """The order after those swaps of two microbatches and moves of one that do not increase the estimate."""
    chance = random.Random(0)
    best = estimate(order)
    for _ in range(trials if len(order) > 1 else 0):
        if is_over():
            break
        a, b = sorted(chance.sample(range(len(order)), 2))
        between = order[a + 1 : b]
        last = (order[b], *between, order[a]) if chance.random() < 0.5 else (*between, order[b], order[a])
        changed = (*order[:a], *last, *order[b + 1 :])
        found = estimate(changed)
        if found <= best:
            best = found
            order = changed
    return order
