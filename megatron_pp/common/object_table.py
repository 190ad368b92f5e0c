"""What belongs to objects, for as long as these live."""

import weakref
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class ObjectTable(Generic[Value]):
    """Values by object, compared by identity. The keys are not kept alive; the value of one that is gone goes when the
    table is listed or gets a new one. A WeakKeyDictionary removes it in a callback, amid whatever runs then: a
    KeyboardInterrupt that arrives in a callback is printed and lost."""

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
        """``pop``, also where it is not there."""
        self._entries.pop(id(key), None)

    def emptied(self) -> list[Value]:
        """All values, also of keys that are gone; the table has none of them any more."""
        values = [value for _, value in self._entries.values()]
        self._entries.clear()
        return values

    def items(self) -> list[tuple[Any, Value]]:
        """Those whose keys are alive."""
        found = []
        for number, entry in list(self._entries.items()):
            key = entry[0]()
            if key is not None:
                found.append((key, entry[1]))
            elif self._entries.get(number) is entry:
                self._entries.pop(number, None)  # another thread may have been here
        return found
