"""Which options were given, and refusing those that do not apply: an option that changes nothing is a mistake.

An option that was not given is None, False or an empty list; what it stands for then is the library's own default.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from megatron_pp.cli.errors import UsageError


def given(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Those of ``names`` that were given, with their values."""
    values = {name: getattr(args, name) for name in names}
    return {name: value for name, value in values.items() if value is not None and value is not False and value != []}


def option(args: argparse.Namespace, name: str) -> str:
    """How the option is written."""
    return str(args.spelling[name])


def refuse(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Raises UsageError for the first of ``names`` that was given, whatever its value; ``why`` ends the sentence."""
    for name in given(args, names):
        raise UsageError(f"{option(args, name)} {why}")
