"""Replace objects under every name that imported modules have for them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


def replace_names(replacements: Sequence[tuple[Any, Any]]) -> None:
    """For each (old, new): put ``new`` in place of ``old`` in all modules, those that have imported its name too."""
    by_id = {id(old): new for old, new in replacements}
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        for name, value in list(names.items()) if isinstance(names, dict) else []:
            if id(value) in by_id:
                setattr(module, name, by_id[id(value)])
