"""Resolves values of a YAML file that refer to other values of the file, as OmegaConf writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_WHOLE = re.compile(r"\$\{([\w.]+)\}")
_SELECTED = re.compile(r"\$\{oc\.select:\s*([\w.]+)\s*(?:,(.*))?\}")
_DEEPEST = 10
_CONSTANTS = {"null": None, "none": None, "": None, "true": True, "false": False}


def resolved(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values after ``${a.b}`` and ``${oc.select:a.b,default}`` are replaced, and the keys whose value is another
    kind of reference. These keys are left out of the values."""
    found: dict[str, Any] = {}
    left: list[str] = []
    for key, value in values.items():
        meant = _meant(key, value, values)
        if isinstance(meant, str) and "${" in meant:
            left.append(key)
        else:
            found[key] = meant
    return found, left


def _meant(key: str, value: Any, values: Mapping[str, Any]) -> Any:
    for _ in range(_DEEPEST):
        if not isinstance(value, str):
            return value
        whole = _WHOLE.fullmatch(value.strip())
        selected = _SELECTED.fullmatch(value.strip())
        if whole is not None and (name := _absolute(whole[1], key)) in values:
            value = values[name]
        elif selected is not None:
            default = (selected[2] or "null").strip()
            value = values.get(_absolute(selected[1], key), _CONSTANTS.get(default.lower(), default))
        else:
            return value
    return value


def _absolute(name: str, key: str) -> str:
    """The full name of a relative one: ``.name`` is in the section of ``key``, ``..name`` in the section above."""
    dots = len(name) - len(name.lstrip("."))
    return ".".join([*key.split(".")[:-dots], name.lstrip(".")]) if dots else name
