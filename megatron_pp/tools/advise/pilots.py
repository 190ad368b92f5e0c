"""Extrapolates the time of a step with many microbatches from two shorter steps, the pilots. In the steady state each
further microbatch takes the same time.

The pilots of `advise` are orders that the clock of lowering times (``planner/timing.py``). `advise` ranks hundreds of
pipelines by them, and simulates the best. The pilots of `check` are plans in the simulator, which has queues and device
rules. `check` tries about a dozen settings, and reports waits for transfers and for peers; the clock does not have
these.
"""

PILOTS = (2, 4)
"""The microbatches of the pilots, in multiples of P."""


def continued(short: float, long: float, few: int, many: int, count: int) -> float:
    """The time of ``count`` microbatches, if ``few`` take ``short`` and ``many`` take ``long``."""
    if few == many:
        return long
    return long + (long - short) / (many - few) * (count - many)
