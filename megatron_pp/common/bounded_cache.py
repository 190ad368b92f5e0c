"""A cache that is bounded in bytes. A leaf: imports nothing from the package, and not torch."""

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """A cache that drops the least recently used entries once the estimated sizes of all exceed ``budget`` bytes. The
    last ``least`` entries stay, whatever their size.

    ``entries`` may be looked up directly, which does not count as use.
    """

    def __init__(self, budget: int, least: int = 1) -> None:
        self.entries: OrderedDict[K, V] = OrderedDict()
        self._budget = budget
        self._least = least
        self._sizes: dict[K, int] = {}
        self._used = 0
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        """The entry, which counts as used now."""
        with self._lock:
            if key not in self.entries:
                return None
            self.entries.move_to_end(key)
            return self.entries[key]

    def put(self, key: K, value: V, size: int) -> V:
        """Keep ``value`` of ``size`` bytes. Returns the kept value, which is another thread's if that came first."""
        with self._lock:
            if key in self.entries:
                return self.entries[key]
            self.entries[key] = value
            self._sizes[key] = size
            self._used += size
            while self._used > self._budget and len(self.entries) > self._least:
                oldest = next(iter(self.entries))
                del self.entries[oldest]
                self._used -= self._sizes.pop(oldest)
            return value

    def clear(self) -> None:
        with self._lock:
            self.entries.clear()
            self._sizes.clear()
            self._used = 0
