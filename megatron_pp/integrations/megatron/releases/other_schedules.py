"""Finds what keeps the steps of a program away from the engine: functions that others have put under the names of
Megatron's schedules or of `get_forward_backward_func`, and references to Megatron's functions that are still in use.

Frameworks replace these names by their own schedules or by wrappers of Megatron's (Primus: `patch_primus_pipeline`,
`patch_zero_bubble`, `dump_pp_data`, its load balancing and DeepSeek-V4). Wrapper classes keep a function that they got
before `install()`.
"""

import gc
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import CellType, CodeType, FrameType, ModuleType
from typing import Any

from megatron_pp.errors import NotServedError
from megatron_pp.integrations.megatron.releases.versions import ENTRIES

SCHEDULES = "megatron.core.pipeline_parallel.schedules"
GETTER = "get_forward_backward_func"
logger = logging.getLogger("megatron_pp")


def check_names(schedules: ModuleType, installed: Sequence[Any], strict: bool) -> None:
    """Warn of each name of Megatron's schedules by which a step does not reach one of ``installed``, the functions of
    `install()` and those that it replaces. Raises NotServedError under ``strict``."""
    for reason in [*_taken_entries(schedules, installed), *_taken_getters(schedules, installed)]:
        if strict:
            raise NotServedError(f"megatron_pp does not serve {reason}; install() without strict=True accepts that")
        logger.warning("megatron_pp does not serve %s", reason)


def _taken_entries(schedules: ModuleType, installed: Sequence[Any]) -> Iterator[str]:
    for name in ENTRIES:
        function = getattr(schedules, name)
        if not leads_to(function, [one for one in installed if one.__name__ == name]):
            yield (
                f"{name}, which {_described(function)} has replaced: what that does around Megatron-core's own would "
                "be lost, so it stays. Call install() before it is put there, and it wraps this engine's"
            )


def _taken_getters(schedules: ModuleType, installed: Sequence[Any]) -> Iterator[str]:
    theirs = [one.theirs for one in installed if hasattr(one, "theirs")]
    ends = [*installed, *theirs, getattr(schedules, GETTER)]
    taken: dict[int, list[str]] = {}
    functions = {path: getattr(module, GETTER, None) for path, module in _megatrons_modules()}
    for path, function in functions.items():
        if function is not None and not leads_to(function, ends):
            taken.setdefault(id(function), []).append(path)
    for paths in taken.values():
        found = _described(functions[paths[0]])
        if found == f"{SCHEDULES}.{GETTER}":
            yield (
                f"the steps of {' and '.join(paths)}: {GETTER} is that of Megatron-core's modules from before "
                "they were imported anew. Import these modules anew too"
            )
            continue
        yield (
            f"the steps of {' and '.join(paths)}: {GETTER} is {found} there, and returns schedules of its own. Turn "
            "that off (in Primus: patch_primus_pipeline, patch_zero_bubble), or do not install()"
        )


def _megatrons_modules() -> list[tuple[str, ModuleType]]:
    return [(path, module) for path, module in sys.modules.copy().items() if path.partition(".")[0] == "megatron"]


def report_unused(schedules: ModuleType, installed: Sequence[Any]) -> None:
    """If no step of a program has reached the engine, warn at its end of names that were replaced after `install()`."""
    for reason in _taken_getters(schedules, installed):
        logger.warning("no step of this program has run through megatron_pp: it does not serve %s", reason)


def leads_to(function: Any, ends: Sequence[Any], depth: int = 4) -> bool:
    """Whether ``function`` is one of ``ends``, or may call one through its closure, its attributes, or the names that
    it uses, at most ``depth`` functions away."""
    if any(function is end for end in ends):
        return True
    if depth == 0:
        return False
    return any(leads_to(other, ends, depth - 1) for other in _used_by(function))


def _used_by(function: Any) -> list[Callable[..., Any]]:
    """The callables that a function, a method, a partial or an object with `__call__` may call."""
    if isinstance(function, partial):
        return [function.func]
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return [each for each in getattr(function, "__dict__", {}).values() if callable(each)]
    names = _names(code)
    space = function.__globals__
    megatrons = vars(sys.modules[SCHEDULES]) if SCHEDULES in sys.modules else {}
    imported = [megatrons[name] for name in names & {*ENTRIES, GETTER} & megatrons.keys()]  # imported in its body
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    used = [*imported, *cells, *(space[name] for name in names if name in space)]
    return [each for each in used if callable(each) and not isinstance(each, type)]


def _names(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def name_holders(fetched: Sequence[Callable[..., Any]], holders: Sequence[Any]) -> None:
    """Warn of ``holders``: they have referred to ``fetched``, Megatron's schedules, since before `install()`."""
    described = sorted({_owner(holder) for holder in holders if not isinstance(holder, FrameType)})
    if described:
        names = [one.__name__ for one in fetched if any(_refers(holder, one) for holder in holders)]
        logger.warning(
            "%s was fetched before install() and is held by %s: steps that are called from there run Megatron-core's "
            "own schedule. Call install() before get_forward_backward_func()",
            " and ".join(names),
            ", ".join(described),
        )


def _refers(holder: Any, function: Any) -> bool:
    return any(each is function for each in gc.get_referents(holder))


def _owner(holder: Any) -> str:
    """A name that a person knows: for an attribute the class of its object, for a closure the function's name."""
    if isinstance(holder, dict):
        owners = [each for each in gc.get_referrers(holder) if getattr(each, "__dict__", None) is holder]
        return _owner(owners[0]) if owners else f"a dict of {holder.get('__name__', 'the program')}"
    if isinstance(holder, CellType):
        functions = [f for cells in gc.get_referrers(holder) for f in gc.get_referrers(cells) if callable(f)]
        return _described(functions[0]) if functions else "a closure"
    return _described(type(holder))


def _described(function: Any) -> str:
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
