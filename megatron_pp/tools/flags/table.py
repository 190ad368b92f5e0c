"""The table of Megatron's flags, which `scripts/megatron_flags_table.py` makes from checkouts of Megatron-LM."""

import csv
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLUMNS = ("setting", "kind", "options", "default", "releases")
_FILE = Path(__file__).with_name("megatron.csv")
ON = "on"
OFF = "off"
EITHER = "either"
SWITCHES = (ON, OFF, EITHER)


@dataclass(frozen=True)
class Setting:
    """One of Megatron's arguments.

    kind      "int", "float" or "text", followed by " list" if it takes several values; a switch is "on", "off" or
              "either"
    options   flag -> the value that this switch sets, or None if the flag takes a value. Empty for a field of a config
              of Megatron-core that no flag sets
    default   the default of Megatron's parser
    releases  the releases of Megatron-core that have the argument, among those that the table was made from
    """

    name: str
    kind: str
    options: Mapping[str, bool | None]
    default: Any
    releases: tuple[str, ...]

    @property
    def spelling(self) -> str:
        return next(iter(self.options), self.name)


_OWN = (Setting("pipeline_schedule", "text", {}, None, ()),)
"""Settings that Megatron does not have, but other programs or this engine."""


@functools.cache
def settings() -> Mapping[str, Setting]:
    """All settings, by name."""
    with _FILE.open(encoding="utf-8", newline="") as file:
        rows = [_setting(row) for row in csv.DictReader(file)]
    return {one.name: one for one in (*rows, *_OWN)}


@functools.cache
def options() -> Mapping[str, Setting]:
    """All settings, by flag. A setting that has several flags is there once for each."""
    return {option: one for one in settings().values() for option in one.options}


def _setting(row: Mapping[str, str]) -> Setting:
    found: dict[str, bool | None] = {}
    for text in row["options"].split():
        option, _, kind = text.partition(":")
        found[option] = _value(option, kind or row["kind"])
    default = json.loads(row["default"]) if row["default"] else None
    return Setting(row["setting"], row["kind"], found, default, tuple(row["releases"].split()))


def _value(option: str, kind: str) -> bool | None:
    if kind == EITHER:
        return not option.startswith("--no-")
    return {ON: True, OFF: False}.get(kind)
