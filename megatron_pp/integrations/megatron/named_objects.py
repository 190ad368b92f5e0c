"""Replaces objects under every name that imported modules have for them, and finds what else refers to them.

Tables of modules and names are copied before they are read. Until Python 3.12, ``list(table.items())`` may collect
garbage half way: a finalizer, or another thread, that imports a module then makes it raise RuntimeError. A dict's
``copy`` runs no Python code.
"""

import gc
import sys
from collections.abc import Sequence
from typing import Any

# Modules that are skipped: they have three of four names, and none of them imports Megatron.
_ELSEWHERE = sys.stdlib_module_names | {"torch", "numpy", "sympy", "mpmath", "networkx"}


def replace_names(replacements: Sequence[tuple[Any, Any]]) -> None:
    """For each (old, new), put ``new`` in place of ``old`` in all modules, also in those that imported the name."""
    by_id = {id(old): new for old, new in replacements}
    for path, module in sys.modules.copy().items():
        names = None if path.partition(".")[0] in _ELSEWHERE else getattr(module, "__dict__", None)
        if not isinstance(names, dict) or by_id.keys().isdisjoint(map(id, names.copy().values())):
            continue
        for name, value in names.copy().items():
            if id(value) in by_id:
                setattr(module, name, by_id[id(value)])


def replace_in(names: dict[str, Any], replacements: Sequence[tuple[Any, Any]]) -> None:
    """``replace_names`` for ``names``, the names of one module."""
    by_id = {id(old): new for old, new in replacements}
    for name, value in names.copy().items():
        if id(value) in by_id:
            names[name] = by_id[id(value)]


def holders_of(objects: Sequence[Any], known: Sequence[Any]) -> list[Any]:
    """The objects that refer to one of ``objects``, except ``objects`` itself and those in ``known``."""
    mark = object()
    own = {id(objects), id(known), *map(id, known)}
    found = [each for each in gc.get_referrers(mark, *objects) if id(each) not in own]
    # Since Python 3.13 get_referrers() reports the tuple of its own arguments. So a mark is passed with them: whatever
    # refers to the mark belongs to this call.
    return [each for each in found if not any(one is mark for one in gc.get_referents(each))]
