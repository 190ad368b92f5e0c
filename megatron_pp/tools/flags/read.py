"""Reads the words of a command line, or the values of a file, as Megatron's settings."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_pp.tools.flags.table import SWITCHES, Setting, options, settings

_WORDS = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}


@dataclass
class Read:
    """The settings that were read.

    given     setting -> value
    spelling  setting -> the name that the user wrote
    unknown   names that are not settings of Megatron
    wrong     sentences about values of the wrong kind
    """

    given: dict[str, Any] = field(default_factory=dict)
    spelling: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def put(self, name: str, spelling: str, value: Any) -> None:
        """Adds a value. A value of the wrong kind goes to ``wrong`` only."""
        setting = settings().get(name)
        if setting is None:
            self.unknown.append(spelling)
            return
        try:
            self.given[name] = typed(setting, value)
        except ValueError as error:
            self.wrong.append(f"{spelling} {error}")
        self.spelling[name] = spelling


def read_words(words: Sequence[str]) -> Read:
    """The settings of a command line, as Megatron's parser reads it. Words before the first flag are left out."""
    read = Read()
    for option, values in words_of_flags(words):
        setting = options().get(option)
        if setting is None:
            read.unknown.append(option)
            continue
        read.spelling[setting.name] = option
        switched = setting.options[option]
        if switched is not None:
            if values:
                read.wrong.append(f"{option} is a switch and takes no value, but {' '.join(values)!r} was given")
            read.given[setting.name] = switched
        elif not values:
            read.wrong.append(f"{option} needs a value, but none was given")
        else:
            read.put(setting.name, option, values if setting.kind.endswith("list") else " ".join(values))
    return read


def words_of_flags(words: Sequence[str]) -> Iterable[tuple[str, list[str]]]:
    """Each flag with the words up to the next flag. Words before the first flag are left out."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            option, equals, value = word.partition("=")
            found.append((option, [value] if equals else []))
        elif found:
            found[-1][1].append(word)
    return found


def typed(setting: Setting, value: Any) -> Any:
    """``value`` as Megatron's parser would convert it. Raises ValueError; its text continues the sentence "NAME
    ..."."""
    if value is None:
        return None
    if setting.kind in SWITCHES:
        found = value if isinstance(value, bool) else _WORDS.get(str(value).lower())
        if found is None:
            raise ValueError(f"is {value!r}; it must be true or false")
        return found
    if setting.kind.endswith(" list"):
        items = value if isinstance(value, (list, tuple)) else str(value).split()
        return [_one(setting.kind.removesuffix(" list"), item) for item in items]
    return _one(setting.kind, value)


def _one(kind: str, value: Any) -> Any:
    if kind == "text":
        return value if isinstance(value, (list, bool)) else str(value)
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
        if kind == "float":
            return number
        if number != int(number):
            raise ValueError
        return int(value) if isinstance(value, str) and value.lstrip("+-").isdigit() else int(number)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"is {value!r}; it must be a {'whole number' if kind == 'int' else 'number'}") from None


def defaults() -> Mapping[str, Any]:
    """The defaults of Megatron's parser."""
    return {name: one.default for name, one in settings().items()}
