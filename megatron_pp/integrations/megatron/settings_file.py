"""A TOML file of settings for `install()`."""

import re
import sys
from os import PathLike
from typing import Any

from megatron_pp.errors import ConfigError, FileFormatError
from megatron_pp.plan.costs.files import read_text

_LARGEST = 1 << 14
# A truth value in a spelling that is not TOML's.
_SWITCH = re.compile(r"^\s*([\w.-]+)\s*=\s*(yes|no|on|off|True|False|Yes|No|On|Off)\s*(?:#.*)?$", re.MULTILINE)


def read_toml(path: str | PathLike[str]) -> dict[str, Any]:
    """The settings in a file. Raises ConfigError, which names the file, if it cannot be read, is not TOML or too long,
    or if no parser is installed."""
    try:
        return parse_toml(read_text(path))
    except FileFormatError as error:  # its text names the file
        raise ConfigError(f"settings file {error}") from error
    except ValueError as error:
        raise ConfigError(f"settings file {path}: {error}") from error


def parse_toml(text: str) -> dict[str, Any]:
    """The settings in ``text``. Raises ValueError if it is not TOML or too long, ConfigError without a parser."""
    if len(text) > _LARGEST:  # the parser takes a second for one key with this many parts, and minutes for ten times
        raise ValueError(f"it has {len(text):,} characters; settings have at most {_LARGEST:,}")
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError as error:
            raise ConfigError("before Python 3.11, reading it takes the package tomli: pip install tomli") from error
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except tomllib.TOMLDecodeError as error:
        word = _SWITCH.search(text)
        if word is None:
            raise
        raise ValueError(f"{error}: {word[1].strip()} is {word[2]}; a switch of TOML is true or false") from error
