"""Replace objects under every name that imported modules have for them."""

import sys
from collections.abc import Sequence
from typing import Any

# Three in four names are in these; none of them imports Megatron.
_ELSEWHERE = sys.stdlib_module_names | {"torch", "numpy", "sympy", "mpmath", "networkx"}


def replace_names(replacements: Sequence[tuple[Any, Any]]) -> None:
    """For each (old, new): put ``new`` in place of ``old`` in all modules, those that have imported its name too."""
    by_id = {id(old): new for old, new in replacements}
    for path, module in list(sys.modules.items()):
        names = None if path.partition(".")[0] in _ELSEWHERE else getattr(module, "__dict__", None)
        if not isinstance(names, dict) or by_id.keys().isdisjoint(map(id, list(names.values()))):
            continue
        for name, value in list(names.items()):
            if id(value) in by_id:
                setattr(module, name, by_id[id(value)])
