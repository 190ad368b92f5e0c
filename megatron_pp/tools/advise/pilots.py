"""A step of many microbatches from two shorter ones, the pilots: in its steady state every further microbatch takes as
long as the one before.

The pilots of `advise` are orders, timed by the clock of lowering (``planner/timing.py``): it ranks hundreds of
pipelines by them, and simulates the best. Those of `check` are plans in the simulator, which has queues and the rules
of the device: it looks at a dozen settings, and says how long ranks wait for transfers and for peers, which the clock
does not know.
"""

PILOTS = (2, 4)
"""Multiples of P microbatches."""


def continued(short: float, long: float, few: int, many: int, count: int) -> float:
    """What ``count`` microbatches take, where ``few`` take ``short`` and ``many`` take ``long``."""
    if few == many:
        return long
    return long + (long - short) / (many - few) * (count - many)
