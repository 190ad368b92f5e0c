"""Which key of which program is which of Megatron's settings: `programs.csv`, whose first fitting row counts.

A key is a path with dots, ``*`` for any rest of it. A setting that begins with "!" is the opposite of the key's value;
"=config" is the setting that the key's last part names in a config of Megatron-core; one that is empty is read and has
nothing to do with the pipeline.
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
    """The settings among ``values``, which are a file's, flat. None is a value that is not given."""
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
    """ "" for a key that has nothing to do with the pipeline, None for one that is not known."""
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
    option = "--" + name.replace("_", "-")  # a flag may have another name than its setting
    if option not in options():
        return None
    opposite = options()[option].options[option] is False
    return ("!" if opposite else "") + options()[option].name
