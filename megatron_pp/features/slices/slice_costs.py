"""Costs of the slices of a sequence under causal attention, and the cuts with which all slices cost the same.

A token's linear layers cost the same everywhere; its attention reads all tokens before it. With ``attention``
the share that attention has in the time of a whole sequence, its first part, a fraction x of the tokens, costs
(1 - attention) x + attention x^2 of it.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from megatron_pp.errors import PlanError


def slice_lengths(seq_length: int, slices: int, attention: float = 0.0, multiple: int = 1) -> tuple[int, ...]:
    """Lengths in tokens of ``slices`` that cost the same, as far as multiples of ``multiple`` allow; equal ones without
    ``attention``. Raises PlanError for too few tokens, and for equal lengths that are not whole.
    """
    check_share(attention)
    units, left = divmod(seq_length, multiple)
    if left or units < slices or (attention == 0 and units % slices):
        least = slices * multiple
        needed = f"a multiple of {least}" if attention == 0 else f"a multiple of {multiple}, and at least {least}"
        raise PlanError(f"{seq_length} tokens cannot be cut into {slices} slices; their number must be {needed}")
    cuts = [0]
    for k in range(1, slices):
        linear = 1 - attention
        share = k / slices
        # The cut is at the x for which linear x + attention x^2 = share.
        wanted = round(units * (2 * share / (linear + math.sqrt(linear**2 + 4 * attention * share))))
        cuts.append(min(max(wanted, cuts[-1] + 1), units - slices + k))
    return tuple(multiple * (end - start) for start, end in pairwise([*cuts, units]))


def slice_shares(lengths: Sequence[int], attention: float = 0.0) -> tuple[float, ...]:
    """Costs of slices of these lengths, as shares of the whole sequence. Raises PlanError for an impossible share."""
    check_share(attention)
    if attention == 0 and len(set(lengths)) == 1:
        return (1 / len(lengths),) * len(lengths)
    total = sum(lengths)
    start = 0
    shares = []
    for length in lengths:
        end = start + length
        shares.append((1 - attention) * length / total + attention * (end**2 - start**2) / total**2)
        start = end
    return tuple(shares)


def check_share(attention: float) -> None:
    """Raises PlanError if ``attention`` is not a share."""
    if not 0 <= attention <= 1:
        raise PlanError(f"the share of attention is {attention}; it must lie between 0 and 1")
