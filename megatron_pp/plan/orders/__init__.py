"""The schedule families. Each gives compute order only; ``megatron_pp.plan.lower.lowering`` adds the communication."""

from megatron_pp.errors import PlanError
from megatron_pp.plan.ir.placement import LOOP, V_SHAPE
from megatron_pp.plan.orders import auto, loop, v, vocabulary
from megatron_pp.plan.orders.family import Family
from megatron_pp.plan.orders.loop import COMBINED, INTERLEAVED, ONE_F_ONE_B

_SEARCHING_FAMILIES = (
    auto.searching_family("auto", loop.FAMILIES, LOOP, chunks=None),
    auto.searching_family("auto_v", v.FAMILIES, V_SHAPE, chunks=2),
)

SCHEDULES: dict[str, Family] = {
    family.name: family
    for family in (
        *loop.FAMILIES,
        *v.FAMILIES,
        *loop.SLICED,
        *vocabulary.FAMILIES,
        *_SEARCHING_FAMILIES,
    )
}

__all__ = ["COMBINED", "INTERLEAVED", "ONE_F_ONE_B", "SCHEDULES", "Family", "check_slices", "register"]


def check_slices(family: Family, slices: int) -> None:
    """Raises PlanError where ``family`` has no orders of that many slices of a sequence."""
    if slices > 1 and not family.sliced:
        names = ", ".join(name for name, other in SCHEDULES.items() if other.sliced)
        raise PlanError(f"schedule {family.name} runs sequences whole, not in {slices} slices; {names} have slices")


def register(family: Family) -> Family:
    """Make a family of the program's own known by its name, for this process: every rank does so before its first step.

    Returns the family. Raises PlanError for a name that is taken, as plans are kept by name.
    """
    if family.name in SCHEDULES:
        raise PlanError(f"a schedule {family.name!r} exists already; register this one under another name")
    SCHEDULES[family.name] = family
    return family
