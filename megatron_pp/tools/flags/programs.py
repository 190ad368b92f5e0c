"""Maps the keys of each program to Megatron's settings, by the table `programs.csv`. The first row that fits a key
counts.

A key is a path with dots; ``*`` matches any part of it. The column "setting" has one of these:

name      the setting has the key's value
!name     the setting has the opposite of the key's value
=config   the key's last part is the name of a field in a config of Megatron-core
(empty)   the key has nothing to do with the pipeline and is ignored
"""

import csv
import fnmatch
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_pp.tools.flags.read import Read
from megatron_pp.tools.flags.table import options, settings

_FILE = Path(__file__).with_name("programs.csv")
CONFIG = "=config"


class Row(NamedTuple):
    program: str
    key: str
    setting: str


@functools.cache
def rows() -> tuple[Row, ...]:
    with _FILE.open(encoding="utf-8", newline="") as file:
        return tuple(Row(row["program"], row["key"], row["setting"]) for row in csv.DictReader(file))


def read_keys(program: str, values: Mapping[str, Any]) -> Read:
    """The settings among ``values``, the flat values of a file. A value of None counts as not given."""
    read = Read()
    for key, value in values.items():
        setting = setting_of(program, key)
        if value is None:
            continue
        if setting is None:
            read.unknown.append(key)
        elif setting:
            opposite = setting.startswith("!") and isinstance(value, bool)
            read.put(setting.removeprefix("!"), key, not value if opposite else value)
    return read


def setting_of(program: str, key: str) -> str | None:
    """The setting of a key: "" if the key has nothing to do with the pipeline, None if the key is not known."""
    for row in rows():
        if row.program == program and fnmatch.fnmatchcase(key, row.key):
            return _of_config(key.rpartition(".")[2]) if row.setting == CONFIG else row.setting
    return None


def _of_config(name: str) -> str | None:
    if name.startswith("_"):
        return ""
    named = next((row.setting for row in rows() if row.program == "config" and row.key == name), name)
    if named.removeprefix("!") in settings():
        return named
    option = "--" + name.replace("_", "-")  # a flag and its setting may have different names
    if option not in options():
        return None
    opposite = options()[option].options[option] is False
    return ("!" if opposite else "") + options()[option].name
