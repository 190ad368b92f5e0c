"""Command-line flags made from dataclasses: a field becomes ``--its-name``, its metadata the help text."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Container
from typing import Any


def add_flags(parser: argparse.ArgumentParser, cls: type, left_out: Container[str] = ()) -> None:
    """Add a flag for every field of dataclass ``cls`` whose type a command line can hold.

    Metadata read: ``help``, ``section`` (starts a group of flags; it lasts until the next), ``choices``, and ``cli``,
        where ``False`` means no flag.

    Flags not given leave no attribute in the namespace, so the dataclass's defaults stay its own.
    """
    hints = typing.get_type_hints(cls)
    group: Any = parser
    for field in dataclasses.fields(cls):
        if section := field.metadata.get("section"):
            group = parser.add_argument_group(section)
        if field.name in left_out or not field.metadata.get("cli", True):
            continue
        options = _options(hints[field.name])
        if options is None:
            continue
        if choices := field.metadata.get("choices"):
            options["choices"] = list(choices)
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            dest=field.name,
            default=argparse.SUPPRESS,
            help=_help(field),
            **options,
        )


def values_of(namespace: argparse.Namespace, cls: type) -> dict[str, Any]:
    """What ``namespace`` says about fields of ``cls``."""
    return {f.name: getattr(namespace, f.name) for f in dataclasses.fields(cls) if hasattr(namespace, f.name)}


def _help(field: dataclasses.Field[Any]) -> str:
    text = field.metadata.get("help", "").replace("%", "%%")
    if field.default in (None, dataclasses.MISSING):
        return text
    return f"{text} (default: {field.default})"


def _options(hint: Any) -> dict[str, Any] | None:
    """argparse's keywords for a value of this type; None for types that no flag can hold."""
    kinds = _kinds(hint)
    if kinds == {bool}:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(hint) is list and typing.get_args(hint) == (str,):
        return {"nargs": "+", "metavar": "PATH"}
    for kind, parse in _PARSERS.items():
        if kind in kinds:
            return {"type": parse, "metavar": kind.__name__.upper()}
    return None


def _kinds(hint: Any) -> set[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return {kind for part in typing.get_args(hint) for kind in _kinds(part)} - {type(None)}
    return {hint}


# In this order: a field that may be a float or text is text on the command line.
_PARSERS: dict[type, Callable[[str], Any]] = {str: str, float: float, int: int}
