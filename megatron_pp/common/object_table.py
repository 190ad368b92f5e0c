"""A table of values that belong to objects, for as long as the objects live."""

import weakref
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class ObjectTable(Generic[Value]):
    """Object -> value, with objects compared by identity. Keys are not kept alive. The value of a dead key is removed
    when the table is listed or gets a new value. (A WeakKeyDictionary would remove it in a callback, at any time, and a
    KeyboardInterrupt that arrives in a callback is printed and lost.)"""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], Value]] = {}

    def get(self, key: Any) -> Value | None:
        entry = self._entries.get(id(key))
        return entry[1] if entry is not None and entry[0]() is key else None

    def __setitem__(self, key: Any, value: Value) -> None:
        self.items()
        self._entries[id(key)] = weakref.ref(key), value

    def setdefault(self, key: Any, value: Value) -> Value:
        found = self.get(key)
        if found is None:
            self[key] = found = value
        return found

    def pop(self, key: Any) -> Value:
        return self._entries.pop(id(key))[1]

    def discard(self, key: Any) -> None:
        """``pop`` that accepts a missing key."""
        self._entries.pop(id(key), None)

    def emptied(self) -> list[Value]:
        """Remove and return all values, also those of dead keys."""
        values = [value for _, value in self._entries.values()]
        self._entries.clear()
        return values

    def items(self) -> list[tuple[Any, Value]]:
        """The entries whose keys are alive."""
        found = []
        for number, entry in self._entries.copy().items():  # a copy collects no garbage half way, as a list may
            key = entry[0]()
            if key is not None:
                found.append((key, entry[1]))
            elif self._entries.get(number) is entry:
                self._entries.pop(number, None)  # another thread may have removed it
        return found
