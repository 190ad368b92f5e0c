"""Reads and changes the flags of a training script as they are written, without knowledge of the script's parser.
`check`, `advise` and `parity` split command lines with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Flags:
    """Flags in their order. A flag has the words up to the next flag as values. Words before the first flag have the
    name ""."""

    items: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @staticmethod
    def read(words: Sequence[str]) -> Flags:
        """Reads `--name value ...`, `--name=value` and `--switch`."""
        items: list[tuple[str, tuple[str, ...]]] = []
        for word in words:
            if word.startswith("--"):
                name, equals, value = word.partition("=")
                items.append((name, (value,) if equals else ()))
            elif items:
                items[-1] = (items[-1][0], (*items[-1][1], word))
            else:
                items.append(("", (word,)))
        return Flags(tuple(items))

    def words(self) -> list[str]:
        return [word for name, values in self.items for word in ((name, *values) if name else values)]

    def __contains__(self, name: str) -> bool:
        return any(known == name for known, _ in self.items)

    def text(self, name: str, default: str = "") -> str:
        """The last value that the words give; "" for a switch."""
        found = [" ".join(values) for known, values in self.items if known == name]
        return found[-1] if found else default

    def number(self, name: str, default: int) -> int:
        """The last value as a number. Raises ValueError if it is not a whole number."""
        text = self.text(name)
        return int(text) if text else default

    def without(self, *names: str) -> Flags:
        return Flags(tuple(item for item in self.items if item[0] not in names))

    def with_values(self, **values: object) -> Flags:
        """The flags with new values. A flag that exists keeps its place; another is added at the end.

        Names are written with _ instead of -. True makes the flag a switch; False and None remove it.
        """
        flags = self
        for key, value in values.items():
            flags = flags.set("--" + key.replace("_", "-"), value)
        return flags

    def set(self, name: str, value: object) -> Flags:
        if value is None or value is False:
            return self.without(name)
        words = () if value is True else tuple(str(value).split())
        if name not in self:
            return Flags((*self.items, (name, words)))
        return Flags(tuple((known, words if known == name else old) for known, old in self.items))

    def having(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name in self]
