"""The schedule families. Each gives compute order only; ``megatron_pp.plan.lower`` adds the communication."""

import importlib
from collections import UserDict
from collections.abc import Callable

from megatron_pp.common.names import unknown
from megatron_pp.errors import PlanError
from megatron_pp.feature_table import families_behind
from megatron_pp.on_demand import load
from megatron_pp.plan.ir.placement import LOOP
from megatron_pp.plan.orders.family import INTERLEAVED, ONE_F_ONE_B, Family

_OWN = {
    "gpipe": "one_chunk",
    ONE_F_ONE_B: "one_chunk",
    "eager_1f1b": "one_chunk",
    INTERLEAVED: "interleaved",
    "gis": "early_backwards",
    "gis_h": "early_backwards",
    "breadth_first": "one_chunk",
    "zb_h1": "zero_bubble",
    "zb_h2": "zero_bubble",
    "interleaved_zb": "zero_bubble",
    "zb_v": "v",
    "v_half": "v",
    "v_min": "v",
    "1f1b_v": "v",
    "dualpipe_v": "v",
    "auto": "megatron_pp.planner.auto",
    "auto_v": "megatron_pp.planner.auto",
}
_MODULES = {name: module for own, path in _OWN.items() for name, module in ((own, path), *families_behind(own).items())}
"""Name -> the module, here or elsewhere, whose FAMILIES have it. It is loaded when the family is first used."""


class Families(UserDict[str, Family]):
    """Families by name. The names of the package's families are known; a family is loaded when it is first used."""

    data: dict[str, Family | None]  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.data = dict.fromkeys(_MODULES)

    def __getitem__(self, name: str) -> Family:
        family = self.data[name]
        if family is None:
            module = _MODULES[name]
            found = importlib.import_module(module if "." in module else f"{__name__}.{module}")
            self.data[name] = family = next(one for one in found.FAMILIES if one.name == name)
        return family


ENDINGS = (".csv", ".json")  # endings of the paths of schedule files

SCHEDULES = Families()

__all__ = [
    "INTERLEAVED", "ONE_F_ONE_B", "SCHEDULES", "Family", "choices",
    "find_family", "names_a_file", "placement_kind", "register",
]  # fmt: skip


def names_a_file(schedule: str) -> bool:
    """Whether ``schedule`` is the path of a file rather than a registered name."""
    return schedule.endswith(ENDINGS)


def choices() -> str:
    """The possible schedules, in words for error messages."""
    return f"one of {', '.join(SCHEDULES)}, or a .csv or .json file"


def find_family(schedule: str) -> Family:
    """The registered family of this name, or of the file at this path.

    Raises PlanError for other names and for a file whose plan cannot run, FileFormatError for a file without one.
    """
    if isinstance(schedule, str):
        if schedule in SCHEDULES:
            return SCHEDULES[schedule]
        if names_a_file(schedule):
            family_of_file: Callable[[str], Family] = load("schedule_file").family_of_file
            return family_of_file(schedule)
    raise PlanError(unknown("schedule", schedule, SCHEDULES, choices()))


def placement_kind(schedule: str | None) -> str:
    """The placement of ``schedule``. It is a loop if ``schedule`` is None, or unknown and refused later."""
    known = schedule is not None and (schedule in SCHEDULES or names_a_file(schedule))
    return find_family(schedule).placement if schedule is not None and known else LOOP


def register(family: Family) -> Family:
    """Register the program's own family under its name in this process; call it on every rank before its first step.
    Returns the family. Raises PlanError for a name that is taken, because plans are kept by name.
    """
    if family.name in SCHEDULES:
        raise PlanError(f"a schedule {family.name!r} exists already; register this one under another name")
    SCHEDULES[family.name] = family
    return family
